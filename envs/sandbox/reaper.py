"""Runs one command and leaves none of its descendants alive. A program of its own, standard library only.

    python -I -S reaper.py PARENT LIMITS COMMAND [ARGUMENT ...]

PARENT is the process id of whoever starts it. LIMITS is JSON: a list of [resource, [soft, hard]].

Invariant: when this program exits, every process that descends from COMMAND is gone, also those that made a
session of their own: it is the "child subreaper" of the kernel, so orphans become its children. It ends early
on SIGTERM, which the kernel also sends when its parent dies. Used where there is no bubblewrap: a process
namespace does the same better, since a command can kill this program.
"""

# pathlib alone would double the start-up time of this program.
# ruff: noqa: PTH123, PTH208
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def parents() -> dict[int, int]:
    """The parent of every process of this machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(name)] = int(fields[1])
    return found


def descendants(of: int) -> list[int]:
    tree = parents()
    found: set[int] = set()
    grown = True
    while grown:
        new = {pid for pid, parent in tree.items() if (parent == of or parent in found) and pid not in found}
        found |= new
        grown = bool(new)
    return sorted(found)


def end_all() -> None:
    """Stop first, so that a process that forks in a loop cannot outrun the kill; then kill and reap.

    Only "no child is left" ends it: a reading of /proc is no snapshot, and misses a process whose parent dies
    between the two readings.
    """
    while True:
        alive = descendants(os.getpid())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if not reap():
            return
        time.sleep(0.001)


def reap() -> bool:
    """Whether a child is left, alive or about to end, after those that ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def main(parent: int, limits: str, argv: list[str]) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def stop(*_: object) -> None:
        end_all()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    child = os.fork()
    if child == 0:
        os.setsid()
        # Where this program is killed itself, the command at least goes with it.
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for what, value in json.loads(limits):
            resource.setrlimit(what, tuple(value))
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"reaper: cannot execute {argv[0]}: {error}\n".encode())
            os._exit(127)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    # From here on a second end must not cut the first one short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
