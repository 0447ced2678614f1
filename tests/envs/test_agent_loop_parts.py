"""The five factors of the transparent loop: each level changes its own factor and nothing else."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_api import Script, bash, say, serving
from test_agent_loop import DONE, backend  # noqa: F401
from test_agent_loop import run as run_program

from configs.harness import HarnessConfig
from envs.harnesses.agent_loop import loop, prompts, schemas
from envs.harnesses.agent_loop.parts import BASE, Part, assembled, known, parsed
from envs.harnesses.agent_loop.tools import Tools
from envs.harnesses.base import Endpoint
from envs.harnesses.registry import harness
from envs.sandbox.base import Limits
from envs.sandbox.create import create
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.space import SPACE
from envs.tasks.task import Task

LEVELS = [(letter, level) for letter in SPACE.letters for level in (0, 1, 2)]
WORK = [
    ("execute_bash", {"command": "echo one > a.txt; cat a.txt"}),
    ("file_editor", {"command": "create", "path": "b/c.txt", "file_text": "two\n"}),
    ("execute_bash", {"command": "cat none; exit 3"}),
    ("file_editor", {"command": "view", "path": "none"}),
]


class Played:
    """Answers from a script and keeps what it was asked."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[dict], list[dict]]] = []

    def complete(self, messages: list[dict], tools: list[dict]) -> dict:
        self.asked.append((copy.deepcopy(messages), copy.deepcopy(tools)))
        last = messages[-1]
        if last["role"] == "user" and "CONTEXT SUMMARY" in last["content"]:
            return {"message": {"content": f"summary {len(messages)}"}}
        if last["role"] == "user" and len(messages) == 2 and "plan" in last["content"]:
            return {"message": {"content": "first a, then b"}}
        return {"message": self.answers.pop(0)}


def call(name: str, arguments: dict, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": f"call{number}", "type": "function", "function": function}]}


def play(levels: str, folder: Path, work=WORK, seed=0, turns=50) -> tuple[dict, Played]:
    """The work in a harness, under the names that it shows."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        parts = assembled(levels, [], seed, str(folder.with_name(f"{folder.name}-home")))
        shown = dict(zip((t["function"]["name"] for t in schemas.TOOLS), names(parts), strict=True))
        client = Played([*(call(shown[name], given, i) for i, (name, given) in enumerate(work)), {"content": "Done."}])
        return loop.run(client, Tools(5.0, 16_000, parts), "Do it.", turns, parts), client
    finally:
        os.chdir(before)


def names(parts) -> list[str]:
    """What the real tools are called, told by their descriptions as a model would."""
    by_text = {tool["function"]["description"]: tool["function"]["name"] for tool in parts.tools(schemas.TOOLS)}
    return [by_text[tool["function"]["description"]] for tool in schemas.TOOLS]


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_names(messages: list[dict]) -> list[dict]:
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["name"] = "tool"
    return messages


@pytest.mark.parametrize(("letter", "level"), LEVELS)
def test_a_level_changes_its_own_factor_alone(letter, level, tmp_path):
    base, first = play(BASE, tmp_path / "base")
    result, client = play(f"{letter}{level}", tmp_path / "work")
    assert (result["end"], result["message"]) == ("final_answer", "Done.")
    assert result["turns"] == base["turns"]
    assert files(tmp_path / "work") == files(tmp_path / "base")
    said, plain = client.asked[-1][0], first.asked[-1][0]
    if level == 0:
        assert client.asked == first.asked
        return
    assert client.asked != first.asked
    assert (said[0] != plain[0]) == (letter == "S")
    assert (client.asked[-1][1] != schemas.TOOLS) == (letter == "T")
    results = [[m["content"] for m in messages if m["role"] == "tool"] for messages in (said, plain)]
    assert (results[0] != results[1]) == (letter == "O")
    assert all(text in shown for shown, text in zip(*results, strict=True))
    asked = [[m["content"] for m in messages if m["role"] == "user"] for messages in (said, plain)]
    assert (asked[0] != asked[1]) == (letter in "CW")
    assert asked[0][0].startswith("Do it.")
    if letter == "T":
        assert without_names(said) == without_names(plain)


@pytest.mark.parametrize("point", SPACE.points()[::7], ids=SPACE.name)
def test_the_same_work_has_the_same_effect_in_every_harness(point, tmp_path):
    result, client = play(SPACE.name(point), tmp_path / "work")
    assert result["end"] == "final_answer"
    assert files(tmp_path / "work") == {"a.txt": "one\n", "b/c.txt": "two\n"}
    extended = sum(b[0][: len(a[0])] == a[0] for a, b in zip(client.asked, client.asked[1:], strict=False))
    assert extended == len(client.asked) - 1, "without a compaction every call extends the one before"


def test_every_prompt_says_the_requirements():
    for _, level in LEVELS[:3]:
        for seed in (0, 1):
            text = assembled(f"S{level}", [], seed).system(prompts.SYSTEM)
            assert all(word in text for word in ("workspace", "directory", "relative", "tool", "one short sentence"))
    assert assembled("S0", []).system("anything") == prompts.SYSTEM


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_distractors_decline_and_real_names_are_none(level, seed):
    parts = assembled(f"T{level}", [], seed)
    tools = Tools(5.0, 1000, parts)
    offered = [tool["function"]["name"] for tool in parts.tools(schemas.TOOLS)]
    mine = names(parts)
    assert len(offered) == len(set(offered)) == 5
    assert not set(offered) & {"execute_bash", "file_editor"}
    for name in set(offered) - set(mine):
        assert tools.call(name, "{}") == f"{name} is not available in this session, sorry; please go on without it."
    told = tools.call("execute_bash", '{"command": "true"}')
    assert told == f"error: unknown tool 'execute_bash'; the tools are {' and '.join(offered)}"
    assert tools.call(mine[0], '{"command": "echo x"}') == "x\n"


def test_structures_say_how_the_call_ended():
    tools = Tools(0.5, 1000, assembled("O2", []))
    assert "<exit_code>3</exit_code>" in tools.call("execute_bash", '{"command": "exit 3"}')
    assert "<exit_code>none</exit_code>" in tools.call("execute_bash", '{"command": "sleep 9"}')
    assert "<tool>execute_bash</tool>" in tools.call("execute_bash", "{}")


@pytest.mark.parametrize(("level", "kept"), [(1, 5), (2, 3)])
def test_summaries_stand_for_rounds_that_left(level, kept, tmp_path):
    work = [("execute_bash", {"command": f"echo round {i}"}) for i in range(14)]
    result, client = play(f"C{level}", tmp_path / "work", work)
    assert result == {"end": "final_answer", "turns": 15, "message": "Done."}
    compactions = [i for i, (messages, _) in enumerate(client.asked) if "CONTEXT SUMMARY" in str(messages[-1])]
    assert len(compactions) >= 2
    notes = tmp_path / "work-home" / "notes.md"
    for at in compactions:
        before, request, after = (client.asked[i][0] for i in (at - 1, at, at + 1))
        assert request[: len(before)] == before
        rounds = [message for message in after if message["role"] == "assistant"]
        assert len(rounds) == kept
        summary = f"summary {len(request)}"
        assert (summary in after[1]["content"]) == (level == 1)
        assert (str(notes) in after[1]["content"]) == (level == 2)
        assert after[1]["content"].startswith("Do it.")
        assert after[-1]["content"] == before[-1]["content"] or after[-1] in request
    views = [messages for i, (messages, _) in enumerate(client.asked) if i not in compactions]
    assert max(sum(m["role"] == "assistant" for m in messages) for messages in views) == kept + 3
    if level == 2:
        assert notes.read_text() == f"summary {len(client.asked[compactions[-1]][0])}\n"


def test_a_plan_comes_first_and_is_asked_for_once(tmp_path):
    result, client = play("W1", tmp_path / "work")
    users = [m["content"] for m in client.asked[-1][0] if m["role"] == "user"]
    assert len(users) == 2
    assert "plan" in users[0]
    assert users[1] == "Now carry out the plan."
    assert result["turns"] == len(WORK) + 1


def test_progress_is_looked_at_every_three_rounds(tmp_path):
    work = [("execute_bash", {"command": f"echo {i}"}) for i in range(7)]
    _, client = play("W2", tmp_path / "work", work)
    roles = [m["role"] for m in client.asked[-1][0]]
    at = [i for i, m in enumerate(client.asked[-1][0]) if str(m["content"]).startswith("Check")]
    assert [roles[:i].count("tool") for i in at] == [3, 6]


def test_an_answer_to_a_look_is_not_the_last_but_the_next_is(tmp_path):
    parts = assembled("W2", [])
    client = Played(
        [*(call("execute_bash", {"command": "true"}) for _ in range(3)), {"content": "half"}, {"content": "Done."}]
    )
    result = loop.run(client, Tools(5.0, 1000, parts), "Do it.", 9, parts)
    assert result["message"] == "Done."
    assert client.asked[-1][0][-1]["content"] == "Go on, or say that the task is done."


def test_work_without_a_plan_is_carried_out(tmp_path):
    parts = assembled("W1", [])
    client = Played([{"content": "no plan"}, {"content": "Done."}])
    client.complete = lambda messages, tools: {"message": client.answers.pop(0)}
    assert loop.run(client, Tools(5.0, 1000, parts), "Do it.", 9, parts)["message"] == "Done."


def test_wordings_differ_by_task_and_not_within_a_group(tmp_path):
    first, second = (play("S1T2O2C1W2", tmp_path / str(seed), seed=seed)[1].asked[-1] for seed in (0, 1))
    assert first[0][0] != second[0][0]
    assert first[1] != second[1]
    assert files(tmp_path / "0") == files(tmp_path / "1")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("S3", "S has the levels 0 to 2, got 3"), ("X0", "unknown factors"), ("S", "no number"), ("", "each factor once"),
     ("S0S1", "each factor once"), ("s0", "expected a name"), ("S0-T1", "expected a name")],
)  # fmt: skip
def test_levels_that_do_not_exist_are_refused(name, fault):
    with pytest.raises(ValueError, match=fault):
        assembled(name, [])


def test_a_name_of_some_factors_leaves_the_others_at_the_base():
    assert parsed("T2W1") == [("T", 2), ("W", 1)]
    assert [type(part).__name__ for part in assembled("T2W1", []).parts] == ["Rules", "Opaque", "Raw", "Full", "Plan"]


OWN = """
class Shouted(Part):
    def instruction(self, text):
        return text.upper()

FACTOR = "{letter}"
LEVELS = [Shouted]
"""


@pytest.mark.parametrize(("letter", "level"), [("W", 3), ("X", 1)])
def test_one_file_adds_a_level_or_a_factor(letter, level, tmp_path):
    own = tmp_path / "my: own.py"
    own.write_text(OWN.format(letter=letter))
    script = Script(bash("true"), say("Done."))
    result, code, _ = run_program(tmp_path, script, levels=f"{letter}{level}", parts=json.dumps([str(own)]))
    assert (code, result["message"]) == (0, "Done.")
    assert script.bodies[0]["messages"][1]["content"] == "WRITE IT: Ü."
    adapter = harness(HarnessConfig(levels=f"{letter}{level}", parts=[own]))
    assert adapter.parts == (own.resolve(),)
    assert len(known([str(own)])[letter]) == level + 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("FACTOR = 1", "expected FACTOR"),
        ("FACTOR = 'X'; LEVELS = [1]", "expected FACTOR"),
        ("1 / 0", "division"),
        ("(", "harness.parts"),
        ("class A(Part):\n def __init__(self, *_): 1 / 0\nFACTOR = 'S'; LEVELS = [A]", "division"),
    ],
)
def test_a_broken_file_is_told_before_anything_starts(text, fault, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(text)
    with pytest.raises(ValueError, match=fault):
        harness(HarnessConfig(levels="S3" if "class A" in text else "S0", parts=[own]))


def test_a_part_that_never_takes_an_answer_for_the_last_comes_to_an_end():
    class Endless(Part):
        def reply(self, message, rounds):
            return "again"

    parts = Endless()
    client = Played([{"content": "Done."}] * 20)
    result = loop.run(client, Tools(5.0, 1000, parts), "Do it.", 5, parts)
    assert result["end"] == "max_turns"
    assert len(client.asked) == 6


async def test_levels_and_parts_of_ones_own_come_into_the_sandbox(backend, tmp_path):  # noqa: F811
    """With the notes of C2, which lie outside of the workspace."""
    own = tmp_path / "own.py"
    own.write_text(OWN.format(letter="X"))
    adapter = harness(HarnessConfig(max_turns=9, command_s=5.0, levels="T2O2C2X1", parts=[own]))
    task = Task("t", "Do it.", tmp_path / "task", "/root/.openclaw/workspace")
    task.input_files.mkdir(parents=True)
    shown = names(assembled("T2", []))[0]

    def shell(command: str) -> dict[str, Any]:
        made = bash(command)
        made["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = shown
        return made

    script = Script(*(shell(f"echo {i}") for i in range(7)), say("what was done"), shell("cat ~/notes/notes.md"), DONE)
    socket = tmp_path / "api.sock"
    with serving(script, socket):
        sandbox = await create(backend, "one", task.input_files, task.mount_dir, tmp_path / "rooms")
        command = adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "key"), Limits(wall_s=30.0))
        finished = await sandbox.run(through_relay(sandbox, command, socket))
        assert adapter.ended(finished) == (True, "final answer"), finished
        first, summing, after = (script.bodies[i]["messages"] for i in (0, 7, 8))
        assert first[1]["content"].startswith("DO IT.")
        assert summing[-1]["content"].startswith("CONTEXT SUMMARY.")
        assert f"it is in {sandbox.inside_home}/notes/notes.md" in after[1]["content"]
        assert "what was done" in script.results[-1]
        assert not list(sandbox.workspace.iterdir())
        await sandbox.destroy()
