"""The servers that a task names: what is read, and that each fault is named by file, line and field."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from envs.harnesses.agent_loop_adapter import AgentLoop
from envs.harnesses.base import check_tools, check_variables
from envs.mcp.spec import McpServer, read_servers
from envs.tasks import clawgym
from envs.tasks.clawgym import TaskError


@pytest.fixture
def folder(tmp_path):
    """A sound task with some files beside it."""
    clawgym.write(tmp_path / "task", "one", "Do it.", {"a.txt": "a"}, {"reward.sh": "echo 1.0\n"}, {})
    for name in ("corpus/a.md", "tools/server.py", "server.py"):
        path = tmp_path / "task" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    (tmp_path / "task" / "linked").symlink_to(tmp_path / "task" / "reward")
    (tmp_path / "task" / "tools" / "out").symlink_to(tmp_path)
    return tmp_path / "task"


def test_each_kind_becomes_a_command(folder):
    docs, web, site, notes, own, near = read_servers(
        [
            {"name": "docs", "kind": "search", "corpus": "corpus"},
            {
                "name": "web",
                "kind": "search",
                "api": {"url": "https://x.example?q={query}", "key_env": "KEY", "key_header": "X", "results": "a.b"},
            },
            {"name": "site", "kind": "fetch", "allow": ["x.example", "--y"]},
            {"name": "notes", "kind": "files", "folder": "input_files", "where": "outside"},
            {"name": "own", "argv": ["python", "server.py", "reward/x"], "env": {"A": "${B}"}},
            {"name": "near", "argv": ["python3", "tools/server.py", "--x"], "env": {"A": "b"}, "where": "inside"},
        ],
        folder,
    )
    start = (sys.executable, "-P", "-m", "envs.mcp")
    assert docs.argv == (*start, "search", "--corpus", str(folder / "corpus"))
    assert web.argv[5:] == (
        "--api",
        "https://x.example?q={query}",
        "--key-env",
        "KEY",
        "--key-header",
        "X",
        "--results",
        "a.b",
    )
    assert web.env["KEY"] == "${KEY}"
    assert site.argv == (*start, "fetch", "--allow=x.example", "--allow=--y")
    assert notes.argv == (*start, "files", "--folder", str(folder / "input_files"))
    assert own == McpServer("own", (sys.executable, "server.py", "reward/x"), "outside", {"A": "${B}"}, folder)
    assert (near.where, near.argv) == ("inside", ("python3", "tools/server.py", "--x"))
    assert near.shown == {"tools/server.py": folder / "tools"}


DOCS = {"name": "docs", "kind": "search", "corpus": "corpus"}
WEB = {"url": "https://x.example/?q={query}"}
OWN = {"name": "own", "argv": ["python", "server.py"]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, ["'mcp'", "expected a list", "dict"]),
        (["docs"], ["'mcp[0]'", "expected an object", "'docs'"]),
        ([DOCS] * 17, ["17 servers", "at most 16"]),
        ([DOCS, DOCS], ["'mcp[1].name'", "also the name"]),
        ([{"kind": "search"}], ["'mcp[0].name'", "missing"]),
        ([DOCS | {"name": "Docs/.."}], ["'mcp[0].name'", "'Docs/..'", "a-z"]),
        ([DOCS | {"kind": "serach"}], ["'mcp[0].kind'", "'serach'", "['fetch', 'files', 'search']"]),
        ([DOCS | {"where": "inside"}], ["'mcp[0].where'", "outside"]),
        ([DOCS | {"corpse": 1}], ["'mcp[0].corpse'", "unknown", "'corpus'"]),
        ([DOCS | {"corpus": "none"}], ["'mcp[0].corpus'", "no folder"]),
        ([DOCS | {"corpus": "../task"}], ["'mcp[0].corpus'", "not below"]),
        ([DOCS | {"corpus": "/etc"}], ["'mcp[0].corpus'", "not below"]),
        ([DOCS | {"corpus": "reward"}], ["'mcp[0].corpus'", "reward/"]),
        ([DOCS | {"corpus": "linked"}], ["'mcp[0].corpus'", "reward/"]),
        ([DOCS | {"corpus": "."}], ["'mcp[0].corpus'", "not below"]),
        ([DOCS | {"corpus": "tools/out"}], ["'mcp[0].corpus'", "not below"]),
        ([{"name": "web", "kind": "search", "api": {}}], ["'mcp[0].api.url'", "missing"]),
        ([{"name": "web", "kind": "search", "api": WEB | {"key": "y"}}], ["'mcp[0].api.key'", "key_env"]),
        ([{"name": "site", "kind": "fetch", "allow": []}], ["'mcp[0].allow'", "list of texts"]),
        ([{"name": "own"}], ["'mcp[0].kind'", "missing", "or 'argv' instead"]),
        ([DOCS | {"kind": ["search"]}], ["'mcp[0].kind'", "list"]),
        ([{"name": "own", "argv": []}], ["'mcp[0].argv'", "list of texts"]),
        ([{"name": "own", "argv": ["python", "none.py"]}], ["'mcp[0].argv'", "no file", "none.py"]),
        ([{"name": "web", "kind": "search", "api": {"url": "ftp://x?{query}"}}], ["'mcp[0].api.url'", "http://"]),
        ([{"name": "web", "kind": "search", "api": {"url": "https://x"}}], ["'mcp[0].api.url'", "{query}", "'post'"]),
        ([{"name": "web", "kind": "search", "api": WEB | {"key_env": "A B"}}], ["'mcp[0].api.key_env'", "'A B'"]),
        ([{"name": "site", "kind": "fetch", "allow": ["x.example/a"]}], ["'mcp[0].allow'", "'x.example/a'"]),
        ([{"name": "site", "kind": "fetch", "allow": ["*.example"]}], ["'mcp[0].allow'", "name each subdomain"]),
        ([OWN | {"env": {"A B": "1"}}], ["'mcp[0].env'", "'A B'"]),
        ([{"name": "own", "argv": ["no-such-program"]}], ["'mcp[0].argv'", "no program 'no-such-program'"]),
        ([OWN | {"env": {"A": 1}}], ["'mcp[0].env'", "object of texts"]),
        ([OWN | {"where": "above"}], ["'mcp[0].where'", "'above'"]),
        ([OWN | {"where": "inside", "env": {"A": "${KEY}"}}], ["'mcp[0].env'", "nothing of this machine"]),
        ([OWN | {"where": "inside", "argv": ["cat", "reward/reward.sh"]}], ["'mcp[0].argv'", "reward/"]),
        ([OWN | {"where": "inside", "argv": ["cat", "linked/reward.sh"]}], ["'mcp[0].argv'", "reward/"]),
        ([OWN | {"where": "inside", "argv": ["ls", "tools/.."]}], ["'mcp[0].argv'", "not below"]),
    ],
)
def test_a_fault_is_named_by_file_line_and_field(folder, value, words):
    path = folder / "data_entry.json"
    entry = json.loads(path.read_text()) | {"mcp": value}
    path.write_text(json.dumps(entry, indent=2))
    with pytest.raises(TaskError) as caught:
        clawgym.load(folder.parent)
    line = path.read_text().split('"mcp"')[0].count("\n") + 1
    for word in [f"data_entry.json:{line}: field ", *words]:
        assert word in str(caught.value)


def test_a_task_carries_its_servers(folder):
    path = folder / "data_entry.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mcp": [DOCS]}))
    (task,) = clawgym.load(folder.parent).tasks
    assert [server.name for server in task.mcp] == ["docs"]


def test_a_variable_that_is_not_set_is_named_before_anything_starts(folder, monkeypatch):
    task = replace(clawgym.read(folder), mcp=read_servers([OWN | {"env": {"A": "${REINS_NO_SUCH}"}}], folder))
    with pytest.raises(ValueError, match=r"task 'one' in .*'own' needs the environment variable REINS_NO_SUCH"):
        check_variables([task])
    monkeypatch.setenv("REINS_NO_SUCH", "x")
    check_variables([task])


def test_a_harness_without_mcp_refuses_a_task_that_needs_it(folder):
    task = clawgym.read(folder)
    check_tools(AgentLoop(), [task])
    task = replace(task, mcp=read_servers([DOCS], folder))
    with pytest.raises(ValueError, match=r"task 'one' .*\(docs\).*harness agent_loop .*harness.name"):
        check_tools(AgentLoop(), [task])
