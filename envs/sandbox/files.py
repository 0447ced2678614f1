"""Copying and removing trees that an agent may have shaped: no link is followed, no special file is opened.

Both are meant for trees in which no process is writing any more.
"""

# Plain paths and system calls: this runs for every file of every episode, twice.
# ruff: noqa: PTH101, PTH102, PTH115, PTH211
from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from envs.sandbox.base import SandboxError, WorkspaceTooLarge


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a copy may hold at most. ``total_bytes`` counts apparent sizes: a sparse file counts in full;
    ``path_bytes`` counts from the copied folder on; ``link_bytes`` are those of all links' texts together.
    """

    total_bytes: int = 512 << 20
    entries: int = 100_000
    path_bytes: int = 3000
    links: int = 10_000
    link_bytes: int = 1 << 20


def _copy_file(source: str, target: str, info: os.stat_result, owner: int | None) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = info.st_size
            while left > 0:
                sent = os.sendfile(writing, reading, None, min(left, 1 << 30))
                if sent == 0:
                    break
                left -= sent
            if owner is not None:
                os.fchown(writing, owner, owner)
            # Set-user-id bits are dropped on purpose: the copy may belong to another user.
            os.fchmod(writing, stat.S_IMODE(info.st_mode) & 0o777)
            os.utime(writing, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _scan(source: Path, target: Path, bounds: Bounds) -> list[tuple[str, str, os.stat_result]]:
    """Every entry below ``source``, its place below ``target`` and its status, folders before contents."""
    found = []
    total = links = link_bytes = 0
    # Below the folder: where the copy lies must not decide whether it is too long.
    above = len(os.fsencode(target)) + 1
    pending = [(os.fspath(source), os.fspath(target))]
    while pending:
        folder, copy = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                there = f"{copy}/{entry.name}"
                found.append((entry.path, there, info))
                if stat.S_ISDIR(info.st_mode):
                    pending.append((entry.path, there))
                elif stat.S_ISREG(info.st_mode):
                    total += info.st_size
                elif stat.S_ISLNK(info.st_mode):
                    links += 1
                    link_bytes += info.st_size
                if len(found) > bounds.entries:
                    raise WorkspaceTooLarge(f"the workspace holds more than {bounds.entries} files and folders")
                if total > bounds.total_bytes:
                    raise WorkspaceTooLarge(f"the workspace holds more than {bounds.total_bytes} bytes")
                if links > bounds.links or link_bytes > bounds.link_bytes:
                    # Whoever looks where they lead goes a way of 40 links for each.
                    most = f"{bounds.links} links, or links of more than {bounds.link_bytes} bytes"
                    raise WorkspaceTooLarge(f"the workspace holds more than {most}")
                if len(os.fsencode(there)) - above > bounds.path_bytes:
                    raise WorkspaceTooLarge(f"a path in the workspace is longer than {bounds.path_bytes} bytes")
    return found


def copy_tree(source: Path, target: Path, owner: int | None = None, bounds: Bounds | None = None) -> None:
    """Copy the folder ``source`` to ``target`` (made here if missing, its entries must be new).

    Links are copied as links; sockets, pipes and devices are left out; modes and times are kept. With
    ``owner`` everything belongs to that user and group id. A ``source`` that is missing, or is not a real
    folder, gives an empty ``target``. Raises WorkspaceTooLarge past ``bounds``, before anything is copied.
    """
    there_is_one = not source.is_symlink() and source.is_dir()
    entries = _scan(source, target, bounds or Bounds()) if there_is_one else []
    target.mkdir(parents=True, exist_ok=True)
    if owner is not None:
        os.chown(target, owner, owner)
    folders = []
    for here, there, info in entries:
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(there)
            folders.append((there, info))
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(here), there)
            if owner is not None:
                os.lchown(there, owner, owner)
        elif stat.S_ISREG(info.st_mode):
            _copy_file(here, there, info, owner)
    for there, info in reversed(folders):
        if owner is not None:
            os.chown(there, owner, owner)
        os.chmod(there, stat.S_IMODE(info.st_mode) & 0o777)
        os.utime(there, ns=(info.st_atime_ns, info.st_mtime_ns))


def open_up(folder: Path) -> None:
    """Make every folder below ``folder`` readable and writable by us again; root has no need of it."""
    subprocess.run(["chmod", "-R", "u+rwX", "--", os.fspath(folder)], check=False, capture_output=True)


def remove_tree(path: Path) -> None:
    """Remove ``path``, whatever it is, if it is there. Raises SandboxError when something stays."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
        return
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        # Folders without permissions and nesting deeper than Python's stack: the system's rm copes with both.
        open_up(path)
        done = subprocess.run(["rm", "-rf", "--", os.fspath(path)], check=False, capture_output=True, text=True)
        if path.exists():
            raise SandboxError(f"could not remove {path}: {done.stderr.strip()[-500:]}") from None
