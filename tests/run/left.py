"""What sandboxes could leave behind on a machine, as names that can be compared before and after."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path

from envs.sandbox.proc import parent_of


def descendants(of: int) -> set[int]:
    """Every process below ``of``, those that ended and were not waited for included."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = {of}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {of}


def left(folder: Path) -> set[str]:
    """All that belongs to this process or to ``folder``: processes, mounts, sockets, entries, groups, descriptors."""
    found = {f"process {pid}" for pid in descendants(os.getpid())}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            views = (process / "mountinfo").read_text() if int(process.name) != os.getpid() else ""
        except OSError:
            continue
        if str(folder) in views:
            found.add(f"process {process.name} that sees {folder}")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found |= {f"mount {line}" for line in mounts if str(folder) in line}
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    found |= {f"socket {line.split()[-1]}" for line in lines if str(folder) in line}
    found |= {f"entry {path}" for path in folder.rglob("*")}
    for above, folders, _ in os.walk("/sys/fs/cgroup"):
        found |= {f"group {above}/{name}" for name in folders if fnmatch(name, f"reins-*.{os.getpid()}.*")}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = descriptor.readlink()
        except FileNotFoundError:
            continue
        # Numbers of pipes and sockets are as good as random; how many there are is not.
        found.add(f"descriptor {descriptor.name} {str(target).partition('[')[0]}")
    return found
