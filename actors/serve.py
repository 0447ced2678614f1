"""The model API alone: a policy, its engine and the proxy, for a harness that you start yourself.

    python -m actors.serve --model DIR                  serve a Hugging Face model folder on a free port
    python -m actors.serve --model DIR --port 8080 --record calls/

Prints the address, a key, and how to point each known harness there. One key is one session: its calls make one
tree, which --record keeps (trees.codec) when the server is ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from rich.console import Console

from actors.api import MODEL
from actors.engines.deployment import bound
from actors.handles import Builders, HandleProxy
from actors.ports import free_port
from actors.proxy import Proxy
from actors.session_contract import SessionSpec, Summary
from actors.start import cause, connect
from actors.tree_builder import TreeBuilderActor
from configs.base import DEVICE
from configs.proxy import ProxyConfig, SessionLimits
from configs.schema import EngineConfig, TreesConfig
from envs.harnesses.pointers import pointers

APP = "reins-serve"


class NoLearner:
    """Where trees go when nobody learns from them."""

    async def add(self, data: bytes) -> None:
        """Let it go; the tree is on disk."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    if not (args.model / "config.json").is_file():
        console.print(f"--model {args.model}: no config.json there; expected a Hugging Face model folder", style="red")
        return 2
    if not DEVICE.fullmatch(args.device):
        console.print(f"--device {args.device}: expected cpu, cuda or cuda:N", style="red")
        return 2
    if args.port and not _is_free(args.port):
        console.print(f"--port {args.port}: it is taken; expected a free port, or 0 for one", style="red")
        return 2
    with tempfile.TemporaryDirectory(prefix="reins-") as scratch:
        try:
            with console.status("starting Ray, the engine and the proxy"):
                connect()
                proxy, builder = _deploy(args, Path(scratch))
            asyncio.run(_serve_until_told(args, proxy, builder, console))
        except KeyboardInterrupt:
            console.print("ended before it was up")
            return 130
        except (RayError, RuntimeError) as error:
            console.print(cause(error, APP), style="red", markup=False, highlight=False)
            return 1
        finally:
            ray.shutdown()
    return 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m actors.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--port", type=int, default=0, help="port on the loopback address; 0 takes a free one")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep the tree of the session there")
    parser.add_argument("--temperature", type=float, default=1.0, help="of every call, whatever the harness asks")
    parser.add_argument("--max-len", type=int, default=32768, help="longest sequence in tokens (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device of the engine")
    return parser.parse_args(argv)


def _deploy(args: argparse.Namespace, scratch: Path) -> tuple[HandleProxy, Any]:
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    args.port = args.port or free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": args.port}, logging_config=quiet)
    builder = (
        ray.remote(TreeBuilderActor)
        .options(num_cpus=0)
        .remote(args.record or scratch / "record", NoLearner(), TreesConfig(max_leaves=10**9))
    )
    engine = EngineConfig(max_len=args.max_len, slots=8, device=args.device)
    app = cast(Any, Proxy).bind(
        ProxyConfig(limits=SessionLimits(calls=10**9, tokens=10**12, wall_s=1e9, concurrent=10**6)),
        args.model,
        bound(args.model, engine, logs=scratch),
        Builders([builder]),
        args.max_len,
        socket_dir=scratch / "api",
        log_dir=scratch / "calls",
    )
    return HandleProxy(serve.run(app, name=APP, logging_config=quiet)), builder


async def _serve_until_told(args: argparse.Namespace, proxy: HandleProxy, builder: Any, console: Console) -> None:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    session = f"serve-{time.strftime('%Y%m%d-%H%M%S')}"
    opened = await proxy.open_session(SessionSpec(session, temperature=args.temperature))
    url = f"http://127.0.0.1:{args.port}"
    for name, lines in pointers(url, opened["key"], MODEL).items():
        console.print(f"\n{name}", style="bold", highlight=False, markup=False)
        # As they are: they are to be pasted.
        print(lines)
    console.print(f"serving {args.model} at {url}; Ctrl-C ends it", highlight=False)
    await told.wait()
    summary = await proxy.close_session(opened["key"])
    await _keep(args, summary, builder, console)


async def _keep(args: argparse.Namespace, summary: Summary, builder: Any, console: Console) -> None:
    """Tell what came of the session, and keep its tree."""
    console.print(f"{summary.calls} calls, {summary.prompt_tokens} prompt and {summary.sampled_tokens} sampled tokens")
    for reason, count in summary.forks.items():
        console.print(f"forks: {count} x {reason}")
    if args.record is None or summary.calls == 0:
        return
    meta = {"episode": summary.session, "step": 0, "split": "train"}
    report = await builder.finish.remote(summary.session, summary.calls, meta)
    if report is None:
        console.print("the tree is not whole: records are missing", style="red")
        return
    path = args.record / "trees" / "step_000000" / f"{summary.session}.tree"
    console.print(f"{report['leaves']} leaves, {report['tokens_trained']} tokens to train on, kept in {path}")


if __name__ == "__main__":
    raise SystemExit(main())
