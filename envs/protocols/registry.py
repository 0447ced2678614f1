"""The wire protocols, and which one a request speaks."""

from __future__ import annotations

from collections.abc import Mapping

from envs.protocols import anthropic_messages, gemini, openai_chat, openai_responses
from envs.protocols.base import WireProtocol

PROTOCOLS: tuple[WireProtocol, ...] = (openai_chat, openai_responses, anthropic_messages, gemini)
HEADERS = (
    "anthropic-version",
    "thread-id",
    "x-claude-code-agent-id",
    "x-codex-turn-metadata",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-id",
    "x-stainless-retry-count",
)
"""What is kept of a request's headers: by these harnesses tell their agents apart. Never one that holds a key."""


_STARTS: tuple[tuple[str, WireProtocol], ...] = (
    ("/v1/chat/", openai_chat),
    ("/v1/responses", openai_responses),
    ("/v1/messages", anthropic_messages),
    ("/v1beta", gemini),
    ("/v1alpha", gemini),
)
_GEMINI_METHODS = tuple({route.path.rpartition("}")[2] for route in gemini.ROUTES if "}:" in route.path})


def spoken(path: str, headers: Mapping[str, str]) -> WireProtocol:
    """The protocol in whose shape to answer: that of the path, else that of the headers."""
    for start, protocol in _STARTS:
        if path.startswith(start):
            return protocol
    if path.endswith(_GEMINI_METHODS) or ("x-goog-api-key" in headers and "anthropic-version" not in headers):
        return gemini
    return anthropic_messages if "anthropic-version" in headers else openai_chat
