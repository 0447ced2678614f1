"""Lines at the head of a system text that change with every call and mean nothing to the policy."""

from __future__ import annotations

import re
from dataclasses import replace

from envs.protocols.canonical import Request

_HEADS = (re.compile(r"\s*x-anthropic-billing-header:[^\n]*(\n|\Z)\s*"),)


def without_volatile_head(request: Request) -> Request:
    """The request without such lines; only the head of the first message is looked at, and only a system one."""
    first = request.messages[0] if request.messages else None
    if first is None or first.role != "system":
        return request
    text = first.text
    for head in _HEADS:
        end = 0
        while (found := head.match(text, end)) is not None and found.end() > end:
            end = found.end()
        text = text[end:]
    if text == first.text:
        return request
    rest = request.messages[1:]
    return replace(request, messages=(replace(first, text=text), *rest) if text else rest)
