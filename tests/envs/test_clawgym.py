"""Task folders: what is read, and that each fault is named by file, line and field. Case D1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.tasks import clawgym
from envs.tasks.faults import TaskError

ENTRY = {
    "task_id": "task_one",
    "user_query": "Do it.",
    "metadata": {"category": "", "n": 3, "nested": {"dropped": 1}},
    "input_mount_dir": "/root/.openclaw/workspace",
}


def folder(root: Path, name: str = "one", entry: dict | str | bytes | None = None) -> Path:
    made = root / name
    (made / "reward").mkdir(parents=True)
    (made / "reward" / "reward.sh").write_text("echo 1.0\n")
    content = ENTRY | {"task_id": f"task_{name}"} if entry is None else entry
    if isinstance(content, dict):
        content = json.dumps(content, indent=2)
    path = made / "data_entry.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return made


def test_a_folder_is_read(tmp_path):
    made = folder(tmp_path)
    (made / "input_files" / "sub dir").mkdir(parents=True)
    (task,) = clawgym.load(tmp_path).tasks
    assert (task.id, task.instruction, task.mount_dir) == ("task_one", "Do it.", "/root/.openclaw/workspace")
    assert task.metadata == {"category": "", "n": 3}
    assert task.folder == made.resolve()
    assert task.input_files.is_dir()


def test_input_files_mount_dir_and_metadata_may_be_missing(tmp_path):
    folder(tmp_path, entry={"task_id": "a", "user_query": "b"})
    (task,) = clawgym.load(tmp_path).tasks
    assert not task.input_files.exists()
    assert (task.mount_dir, task.metadata) == (clawgym.MOUNT_DIR, {})


def test_a_task_may_ask_for_what_its_grader_gets(tmp_path):
    folder(tmp_path, entry=ENTRY | {"grader_gets": ["transcript", "final_message"]})
    (task,) = clawgym.load(tmp_path).tasks
    assert task.grader_gets == ("transcript", "final_message")


def without(name: str) -> dict:
    return {key: value for key, value in ENTRY.items() if key != name}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (without("user_query"), ["data_entry.json:1", "'user_query'", "missing"]),
        (without("task_id"), ["'task_id'", "missing"]),
        (ENTRY | {"grader_gets": "all"}, ["'grader_gets'", "expected a list", "str"]),
        (ENTRY | {"grader_gets": ["transcript", "keys"]}, ["'grader_gets'", "'keys'", "final_message"]),
        (ENTRY | {"user_query": 3}, ["data_entry.json:3", "'user_query'", "expected a text", "int"]),
        (ENTRY | {"user_query": "  "}, ["data_entry.json:3", "'user_query'", "empty"]),
        (ENTRY | {"metadata": []}, ["data_entry.json:4", "'metadata'", "expected an object", "list"]),
        (ENTRY | {"input_mount_dir": "work"}, ["'input_mount_dir'", "absolute", "'work'"]),
        (ENTRY | {"input_mount_dir": "/usr/x"}, ["'input_mount_dir'", "system"]),
        ('{"task_id": "x",\n  "user_query": }', ["data_entry.json:2:17", "not valid JSON"]),
        ("[1]", ["data_entry.json:1", "expected a JSON object", "list"]),
        (b'{\n"task_id": "\xff"}', ["data_entry.json:2", "not UTF-8"]),
    ],
)
def test_a_fault_is_named_by_file_line_and_field(tmp_path, entry, words):
    folder(tmp_path, "bad", entry)
    with pytest.raises(TaskError) as caught:
        clawgym.load(tmp_path)
    for word in ["bad", *words]:
        assert word in str(caught.value)


def test_one_broken_among_23(tmp_path):
    """Case D1."""
    for number in range(22):
        folder(tmp_path, f"t{number:02}")
    folder(tmp_path, "t07b", '{"task_id": "x"')
    with pytest.raises(TaskError, match=r"1 broken task .*\n.*t07b/data_entry.json:1:16"):
        clawgym.load(tmp_path)
    loaded = clawgym.load(tmp_path, skip_bad=True)
    assert len(loaded.tasks) == 22
    assert len(loaded.skipped) == 1
    assert "t07b" in loaded.skipped[0]
    assert [task.id for task in loaded.tasks] == sorted(task.id for task in loaded.tasks)


def test_all_faults_are_named_at_once(tmp_path):
    folder(tmp_path, "a", "[]")
    folder(tmp_path, "b", "{}")
    (folder(tmp_path, "c") / "reward" / "reward.sh").unlink()
    (tmp_path / "d").mkdir()
    with pytest.raises(TaskError) as caught:
        clawgym.load(tmp_path, skip_bad=True)
    assert len(caught.value.faults) == 4
    assert "reward.sh" in caught.value.faults[2]


def test_two_tasks_of_one_id(tmp_path):
    folder(tmp_path, "a", ENTRY)
    folder(tmp_path, "b", ENTRY)
    with pytest.raises(TaskError, match=r"b/data_entry.json: field 'task_id'.*a/data_entry.json"):
        clawgym.load(tmp_path)


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_path_without_tasks(tmp_path, what):
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    with pytest.raises(TaskError, match=r"missing: no such folder|no task folders"):
        clawgym.load(path)


def test_one_task_folder_can_be_given_itself(tmp_path):
    made = folder(tmp_path)
    assert [task.id for task in clawgym.load(made).tasks] == ["task_one"]


def test_what_is_written_is_read_back(tmp_path):
    written = clawgym.write(
        tmp_path / "t",
        "t1",
        "Grüße.",
        {"a b/ü.txt": "x", "empty/": "", "raw": b"\xff"},
        {"reward.sh": "echo 1\n", "expected/x": "y"},
        {"family": "copy", "level": 2},
    )
    (read,) = clawgym.load(tmp_path).tasks
    assert read == written
    assert (read.input_files / "a b" / "ü.txt").read_text() == "x"
    assert list((read.input_files / "empty").iterdir()) == []
    assert (read.input_files / "raw").read_bytes() == b"\xff"
    assert (read.reward_dir / "expected" / "x").read_text() == "y"
    with pytest.raises(TaskError, match=r"reward\.sh"):
        clawgym.write(tmp_path / "t", "t2", "x", {}, {}, {})
