"""The command line of ``algos.run``."""

import sys

import pytest

from actors.engines.published import seal
from algos import run
from configs.loader import dump, load


@pytest.mark.parametrize(
    "line",
    ["steps=1 seed=2 --dry-run", "--dry-run steps=1 seed=2", "steps=1 --dry-run seed=2"],
)
def test_settings_may_stand_on_either_side_of_an_option(line, capsys):
    assert run.main(line.split()) == 0
    assert "training    1 steps" in capsys.readouterr().out


def test_skip_bad_tasks_is_a_short_form():
    assert run._arguments(["--skip-bad-tasks", "seed=1"]).overrides[-1] == "tasks.skip_bad=true"


def test_a_plan_says_where_a_resumed_run_writes_and_what_is_not_evaluated(tmp_path, capsys):
    from envs.tasks import desk

    desk.write(desk.generate("train", 3, seed=0), tmp_path / "tasks")
    assert run.main(["--dry-run", "eval.every=0", f"tasks.path={tmp_path / 'tasks'}", f"dir={tmp_path}"]) == 0
    assert "evaluation  none: tasks.heldout=0" in capsys.readouterr().out
    finished = tmp_path / "quickstart-1"
    finished.mkdir()
    (finished / "config.yaml").write_text(dump(load(None, ["steps=2"])))
    assert run.main(["--dry-run", "--resume", str(finished)]) == 0
    assert f"writes to   {finished}, going on after step 0" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("python", ["", "/no/python", sys.executable])
def test_a_missing_sglang_is_told_before_anything_starts(python, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("REINS_SGLANG_PYTHON", raising=False)
    named = [f"engine.sglang.python={python}"] if python else []
    assert run.main(["engine.kind=sglang", f"dir={tmp_path}", *named]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert (python or "no interpreter with SGLang") in said
    assert "pip install" in said
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    text = dump(load(None, ["steps=2"]))
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    seal(checkpoint, 2)
    assert run.main(["--resume", str(tmp_path), "learner.learning_rate=1"]) == 0
    assert "has all of its 2 steps" in capsys.readouterr().out
    assert (tmp_path / "config.yaml").read_text() == text


def test_settings_that_a_resume_changes_are_kept(tmp_path):
    said = []
    display = type("Display", (), {"say": staticmethod(said.append)})
    for settings in (["seed=1"], ["seed=1"], ["seed=2"]):
        run._write_settings(load(None, settings), tmp_path, display)
    assert "seed: 1" in (tmp_path / "config.until_step_000000.yaml").read_text()
    assert "seed: 2" in (tmp_path / "config.yaml").read_text()
    assert len(said) == 1
