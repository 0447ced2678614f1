"""The key of a session: unguessable, and its head says where the session's requests go.

Apart from the sessions, so that a sandbox actor starts without loading tokenizers.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

ROUTE_LENGTH = 8
IN_PATH = re.compile(r"^/s/([^/]*)")
_LIKE_A_KEY = re.compile(r"[0-9a-f]{32,}")
_HEADERS = (b"x-api-key", b"x-goog-api-key")


def new_key(session: str) -> str:
    """A new key for a session, alphanumeric."""
    return route(session) + secrets.token_hex(24)


def route(session: str) -> str:
    """The head of a session's keys, which tells nothing else about them."""
    return digest(session)[:ROUTE_LENGTH]


def digest(text: str) -> str:
    """Hash of a key or a name, 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def redacted(text: str) -> str:
    """The text without what may be a key or half of one: as it may be logged and told."""
    return _LIKE_A_KEY.sub("...", text)


def carried(scope: Mapping[str, Any]) -> str:
    """The key that an HTTP request carries, from its ASGI scope: in the path, as a bearer, in the header or the
    query of one of the protocols; empty without one.
    """
    found = IN_PATH.match(scope["path"])
    if found:
        return found[1]
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for name in _HEADERS:
        if headers.get(name):
            return headers[name].decode("latin-1")
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])[0]
