"""Tool calls as a policy writes them, well or badly, to calls that a harness can read.

A call that cannot be read with certainty is not a call: it stays in the text, as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from renderers import ParsedToolCall, ToolCallParseStatus

from envs.protocols.canonical import ToolCall
from envs.protocols.fields import shallow

_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_ENDS = re.compile(r"</parameter>|<parameter=|</function>")


def valid_call(attempt: ParsedToolCall, tools: Sequence[Mapping[str, Any]] = ()) -> ToolCall | None:
    """The call, if a harness can read it: a name, and arguments that are a JSON object in valid Unicode."""
    written = (attempt.raw or "").strip()
    if _FUNCTION.match(written):
        whole = attempt.status != ToolCallParseStatus.UNCLOSED_BLOCK
        return _xml_call(written, tools) if whole else None
    name, arguments = attempt.name, attempt.arguments
    if attempt.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return None
    if not isinstance(name, str) or not name.strip():
        return None
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    if arguments is None:
        arguments = {}
    return ToolCall("", name, arguments) if isinstance(arguments, dict) and shallow(arguments) else None


def as_text(attempt: ParsedToolCall) -> str:
    end = "" if attempt.status == ToolCallParseStatus.UNCLOSED_BLOCK else "\n</tool_call>"
    return f"<tool_call>\n{attempt.raw}{end}"


def _xml_call(raw: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    """``<function=NAME><parameter=KEY>VALUE</parameter>...</function>``.

    A value ends where it says so, or where the next parameter or the end of the function begins: a policy that
    forgets one closing tag means both parameters. Without any end the value may be cut, and is none.
    """
    function = _FUNCTION.match(raw)
    assert function is not None
    name = function[1].strip()
    types = _parameter_types(name, tools)
    arguments: dict[str, Any] = {}
    rest = raw[function.end() :]
    if rest.count("<parameter=") != len(_PARAMETER.findall(rest)):
        return None
    for start in _PARAMETER.finditer(rest):
        end = _VALUE_ENDS.search(rest, start.end())
        if end is None:
            return None
        value = _typed(
            rest[start.end() : end.start()].removeprefix("\n").removesuffix("\n"), types.get(start[1].strip())
        )
        if value is _UNREADABLE:
            return None
        arguments[start[1].strip()] = value
    return ToolCall("", name, arguments) if name and shallow(arguments) else None


_UNREADABLE = object()


def _parameter_types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            if isinstance(properties, Mapping):
                return {key: each.get("type") for key, each in properties.items() if isinstance(each, Mapping)}
    return {}


def _typed(text: str, kind: Any) -> Any:
    """A value as its schema says; text where the schema says nothing."""
    if kind in (None, "string") or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _UNREADABLE
    return value
