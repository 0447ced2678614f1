"""What tells a sub-agent, a compaction and a side call from the main line."""

import json

import pytest

from envs.harnesses.agent_loop import context
from envs.harnesses.kinds import agent_of, classify
from envs.protocols.canonical import Message, Request
from trees import forks

TOOL = {"type": "function", "function": {"name": "Bash"}}
SYSTEM = Message("system", "You are a coding agent.")
TASK = Message("user", "Fix the test.")


def call(*messages, tools=(TOOL,), **headers):
    return Request("policy", messages, tuple(tools), headers={k.replace("_", "-"): v for k, v in headers.items()})


CASES = {
    "claude sub-agent": ("subagent", call(SYSTEM, TASK, x_claude_code_agent_id="a1")),
    "codex sub-agent": ("subagent", call(SYSTEM, TASK, x_openai_subagent="collab_spawn")),
    "opencode sub-agent": ("subagent", call(SYSTEM, TASK, x_parent_session_id="ses_1")),
    "openclaw sub-agent": (
        "subagent",
        call(SYSTEM, Message("user", "[Sun 2026-11-29 12:17 UTC] [Subagent Context] You are running as a subagent")),
    ),
    "qwen sub-agent": ("subagent", call(Message("system", "You are a general-purpose agent. Do it."), TASK)),
    "gemini sub-agent": (
        "subagent",
        call(SYSTEM, TASK, tools=[{"type": "function", "function": {"name": "complete_task"}}]),
    ),
    "claude compaction": (
        "compaction",
        call(SYSTEM, TASK, Message("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n...")),
    ),
    "codex compaction": (
        "compaction",
        call(
            SYSTEM,
            TASK,
            tools=(),
            x_codex_turn_metadata=json.dumps({"request_kind": "compaction"}, separators=(",", ":")),
        ),
    ),
    "agent loop summary": (
        "compaction",
        call(SYSTEM, TASK, Message("user", context.Summary().request())),
    ),
    "agent loop after a summary": (
        "after-compaction",
        call(SYSTEM, Message("user", f"Fix it.\n\n{context.Summary().reminder('Nothing yet.')}")),
    ),
    "opencode title": ("side", call(Message("system", "You are a title generator. Output"), TASK, tools=())),
    "claude after compaction": (
        "after-compaction",
        call(SYSTEM, Message("user", "<r>x</r>\n\nThis session is being continued from a previous conversation")),
    ),
    "codex after compaction": (
        "after-compaction",
        call(SYSTEM, TASK, Message("user", "Another language model started to solve this problem and")),
    ),
    "codex after compaction, with all that the user said before": (
        "after-compaction",
        call(
            SYSTEM,
            Message("user", "<env>"),
            TASK,
            TASK,
            Message("user", "Another language model started to solve this problem"),
        ),
    ),
    "openclaw after compaction": (
        "after-compaction",
        call(SYSTEM, Message("user", "The conversation history before this point was compacted into")),
    ),
    "qwen after compaction": (
        "after-compaction",
        call(SYSTEM, TASK, Message("assistant", "Got it. Thanks for the additional context!"), TASK),
    ),
    "qwen at the start": ("main", call(SYSTEM, TASK, Message("assistant", "Got it. Thanks for the context!"), TASK)),
    "main": ("main", call(SYSTEM, TASK)),
    "the words of a hint inside a task": (
        "main",
        call(SYSTEM, Message("user", "Why does it say: You are a title generator?")),
    ),
    "a compaction prompt that was answered": (
        "main",
        call(SYSTEM, Message("user", "CRITICAL: Respond with TEXT ONLY"), Message("assistant", "summary"), TASK),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_known_harnesses(name):
    kind, request = CASES[name]
    found, why = classify(request, None, "", False)
    assert found == kind
    assert bool(why) == (kind != "main")


@pytest.mark.parametrize(
    ("parent", "fork", "elsewhere", "tools", "kind"),
    [
        ("main", "", True, (TOOL,), "main"),
        ("subagent", "", True, (TOOL,), "subagent"),
        ("side", forks.RETRY, True, (), "side"),
        ("compaction", "", True, (TOOL,), "after-compaction"),
        ("after-compaction", "", True, (TOOL,), "after-compaction"),
        (None, forks.NEW_CONVERSATION, True, (TOOL,), "subagent"),
        (None, forks.NEW_CONVERSATION, True, (), "side"),
        (None, forks.NEW_CONVERSATION, False, (TOOL,), "main"),
        (None, forks.TOOLS_CHANGED, True, (TOOL,), "main"),
        (None, forks.HISTORY_EDITED, True, (TOOL,), "main"),
    ],
)
def test_unknown_harnesses_by_where_the_conversation_starts(parent, fork, elsewhere, tools, kind):
    assert classify(call(SYSTEM, TASK, tools=tools), parent, fork, elsewhere)[0] == kind


def test_agents_are_told_apart_by_their_headers():
    assert agent_of(call(TASK, x_claude_code_agent_id="a1", x_session_id="s")) == "a1"
    assert agent_of(call(TASK, thread_id="t")) == "t"
    assert agent_of(call(TASK)) == ""
