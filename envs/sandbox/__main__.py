"""Command line of the sandboxes: check a backend on this machine, make its image, remove what dead owners left."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from envs.sandbox.base import SandboxError
from envs.sandbox.bubblewrap import own_user_namespace, sized_tmpfs
from envs.sandbox.cgroups import holding
from envs.sandbox.check import check_sandbox
from envs.sandbox.create import BACKENDS, BackendName, unavailable
from envs.sandbox.engine import unreachable
from envs.sandbox.gc import gc, gc_containers
from envs.sandbox.image import SOURCES, make
from envs.sandbox.recipe import image_name

_EXAMPLES = """examples:
  python -m envs.sandbox check                      does bubblewrap work here, and does it keep its promises?
  python -m envs.sandbox check --backend process    what the backend without isolation keeps, and what not
  python -m envs.sandbox check --backend docker     the same of the Docker engine of this machine
  python -m envs.sandbox image                      make the image of the backend docker, unless it is there
  python -m envs.sandbox gc                         remove the containers whose owners are gone
  python -m envs.sandbox gc /tmp                    remove what killed runs left in a folder, and nothing else there
"""


def _check(backend: BackendName) -> int:
    chosen: BackendName = ("process" if unavailable() else "bubblewrap") if backend == "auto" else backend
    if chosen != backend:
        print(f"backend {chosen}" + (f" ({unavailable()})" if unavailable() else ""))
    with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
        try:
            results = asyncio.run(check_sandbox(chosen, Path(root)))
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


def _gc(root: Path | None) -> int:
    if root is not None and not root.is_dir():
        print(f"{root}: no such folder; expected the folder that holds the sandboxes", file=sys.stderr)
        return 2
    if root is None and (reason := unreachable()):
        print(f"nothing was looked for: {reason}")
        return 0
    removed = gc_containers(None) if root is None else gc(root, shared=True)
    what = "sandbox whose owner is" if len(removed) == 1 else "sandboxes whose owners are"
    print(f"removed {len(removed)} {what} gone" + "".join(f"\n  {name}" for name in removed))
    return 0


def _image(name: str, source: str, again: bool, mirror: str) -> int:
    console = Console()
    try:
        with console.status("") as status:
            made = make(
                name or image_name(),
                source,
                again,
                mirror,
                say=lambda text: console.print(text, highlight=False, markup=False),
                show=lambda text: status.update(escape(text)),
            )
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    print(made)
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
    checking.add_argument("--backend", choices=BACKENDS, default="auto", help="which; auto: as a run takes it")
    imaging = commands.add_parser("image", help="make the image of the backend docker; prints its name")
    imaging.add_argument("--name", default="", help="another name than that of the recipe's contents")
    imaging.add_argument("--source", choices=SOURCES, default="auto", help="auto: the registry where it is reachable")
    imaging.add_argument("--mirror", default="", help="where debootstrap finds Debian, if not in the usual place")
    imaging.add_argument("--again", action="store_true", help="make it anew although it is there")
    collecting = commands.add_parser("gc", help="remove the containers, or sandboxes under ROOT, whose owners are gone")
    collecting.add_argument(
        "root",
        type=Path,
        metavar="ROOT",
        nargs="?",
        help="folder with sandboxes in it; none: containers",
    )
    arguments = parser.parse_args()
    if arguments.command == "check":
        return _check(arguments.backend)
    if arguments.command == "image":
        return _image(arguments.name, arguments.source, arguments.again, arguments.mirror)
    return _gc(arguments.root)


if __name__ == "__main__":
    sys.exit(main())
