"""Runs a task's MCP servers beside its sandbox: one Unix socket each, one process for each connection.

Invariants: after ``close`` no process of any server is alive, no task runs and no socket is left; what a connection
keeps in memory is bounded by ``tap.LONGEST`` in each direction; a server that ends gives its client an answer to
every request, and never a connection that breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from envs.harnesses.base import ToolServer
from envs.mcp.program import Program
from envs.mcp.spec import PYTHONS, McpServer
from envs.mcp.tap import LONGEST, CallLog, Tap
from envs.sandbox.base import Mount, Sandbox
from envs.sandbox.bytecode import compiled
from envs.sandbox.files import remove_tree

_log = logging.getLogger(__name__)
_BRIDGE = Path(__file__).with_name("bridge.py")
_SOCKETS = "/run/mcp"
_PROGRAMS = "/opt/mcp"
_MOST_CONNECTIONS = 8
_GRACE_S = 3.0
_KEPT = ("PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Servers:
    """The servers of one episode, from ``open`` to ``close``.

    ``given`` is how a harness inside starts each; ``mounts`` go with it. Calls on servers outside are written to
    ``log``. Those on servers inside pass by nobody outside: the policy's own tool calls, in the episode's tree, are
    their record.
    """

    def __init__(self, wanted: tuple[McpServer, ...], sandbox: Sandbox) -> None:
        """Raises ServerFault for a variable of this machine's that a server needs and that is not set."""
        self.log = CallLog()
        program = compiled(sandbox.python, _BRIDGE)[0] if wanted else _BRIDGE
        bridge = Mount(program, f"{_PROGRAMS}/bridge{program.suffix}")
        # Beside the home: nothing there is shown inside but what a mount names.
        self._folder = sandbox.home.parent / "mcp"
        sockets = Mount(self._folder, _SOCKETS)
        mounts: list[Mount] = []
        given: list[ToolServer] = []
        self._doors: list[_Door] = []
        env = {name: text for name, text in sandbox.environment().items() if name == "LD_LIBRARY_PATH"}
        for server in wanted:
            if server.where == "inside":
                given.append(_inside(server, sandbox, mounts, env))
                continue
            argv = (sandbox.python, "-I", "-S", sandbox.inside(bridge), sandbox.inside(sockets), server.name)
            given.append(ToolServer(server.name, argv, env))
            self._doors.append(_Door(server, self.log))
        self.given = tuple(given)
        self.mounts = (*mounts, bridge, sockets) if self._doors else tuple(mounts)

    async def open(self) -> None:
        """Listen at every socket. Returns when all servers are ready: not every harness waits for a slow one."""
        if self._doors:
            self._folder.mkdir()
            self._folder.chmod(0o755)
        await asyncio.gather(*(door.open(self._folder) for door in self._doors))

    async def close(self) -> None:
        """End everything. Safe to call twice, and without ``open``."""
        if not self._doors:
            return
        await asyncio.gather(*(door.close() for door in self._doors))
        await asyncio.to_thread(remove_tree, self._folder)


def _inside(server: McpServer, sandbox: Sandbox, mounts: list[Mount], env: dict[str, str]) -> ToolServer:
    argv = []
    for place, argument in enumerate(server.argv):
        entry = server.shown.get(argument)
        if entry is None:
            argv.append(sandbox.python if place == 0 and argument in PYTHONS else argument)
            continue
        mount = Mount(entry, f"{_PROGRAMS}/{server.name}/{entry.name}")
        if mount not in mounts:
            mounts.append(mount)
        below = Path(os.path.normpath(argument)).parts[1:]
        argv.append("/".join((sandbox.inside(mount), *below)))
    return ToolServer(server.name, tuple(argv), {**env, **server.env})


class _Door:
    """The socket of one server, and its connections."""

    def __init__(self, server: McpServer, log: CallLog) -> None:
        self._server = server
        self._env = {name: os.environ[name] for name in _KEPT if name in os.environ} | server.environment()
        self._log = log
        self._listening: asyncio.Server | None = None
        self._closed = False
        self._connections: dict[asyncio.Task[None], tuple[Program, asyncio.StreamWriter]] = {}
        self._ready: Program | None = None
        """Started ahead for the first client."""

    async def open(self, folder: Path) -> None:
        self._ready = Program(self._server, self._env)
        await self._ready.ready()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            # The path of a room may be longer than an address can be.
            listener.bind(f"/proc/self/fd/{descriptor}/{self._server.name}")
        finally:
            os.close(descriptor)
        # Inside is another user than ours; who sees the folder is decided by the mount.
        (folder / self._server.name).chmod(0o666)
        self._listening = await asyncio.start_unix_server(self._accept, sock=listener, limit=LONGEST)

    async def close(self) -> None:
        self._closed = True
        if self._listening is not None:
            self._listening.close()
        # A task that is cancelled before its first step ends nothing itself.
        left = list(self._connections.values())
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for program, writer in left:
            writer.transport.abort()
            await program.end()
        if self._ready is not None:
            await self._ready.end()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or len(self._connections) >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        program, self._ready = self._ready or Program(self._server, self._env), None
        task = asyncio.create_task(_Connection(program, Tap(self._server.name, self._log), reader, writer).serve())
        self._connections[task] = (program, writer)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("MCP server %s: a connection broke: %r", self._server.name, error)


class _Connection:
    """One client, and the server process that is its own."""

    def __init__(self, program: Program, tap: Tap, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._program = program
        self._tap = tap
        self._reader = reader
        self._writer = writer
        self._client_left = False

    async def serve(self) -> None:
        try:
            stdin, stdout = await self._program.pipes()
            answers = asyncio.create_task(self._answers(stdout))
            try:
                await self._requests(stdin)
                self._client_left = True
                stdin.close()
                # What was asked is still answered, to a client that only said its last word.
                await asyncio.wait([answers], timeout=_GRACE_S)
            finally:
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)
        finally:
            # Dropped, not flushed: a client that reads nothing must not hold an episode up.
            self._writer.transport.abort()
            self._tap.end("the connection ended before an answer came")
            await self._program.end()

    async def _requests(self, stdin: asyncio.StreamWriter) -> None:
        """Pass on what the client says, to its end."""
        with contextlib.suppress(ConnectionError):
            while line := await self._line():
                forward, answer = self._tap.to_server(line)
                if forward:
                    stdin.write(forward)
                    # A server that is gone is the other direction's to tell.
                    with contextlib.suppress(ConnectionError):
                        await stdin.drain()
                if answer:
                    await self._say(answer)

    async def _line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError:
            # Longer than a message can be, so none of its ids is known: there is nothing to answer.
            _log.warning("MCP server %s: a message of over %d bytes; hung up", self._tap.name, LONGEST)
            return b""

    async def _answers(self, stdout: asyncio.StreamReader) -> None:
        """Pass on what the server says; when it ends, tell the client so, now and whenever it asks again."""
        why = ""
        with contextlib.suppress(ConnectionError):
            try:
                while line := await stdout.readline():
                    if forward := self._tap.to_client(line):
                        await self._say(forward)
            except ValueError:
                why = f"it sent a message of over {LONGEST} bytes"
                await self._program.end()
            if not self._client_left:
                why = why or f"it ended with exit code {await self._program.code()}"
                _log.warning("MCP server %s: %s\n%s", self._tap.name, why, self._program.said())
                await self._say(self._tap.end(why))

    async def _say(self, lines: bytes) -> None:
        self._writer.write(lines)
        await self._writer.drain()
