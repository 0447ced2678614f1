"""The command line of ``algos.run``."""

import json
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import torch
from ray.exceptions import RayTaskError

from actors import coordinator, start
from actors.engines.published import seal
from algos import run, run_folder, runlog
from configs.loader import dump, load
from envs.tasks import desk


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
        run_folder.write_settings(load(None, settings), tmp_path, display)
    assert "seed: 1" in (tmp_path / "config.until_step_000000.yaml").read_text()
    assert "seed: 2" in (tmp_path / "config.yaml").read_text()
    assert len(said) == 1


def killed(folder, *settings):
    """A run folder as a kill leaves it: settings, and the row of one training episode."""
    (folder / "config.yaml").write_text(dump(load(None, ["tasks.train=8", "eval.tasks=2", *settings])))
    row = {"id": "a", "step": 0, "split": "train", "status": "failed", "harness": "loop", "reason": "lost"}
    (folder / "episodes.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def ran(monkeypatch, tmp_path_factory):
    """What is in place of a run's parts: ``ran`` is told the step at which they start, and may raise ``fault``."""

    class Ran(list):
        fault = None

    ran = Ran()

    @asynccontextmanager
    async def started(config, folder, model, at):
        ran.append(at)
        yield None

    class Coordinator:
        def __init__(self, *_): ...

        async def run(self):
            if ran.fault is not None:
                raise ran.fault

    monkeypatch.setattr(start, "started", started)
    monkeypatch.setattr(coordinator, "Coordinator", Coordinator)
    monkeypatch.setattr(run, "_policy", lambda config, display: tmp_path_factory.mktemp("policy"))
    return ran


def test_new_settings_hold_only_once_the_episodes_of_the_old_ones_are_gone(tmp_path, ran, monkeypatch):
    folder = killed(tmp_path, "rollout.temperature=0.5", "wandb.mode=disabled")
    before = (folder / "config.yaml").read_text()
    resume = ["--resume", str(folder), "rollout.temperature=0.75"]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runlog, "rewind", interrupted)
        assert run.main(resume) == 130
    assert (folder / "config.yaml").read_text() == before
    assert run.main(resume) == 0
    assert "temperature: 0.75" in (folder / "config.yaml").read_text()
    assert (folder / "config.until_step_000000.yaml").read_text() == before
    assert (folder / "episodes.jsonl").read_text() == ""
    assert ran == [0]


def test_a_new_run_keeps_its_settings(tmp_path, ran):
    assert run.main([f"dir={tmp_path}", "tasks.train=8", "eval.tasks=2", "wandb.mode=disabled", "seed=7"]) == 0
    [path] = tmp_path.glob("*/config.yaml")
    assert "seed: 7" in path.read_text()


def test_a_resume_without_a_readable_checkpoint_changes_nothing(tmp_path, ran, capsys):
    folder = killed(tmp_path, "wandb.mode=disabled")
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer.pt").write_bytes(b"state")
        seal(checkpoint, step)
        (checkpoint / "trainer.pt").write_bytes(b"other")
    before = contents(folder)
    assert run.main(["--resume", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"none of the 2 checkpoints in {folder / 'checkpoints'} can be read" in said
    assert "xxh3_128" in said
    assert f"model.path={folder / 'checkpoints' / 'step_000004'}" in said
    assert f"remove {folder / 'checkpoints'}" in said
    assert (contents(folder), ran) == (before, [])
    (folder / "checkpoints" / "step_000002" / "trainer.pt").write_bytes(b"state")
    assert run.main(["--resume", str(folder)]) == 0
    assert ran == [2]


def test_an_error_of_a_part_ends_the_run_with_its_cause_and_how_to_go_on(tmp_path, ran, capsys):
    folder = killed(tmp_path, "wandb.mode=disabled")
    error = ValueError("got loss nan, expected a number\nat token 7")
    traceback = 'Traceback (most recent call last):\n  File "learner.py", line 7, in train\n    deep_inside()\n'
    ran.fault = RayTaskError("train", f"{traceback}ValueError: got loss nan", error).as_instanceof_cause()
    assert run.main(["--resume", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "stopped: ValueError: got loss nan, expected a number (where" in err
    assert "Traceback" not in out + err
    assert f"--resume {folder}" in out
    whole = (folder / "fault.txt").read_text()
    assert "deep_inside()" in whole
    assert "\x1b" not in whole


def test_an_evaluation_that_was_killed_is_run_by_a_resume(tmp_path, ran, capsys):
    folder = killed(tmp_path, "steps=0", "wandb.mode=disabled")
    assert run.main(["--resume", str(folder)]) == 0
    assert ran == [0]
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    assert run.main(["--resume", str(folder)]) == 0
    assert ran == [0]
    assert "has all of its 0 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "none"),
    [
        (["eval.every=10", "checkpoint.every=5", "steps=11"], False),
        (["eval.every=10", "checkpoint.every=5", "steps=10"], True),
        (["eval.every=4", "checkpoint.every=5", "steps=20"], True),
        (["eval.every=0", "checkpoint.every=5", "steps=20"], True),
        (["eval.every=10", "checkpoint.every=5", "steps=11", "eval.wait=false"], True),
        (["eval.every=0", "checkpoint.every=5", "steps=20", "checkpoint.keep_best=0"], False),
    ],
)
def test_a_plan_says_when_no_checkpoint_can_be_among_the_best(settings, none, tmp_path, capsys):
    assert run.main(["--dry-run", f"dir={tmp_path}", *settings]) == 0
    said = capsys.readouterr().out
    assert "checkpoints every 5 steps; the newest 3 stay" in said
    assert ("no step before the last has both" in said) == none


def test_online_tracking_without_a_key_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    assert run.main(["--dry-run", f"dir={tmp_path}", "wandb.mode=online"]) == 2
    assert "expected an account's key" in capsys.readouterr().err


def test_the_end_of_a_run_points_to_its_report(tmp_path, ran, capsys):
    folder = killed(tmp_path, "wandb.mode=disabled")
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    assert run.main(["--resume", str(folder), "steps=1"]) == 0
    assert f"-m algos.report {folder}" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["space.set=orthogonal", "space.size=20"], "expected one of [18"),
        (["space.set=random", "space.size=300"], "expected 1 to 243"),
        (["space.set=names", "space.names=[S0T0O0C0W7]"], "there is no W7"),
        (["space.set=paper18", "assignment.kind=random", "assignment.k=19"], "expected at most 18"),
        (["harness.levels=S7"], "S has the levels 0 to 2"),
    ],
)
def test_sets_of_harnesses_that_cannot_be_are_one_line_before_anything_starts(arguments, fault, capsys, tmp_path):
    assert run.main(["--dry-run", f"dir={tmp_path}", *arguments]) == 2
    told = capsys.readouterr()
    assert fault in (told.err + told.out).replace("\n", " ")


@pytest.mark.parametrize(
    ("settings", "start", "begun", "lost"),
    [
        (["eval.wait=false"], 5, [0, 2], True),
        (["eval.wait=false"], 5, [0, 2, 4], False),
        (["eval.wait=false"], 4, [0, 2], True),
        (["eval.wait=false"], 1, [0], False),
        (["eval.wait=false", "eval.every=0"], 5, [0], False),
        (["eval.wait=true"], 5, [0, 2], False),
    ],
)
def test_an_evaluation_beside_the_training_that_a_kill_ended_is_told_by_its_missing_figures(
    settings, start, begun, lost
):
    rows = [{"step": at + 1, "eval/step": at, "eval/heldout/reward_greedy": 0.5} for at in begun]
    rows += [{"step": 4, "eval/skipped": 1}]
    assert run._lost_evaluation(load(None, ["eval.every=2", *settings]), start, rows) is lost


def test_the_plan_says_how_many_tasks_there_are_which_are_left_out_and_that_no_gpu_is_seen(tmp_path, capsys):
    tasks = tmp_path / "tasks"
    desk.write(desk.generate("train", 5, seed=0), tasks)
    broken = sorted(tasks.iterdir())[2]
    (broken / "data_entry.json").write_text("{")
    settings = [f"tasks.path={tasks}", "engine.device=cuda", "sandbox.backend=process", f"dir={tmp_path}"]
    assert run.main(["--dry-run", "--skip-bad-tasks", *settings]) == 0
    told = capsys.readouterr().out
    assert f"skipped {broken}" in told
    assert f"tasks       {tasks}: 4 to practise on, 0 held out, 1 broken left out" in told
    assert ("careful     engine.device=cuda: no GPU is seen" in told) is not torch.cuda.is_available()


QUICK = (
    *((f"algos.{name}", ["--help"]) for name in ("run", "eval", "analyse", "report", "sft", "coldstart", "export")),
    *((name, ["--help"]) for name in ("actors.serve", "trees.view", "envs.tasks")),
    ("algos.export", ["/nowhere", "out"]),
    ("actors.serve", ["--model", "/nowhere"]),
)


@pytest.mark.parametrize(("module", "arguments"), QUICK)
def test_help_and_what_is_wrong_at_first_sight_are_told_without_loading_what_takes_seconds(module, arguments):
    code = f"""
import runpy, sys
sys.argv = [{module!r}, *{arguments!r}]
try:
    runpy.run_module({module!r}, run_name="__main__")
except SystemExit:
    sys.exit(bool({{"torch", "ray", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout + done.stderr
    assert done.returncode == 0
