"""What `python -m envs.mcp check` says of a task's servers."""

import json
import sys
from pathlib import Path

from envs.mcp import check
from envs.mcp.__main__ import main
from envs.tasks import clawgym

TOY = Path(__file__).with_name("toy_mcp_server.py")


def task(folder, *servers):
    clawgym.write(folder, folder.name, "Do it.", {}, {"reward.sh": "echo 1.0\n"}, {})
    path = folder / "data_entry.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mcp": list(servers)}))
    return str(folder)


def test_tools_are_listed_and_what_fails_is_said(tmp_path, monkeypatch, capsys):
    toy = {"name": "toy", "argv": ["python", str(TOY)]}
    sound = task(tmp_path / "sound", toy, toy | {"name": "near", "where": "inside"})
    monkeypatch.setattr(sys, "argv", ["envs.mcp", "check", sound])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"{sound}: toy (outside): echo, big, " in said
    assert "near (inside): not tried" in said
    bad = [task(tmp_path / "ends", {"name": "ends", "argv": ["false"]}), task(tmp_path / "none", {"name": "x"})]
    monkeypatch.setattr(sys, "argv", ["envs.mcp", "check", *bad, task(tmp_path / "empty")])
    assert main() == 1
    said = capsys.readouterr().out
    assert "ends (outside): FAILS: MCP server ends: it ended with exit code 1" in said
    assert "field 'mcp[0].kind'" in said
    assert "1 of 3 tasks name no MCP servers" in said
    assert "skip-bad-tasks" not in said


def test_a_server_that_never_answers_and_a_folder_of_tasks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "_START_S", 0.5)
    task(tmp_path / "mute", {"name": "mute", "argv": ["sleep", "60"]})
    task(tmp_path / "empty")
    monkeypatch.setattr(sys, "argv", ["envs.mcp", "check", str(tmp_path)])
    assert main() == 1
    said = capsys.readouterr().out
    assert "mute (outside): FAILS: it did not answer within 0.5 s" in said
    assert "1 of 2 tasks name no MCP servers" in said
    monkeypatch.setattr(sys, "argv", ["envs.mcp", "check", str(tmp_path / "none")])
    assert main() == 2
    assert "none: no such folder; expected one that holds task folders" in capsys.readouterr().err
