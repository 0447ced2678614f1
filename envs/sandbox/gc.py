"""Removing what dead owners left: the processes and containers of their sandboxes, then the directories.

A sandbox names its owner by pid and start time. Its processes die with the owner, save in the milliseconds of
its start in which the kernel has not yet been told so, and save those in containers. Therefore every owner has a
warden: a process that waits for the owner's end and then cleans up after it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from envs.sandbox import cgroups
from envs.sandbox.files import remove_tree
from envs.sandbox.proc import start_time

_OWNER_FILE = "owner"
_OWNER = re.compile(r"(\d+) (\d+)\n?")
_PARTS = {"workspace", "home", "tmp", "shm", "frozen", "etc", "mcp"}
"""What may lie in a sandbox whose making or removal was cut off."""
_UNOWNED_GRACE_S = 60.0
_ROUNDS = 6
_PAUSE_S = 0.5


def claim(base: Path) -> None:
    """Write down that the sandbox in ``base`` belongs to this process, and have the warden know of it."""
    pid = os.getpid()
    (base / _OWNER_FILE).write_text(f"{pid} {start_time(pid)}\n")
    _tell_warden(base.parent, pid)


def orphaned(base: Path, shared: bool = False) -> bool:
    """Whether ``base`` is a sandbox, or the folder of a run, whose owner is gone.

    A sandbox without an owner file is being made or removed, until it is a minute old. Whatever else lies there is
    somebody's, and no orphan. ``shared``: others make folders there too, and what has no owner file may be theirs.
    """
    if base.is_symlink() or not base.is_dir():
        return False
    # One that has another name or is gone by now is its owner's affair, one that we may not read is another's.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        owner = base / _OWNER_FILE
        if owner.exists():
            found = _OWNER.fullmatch(owner.read_text(errors="replace")) if owner.is_file() else None
            return found is not None and start_time(int(found[1])) != found[2]
        if shared:
            return False
        info = base.stat()
        private = stat.S_IMODE(info.st_mode) == 0o700 and all(entry.name in _PARTS for entry in base.iterdir())
        return private and time.time() - info.st_mtime > _UNOWNED_GRACE_S
    return False


def processes_of(base: Path) -> list[int]:
    """The processes of a bubblewrap sandbox: those that have its workspace mounted, and a start that hangs.

    A start is told by its working directory: it hangs for ever when its parent dies before handing over.
    """
    found = []
    own = Path("/proc/self/ns/mnt").readlink()
    for process in Path("/proc").glob("[0-9]*"):
        # A process that ends meanwhile, or another user's, is none of ours.
        with contextlib.suppress(OSError):
            starting = (process / "cwd").readlink() == base and (process / "comm").read_text() == "bwrap\n"
            # Most processes of a machine are in our own mount namespace: their tables of mounts need not be read.
            if starting or ((process / "ns/mnt").readlink() != own and _mounts(process, base)):
                found.append(int(process.name))
    return found


def end_processes(base: Path) -> None:
    """Kill whatever runs in the bubblewrap sandbox of ``base``."""
    for pid in processes_of(base):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _mounts(process: Path, base: Path) -> bool:
    ending = f"/{base.name}/workspace"
    for line in (process / "mountinfo").read_text(errors="replace").splitlines():
        source, mounted = line.split(" ")[3:5]
        if source.endswith(ending) and Path(f"{process}/root{mounted}").samefile(base / "workspace"):
            return True
    return False


def gc(root: Path, shared: bool = False) -> list[str]:
    """Remove every sandbox in ``root`` whose owner is gone, what runs first, and nothing else; the labels removed.

    Control groups of owners that are gone are removed too, wherever the sandboxes were. ``shared``: ``root`` is a
    folder such as /tmp, where others make folders too.
    """
    root = root.resolve()
    found = sorted(root.iterdir()) if root.is_dir() else []
    orphans = [base for base in found if orphaned(base, shared)]
    removed = gc_containers(root, orphans)
    for base in orphans:
        end_processes(base)
        remove_tree(base)
    cgroups.collect()
    return sorted({*removed, *(base.name for base in orphans)})


def gc_containers(root: Path | None, bases: Sequence[Path] = ()) -> list[str]:
    """Remove the containers of sandboxes whose owners are gone, wherever a Docker engine listens; their labels.

    ``root``: only those under it. ``bases``: the folders of sandboxes whose containers go in any case.
    """
    from envs.sandbox import engine

    return [] if engine.unreachable() else engine.remove_orphans(root, bases)


@functools.cache
def _tell_warden(root: Path, owner: int) -> None:
    # A warden that somebody killed is missed only if this process is killed as well.
    with contextlib.suppress(BrokenPipeError):
        os.write(_warden(owner), os.fsencode(root) + b"\0")


@functools.cache
def _warden(owner: int) -> int:  # noqa: ARG001 - a fork of this process needs a warden of its own
    """The pipe to this process's warden: it takes roots, and its end is the end of this process."""
    reading, writing = os.pipe()
    # A session of its own and no child of ours: what ends us, or our children, must not end it.
    argv = ["setsid", "-f", sys.executable, "-m", "envs.sandbox.gc"]
    path = os.fspath(Path(__file__).parents[2])
    # It outlives us by seconds: holding our output open, it would keep whoever reads that waiting.
    quiet = subprocess.DEVNULL
    env = os.environ | {"PYTHONPATH": path}
    subprocess.run(argv, stdin=reading, stdout=quiet, stderr=quiet, env=env, cwd="/", check=True)
    os.close(reading)
    return writing


def _main() -> None:
    roots = [Path(os.fsdecode(root)) for root in set(sys.stdin.buffer.read().split(b"\0")) if root]
    for _ in range(_ROUNDS):
        for root in roots:
            # The owner's launcher, or another warden, may be removing the same.
            with contextlib.suppress(OSError, RuntimeError):
                gc(root)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    _main()
