"""Waits inside a room for its command and becomes it, so that a start costs neither namespaces nor an interpreter.

    python -I -S waiting.py RELAY

A program of its own, whose standard input is a socket. It writes ``r`` when it is ready, takes one message, writes
``k``, sets the limits of the message and becomes its command, which sees the environment of the message and nothing
of this socket. What follows ``k`` is the end of the stream, or why the command could not be started.

RELAY is the path of ``relay.py`` or of its byte code, loaded while waiting; a command that begins with it runs here
as it would in an interpreter of its own. It may be empty.

A message is its length in decimal, a line end, and fields, each ended by a zero byte: the number of arguments, the
number of limits, the arguments, the limits as ``resource soft hard``, the environment as ``NAME=value``.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

_SWITCHES = [b"-I", b"-S"]


def message(argv: list[str], limits: list[tuple[int, tuple[int, int]]], env: dict[str, str]) -> bytes:
    """What to send for a command. Raises ValueError for a zero byte."""
    values = [f"{what} {soft} {hard}" for what, (soft, hard) in limits]
    fields = [str(len(argv)), str(len(limits)), *argv, *values, *(f"{name}={value}" for name, value in env.items())]
    if any("\0" in field for field in fields):
        raise ValueError("a command with a zero byte in its arguments or its environment; expected none")
    body = b"".join(os.fsencode(field) + b"\0" for field in fields)
    return b"%d\n" % len(body) + body


def _receive(door: int) -> list[bytes]:
    """The fields of the message; none when the other side is gone."""
    held = b""
    while b"\n" not in held:
        chunk = os.read(door, 1 << 16)
        if not chunk:
            return []
        held += chunk
    length, _, body = held.partition(b"\n")
    while len(body) < int(length):
        chunk = os.read(door, 1 << 16)
        if not chunk:
            return []
        body += chunk
    return body.split(b"\0")[:-1]


def main(relay: str) -> int:
    door = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if relay:
        sys.path.insert(0, os.path.dirname(relay))  # noqa: PTH120
        import relay as relayed  # type: ignore[import-not-found]
    os.write(door, b"r")
    fields = _receive(door)
    if not fields:
        return 0
    os.write(door, b"k")
    arguments, limits = int(fields[0]), int(fields[1])
    argv = fields[2 : 2 + arguments]
    env = dict(field.split(b"=", 1) for field in fields[2 + arguments + limits :])
    for value in fields[2 + arguments : 2 + arguments + limits]:
        what, soft, hard = map(int, value.split())
        resource.setrlimit(what, (soft, hard))
    if relay and argv[1:4] == [*_SWITCHES, os.fsencode(relay)]:
        os.close(door)
        os.environb.clear()
        os.environb.update(env)
        return relayed.main([os.fsdecode(argument) for argument in argv[4:]])
    # Python ignores these two signals; the command expects the defaults.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(door, b"cannot execute %s: %s" % (argv[0], os.fsencode(str(error))))
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
