"""The viewer's server: a page, the list in portions, and a tree at a time; on the loopback address only."""

from __future__ import annotations

import gzip
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trees.viewer.catalogue import Catalogue, PlaceError
from trees.viewer.page import page
from trees.viewer.payload import describe, dumps, plain
from trees.viewer.wording import Wording

HOST = "127.0.0.1"
PORTION = 200
"""Rows in one answer: those that no log knows cost a read of their tree."""
_LONGEST_NUMBER = 10
_OWN_NAMES = {"127.0.0.1", "localhost", "::1"}
_WORTH_PACKING = 16_384
"""Bytes from which an answer is compressed: the page is often looked at through an SSH tunnel."""


class ViewServer(ThreadingHTTPServer):
    """Serves one catalogue. Raises OSError when the port is taken; 0 takes a free one."""

    daemon_threads = True

    def __init__(self, catalogue: Catalogue, wording: Wording | None, about: dict[str, Any], port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self._catalogue = catalogue
        self._wording = wording
        self._about = about
        self._page = page()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def answer(self, target: str) -> tuple[HTTPStatus, str, str]:
        """Status, media type and body for a request's path and query."""
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if parts.path == "/":
            return HTTPStatus.OK, "text/html", self._page
        if parts.path == "/episodes":
            return self._portion(query.get("from", "0"))
        if parts.path == "/tree":
            return self._tree(query.get("episode", ""))
        return _refusal(HTTPStatus.NOT_FOUND, f"got path {parts.path!r}, expected /, /episodes or /tree")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def _portion(self, start: str) -> tuple[HTTPStatus, str, str]:
        first = int(start) if start.isdecimal() and len(start) < _LONGEST_NUMBER else 0
        if first == 0:
            try:
                self._catalogue.scan()
            except PlaceError as error:
                return _refusal(HTTPStatus.NOT_FOUND, str(error))
        total = len(self._catalogue.names())
        after = first + PORTION
        portion = {
            "rows": plain(self._catalogue.rows(first, PORTION)),
            "next": after if after < total else None,
            "about": {**self._about, "total": total, "without_tree": self._catalogue.without_tree},
        }
        return HTTPStatus.OK, "application/json", dumps(portion)

    def _tree(self, name: str) -> tuple[HTTPStatus, str, str]:
        try:
            tree = self._catalogue.open(name)
        except PlaceError as error:
            return _refusal(HTTPStatus.NOT_FOUND, str(error))
        except (OSError, ValueError) as error:
            return _refusal(HTTPStatus.UNPROCESSABLE_ENTITY, f"{self._catalogue.entry(name).path.name}: {error}")
        return HTTPStatus.OK, "application/json", dumps(describe(name, tree, self._wording))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ViewServer

    def do_GET(self) -> None:
        # A name that somebody else points at the loopback address must not read what is here.
        if _host(self.headers.get("Host", "")) in _OWN_NAMES:
            try:
                status, kind, text = self.server.answer(self.path)
            except Exception as error:
                # One odd tree must not leave the page without an answer.
                told = f"{type(error).__name__}: {error}"
                status, kind, text = _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, told)
        else:
            status, kind, text = _refusal(HTTPStatus.FORBIDDEN, "expected a request to localhost or 127.0.0.1")
        body = text.encode("utf-8")
        self.send_response(status)
        if len(body) >= _WORTH_PACKING and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: the terminal shows the address."""


def _host(header: str) -> str:
    """The name in a Host header, without its port; an SSH tunnel may have another."""
    return header[1:].split("]")[0] if header.startswith("[") else header.split(":")[0].lower()


def _refusal(status: HTTPStatus, message: str) -> tuple[HTTPStatus, str, str]:
    return status, "application/json", dumps({"error": message})
