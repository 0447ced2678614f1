"""A transcript as OpenClaw keeps it, the form in which ClawGym's and PinchBench's graders read what was said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VARIABLE = "OPENCLAW_REWARD_PAYLOAD"
"""The environment variable that names a grader's file of what was said."""
_ROLES = {"user": "user", "assistant": "assistant", "tool": "toolResult"}
_KINDS = ("main", "subagent", "after-compaction")


def events(transcript: str) -> Iterator[dict[str, Any]]:
    """An event for each message of our own transcript, JSON lines, that an agent said or was told."""
    for text in transcript.splitlines():
        line = json.loads(text)
        if line.get("kind") in _KINDS and line.get("role") in _ROLES:
            yield {"type": "message", "message": {"role": _ROLES[line["role"]], "content": list(_parts(line))}}


def _parts(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if line.get("text"):
        yield {"type": "text", "text": line["text"]}
    for call in line.get("tool_calls", []):
        # Graders were written for versions that call the arguments by either name.
        given = call.get("arguments", {})
        yield {"type": "toolCall", "id": call.get("id", ""), "name": call["name"], "arguments": given, "params": given}
