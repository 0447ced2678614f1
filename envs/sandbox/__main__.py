"""Command line of the sandboxes: check a backend on this machine, and remove what dead owners left."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from envs.sandbox.base import SandboxError
from envs.sandbox.bubblewrap import own_user_namespace, sized_tmpfs
from envs.sandbox.cgroups import holding
from envs.sandbox.check import check
from envs.sandbox.create import unavailable
from envs.sandbox.gc import gc

_EXAMPLES = """examples:
  python -m envs.sandbox check                      does bubblewrap work here, and does it keep its promises?
  python -m envs.sandbox check --backend process    what the backend without isolation keeps, and what not
  python -m envs.sandbox gc /tmp/reins-sandboxes    remove the sandboxes whose owners are gone
"""


def _check(backend: str) -> int:
    chosen = ("process" if unavailable() else "bubblewrap") if backend == "auto" else backend
    if chosen != backend:
        print(f"backend {chosen}" + (f" ({unavailable()})" if unavailable() else ""))
    with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
        try:
            results = asyncio.run(check(chosen, Path(root)))  # type: ignore[arg-type]
        except SandboxError as error:
            print(f"FAILS  the backend {chosen} cannot be used: {error}")
            return 1
    if chosen == "bubblewrap":
        print(f"note   {holding()}")
        print(f"note   {'in memory, bounded' if sized_tmpfs() else 'on disk, not bounded'}: /tmp and /dev/shm")
        print(f"note   {'own' if os.geteuid() or own_user_namespace() else 'no own'} user namespace")
    for name, fault in results:
        print(f"{'FAILS' if fault else 'holds'}  {name}" + (f": {fault}" if fault else ""))
    return 1 if any(fault for _, fault in results) else 0


def _gc(root: Path) -> int:
    if not root.is_dir():
        print(f"{root}: no such folder; expected the folder that holds the sandboxes", file=sys.stderr)
        return 2
    removed = gc(root)
    print(f"removed {len(removed)} sandboxes whose owners are gone" + "".join(f"\n  {name}" for name in removed))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.sandbox",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="run a backend's contract for real; exit code 1 if something fails")
    checking.add_argument("--backend", choices=("auto", "bubblewrap", "process"), default="auto")
    collecting = commands.add_parser("gc", help="remove the sandboxes under ROOT whose owners are gone")
    collecting.add_argument("root", type=Path, metavar="ROOT")
    arguments = parser.parse_args()
    return _check(arguments.backend) if arguments.command == "check" else _gc(arguments.root)


if __name__ == "__main__":
    sys.exit(main())
