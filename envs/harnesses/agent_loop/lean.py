"""JSON and a TCP connection from the interpreter's built-in accelerators alone.

``json`` loads ``re`` and ``enum``, ``socket`` loads ``selectors``: 13 ms of CPU at start-up, as much as all
the rest of this program, which starts anew for every task. The C parts that those two wrap load in under a
millisecond. ``_json`` is no public interface: where it is missing or has changed, ``json`` takes over.
"""

from __future__ import annotations

import _socket

try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    class _Context:
        """What ``json.JSONDecoder`` hands to the scanner."""

        strict = True
        object_hook = None
        object_pairs_hook = None
        parse_float = float
        parse_int = int
        parse_constant = float
        memo: dict = {}  # noqa: RUF012 - emptied by the scanner after every text

    _scan = make_scanner(_Context())  # type: ignore[arg-type]

    def _refuse(value: object) -> object:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")

    _encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)

    def dumps(value: object) -> str:
        """``json.dumps(value)``."""
        return "".join(_encode(value, 0))

    def loads(text: str) -> object:
        """``json.loads(text)``; ValueError where it is not JSON."""
        start = len(text) - len(text.lstrip(" \t\n\r"))
        try:
            value, end = _scan(text, start)
            if not text[end:].strip(" \t\n\r"):
                return value
        except (StopIteration, SystemError):
            # The scanner cannot make its errors without ``json`` being loaded: SystemError in Python 3.11.
            pass
        import json

        return json.loads(text)

    loads(dumps({"a": [1, "b", None, 0.5]}))
except (ImportError, TypeError):
    from json import dumps, loads  # type: ignore[assignment]

__all__ = ["Connection", "dumps", "loads"]


class Connection:
    """A TCP connection with buffered reading. Raises OSError; EOFError when it ends too early."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._socket = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._socket.connect((host, port))
        self._socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        self._held = bytearray()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def line(self) -> str:
        """The next line, without its end."""
        while (end := self._held.find(b"\n")) < 0:
            self._more()
        line = self._held[:end].decode("latin-1").rstrip("\r")
        del self._held[: end + 1]
        return line

    def exactly(self, size: int) -> bytes:
        while len(self._held) < size:
            self._more()
        data = bytes(self._held[:size])
        del self._held[:size]
        return data

    def rest(self) -> bytes:
        """Everything up to the end."""
        try:
            while True:
                self._more()
        except EOFError:
            data, self._held = bytes(self._held), bytearray()
            return data

    def _more(self) -> None:
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise EOFError("the connection ended in the middle of an answer")
        self._held += chunk

    def close(self) -> None:
        self._socket.close()
