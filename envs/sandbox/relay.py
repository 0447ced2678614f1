"""Carries loopback TCP connections to a Unix socket while a command runs; ends with the command's exit code.

    python -I -S relay.py FOLDER NAME PORT COMMAND [ARGUMENT ...]

A program of its own. In COMMAND, its arguments and its environment, ``{relay_port}`` becomes the port, which
the kernel chooses where PORT is 0. Bytes pass unchanged in both directions; the end of one direction is
passed on as such.

The sockets in FOLDER are replicas of one server; NAME is the one to prefer. When nobody listens there another is
taken, and while there is none a connection waits. A request that was sent and not answered by a single byte when
its replica went away is sent again to the next: the client sees a slow answer and no broken one.

Where it has namespaces of its own (PORT is not 0), it says on its standard error what was left at the end: how
many processes, how often the network was tried, which is not there, and what lies in /tmp and /dev/shm.

It starts once per episode, so it imports only modules that are built in: ``socket`` alone, which adds names
to ``_socket``, would double its start-up time.
"""

# pathlib alone would double the start-up time of this program.
# ruff: noqa: B905, PTH123, PTH208
from __future__ import annotations

import _socket
import os
import select
import sys
import time

PLACEHOLDER = "{relay_port}"
_CHUNK = 1 << 16
_HELD = 1 << 18
_SIGPIPE, _SIGXFSZ = 13, 25
_AGAIN_MS = 100
_PATIENCE_S = 90.0
_REPEATS = 3
_SETTLE_S = 0.05
_NAMES = 8
_FILES = 100
_TEMPORARY = ("/tmp", "/dev/shm")


class Flow:
    """One direction of a connection: what was read from ``source`` and waits for ``sink``."""

    def __init__(self, source: _socket.socket, sink: _socket.socket | None) -> None:
        self.source = source
        self.sink = sink
        self.held = bytearray()
        self.ended = False
        self.passed_on = False
        self.sent = bytearray()
        """What the sink took since the other direction last moved."""

    def read(self) -> int:
        """Bytes read; the end is noted, and not passed on yet."""
        try:
            chunk = self.source.recv(_CHUNK)
        except BlockingIOError:
            return 0
        if chunk:
            self.held += chunk
            self.write()
        else:
            self.ended = True
        return len(chunk)

    def write(self) -> None:
        if self.sink is None:
            return
        try:
            sent = self.sink.send(self.held)
        except BlockingIOError:
            return
        self.sent += self.held[:sent]
        del self.held[:sent]
        self.pass_on()

    def pass_on(self) -> None:
        if self.sink is not None and self.ended and not self.held and not self.passed_on:
            self.passed_on = True
            self.sink.shutdown(_socket.SHUT_WR)


class Connection:
    """A TCP connection from inside and its counterpart on a Unix socket, while there is one."""

    def __init__(self, fd: int) -> None:
        self.near = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0, fd)
        self.near.setblocking(False)
        self.near.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self.far: _socket.socket | None = None
        self.out = Flow(self.near, None)
        self.back: Flow | None = None
        self.repeats = 0
        self.waits_since = time.monotonic()

    def connect(self, folder: str, name: str) -> bool:
        """Find a replica that listens; whether there is one."""
        try:
            others = [other for other in os.listdir(folder) if other != name]
        except OSError:
            # No folder, or no descriptor left: as if nobody listened.
            return False
        for candidate in [name, *sorted(others)]:
            try:
                far = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            except OSError:
                return False
            try:
                far.connect(f"{folder}/{candidate}")
            except OSError:
                far.close()
                continue
            far.setblocking(False)
            self.far = self.out.sink = far
            self.back = Flow(far, self.near)
            self.out.write()
            return True
        return False

    def handle(self, fd: int, events: int) -> bool:
        """Move what can be moved; whether the connection goes on."""
        try:
            return self._move(fd, events)
        except OSError:
            return fd != self.near.fileno() and self.part()

    def _move(self, fd: int, events: int) -> bool:
        if self.back is None:
            self.out.read()
            return not self.out.ended or (bool(self.out.held) and not events & select.POLLHUP)
        near = fd == self.near.fileno()
        reading, writing = (self.out, self.back) if near else (self.back, self.out)
        if events & select.POLLOUT:
            writing.write()
        if not reading.ended:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                moved = reading.read()
                if moved:
                    writing.sent.clear()
                elif reading.ended:
                    if not near and self.part():
                        return True
                    reading.pass_on()
        elif events & (select.POLLHUP | select.POLLERR):
            # This side takes nothing any more either.
            writing.ended = writing.passed_on = True
            writing.held.clear()
        return not (self.out.passed_on and self.back.passed_on)

    def unanswered(self) -> bool:
        """Whether a request was sent of whose answer not a byte has come, and the client still waits."""
        return bool(self.out.sent) and not self.out.ended and self.back is not None and not self.back.held

    def part(self) -> bool:
        """Leave a replica that went away, and wait for another; False where the client must hear of it."""
        if not self.unanswered() or self.repeats >= _REPEATS or self.far is None:
            return False
        self.repeats += 1
        self.far.close()
        self.far = self.back = self.out.sink = None
        self.out.held[:0] = self.out.sent
        self.out.sent.clear()
        self.waits_since = time.monotonic()
        return True

    def interests(self) -> list[tuple[int, int]]:
        """What to poll each side for; -1 for a side that is done with, whose hang-up would never stop."""
        if self.back is None:
            full = self.out.ended or len(self.out.held) >= _HELD
            return [(self.near.fileno(), 0 if full else select.POLLIN)]
        found = []
        for reading, writing in ((self.out, self.back), (self.back, self.out)):
            events = 0 if reading.ended or len(reading.held) >= _HELD else select.POLLIN
            events |= select.POLLOUT if writing.held else 0
            found.append((reading.source.fileno(), events if not (reading.ended and writing.passed_on) else -1))
        return found

    def close(self) -> None:
        self.near.close()
        if self.far is not None:
            self.far.close()


def start(argv: list[str], port: int) -> int:
    number = str(port)
    argv = [argument.replace(PLACEHOLDER, number) for argument in argv]
    env = {name: value.replace(PLACEHOLDER, number) for name, value in os.environ.items()}
    # Python ignores these two signals; the command expects the defaults.
    return os.posix_spawnp(argv[0], argv, env, setsigdef=[_SIGPIPE, _SIGXFSZ])


class Relay:
    """All connections, until the process of ``pidfd`` is gone."""

    def __init__(self, listener: _socket.socket, folder: str, name: str, pidfd: int) -> None:
        self.listener = listener
        self.folder = folder
        self.name = name
        self.pidfd = pidfd
        self.poll = select.poll()
        self.connections: dict[int, Connection] = {}
        self.waiting: list[Connection] = []
        self.deaf_since = 0.0
        """Since when connections are not taken, because there were no descriptors left; 0 if they are."""

    def serve(self) -> None:
        self.poll.register(self.pidfd, select.POLLIN)
        self.poll.register(self.listener.fileno(), select.POLLIN)
        while True:
            for fd, events in self.poll.poll(_AGAIN_MS if self.waiting or self.deaf_since else None):
                if fd == self.pidfd:
                    return
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.connections:
                    self.move(self.connections[fd], fd, events)
            self.join()

    def accept(self) -> None:
        try:
            accepted, _ = self.listener._accept()  # type: ignore[attr-defined]
        except OSError:
            self.deaf_since = time.monotonic()
            self.poll.unregister(self.listener.fileno())
            return
        connection = Connection(accepted)
        self.connections[connection.near.fileno()] = connection
        self.waiting.append(connection)

    def move(self, connection: Connection, fd: int, events: int) -> None:
        before = connection.far.fileno() if connection.far is not None else -1
        goes_on = connection.handle(fd, events)
        if before >= 0 and connection.far is None:
            # The poll forgets a descriptor that is closed; we do too.
            del self.connections[before]
            self.waiting.append(connection)
        if goes_on:
            self.watch(connection)
        else:
            self.drop(connection)

    def join(self) -> None:
        """Give the connections that wait a replica; one that waited too long is closed."""
        if self.deaf_since and time.monotonic() - self.deaf_since > _AGAIN_MS / 1000:
            self.deaf_since = 0.0
            self.poll.register(self.listener.fileno(), select.POLLIN)
        for connection in list(self.waiting):
            if connection.connect(self.folder, self.name):
                assert connection.far is not None
                self.connections[connection.far.fileno()] = connection
                self.waiting.remove(connection)
                self.watch(connection)
            elif time.monotonic() - connection.waits_since > _PATIENCE_S:
                os.write(2, f"relay: nobody listens in {self.folder}\n".encode())
                self.drop(connection)
            else:
                self.watch(connection)

    def watch(self, connection: Connection) -> None:
        for fd, wanted in connection.interests():
            self.poll.register(fd, max(0, wanted))
            if wanted < 0:
                self.poll.unregister(fd)

    def drop(self, connection: Connection) -> None:
        for fd in [fd for fd, known in self.connections.items() if known is connection]:
            self.poll.register(fd, 0)
            self.poll.unregister(fd)
            del self.connections[fd]
        if connection in self.waiting:
            self.waiting.remove(connection)
        connection.close()


def others() -> list[str]:
    """The names of the living processes of this namespace besides this one and those above it."""
    seen: dict[int, tuple[int, str]] = {}
    for number in os.listdir("/proc"):
        if number.isdigit():
            try:
                head, _, tail = _text(f"/proc/{number}/stat").rpartition(")")
            except OSError:
                continue
            state, parent = tail.split()[:2]
            if state not in "ZX":
                seen[int(number)] = int(parent), head.partition("(")[2]
    above = os.getpid()
    while above in seen:
        above = seen.pop(above)[0]
    seen.pop(1, None)
    return [_plain(name) for _, name in seen.values()]


def tried(snmp: str, snmp6: str) -> tuple[int, int]:
    """From the kernel's counters of a network namespace: how often there was no route to where something was sent,
    and how many datagrams found no listener.

    Without servers of names to ask, a look-up goes to the loopback address, where nobody listens.
    """
    counts: dict[str, int] = {}
    lines = snmp.splitlines()
    for names, values in zip(lines[::2], lines[1::2]):
        kind, *rest = names.split()
        for name, value in zip(rest, values.split()[1:]):
            counts[kind + name] = int(value)
    for line in snmp6.splitlines():
        name, value = line.split()
        counts[name] = int(value)
    unrouted = counts.get("Ip:OutNoRoutes", 0) + counts.get("Ip6OutNoRoutes", 0)
    return unrouted, counts.get("Udp:NoPorts", 0) + counts.get("Udp6NoPorts", 0)


def temporary() -> list[str]:
    """What lies directly in the temporary folders, or the first of much."""
    found = []
    for folder in _TEMPORARY:
        try:
            found += [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
        except OSError:  # the command has closed it to us
            continue
    return found[:_FILES]


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _plain(name: str) -> str:
    """A name as it can stand in a list on one line."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_./") else "_" for letter in name)


def tell_the_end() -> None:
    """Say what is left, if anything; a process that is about to go is given a moment."""
    left = others()
    if left:
        time.sleep(_SETTLE_S)
        left = others()
    try:
        unrouted, lookups = tried(_text("/proc/net/snmp"), _text("/proc/net/snmp6"))
    except OSError:
        unrouted = lookups = 0
    files = temporary()
    if left or unrouted or lookups or files:
        names, paths = ",".join(left[:_NAMES]), ",".join(map(_plain, files))
        line = f"processes={len(left)} ({names}) unrouted={unrouted} lookups={lookups} files={len(files)} ({paths})"
        os.write(2, f"relay: at the end: {line}\n".encode())


def main(argv: list[str]) -> int:
    folder, name, port, command = argv[0], argv[1], int(argv[2]), argv[3:]
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    try:
        pid = start(command, listener.getsockname()[1])
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
        # As a shell has it.
        return 127 if isinstance(error, FileNotFoundError) else 126
    Relay(listener, folder, name, os.pidfd_open(pid)).serve()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if port:
        tell_the_end()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
