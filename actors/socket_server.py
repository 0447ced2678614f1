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
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MOST_BYTES = 107
MOST_CONNECTIONS = 256
"""At the same time from one user id other than ours, as sandboxes have: none can starve the others."""


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
            if self._server is None or self._serving is None or self.path is None:
                return
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self.path.unlink(missing_ok=True)
            if self._own is not None:
                shutil.rmtree(self._own, ignore_errors=True)
            self._server, self._serving, self.path = None, None, None

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
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.setblocking(False)
        config = uvicorn.Config(
            app,
            http=_Bounded,
            lifespan="off",
            access_log=False,
            log_level="warning",
            log_config=None,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)
        return path


class _Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Hangs up on a user who has too many connections."""

    _by_user: ClassVar[Counter[int]] = Counter()
    _user: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        credentials = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        user = struct.unpack("3i", credentials)[1]
        if user != os.geteuid() and self._by_user[user] >= MOST_CONNECTIONS:
            transport.abort()
            return
        self._user = user
        self._by_user[user] += 1
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._user is not None:
            super().data_received(data)

    def eof_received(self) -> None:
        if self._user is not None:
            super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._user is None:
            return
        self._by_user[self._user] -= 1
        if not self._by_user[self._user]:
            del self._by_user[self._user]
        super().connection_lost(exc)


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
