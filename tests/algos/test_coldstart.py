"""The cold start: its cache, its reports, its refusals; and (marked) its targets."""

import dataclasses
import json

import pytest
import torch
from needs import cold_policy
from safetensors.torch import load_file

from algos.coldstart import coldstart, fingerprint, main
from algos.recipe import REPORT, ColdstartError, ColdstartReport, Recipe

SHORT = Recipe(
    batch=8, transcripts=16, probes=1, first_look=1, look_every=1, goal=0.0, full_steps=2, decay_steps=1, more_steps=1,
    rounds=2, attempts=2, measured=1, least_sampled=0.0, most_greedy=1.0, threads=1,
)  # fmt: skip


def test_it_makes_a_policy_once(tmp_path):
    said, ticks = [], []
    folder = coldstart(tmp_path, 5, said.append, SHORT, lambda *t: ticks.append(t), "process")
    assert {p.name for p in folder.iterdir()} >= {"tokenizer.json", "config.json", "model.safetensors", REPORT}
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]
    report = ColdstartReport(**json.loads((folder / REPORT).read_text()))
    assert (report.seed, report.steps, len(report.sampled)) == (5, 3, 8)
    assert ticks[-1] == (3, 3)
    assert any("measuring" in line for line in said)
    said.clear()
    assert coldstart(tmp_path, 5, said.append, SHORT) == folder
    assert not said


def test_equal_seeds_give_equal_weights(tmp_path):
    folders = [coldstart(tmp_path / name, 5, recipe=SHORT, backend="process") for name in ("a", "b")]
    other = coldstart(tmp_path / "a", 6, recipe=SHORT, backend="process")
    # Tensors, not bytes: the order of names in a safetensors header is not fixed.
    first, second, third = (load_file(folder / "model.safetensors") for folder in (*folders, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_the_fingerprint_covers_seed_and_recipe():
    marks = {fingerprint(0, SHORT), fingerprint(1, SHORT), fingerprint(0, dataclasses.replace(SHORT, habit=0.5))}
    assert len(marks) == 3
    assert fingerprint(0, SHORT) in marks


def test_a_policy_that_cannot_do_the_work_is_not_kept(tmp_path):
    with pytest.raises(ColdstartError, match=r"attempt 2: sampled success in \w+ is 0.00, expected at least 0.12"):
        coldstart(tmp_path, 0, recipe=dataclasses.replace(SHORT, least_sampled=0.12, rounds=1), backend="process")
    assert not list(tmp_path.iterdir())


def test_an_interruption_leaves_nothing(tmp_path):
    def interrupt(step, likely):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coldstart(tmp_path, 0, recipe=SHORT, tick=interrupt, backend="process")
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_to_overwrite(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.learning
@pytest.mark.timeout(900)
def test_targets():
    report = ColdstartReport(**json.loads((cold_policy() / REPORT).read_text()))
    assert report.greedy_mean <= 0.25
    assert min(report.sampled.values()) >= 0.12
    assert report.sampled_mean >= 0.2
