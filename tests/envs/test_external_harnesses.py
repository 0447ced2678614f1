"""Adapters of outside programs: what is said when one is missing, and how its end is read. No program is started."""

import json
import tomllib

import pytest

from configs.harness import HarnessConfig
from envs.harnesses.base import Endpoint, ToolServer
from envs.harnesses.external.adapters import ADAPTERS
from envs.harnesses.external.program import json_document
from envs.harnesses.external.releases import STAMP, releases
from envs.harnesses.registry import harness
from envs.sandbox.base import Finished, Limits
from envs.sandbox.create import create
from envs.tasks.task import Task


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder in which every release seems to be installed."""
    monkeypatch.setenv("REINS_HARNESSES", str(tmp_path))
    for name, release in releases().items():
        (tmp_path / name).mkdir()
        (tmp_path / name / STAMP).write_text(json.dumps({"packages": release.packages}))
    return tmp_path


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_program_is_named_before_anything_starts(name, tmp_path, monkeypatch):
    monkeypatch.setenv("REINS_HARNESSES", str(tmp_path))
    with pytest.raises(ValueError, match=rf"(?s){name}.*not installed.*python -m envs.harnesses install {name}"):
        harness(HarnessConfig(name=name))


def test_another_version_is_not_the_pinned_one(installed):
    assert harness(HarnessConfig(name="codex")).name == "codex"
    (installed / "codex" / STAMP).write_text(json.dumps({"packages": {"@openai/codex": "0.1.0"}}))
    with pytest.raises(ValueError, match=r"holds \{'@openai/codex': '0.1.0'\}, expected"):
        harness(HarnessConfig(name="codex"))


RESULT = {"type": "result", "is_error": False, "result": "done"}
ENDS = [
    ("claude_code", 0, RESULT, (True, "final answer")),
    ("claude_code", 1, RESULT | {"is_error": True, "result": "API Error: 400"}, (False, "error: API Error: 400")),
    ("claude_code", 1, RESULT | {"subtype": "error_max_turns"}, (False, "max turns")),
    ("codex", 0, {"type": "turn.completed"}, (True, "final answer")),
    ("codex", 1, {"type": "turn.failed", "error": {"message": "gone"}}, (False, "error: gone")),
    ("codex", 1, {"type": "turn.failed", "error": {"message": "max_output_tokens"}}, (True, "answer cut")),
    ("gemini_cli", 0, {"response": "done"}, (True, "final answer")),
    ("gemini_cli", 1, {"error": {"message": "x"}}, (False, 'error: {"message": "x"}')),
    ("mini_swe_agent", 0, {"exit_status": "Submitted"}, (True, "final answer")),
    ("mini_swe_agent", 0, {"exit_status": "RepeatedFormatError"}, (True, "repeated format error")),
    ("mini_swe_agent", 0, {"exit_status": "LimitsExceeded"}, (False, "max turns")),
    ("mini_swe_agent", 0, {"exit_status": None}, (False, "no result (exit code 0)")),
    ("openclaw", 0, {"ok": True}, (True, "final answer")),
    ("openclaw", 1, {"ok": False, "error": "x"}, (False, 'error: "x"')),
    ("opencode", 0, {"type": "step_finish", "part": {"reason": "stop"}}, (True, "final answer")),
    ("opencode", 0, {"type": "step_finish", "part": {"reason": "length"}}, (True, "ended: length")),
    ("opencode", 1, {"type": "error", "error": "x"}, (False, 'error: "x"')),
    ("qwen_code", 0, RESULT, (True, "final answer")),
    ("qwen_code", 0, RESULT | {"result": "[API Error: terminated]"}, (False, "error: [API Error: terminated]")),
]


@pytest.mark.parametrize(("name", "code", "line", "ended"), ENDS)
def test_an_end_is_read_from_what_the_program_says(name, code, line, ended, installed):
    adapter = harness(HarnessConfig(name=name))
    assert adapter.ended(Finished(code, f"noise\n{json.dumps(line)}\n".encode(), b"", 1.0)) == ended
    assert adapter.ended(Finished(None, b"", b"", 1.0)) == (False, "time limit")
    assert adapter.ended(Finished(3, b"nonsense {", b"", 1.0)) == (False, "no result (exit code 3)")


@pytest.mark.parametrize("text", ['{"a": 1}', 'log\n{\n  "a": 1\n}\n', 'log {\n{"b": 2}\n{"a": 1}'])
def test_a_document_at_the_end_of_the_output(text):
    assert json_document(text.encode()) == {"a": 1}


CONFIGURED = {
    "claude_code": (".claude-mcp.json", ("mcpServers",)),
    "codex": (".codex/config.toml", ("mcp_servers",)),
    "gemini_cli": (".gemini/settings.json", ("mcpServers",)),
    "openclaw": ("openclaw.json", ("mcp", "servers")),
    "opencode": (".config/opencode/opencode.json", ("mcp",)),
    "qwen_code": (".qwen/settings.json", ("mcpServers",)),
}


def test_every_harness_but_one_takes_mcp_servers(installed):
    assert {name for name in ADAPTERS if harness(HarnessConfig(name=name)).takes_mcp} == set(CONFIGURED)


@pytest.mark.parametrize("name", CONFIGURED)
async def test_mcp_servers_stand_in_the_form_of_each_harness(name, installed, tmp_path):
    sandbox = await create("process", "room", None, "/root/workspace", tmp_path / "rooms")
    server = ToolServer("docs", ("python3", "-c", 'print("é😀")'), {"A": 'b"c'})
    task = Task("one", "Do it.", tmp_path, "/root/workspace")
    command = harness(HarnessConfig(name=name)).command(
        sandbox, task, Endpoint("http://127.0.0.1:1", "key"), Limits(), (server,)
    )
    path, keys = CONFIGURED[name]
    text = (sandbox.home / path).read_text()
    settings = tomllib.loads(text) if path.endswith("toml") else json.loads(text)
    for key in keys:
        settings = settings[key]
    (entry,) = settings.values()
    assert list(settings) == ["docs"]
    argv = entry["command"] if name == "opencode" else [entry["command"], *entry["args"]]
    assert tuple(argv) == server.argv
    assert (entry.get("env") or entry.get("environment")) == {"A": 'b"c'}
    if name == "claude_code":
        assert f"--mcp-config={sandbox.inside_home}/{path}" in command.argv
    await sandbox.destroy()
