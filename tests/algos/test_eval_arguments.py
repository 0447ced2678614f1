"""``python -m algos.eval`` up to where parts would start, and its folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.evaluation import attempts
from algos import eval_folder
from algos.eval import CONFIG, main
from algos.run_folder import RunError
from algos.runlog import line
from configs.eval import EvaluationConfig
from configs.loader import ConfigError, dump, load_as
from envs.harnesses.sets import with_rings
from envs.tasks import clawgym
from envs.tasks.draft import Draft
from envs.tasks.task import Task

RINGS = "rings=[{name: a, harnesses: [{name: agent_loop}]}]"
SMALL = ["sandbox.backend=process", RINGS, "tasks={one: {limit: 2}}"]


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def error_of(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_help_and_dry_run_import_neither_torch_nor_ray(model, tmp_path):
    code = (
        "import sys; from algos.eval import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    for arguments in (["--help"], ["--dry-run", f"model.path={model}", f"dir={tmp_path}", *SMALL]):
        told = subprocess.check_output([sys.executable, "-c", code, *arguments], text=True)
        assert told.rstrip().endswith("[]"), told[-500:]


def test_a_dry_run_says_what_would_be_evaluated_and_leaves_nothing(capsys, model, tmp_path):
    assert main(["--dry-run", f"model.path={model}", f"dir={tmp_path / 'evals'}", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "ring        a: one in agent_loop, 2 episodes a run" in told
    assert "episodes    6: 3 independent runs" in told
    assert not (tmp_path / "evals").exists()


def test_runs_without_chance_are_called_alike(capsys, model, tmp_path):
    main(["--dry-run", f"model.path={model}", f"dir={tmp_path}", "temperature=0", *SMALL])
    assert "the runs are alike" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("rings=[{name: a, harnesses: [{name: agent_loop, turns: 3}]}]", "max_turns"),
        ("rings=[{name: a, harnesses: [{name: nothing}]}]", "nothing"),
        ("rings=[{name: a, harnesses: [{}], tasks: [none]}]", "expected names of tasks: one"),
        ("rings=[{name: a, harnesses: [{}, {}]}]", "a label for each that tells it apart"),
        ("rings=[{name: a, harnesses: [{}]}, {name: a, harnesses: [{}]}]", "a name of its own for each"),
        ("rings=[{name: a, harnesses: [{}]}, {name: b, harnesses: [{max_turns: 3}]}]", "tells them apart"),
        ("tasks.one.limt=3", "tasks.one.limit"),
        ("tasks.one.path=/nowhere/at/all", "tasks.one: "),
        ("tasks.one.families=[nothing]", "tasks.one: "),
        ("runs=0", "runs: "),
        ("rings=[{name: a, harnesses: [{}, {name: claudecode}]}]", "rings.0.harnesses.1: harness.name 'claudecode'"),
        ("rings=[{name: a, harnesses: [{}, {label: b}], space: {}}]", "expected one agent_loop without label"),
        ("rings=[{name: a, harnesses: [{name: codex}], space: {}}]", "expected one agent_loop without label"),
        ("rings=[{name: a, harnesses: [{}], space: {set: all, which: far}}]", "rings.0.space: got a set that meets"),
        ("rings=[{name: a, harnesses: [{}], space: {set: names, names: [S9]}}]", "rings.0.space: got harness 'S9'"),
        ("tasks={../../one: {limit: 2}}", "tasks.../../one"),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(capsys, model, tmp_path, setting, says):
    arguments = [f"model.path={model}", f"dir={tmp_path / 'evals'}", *SMALL, setting, "--dry-run"]
    assert says in error_of(capsys, *arguments)
    assert not (tmp_path / "evals").exists()


NAMED = "{set: names, names: [S0T0O0C0W0, S1T1O1C1W1], which: near}"
NEAR = f"rings=[{{name: near, harnesses: [{{max_turns: 3}}], space: {NAMED}}}]"


def test_a_ring_may_be_a_set_out_of_the_space_of_harnesses_or_held_out_from_one(capsys, model, tmp_path):
    file = CONFIG.with_name("eval_space.yaml")
    assert main([str(file), "--dry-run", "sandbox.backend=process", f"model.path={model}", f"dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    for ring, first in (("training", "S0T0O0C0W0"), ("near", "S0T0O0C0W1"), ("far", "S0T0O0C1W1")):
        assert f"ring        {ring}: heldout in {first}, " in told
    assert "episodes    2592: 3 independent runs" in told
    found = with_rings(load_as(EvaluationConfig, CONFIG, [NEAR, "tasks={one: {}}"]))
    assert [one.known_as for one in found.rings[0].harnesses] == ["S0T0O0C0W1", "S1T1O1C1W2"]
    assert {one.max_turns for one in found.harnesses.values()} == {3}
    assert with_rings(found) == found


def test_tasks_that_need_a_judge_are_told_before_anything_starts(capsys, model, tmp_path):
    rubric = {"criteria": [{"id": "a", "text": "It is good."}]}
    clawgym.write_draft(Draft("here", "t1", "Do it.", {}, rubric=rubric), tmp_path / "tasks" / "t1")
    arguments = [f"model.path={model}", f"dir={tmp_path}", *SMALL, f"tasks={{one: {{path: {tmp_path / 'tasks'}}}}}"]
    assert "judge" in error_of(capsys, *arguments, "--dry-run")
    assert main([*arguments, "--dry-run", "judge.url=http://127.0.0.1:1/v1", "judge.model=m"]) == 0


def test_a_model_that_is_none_is_told(capsys, tmp_path):
    assert "got nothing, expected model.path=runs/NAME" in error_of(capsys, "--dry-run", *SMALL)
    (tmp_path / "checkpoints").mkdir()
    assert "no undamaged checkpoint" in error_of(capsys, "--dry-run", f"model.path={tmp_path}", *SMALL)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error_of(capsys, "--dry-run", f"model.path={tmp_path / 'empty'}", *SMALL)


def test_settings_of_one_trees_key_leave_the_others():
    assert EvaluationConfig.model_validate({"trees": {"max_leaves": 3}}).trees.keep == "all"


def test_the_parts_are_those_of_a_run_that_trains_nothing():
    config = EvaluationConfig.model_validate({"rings": [{"name": "a", "harnesses": [{"label": "x"}, {"label": "y"}]}]})
    parts = config.parts()
    assert parts.steps == 0
    assert list(parts.harnesses) == ["x", "y"]


def begun(folder: Path, **settings) -> list:
    config = EvaluationConfig.model_validate({"model": {"path": "m"}} | settings)
    tasks = [Task(f"t{i}", "do it", Path("/t"), "/w", {"family": "f"}) for i in range(2)]
    planned = attempts(config, {"heldout": tasks})
    eval_folder.write_settings(folder, config, planned)
    return planned


def write_rows(folder: Path, planned, status="completed") -> None:
    with (folder / "episodes.jsonl").open("a") as file:
        for one in planned:
            reward = None if status == "failed" else 1.0
            file.write(line(one.identity | {"status": status, "reward": reward, "category": "f", "reason": "why"}))


def test_a_line_cut_short_and_failed_attempts_are_run_again_and_no_other(tmp_path):
    planned = begun(tmp_path)
    write_rows(tmp_path, planned[:2])
    write_rows(tmp_path, planned[2:3], "failed")
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"id": "r01n0000')
    kept = eval_folder.reopened(tmp_path)
    assert [row["id"] for row in kept] == [one.spec.id for one in planned[:2]]
    assert (tmp_path / "episodes.jsonl").read_text().count("\n") == 2
    write_rows(tmp_path, planned[2:])
    assert eval_folder.scores(tmp_path).complete


def test_a_resume_takes_more_runs_and_refuses_what_would_make_other_episodes(tmp_path):
    begun(tmp_path)
    assert eval_folder.settings(tmp_path, ["runs=5", "sandbox.concurrency=2"]).runs == 5
    with pytest.raises(ConfigError, match="would make some of its episodes other"):
        eval_folder.settings(tmp_path, ["temperature=0.5"])
    with pytest.raises(ConfigError, match="expected at least its 3"):
        eval_folder.settings(tmp_path, ["runs=2"])
    with pytest.raises(ConfigError, match=r"no config\.yaml there"):
        eval_folder.settings(tmp_path / "none", [])
    (tmp_path / "attempts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no attempts\.jsonl there"):
        eval_folder.settings(tmp_path, [])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b"garbage\n", "line 7: got no JSON"),
        (b"\xff\n", "line 7: got no JSON"),
        (b"[1]\n", "line 7: got [1]"),
        *(
            (b'{"id": "a", "status": "completed", "reward": %b}\n' % reward, "line 7: reward: got ")
            for reward in (b"NaN", b"Infinity", b"1" + b"0" * 400, b'"good"', b"[1]", b"-0.5")
        ),
        (b'{"id": [1], "status": "completed", "reward": 1}\n', "line 7: id: got [1], expected a text"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_changed(capsys, tmp_path, damage, says):
    write_rows(tmp_path, begun(tmp_path))
    with (tmp_path / "episodes.jsonl").open("ab") as file:
        file.write(damage)
    before = (tmp_path / "episodes.jsonl").read_bytes()
    assert says in error_of(capsys, "--table", str(tmp_path))
    with pytest.raises(RunError, match="line 7"):
        eval_folder.reopened(tmp_path)
    assert (tmp_path / "episodes.jsonl").read_bytes() == before


def test_a_line_without_what_an_attempt_has_is_named(capsys, tmp_path):
    begun(tmp_path)
    (tmp_path / "attempts.jsonl").write_text('{"id": "r00n000000"}\n')
    assert "line 1: got no 'ring', expected a row with id, ring" in error_of(capsys, "--table", str(tmp_path))


def test_tables_are_written_in_three_forms(tmp_path):
    planned = begun(tmp_path)
    write_rows(tmp_path, planned[:-1])
    found = eval_folder.scores(tmp_path)
    eval_folder.write_tables(tmp_path, found, EvaluationConfig())
    assert "(incomplete)" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())["episodes"]["not_ended"] == 1
    assert (tmp_path / "table.html").read_text().startswith("<!doctype html>")


def test_tables_of_two_evaluations_of_one_name_are_told_apart_by_their_folders(capsys, tmp_path):
    for name in ("before", "after"):
        write_rows(tmp_path / name, begun(tmp_path / name))
    assert main(["--table", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert "after - before" in capsys.readouterr().out
    assert "no attempts.jsonl there" in error_of(capsys, "--table", str(tmp_path))


def test_what_a_run_removes_stays_with_the_evaluation(tmp_path):
    checkpoint = tmp_path / "step_000004"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_text("weights")
    linked = eval_folder.link_model(checkpoint.iterdir(), tmp_path / "evaluation")
    (checkpoint / "model.safetensors").unlink()
    assert (linked / "model.safetensors").read_text() == "weights"


def test_saved_settings_are_read_back(tmp_path):
    begun(tmp_path, tasks={"heldout": {"limit": 3}}, runs=2)
    saved = eval_folder.settings(tmp_path, [])
    assert dump(saved) == (tmp_path / "config.yaml").read_text()
