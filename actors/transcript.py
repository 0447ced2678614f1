"""What was said in a session, as the JSON lines that a grader may read.

Invariant: it is made of what the proxy itself was sent and answered, never of what a harness says about it; its size
is bounded whatever is said.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable

from envs.protocols.canonical import Message
from trees.record import Kind

MESSAGE_CHARACTERS = 1 << 16
TOTAL_CHARACTERS = 8 << 20


class Transcript:
    """A line for each message, when it first comes up; a call that is repeated repeats its own."""

    def __init__(self, most: int = TOTAL_CHARACTERS) -> None:
        """``most``: characters that all lines may have; beyond it the oldest are left out, and counted."""
        self._most = most
        self._lines: deque[str] = deque()
        self._size = 0
        self._left_out = 0

    def add(self, ordinal: int, kind: Kind, messages: Iterable[Message]) -> None:
        """Add what a call brought and was answered. ``ordinal``: which call of the session it is, from 0."""
        for message in messages:
            line = _line(ordinal, kind, message)
            self._lines.append(line)
            self._size += len(line)
        while self._size > self._most:
            self._size -= len(self._lines.popleft())
            self._left_out += 1

    def text(self) -> str:
        note = [json.dumps({"left_out": self._left_out})] if self._left_out else []
        return "".join(f"{line}\n" for line in (*note, *self._lines))


def _line(ordinal: int, kind: Kind, message: Message) -> str:
    plain = {
        "call": ordinal,
        "kind": kind,
        "role": message.role,
        "text": _cut(message.text),
        "reasoning": _cut(message.reasoning),
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": _arguments(c.arguments)} for c in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return json.dumps({name: value for name, value in plain.items() if value not in ("", [])})


def _arguments(arguments: dict | str) -> dict | str:
    """Arguments that are too long are given as text, cut."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return arguments if len(text) <= MESSAGE_CHARACTERS else _cut(text)


def _cut(text: str) -> str:
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
