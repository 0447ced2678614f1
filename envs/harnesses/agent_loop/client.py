"""OpenAI Chat Completions over one kept-alive HTTP/1.1 connection.

``http.client`` is not used: it loads ``email``, which costs 45 ms of CPU at every start of this program.
What is spoken is the part of HTTP/1.1 that JSON APIs answer with: a status line, headers, and a body with a
length, in chunks, or up to the end of the connection.
"""

from __future__ import annotations

import time

from . import lean

RETRY_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


class ApiError(Exception):
    """The API refused the request, or stayed out of reach after every retry."""


class _TransientError(Exception):
    """Worth another try."""


class Client:
    """A client for ``base_url`` (``http://host:port``, a path prefix allowed) with a bearer key."""

    def __init__(self, base_url: str, key: str, model: str, read_timeout_s: float = 1800.0) -> None:
        scheme, separator, rest = base_url.partition("://")
        if scheme != "http" or not separator:
            raise ValueError(f"base_url {base_url!r}: expected http://HOST:PORT")
        authority, _, prefix = rest.partition("/")
        host, _, port = authority.partition(":")
        self.host = host
        self.port = int(port or 80)
        self.path = f"/{prefix.strip('/')}/v1/chat/completions".replace("//", "/")
        self.key = key
        self.model = model
        self.read_timeout_s = read_timeout_s
        self._connection: lean.Connection | None = None

    def complete(self, messages: list[dict], tools: list[dict]) -> dict:
        """The first choice, ``{"message": ..., "finish_reason": ...}``. Raises ApiError."""
        body = lean.dumps({"model": self.model, "messages": messages, "tools": tools}).encode()
        reason: Exception | None = None
        for delay in RETRY_DELAYS_S:
            try:
                return self._choice(*self._exchange(body))
            except (OSError, EOFError, ValueError, _TransientError) as error:
                reason = error
                self.close()
                time.sleep(delay)
        raise ApiError(f"{reason}, after {len(RETRY_DELAYS_S)} tries")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _choice(self, status: int, payload: bytes) -> dict:
        if status >= 500:
            raise _TransientError(f"HTTP {status}: {payload[:300]!r}")
        if status != 200:
            raise ApiError(f"HTTP {status}: {payload.decode(errors='replace')[:1000]}")
        answer = lean.loads(payload.decode())
        try:
            choice = answer["choices"][0]  # type: ignore[index]
            if isinstance(choice["message"], dict):
                return choice
        except (LookupError, TypeError):
            pass
        raise _TransientError(f"an answer that is no chat completion: {payload[:300]!r}")

    def _exchange(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = lean.Connection(self.host, self.port, self.read_timeout_s)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {self.key}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection = self._connection
        connection.send(head.encode() + body)
        status, headers = _read_head(connection)
        while 100 <= status < 200:
            status, headers = _read_head(connection)
        payload, reusable = _read_body(connection, headers)
        if not reusable or headers.get("connection", "").lower() == "close":
            self.close()
        return status, payload


def _read_head(connection: lean.Connection) -> tuple[int, dict[str, str]]:
    parts = connection.line().split(None, 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise _TransientError(f"not an HTTP/1.1 answer: {' '.join(parts)[:100]!r}")
    headers: dict[str, str] = {}
    while line := connection.line():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


def _read_body(connection: lean.Connection, headers: dict[str, str]) -> tuple[bytes, bool]:
    """The body, and whether the connection can be used again."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        chunks = []
        while size := int(connection.line().partition(";")[0], 16):
            chunks.append(connection.exactly(size))
            connection.line()
        while connection.line():
            pass
        return b"".join(chunks), True
    if "content-length" in headers:
        return connection.exactly(int(headers["content-length"])), True
    return connection.rest(), False
