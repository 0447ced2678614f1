"""Which part of an episode a model call belongs to, from what the call itself shows.

The table holds what each harness is known to put on its calls; a call that no line of it fits is placed by
where its conversation starts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.protocols.canonical import Message, Request
from trees import forks
from trees.record import Kind


@dataclass(frozen=True, slots=True)
class Hint:
    """All conditions that are given must hold; patterns are searched from the start of the text."""

    kind: Kind
    why: str
    header: str = ""
    """A header that must be there; ``value`` is searched for in it."""
    value: str = ""
    system: str = ""
    """Start of a system text."""
    first_user: str = ""
    """Start of one of the user's messages before the first answer."""
    last_user: str = ""
    """Start of the user's last message, where it ends the conversation."""
    first_answer: str = ""
    """Start of the first assistant message."""
    tool: str = ""
    """A tool that must be offered."""
    tools: bool | None = None
    """Whether any tools must, or must not, be offered."""

    def fits(self, call: Request) -> bool:
        if self.header and (self.header not in call.headers or self.value not in call.headers[self.header]):
            return False
        if self.tools is not None and bool(call.tools) != self.tools:
            return False
        if self.tool and self.tool not in (tool["function"]["name"] for tool in call.tools):
            return False
        if self.system and not _starts(self.system, [m.text for m in call.messages if m.role == "system"][:1]):
            return False
        if self.first_answer and not _starts(self.first_answer, _first_answer(call.messages)):
            return False
        if self.first_user and not _starts(self.first_user, _first_users(call.messages)):
            return False
        last = call.messages[-1:] if call.messages[-1:] and call.messages[-1].role == "user" else ()
        return not self.last_user or _starts(self.last_user, [message.text for message in last])


HINTS: tuple[Hint, ...] = (
    Hint("subagent", "claude-code: agent id", header="x-claude-code-agent-id"),
    Hint("subagent", "codex: sub-agent header", header="x-openai-subagent"),
    Hint("subagent", "opencode: parent session", header="x-parent-session-id"),
    Hint("subagent", "openclaw: sub-agent context", first_user=r"(\[[^\]]*\] *)?\[Subagent Context\]"),
    Hint("subagent", "qwen-code: sub-agent prompt", system="You are a general-purpose agent"),
    Hint("subagent", "gemini-cli: sub-agent tool", tool="complete_task"),
    Hint("compaction", "codex: request kind", header="x-codex-turn-metadata", value='"request_kind":"compaction"'),
    Hint("compaction", "claude-code: compaction prompt", last_user="CRITICAL: Respond with TEXT ONLY"),
    Hint("compaction", "codex: compaction prompt", last_user="You are performing a CONTEXT CHECKPOINT COMPACTION"),
    Hint("compaction", "openclaw: compaction prompt", system="You are a context summarization assistant", tools=False),
    Hint("compaction", "opencode: compaction prompt", system=".{0,80}context summarization agent", tools=False),
    Hint(
        "compaction",
        "qwen-code or gemini-cli: compaction prompt",
        system="You are the component that summarizes internal chat history",
    ),
    Hint("compaction", "agent_loop: summary request", last_user=r"CONTEXT SUMMARY\."),
    Hint("side", "opencode: title prompt", system="You are a title generator", tools=False),
    Hint("side", "qwen-code: memory prompt", system=".{0,80}managed memory extraction subagent"),
    Hint(
        "after-compaction",
        "claude-code: summary",
        first_user=r"[\s\S]*This session is being continued from a previous conversation",
    ),
    Hint("after-compaction", "agent_loop: summary", first_user=r"[\s\S]*\n\nSummary of the earlier steps:"),
    Hint("after-compaction", "codex: summary", first_user="Another language model started to solve this problem"),
    Hint("after-compaction", "opencode: summary", first_user="What did we do so far"),
    Hint(
        "after-compaction", "openclaw: summary", first_user="The conversation history before this point was compacted"
    ),
    Hint(
        "after-compaction",
        "qwen-code or gemini-cli: summary",
        first_answer=r"Got it\. Thanks for the additional context",
    ),
)


AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Claude Code, Codex, OpenCode."""


def agent_of(call: Request) -> str:
    """Which agent of the harness makes a call, where its headers say so; empty where not."""
    return next((call.headers[name] for name in AGENT_HEADERS if name in call.headers), "")


def classify(call: Request, parent: Kind | None, fork: str, elsewhere: bool) -> tuple[Kind, str]:
    """The kind of a call and why.

    ``parent``: kind of the call that it extends; ``fork``: one of ``trees.forks``; ``elsewhere``: whether the
    session has a main line and it begins with another system text or other tools.
    """
    for hint in HINTS:
        if hint.fits(call):
            return hint.kind, hint.why
    if parent == "compaction":
        return "after-compaction", "goes on after a compaction"
    if parent is not None and parent != "main":
        return parent, "goes on from a call of this kind"
    if parent is None and elsewhere and fork == forks.NEW_CONVERSATION:
        if call.tools:
            return "subagent", "another conversation, with tools"
        return "side", "another conversation, without tools"
    return "main", ""


def _first_users(messages: Sequence[Message]) -> list[str]:
    opening = itertools.takewhile(lambda message: message.role != "assistant", messages)
    return [message.text for message in opening if message.role == "user"]


def _first_answer(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages if message.role == "assistant"][:1]


def _starts(pattern: str, texts: Sequence[str]) -> bool:
    return any(re.match(pattern, text.lstrip()) for text in texts)
