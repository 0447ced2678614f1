"""Real harnesses call a search outside and a server inside, as stdio servers in their own configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from dialects import Dialect
from measured import measure
from needs import require
from scenarios import Lines, Scenario
from script_engine import Call, Step
from stage import make_task, make_tokenizer, perform, quiet

from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable
from envs.tasks import clawgym
from envs.tasks.task import Task
from trees import forks

pytestmark = [pytest.mark.harness, pytest.mark.timeout(240)]
TOY = Path(__file__).parents[1] / "envs" / "toy_mcp_server.py"
FACT = "Beta is the second letter of the Greek alphabet, as every vulture knows."


def _named(form: str) -> Callable[[str, str, dict], Call]:
    return lambda server, tool, arguments: (form.format(server=server, tool=tool), arguments)


def _by_id(server: str, tool: str, arguments: dict) -> Call:
    return "tool_call", {"id": f"{server}__{tool}", "args": arguments}


TOOLS: Mapping[str, Callable[[str, str, dict], Call]] = {
    "claude_code": _named("mcp__{server}__{tool}"),
    "codex": _named("mcp__{server}__{tool}"),
    "gemini_cli": _named("mcp_{server}_{tool}"),
    "openclaw": _by_id,
    "opencode": _named("{server}_{tool}"),
    "qwen_code": _named("mcp__{server}__{tool}"),
}
LOADS = {"qwen_code": (("tool_search", {"query": "select:mcp__docs__search,mcp__near__echo"}),)}
"""What makes the tools known first, where a harness keeps them back: its list of tools changes by that."""


def _scenario(harness: str) -> Scenario:
    tool = TOOLS[harness]

    def lines(d: Dialect) -> Lines:
        return {
            "main": (
                *(Step("I look for the tools.", (call,)) for call in LOADS.get(harness, ())),
                Step("I search.", (tool("docs", "search", {"query": "vulture alphabet"}),)),
                Step("I ask the other one.", (tool("near", "echo", {"word": "heron"}),)),
                Step("I read the notes.", (d.read("notes.txt"),)),
                Step("", (tool("docs", "search", {"query": "xylophone"}),)),
                Step("", (d.write("answer.txt", "BETA"),)),
                Step("", (d.shell("cat answer.txt"),)),
                d.end("I wrote BETA to answer.txt."),
            )
        }

    return Scenario("mcp", lines, causes=frozenset({forks.TOOLS_CHANGED}) if harness in LOADS else frozenset())


def _task(folder: Path) -> Task:
    """The task of all scenarios, with a corpus to search and a server of its own that runs inside."""
    make_task(folder)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "greek.md").write_text(f"# Letters\n\n{FACT}\n")
    (folder / "corpus" / "other.md").write_text("Nothing about letters stands here.\n")
    (folder / "server.py").write_text(TOY.read_text())
    (folder / "server.py").chmod(0o644)
    path = folder / "data_entry.json"
    servers = [
        {"name": "docs", "kind": "search", "corpus": "corpus"},
        {"name": "near", "argv": ["python", "server.py"], "where": "inside"},
    ]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mcp": servers}))
    return clawgym.read(folder)


@pytest.mark.parametrize("name", list(TOOLS))
async def test_tools_of_mcp_servers_are_called_and_written_down(name, tmp_path_factory, short_folder):
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    quiet()
    rendering = Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    played = await perform(name, _scenario(name), rendering, short_folder / "s", task=_task)
    outcome = played.outcome
    assert (outcome.status, outcome.grade) == ("completed", 1.0), (outcome.reason, outcome.log)
    assert [(row["server"], row["tool"], row["is_error"]) for row in outcome.mcp] == [("docs", "search", False)] * 2
    assert json.loads(outcome.mcp[0]["arguments"])["query"] == "vulture alphabet"
    last = rendering.tokenizer.decode(max((asked.prompt for asked in played.asked), key=len))
    assert FACT in last
    assert '{"word": "heron"}' in last.replace('\\"', '"')
    assert "no document has any of these words" in last
    figures = measure(played, rendering)
    assert figures.trained_main == figures.sampled_main > 0, figures
    assert (figures.reencoded, figures.false_forks, figures.misplaced) == (0, 0, 0), figures
    rooms = short_folder / "s" / "rooms"
    assert not list(rooms.iterdir())
