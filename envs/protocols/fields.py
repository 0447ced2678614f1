"""Reading and writing the fields that every protocol has.

The readers raise ``WireError`` (400) that names the field, what came and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs.protocols.canonical import ToolCall
from envs.protocols.errors import invalid
from envs.protocols.wire import loads

_MOST_NESTED = 64
UNSEEN = "[not shown: this policy reads text only]"
"""What the policy reads in place of an image or a file in the output of a tool, which the agent can look at otherwise.

In what a user says it is refused: the task cannot be done without it.
"""


def text(value: Any, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(field, value, "a string or null")
    return value


def flag(value: Any, field: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(field, value, "true, false or null")


def number(value: Any, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
        raise invalid(field, value, "a number of at least 0")
    return float(value)


def whole(value: Any, field: str) -> int | None:
    """A number of at least 1."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise invalid(field, value, "a whole number of at least 1")
    return value


def texts(value: Any, field: str) -> tuple[str, ...]:
    """A list of strings; one string alone is a list of it, null is none."""
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise invalid(field, value, "a string, a list of strings or null")
    return tuple(item for item in found if item)


def parts(
    value: Any, field: str, readable: Sequence[str], unreadable: Sequence[str], of_tool: bool = False
) -> list[str]:
    """The texts of a list of content parts in the form of OpenAI's protocols; null is none.

    ``readable`` and ``unreadable``: types of parts with text, refusals aside, and of those that hold none.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(field, value, "a string, null, or a list of text parts")
    found = []
    for i, part in enumerate(value):
        where = f"{field}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in readable:
            found.append(text(part.get("text"), f"{where}.text"))
        elif kind == "refusal":
            found.append(text(part.get("refusal"), f"{where}.refusal"))
        elif kind in unreadable and of_tool:
            found.append(UNSEEN)
        elif kind in unreadable:
            expected = "text: this policy reads no images, audio or files"
            raise invalid(f"{where}.type", kind, expected, "unsupported_content")
        else:
            raise invalid(where, part, f'a part such as {{"type": "{readable[0]}", "text": "..."}}')
    return found


def arguments(value: Any, field: str) -> dict[str, Any] | str:
    """Arguments of a tool call, as an object or as JSON text; text that is no JSON object stays text.

    Harnesses replay malformed calls of the policy; the raw text is then what the call was.
    """
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise invalid(field, value, "a JSON object as a string")
    try:
        parsed = loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def shallow(value: Any) -> bool:
    """Whether a JSON value nests at most 64 deep, which every reader along the way can walk."""
    level = [value]
    for _ in range(_MOST_NESTED):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        if not inner:
            return True
        level = [item for items in inner for item in items]
    return False


def arguments_text(call: ToolCall) -> str:
    """The arguments of a call as JSON text."""
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call for protocols that carry objects; text that is none is the field ``text``."""
    return {"text": call.arguments} if isinstance(call.arguments, str) else call.arguments


def sse(data: Any, event: str = "") -> bytes:
    """One server-sent event that carries JSON."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
