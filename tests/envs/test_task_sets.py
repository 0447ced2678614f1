"""How tasks of a path reach a run: their format, which are used, and what is told before anything starts."""

from __future__ import annotations

import pytest
from made_tasks import MAKERS, jobbench, pinchbench, put

from algos import run
from configs.schema import EvalConfig, TasksConfig
from envs.tasks.sets import load_sets


def sets(path, folder, **settings):
    tasks = TasksConfig.model_validate({"path": path, **settings})
    return load_sets(tasks, EvalConfig(), folder, 0)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_path_of_any_format_is_split_into_tasks_to_practise_on_and_to_measure_on(maker, tmp_path):
    for number in range(10):
        MAKERS[maker](tmp_path / "set", number)
    found = sets(tmp_path / "set", tmp_path / "run", heldout=0.2)
    assert (len(found.train), len(found.evaluation["heldout"])) == (8, 2)
    assert all(task.folder.is_dir() for task in found.train)
    few = sets(tmp_path / "set", tmp_path / "few", limit=3)
    assert len(few.train) == 3
    again = sets(tmp_path / "set", tmp_path / "run", heldout=0.2)
    assert again == found


def test_a_format_may_be_named_where_several_lie_together(tmp_path):
    pinchbench(tmp_path, 1)
    jobbench(tmp_path, 1)
    assert [task.id for task in sets(tmp_path, tmp_path / "a").train] == ["task_01"]
    assert [task.id for task in sets(tmp_path, tmp_path / "b", format="jobbench").train] == ["main__bakers__task1"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "judge: got none, and 2 tasks are graded by one (task_01, task_03)"),
        (["tasks.format=gym"], "got the format 'gym'"),
        (["judge.url=http://x/v1"], "judge.model: Field required"),
        (["judge.url=http://x/v1", "judge.model=m", "judge.vote=3"], "unknown key 'judge.vote'"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(settings, words, tmp_path, capsys):
    pinchbench(tmp_path / "set", 1)
    pinchbench(tmp_path / "set", 2, "automated")
    pinchbench(tmp_path / "set", 3, "llm_judge")
    path = [f"tasks.path={tmp_path / 'set'}", f"dir={tmp_path / 'runs'}", "tasks.heldout=0.3"]
    assert run.main(["--dry-run", *path, *settings]) != 0
    said = capsys.readouterr()
    assert words in " ".join((said.out + said.err).split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("settings", [["tasks.graded_by=script"], ["judge.url=http://x/v1", "judge.model=m"]])
def test_with_a_judge_or_without_its_tasks_a_run_may_start(settings, tmp_path, capsys):
    pinchbench(tmp_path / "set", 1)
    pinchbench(tmp_path / "set", 2, "automated")
    assert run.main(["--dry-run", f"tasks.path={tmp_path / 'set'}", f"dir={tmp_path}", *settings]) == 0


def test_files_that_fit_into_no_workspace_are_told_before_anything_starts(tmp_path):
    with jobbench(tmp_path, 1).parent.joinpath("task_folder", "huge.bin").open("wb") as huge:
        huge.truncate((512 << 20) + 1)
    put(tmp_path / "x", "")
    with pytest.raises(ValueError, match=r"RUBRICS\.json: its files have 5\d+ bytes, expected at most 536870912"):
        sets(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.01, 1), (0.1, 1), (0.5, 5)])
def test_a_share_of_the_tasks_is_at_least_one_of_them(share, kept, tmp_path):
    for number in range(10):
        MAKERS["jsonl"](tmp_path / "set", number)
    found = sets(tmp_path / "set", tmp_path / "run", heldout=share)
    assert (len(found.train), len(found.evaluation.get("heldout", ()))) == (10 - kept, kept)


def test_a_dry_run_says_which_broken_tasks_a_run_would_leave_out(tmp_path, capsys):
    for number in range(5):
        file = MAKERS["jsonl"](tmp_path / "set", number)
    file.write_text(file.read_text() + "{broken\n")
    settings = [f"tasks.path={tmp_path / 'set'}", f"dir={tmp_path / 'runs'}", "tasks.heldout=0.2"]
    assert run.main(["--dry-run", *settings]) == 2
    assert f"{file}:6:2: not valid JSON" in capsys.readouterr().err
    assert run.main(["--dry-run", "--skip-bad-tasks", *settings]) == 0
    said = capsys.readouterr().out
    assert f"skipped {file}:6:2: not valid JSON" in said
    assert "4 to practise on, 1 held out, 1 broken left out" in said


def test_a_share_that_leaves_no_task_to_practise_on_is_told_by_a_dry_run(tmp_path, capsys):
    MAKERS["jsonl"](tmp_path / "set", 0)
    settings = [f"tasks.path={tmp_path / 'set'}", f"dir={tmp_path / 'runs'}", "tasks.heldout=0.5"]
    assert run.main(["--dry-run", *settings]) == 2
    assert "leaves none to practise on; lower it" in capsys.readouterr().err
