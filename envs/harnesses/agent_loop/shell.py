"""Runs one bash command with a time limit and bounded output; past the limit its process group is killed.

``subprocess`` is not used: importing it costs 17 ms of CPU, which this program would pay for every task.
"""

from __future__ import annotations

import os
import select
import time

SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
_KEPT = 1 << 20
_READS = 64
_PRIVATE = "AGENT_LOOP_"


def run(command: str, timeout_s: float) -> tuple[str, int | None]:
    """Standard output and error in one text, and the exit code (128 + signal), or None when the time was up.

    Output ends with the shell: what a background process writes later is not waited for.
    """
    if "\0" in command:
        return "bash: the command holds a NUL character\n", 2
    reading, writing = os.pipe()
    env = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, writing, 1),
        (os.POSIX_SPAWN_DUP2, writing, 2),
    ]
    try:
        pid = os.posix_spawn(
            "/bin/bash",
            ["bash", "-c", command],
            env,
            file_actions=actions,
            setpgroup=0,
            setsigdef=[SIGPIPE, SIGXFSZ],
        )
    except OSError as error:
        os.close(reading)
        return f"bash: {error.strerror}\n", 126
    finally:
        os.close(writing)
    shell = os.pidfd_open(pid)
    os.set_blocking(reading, False)
    try:
        output, in_time = _collect(shell, reading, time.monotonic() + timeout_s)
    finally:
        if not select.select([shell], [], [], 0)[0]:
            os.killpg(pid, SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(reading)
        os.close(shell)
    if not in_time:
        return output, None
    return output, code if code >= 0 else 128 - code


def _collect(shell: int, reading: int, deadline: float) -> tuple[str, bool]:
    """What was printed until the shell ended or the deadline came, at most 1 MiB of head and tail each."""
    head, tail, dropped = bytearray(), bytearray(), 0
    poll = select.poll()
    poll.register(shell, select.POLLIN)
    poll.register(reading, select.POLLIN)
    ended = False
    while not ended and (left := deadline - time.monotonic()) > 0:
        ready = [fd for fd, _ in poll.poll(left * 1000)]
        ended = shell in ready
        # A bounded number of reads: a background process may write faster than we read, for ever.
        for _ in range(_READS):
            chunk = _read(reading)
            if not chunk:
                break
            if len(head) < _KEPT:
                head += chunk
            else:
                tail += chunk
            if len(tail) > 2 * _KEPT:
                dropped += len(tail) - _KEPT
                del tail[: len(tail) - _KEPT]
        if chunk == b"" and reading in ready:
            poll.unregister(reading)
    note = b"\n[... %d bytes left out ...]\n" % dropped if dropped else b""
    return (head + note + tail).decode(errors="replace"), ended


def _read(fd: int) -> bytes | None:
    """The next bytes; empty at the end; None when there are none now."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
