"""The command line of the tasks, in every format."""

from __future__ import annotations

import json

import pytest
from made_tasks import MAKERS, NAMES, jobbench, jsonl, pinchbench

from envs.tasks import clawgym
from envs.tasks.__main__ import main

KINDS = pytest.mark.parametrize("maker", MAKERS)


def made(root, maker, count=3):
    for number in range(count):
        MAKERS[maker](root, number)
    return str(root)


@KINDS
def test_numbers_of_a_set(maker, tmp_path, capsys):
    assert main(["stats", made(tmp_path, maker), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["tasks"], numbers["format"], numbers["broken"]) == (3, NAMES[maker], 0)
    assert sum(numbers["graded_by"].values()) == 3
    assert numbers["input_files"]["most"] >= 1
    assert main(["stats", str(tmp_path)]) == 0
    assert f"next: python -m envs.tasks show {tmp_path}" in capsys.readouterr().out


@KINDS
def test_some_tasks_are_drawn_by_a_seed_and_written(maker, tmp_path, capsys):
    place = made(tmp_path / "set", maker, 9)
    drawn = []
    for number, seed in enumerate("113"):
        out = tmp_path / str(number)
        assert main(["sample", place, "4", "--seed", seed, "--out", str(out)]) == 0
        drawn.append(capsys.readouterr().out.replace(str(out), ""))
        assert len(clawgym.load(out).tasks) == 4
    assert drawn[0] == drawn[1] != drawn[2]


@KINDS
def test_one_task_is_shown(maker, tmp_path, capsys):
    place = made(tmp_path, maker, 1)
    main(["sample", place, "1"])
    name = capsys.readouterr().out.split("  ")[0]
    assert main(["show", place, name]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert "graded by" in out
    assert main(["show", place, "nothing"]) == 2
    assert name in capsys.readouterr().err


def test_a_check_runs_what_there_is_to_run(tmp_path, capsys):
    pinchbench(tmp_path / "p", 1)
    jobbench(tmp_path / "j", 1)
    file = jsonl(tmp_path / "l", 1)
    file.write_text(file.read_text() + "{broken\n")
    places = [str(tmp_path / name) for name in "pjl"]
    assert main(["check", "--backend", "process", *places]) == 1
    out = capsys.readouterr().out
    assert f"holds  {tmp_path / 'p'}" in out
    assert f"warns  {tmp_path / 'j'}" in out
    assert "only a judge grades it" in out
    assert f"FAILS  {file}:2:2\n    {file}:2:2: not valid JSON" in out
    assert out.endswith("4 tasks checked, 1 broken\n")


def test_faults_are_told_beside_what_is_sound(tmp_path, capsys):
    file = jsonl(tmp_path, 1)
    file.write_text(file.read_text() + "[]\n")
    assert main(["stats", str(tmp_path), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["broken"] == 1
    assert said.err == f"{file}:2: expected a JSON object, got list\n"


def test_built_in_tasks_are_made(tmp_path, capsys):
    options = ["--split", "heldout", "--level", "2", "--count", "4", "--out", str(tmp_path)]
    assert main(["generate", *options]) == 0
    assert "4 tasks of the split heldout, level 2" in capsys.readouterr().out
    assert {task.metadata["split"] for task in clawgym.load(tmp_path).tasks} == {"heldout"}


@pytest.mark.parametrize("argv", [["stats", "/nowhere"], ["check", "/nowhere"], ["sample", "/nowhere"]])
def test_a_place_that_is_not_there(argv, capsys):
    assert main(argv) == 2
    assert "/nowhere: no such folder or file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["sample", "SET", "2"], ["generate"]])
def test_tasks_are_not_written_among_what_is_there(command, tmp_path, capsys):
    place = made(tmp_path / "set", "jsonl")
    kept = tmp_path / "mine" / "kept.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert main([place if word == "SET" else word for word in command] + ["--out", str(kept.parent)]) == 2
    assert f"--out: {kept.parent} exists already; expected a new folder" in capsys.readouterr().err
    assert list(kept.parent.iterdir()) == [kept]


def test_a_sample_that_is_smaller_than_was_asked_for_says_so(tmp_path, capsys):
    place = made(tmp_path, "jsonl", 3)
    assert main(["sample", place, "50"]) == 0
    assert f"{place} has 3 sound tasks, and 50 were asked for" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5", "9" * 5000])
def test_a_count_that_is_none_is_told_in_words(count, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--out", str(tmp_path), f"--count={count}"])
    assert f"got '{count[:80]}', expected a whole number of at least 1" in capsys.readouterr().err


def test_an_id_that_is_none_is_answered_with_those_that_there_are(tmp_path, capsys):
    place = made(tmp_path, "jsonl", 12)
    assert main(["show", place, "x"]) == 2
    assert "it has own-0, own-1, own-2, own-3, own-4, own-5, own-6, own-7, own-8, own-9, and 2 more" in (
        capsys.readouterr().err
    )
    assert main(["show", place, "own-11 "]) == 2
    (tmp_path / "own.jsonl").write_text("{")
    assert main(["show", place, "x"]) == 2
    assert "it has none that can be read\n" in capsys.readouterr().err


def test_words_of_a_task_cannot_command_the_terminal(tmp_path, capsys):
    row = {"id": "a", "instruction": "x\x1b[2Jy", "grader": "printf '\\033[2J' >&2; exit 1"}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + '\n{"id": "\x1b[2J", "id": 1}\n')
    for command in (["show", "a"], ["sample"], ["check", "--backend=process"]):
        main([command[0], str(tmp_path), *command[1:]])
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.out
    assert "\x1b" not in said.out + said.err


def test_two_task_folders_of_one_id_are_broken(tmp_path, capsys):
    made(tmp_path, "clawgym", 2)
    entry = tmp_path / "t01" / "data_entry.json"
    entry.write_text(entry.read_text().replace("task_1", "task_0"))
    assert main(["check", "--backend", "process", str(tmp_path)]) == 1
    assert "'task_0' is also the id of" in capsys.readouterr().out
