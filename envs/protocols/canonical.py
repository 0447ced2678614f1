"""The canonical conversation: what every wire protocol is turned into and answered from."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
_SIGNED = "reins:"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy made it. ``arguments`` is the parsed object, or the raw text when it is not JSON."""

    id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``tool_call_id`` and ``name`` belong to role ``tool``; ``node`` to role ``assistant``."""

    role: Role
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    node: str = ""
    """The call whose answer this is, where the protocol carries a pointer besides tool-call ids; else empty."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the harness asked for; the training setting may override it."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A model call in canonical form. ``tools`` are OpenAI function specifications."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    previous: str = ""
    """The call after whose answer ``messages`` go on; empty: they are the whole conversation."""
    instructed: bool = False
    """Whether the first message holds for this request alone: one that goes on from it brings its own."""
    keep: bool = False
    """Whether a later request may name this call as ``previous``."""
    headers: dict[str, str] = field(default_factory=dict)
    """Those by which harnesses tell their agents apart, names in lower case."""
    protocol: str = ""
    wire: dict[str, Any] = field(default_factory=dict)
    """What only the answer in this protocol needs of the request."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call. ``cached`` is the part of ``prompt`` that needed no prefill."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The decoded copy of a completion that goes to the harness."""

    id: str
    model: str
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stop: str = ""
    """The stop sequence of the request that ended it, which is not part of the text."""


def signature(call: str) -> str:
    """The opaque base64 text by which a client hands back which call reasoning came from."""
    return base64.b64encode(f"{_SIGNED}{call}".encode()).decode()


def signed_call(text: object) -> str:
    """The call of a signature of ours; empty for anything else."""
    try:
        decoded = base64.b64decode(text, validate=True).decode() if isinstance(text, str | bytes) else ""
    except ValueError:
        return ""
    return decoded.removeprefix(_SIGNED) if decoded.startswith(_SIGNED) else ""
