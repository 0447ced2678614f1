"""Watches the JSON-RPC lines between one client and one server: what is passed on, refused, answered and written down.

Invariants: every line that is passed on is one JSON object; every request that reached the server is answered once,
by the server or, when that has ended, by an error that says so; a call of a tool is written down exactly once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LONGEST = 4 << 20
"""Bytes of one message, in either direction."""
MOST_CALLS = 2000
"""Calls of tools on one server in one episode; further ones are refused."""
_MOST_PENDING = 256
_MOST_ROWS = 500
_ARGUMENT_CHARACTERS = 500
_LONGEST_ID = 200
_PARSE, _INVALID, _SERVER = -32700, -32600, -32000


@dataclass(slots=True)
class CallLog:
    """The calls of one episode on all its servers, the first of them as rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    """By server, those that have no row any more included."""

    def begin(self, server: str) -> bool:
        """Count a call; whether it may be made."""
        self.calls[server] = self.calls.get(server, 0) + 1
        return self.calls[server] <= MOST_CALLS

    def end(self, row: dict[str, Any]) -> None:
        if len(self.rows) < _MOST_ROWS:
            self.rows.append(row)


@dataclass(frozen=True, slots=True)
class _Asked:
    is_call: bool
    tool: str
    arguments: str
    began: float


def _error(ident: object, code: int, message: str) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": message}}).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong with it."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return f"not JSON that can be read: {error}"
    return message if isinstance(message, dict) else f"expected a JSON object, got {type(message).__name__}"


@dataclass(slots=True)
class Tap:
    """One connection to the server ``name``. Each method takes or makes whole lines with their line ends."""

    name: str
    log: CallLog
    clock: Callable[[], float] = time.monotonic
    ended: str = ""
    """Why the server is gone; empty while it runs."""
    _pending: dict[str, tuple[Any, _Asked]] = field(default_factory=dict)

    def to_server(self, line: bytes) -> tuple[bytes, bytes]:
        """What the server and what the client are told when the client sends ``line``."""
        if not line.strip():
            return b"", b""
        message = _object(line)
        if isinstance(message, str):
            return b"", _error(None, _PARSE, message)
        method, ident = message.get("method"), message.get("id")
        if not isinstance(method, str) or ident is None:
            # A notification, or an answer to something that the server asked.
            return (b"" if self.ended else _whole(line)), b""
        if not isinstance(ident, str | int) or isinstance(ident, bool) or len(str(ident)) > _LONGEST_ID:
            return b"", _error(None, _INVALID, f"expected an id of at most {_LONGEST_ID} characters or digits")
        asked = self._asked(method, message.get("params"))
        if self.ended:
            return b"", self._refuse(ident, asked, self.ended)
        if len(self._pending) >= _MOST_PENDING:
            return b"", self._refuse(ident, asked, f"more than {_MOST_PENDING} requests wait for an answer")
        if json.dumps(ident) in self._pending:
            return b"", self._refuse(ident, asked, f"the id {ident!r:.80} is that of a request that waits")
        if method == "tools/call" and not self.log.begin(self.name):
            return b"", self._refuse(ident, asked, f"more than {MOST_CALLS} calls in this episode")
        self._pending[json.dumps(ident)] = (ident, asked)
        return _whole(line), b""

    def to_client(self, line: bytes) -> bytes:
        """What the client is told when the server sends ``line``; nothing for what is no message."""
        message = _object(line)
        if isinstance(message, str):
            return b""
        if "method" not in message:
            _, asked = self._pending.pop(json.dumps(message.get("id")), (None, None))
            if asked is None:
                return b""
            if asked.is_call:
                result = message.get("result")
                failed = "error" in message or (isinstance(result, dict) and bool(result.get("isError")))
                self._write(asked, len(line), failed)
        return _whole(line)

    def end(self, why: str) -> bytes:
        """The server is gone: the answers to all that waits, which say why."""
        self.ended = why
        waiting = list(self._pending.values())
        self._pending.clear()
        return b"".join(self._refuse(ident, asked, why) for ident, asked in waiting)

    def _asked(self, method: str, params: object) -> _Asked:
        params = params if isinstance(params, dict) else {}
        arguments = json.dumps(params.get("arguments", {}), ensure_ascii=False)
        return _Asked(method == "tools/call", _short(str(params.get("name", ""))), _short(arguments), self.clock())

    def _refuse(self, ident: object, asked: _Asked, why: str) -> bytes:
        self._write(asked, 0, True, why)
        return _error(ident, _SERVER, f"MCP server {self.name}: {why}")

    def _write(self, asked: _Asked, size: int, failed: bool, why: str = "") -> None:
        if not asked.is_call:
            return
        row = {
            "server": self.name,
            "tool": asked.tool,
            "arguments": asked.arguments,
            "result_bytes": size,
            "is_error": failed,
            "seconds": round(self.clock() - asked.began, 3),
        }
        self.log.end(row | ({"reason": why} if why else {}))


def _whole(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n"


def _short(text: str) -> str:
    """The head of a text, without halves of characters, which no file of rows could hold."""
    return text[:_ARGUMENT_CHARACTERS].encode("utf-8", "replace").decode()
