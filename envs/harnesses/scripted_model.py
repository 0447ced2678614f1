"""A model API on a Unix socket that plays one part: it answers, refuses, or stays silent. For checking harnesses.

It speaks all wire protocols, and keeps what it was asked.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from starlette.routing import compile_path

from envs.protocols import wire
from envs.protocols.base import Route, WireProtocol
from envs.protocols.canonical import Message, Reply, Request, Usage
from envs.protocols.errors import WireError
from envs.protocols.registry import PROTOCOLS, spoken

Part = Literal["answer", "limit", "silence"]
FINAL = "I have done all that was asked. There is nothing left to do."
_MODEL = "policy"
_PATTERNS = [(*compile_path(route.path)[::2], route, protocol) for protocol in PROTOCOLS for route in protocol.ROUTES]


@dataclass
class Model:
    """The part that is played, and what came. Filled by threads of the server."""

    part: Part
    calls: list[Request] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """The key of each call; empty where it had none."""
    unknown: list[str] = field(default_factory=list)
    """What was asked for and does not exist, as method and path."""
    refused: list[str] = field(default_factory=list)
    """What was wrong with calls that could not be read."""
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(model: Model, socket: Path) -> Iterator[None]:
    """Play ``model`` at ``socket`` until the context ends."""
    server = _Server(os.fspath(socket), _handler(model))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        model.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is nothing to print about."""


def _handler(model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(b"")

        def do_POST(self) -> None:
            self._respond(_body(self))

        def _respond(self, body: bytes) -> None:
            url = urlsplit(self.path)
            protocol = spoken(url.path, {name.lower(): value for name, value in self.headers.items()})
            try:
                status, kind, answer = self._answer(url.path, dict(parse_qsl(url.query)), body, protocol)
            except WireError as error:
                status = protocol.STATUS.get(error.status, error.status)
                kind, answer = "application/json", _json(protocol.error(error))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            if status == 429:
                self.send_header("x-should-retry", "false")
            self.end_headers()
            self.wfile.write(answer)

        def _answer(
            self, path: str, query: dict[str, str], body: bytes, protocol: WireProtocol
        ) -> tuple[int, str, bytes]:
            found = _route(self.command, path, protocol)
            if found is None:
                model.unknown.append(f"{self.command} {path}")
                raise WireError(404, f"{self.command} {path}: Not Found", "unknown_url")
            route, params, protocol = found
            if route.action == "models":
                return 200, "application/json", _json(protocol.models((_MODEL,)))
            if route.action == "model":
                return 200, "application/json", _json(protocol.model(params["model"]))
            try:
                request = protocol.parse(wire.read(body), {**query, **params, **route.params})
            except WireError as error:
                model.refused.append(f"{self.command} {path}: {error.message}")
                raise
            if route.action == "count":
                return 200, "application/json", _json(protocol.count(len(body) // 4))
            model.keys.append(_key(self.headers, query))
            model.calls.append(request)
            return self._complete(protocol, request, len(body) // 4)

        def _complete(self, protocol: WireProtocol, request: Request, tokens: int) -> tuple[int, str, bytes]:
            if model.part == "silence":
                model.over.wait()
            if model.part == "limit":
                raise WireError(429, "limit of this session reached: calls: 0 used of 0", "limit_reached", "calls")
            message = Message("assistant", FINAL)
            reply = Reply(f"c{len(model.calls)}", request.model, message, "stop", Usage(tokens, len(FINAL) // 4))
            if request.stream:
                kind = request.wire.get("content_type", "text/event-stream; charset=utf-8")
                return 200, kind, b"".join(protocol.stream(reply, request))
            return 200, "application/json", _json(protocol.dump(reply, request))

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: Any) -> None:
            """What is asked is kept, not printed."""

    return Handler


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if "chunked" not in handler.headers.get("Transfer-Encoding", "").lower():
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    chunks = []
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        chunks.append(handler.rfile.read(size))
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        pass
    return b"".join(chunks)


def _route(method: str, path: str, preferred: WireProtocol) -> tuple[Route, dict[str, str], WireProtocol] | None:
    found = [
        (route, match.groupdict(), protocol)
        for pattern, _, route, protocol in _PATTERNS
        if route.method == method and (match := pattern.match(path))
    ]
    return next((one for one in found if one[2] is preferred), found[0] if found else None)


def _key(headers: Any, query: dict[str, str]) -> str:
    bearer = headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer or headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key", "")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
