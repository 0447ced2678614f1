"""JSON as it comes over a wire.

Invariant: what ``loads`` returns holds only text that every tokenizer can encode. JSON can spell half of a
surrogate pair; it becomes U+FFFD.
"""

from __future__ import annotations

import json
import re
from typing import Any

from envs.protocols.errors import WireError

_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Spelled out, or in the bytes themselves, which Python's reader lets pass."""


def loads(body: bytes | str) -> Any:
    """Parse JSON. Raises ``ValueError`` where it is none, ``RecursionError`` where it nests too deeply."""
    raw = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    value = json.loads(body)
    plain = json.detect_encoding(raw).startswith("utf-8") and not _MAY_BE_SURROGATE.search(raw)
    return value if plain else _well_formed(value)


def read(body: bytes) -> Any:
    """Parse the body of a request. Raises ``WireError`` 400."""
    try:
        return loads(body)
    except ValueError as error:
        raise WireError(400, f"body: not valid JSON: {error}", "invalid_json") from error
    except RecursionError as error:
        raise WireError(400, "body: nested too deeply", "invalid_json") from error


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value
