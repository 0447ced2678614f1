"""The model API alone: a policy, its engine and the proxy, for a harness that you start yourself.

    python -m actors.serve --model DIR                  serve a Hugging Face model folder on a free port
    python -m actors.serve --model DIR --port 8080 --record calls/

Prints the address, a key, and how to point each known harness there. One key is one session: its calls make one
tree, which --record keeps (trees.codec) when the server is ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.base import DEVICE


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    if fault := _fault(args):
        console.print(fault, style="red", soft_wrap=True, markup=False, highlight=False)
        return 2
    # Not before: Ray and torch take seconds to load, and what is wrong here is told at once.
    from actors.serving import serve_until_told

    return serve_until_told(args, console)


def _fault(args: argparse.Namespace) -> str:
    """What stands in the way; empty where nothing does."""
    if not (args.model / "config.json").is_file():
        return f"--model {args.model}: no config.json there; expected a Hugging Face model folder"
    if not DEVICE.fullmatch(args.device):
        return f"--device {args.device}: expected cpu, cuda or cuda:N"
    if args.port and not _is_free(args.port):
        return f"--port {args.port}: it is taken; expected a free port, or 0 for one"
    return ""


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


if __name__ == "__main__":
    raise SystemExit(main())
