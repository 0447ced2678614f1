"""The parts behind ``python -m actors.serve``: deployed, kept up until a signal, and taken down."""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
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
from configs.proxy import ProxyConfig, SessionLimits
from configs.schema import EngineConfig, TreesConfig
from envs.harnesses.pointers import pointers

APP = "reins-serve"


class NoLearner:
    """Where trees go when nobody learns from them."""

    async def add(self, data: bytes) -> None:
        """Let it go; the tree is on disk."""


def serve_until_told(args: argparse.Namespace, console: Console) -> int:
    """Exit status: 0 ended by a signal, 1 it could not be started, 130 ended before it was up."""
    with tempfile.TemporaryDirectory(prefix="reins-") as scratch:
        try:
            with console.status("starting Ray, the engine and the proxy"):
                connect()
                proxy, builder = _deploy(args, Path(scratch))
            asyncio.run(_session(args, proxy, builder, console))
        except KeyboardInterrupt:
            console.print("ended before it was up")
            return 130
        except (RayError, RuntimeError) as error:
            console.print(cause(error, APP), style="red", markup=False, highlight=False)
            return 1
        finally:
            ray.shutdown()
    return 0


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


async def _session(args: argparse.Namespace, proxy: HandleProxy, builder: Any, console: Console) -> None:
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
    _say(console, f"serving {args.model} at {url}; Ctrl-C ends it")
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
    _say(console, f"{report['leaves']} leaves, {report['tokens_trained']} tokens to train on, kept in {path}")
    _say(console, f"look at it:  python -m trees.view {args.record}")


def _say(console: Console, text: str) -> None:
    """Paths in one line and as they are: they are to be pasted."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
