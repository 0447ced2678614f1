"""A proxy without a policy: every session has a part to play, and its model says what the part wants.

It speaks Chat Completions on a Unix socket, as far as the agent loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.session_contract import SessionSpec, Summary

Hook = Callable[[str], Awaitable[None] | None]


@dataclass
class Part:
    """What happens in one session: the commands that the model asks for, and what is done at which moment."""

    commands: tuple[str, ...] = ("cat notes.txt", "cp notes.txt answer.txt")
    opened: Hook | None = None
    called: Hook | None = None
    """Before the first call is answered."""
    closed: Hook | None = None
    hangs: bool = False
    """Whether no call is answered."""


@dataclass
class StandIn:
    """The client that a sandbox actor is given, and the server behind it."""

    folder: Path
    parts: dict[str, Part] = field(default_factory=dict)
    """By the session's id."""
    _sessions: dict[str, str] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[Any]] = field(default_factory=set)

    async def __aenter__(self) -> StandIn:
        self.folder.mkdir()
        self._server = await asyncio.start_unix_server(self._serve, self.folder / "api.sock", limit=1 << 22)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.gather(*self._serving)
        (self.folder / "api.sock").unlink()
        self.folder.rmdir()

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        key = uuid.uuid4().hex
        self._sessions[key], self._calls[key] = spec.id, 0
        await _call(self.parts[spec.id].opened, spec.id)
        return {"key": key, "socket": str(self.folder / "api.sock")}

    async def close_session(self, key: str) -> Summary:
        session = self._sessions.pop(key)
        calls = self._calls.pop(key)
        await _call(self.parts[session].closed, session)
        return Summary(session, calls, 1, 1, "stop", True, True, "", "", 0, {}, 0.0)

    async def since_call(self, key: str) -> float:
        return 0.0

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                messages = json.loads(await reader.readexactly(length))["messages"]
                key = head.partition(b"bearer ")[2].split(b"\r\n")[0].decode()
                if key not in self._sessions:
                    break
                if self.parts[self._sessions[key]].hangs:
                    self._calls[key] += 1
                    await reader.read(1)
                    break
                answer = await self._answer(key, sum(message["role"] == "assistant" for message in messages))
                body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": answer}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def _answer(self, key: str, turn: int) -> dict[str, Any]:
        session = self._sessions[key]
        part = self.parts[session]
        self._calls[key] += 1
        if self._calls[key] == 1:
            await _call(part.called, session)
        if turn >= len(part.commands):
            return {"role": "assistant", "content": "Done."}
        function = {"name": "execute_bash", "arguments": json.dumps({"command": part.commands[turn]})}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
        }


async def _call(hook: Hook | None, session: str) -> None:
    if hook is not None and (waiting := hook(session)) is not None:
        await waiting
