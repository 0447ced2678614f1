"""A hop between a harness and the proxy that shows the faults which the proxy itself never shows.

One request per connection. Faults are counted over the requests that ask for a completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Fault = Literal["500", "429", "refused", "lost", "cut"]
"""``refused``: hung up on before anything is asked. ``lost``: asked, and the answer withheld. ``cut``: the
first half of the answer, then hung up."""
_ASKS = (
    b"/chat/completions",
    b"/messages?",
    b"/messages ",
    b"/responses",
    b":streamGenerateContent",
    b":generateContent",
)
_STATUS = {
    "500": (b"500 Internal Server Error", "api_error"),
    "429": (b"429 Too Many Requests", "rate_limit_error"),
}


@dataclass(frozen=True)
class Seen:
    """One request as it came by."""

    path: str
    size: int
    fault: str


class FaultHop:
    """Listens at ``path`` and passes on to the Unix socket ``behind``; ``faults``: by number of the request."""

    def __init__(self, path: Path, behind: Path, faults: Mapping[int, Fault]) -> None:
        self.path = path
        self.seen: list[Seen] = []
        self._behind = behind
        self._faults = faults
        self._asked = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultHop:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client may leave at any moment; what it asked is passed on all the same.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._pass_on(reader, writer)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *headers = head[:-4].split(b"\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (h.partition(b":") for h in headers)}
        if b"100-continue" in fields.get(b"expect", b""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, fields)
        fault = self._fault(line)
        self.seen.append(Seen(line.split(b" ")[1].decode(), len(body), fault))
        if fault in _STATUS:
            writer.write(_refusal(fault))
        elif fault != "refused":
            kept = [h for h in headers if h.split(b":")[0].lower() not in _HOP]
            kept += [b"connection: close", b"content-length: %d" % len(body)]
            await self._ask(b"\r\n".join([line, *kept]) + b"\r\n\r\n" + body, writer, fault)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    def _fault(self, line: bytes) -> str:
        if not line.startswith(b"POST") or not any(path in line for path in _ASKS):
            return ""
        self._asked += 1
        return self._faults.get(self._asked - 1, "")

    async def _ask(self, request: bytes, writer: asyncio.StreamWriter, fault: str) -> None:
        reader, behind = await asyncio.open_unix_connection(self._behind)
        behind.write(request)
        if fault:
            answer = await reader.read()
            writer.write(answer[: len(answer) // 2] if fault == "cut" else b"")
        else:
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        behind.close()


_HOP = {b"connection", b"content-length", b"transfer-encoding", b"expect", b"keep-alive"}


async def _body(reader: asyncio.StreamReader, fields: dict[bytes, bytes]) -> bytes:
    if b"chunked" not in fields.get(b"transfer-encoding", b""):
        return await reader.readexactly(int(fields.get(b"content-length", b"0")))
    whole = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        whole += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return whole


def _refusal(fault: str) -> bytes:
    status, kind = _STATUS[fault]
    error = {"type": "error", "error": {"type": kind, "message": "injected", "code": int(fault), "status": "INTERNAL"}}
    body = json.dumps(error).encode()
    head = [b"HTTP/1.1 " + status, b"content-type: application/json", b"connection: close"]
    if fault == "429":
        head.append(b"retry-after: 1")
    return b"\r\n".join([*head, b"content-length: %d" % len(body)]) + b"\r\n\r\n" + body
