"""An ASGI app on a Unix socket, inside the event loop that is already running.

Several servers may have one folder: their sockets are its only content, so that a client that has the folder finds
another where one is gone. The path is short enough for the 107 bytes that a Unix socket's address may have.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import struct
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

_MOST_BYTES = 107
MOST_CONNECTIONS = 256
"""At the same time from one user id other than ours, as sandboxes have: none can starve the others."""
_QUEUE = 1024
_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class SocketServer:
    """Starts on the first ``start``; the socket goes with ``stop``."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: that of the sockets, which only its owner should be able to reach; None makes one of its
        own, which goes with ``stop`` or with the process.
        """
        self._folder = folder
        self._own: Path | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._door: _Door | None = None
        self._lock = asyncio.Lock()
        self.path: Path | None = None

    async def start(self, app: Any) -> Path:
        """Serve ``app``, if not yet listening, and return the path. ``ValueError``: too long a path."""
        async with self._lock:
            if self.path is None:
                self.path = await self._listen(app)
            return self.path

    async def stop(self) -> None:
        """End all connections and remove the socket. Safe to call twice."""
        async with self._lock:
            if self._server is None or self._serving is None or self._door is None or self.path is None:
                return
            self._door.close()
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self.path.unlink(missing_ok=True)
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
            self._server, self._serving, self._door, self.path = None, None, None, None

    async def _listen(self, app: Any) -> Path:
        folder = self._folder
        if folder is None:
            self._own = Path(tempfile.mkdtemp(prefix="reins-"))
            weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
            folder = self._own / "api"
        folder.mkdir(exist_ok=True)
        _remove_dead(folder)
        path = folder / f"{secrets.token_hex(4)}.sock"
        if len(str(path).encode()) > _MOST_BYTES:
            raise ValueError(f"{path}: got a socket path over {_MOST_BYTES} bytes; choose a shorter folder for it")
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            log_config=None,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        self._door = _Door(path, self._server)
        return path


class _Door:
    """Takes connections off the queue faster than they can be made, so that nobody waits behind a flood.

    Whoever has too many is hung up on before anything is made for him.
    """

    def __init__(self, path: Path, server: uvicorn.Server) -> None:
        self._server = server
        self._http = _counted(server.config.http_protocol_class)
        self._loop = asyncio.get_running_loop()
        self._by_user: Counter[int] = Counter()
        self._welcoming: set[asyncio.Task[Any]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.setblocking(False)
        self._listener.listen(_QUEUE)
        self._loop.add_reader(self._listener, self._take)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _take(self) -> None:
        for _ in range(_QUEUE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # Out of descriptors: the queue keeps the others until there are some again.
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._go_on)
                return
            user = _user_of(connection)
            if user != os.geteuid() and self._by_user[user] >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._by_user[user] += 1
            task = self._loop.create_task(self._welcome(connection, user))
            self._welcoming.add(task)
            task.add_done_callback(self._welcoming.discard)

    def _go_on(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._take)

    async def _welcome(self, connection: socket.socket, user: int) -> None:
        def protocol() -> asyncio.Protocol:
            made = self._http(config=self._server.config, server_state=self._server.server_state, app_state={})
            made.gone = lambda: self._leave(user)
            return made

        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(protocol, connection)
        except OSError:
            # Whoever asked has gone in the meantime.
            connection.close()
            self._leave(user)

    def _leave(self, user: int) -> None:
        self._by_user[user] -= 1
        if not self._by_user[user]:
            del self._by_user[user]


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def _counted(http: Any) -> Any:
    """Uvicorn's protocol, which tells when its connection is gone."""

    class Counted(http):
        gone: Callable[[], None]

        def connection_lost(self, exc: Exception | None) -> None:
            self.gone()
            super().connection_lost(exc)

    return Counted


def _remove_dead(folder: Path) -> None:
    """Remove the sockets at which nobody listens any more."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
