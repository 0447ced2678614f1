"""The loop and the command of supervised fine-tuning."""

import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from message_rows import GOOD, desk_row, write
from needs import cold_policy
from transformers import AutoModelForCausalLM

from actors import checkpoints
from actors.rendering import Rendering
from algos import sft
from algos.finetune import FineTuning
from algos.imitation import chances, transcribe
from algos.runlog import read_jsonl
from algos.tiny import build_model, build_tokenizer
from configs.loader import load_as
from configs.sft import SftConfig
from envs.tasks.desk import expert, generate


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The tiny policy before its cold start."""
    folder = tmp_path_factory.mktemp("policy")
    build_tokenizer(folder)
    rendering = Rendering(folder)
    build_model(len(rendering.tokenizer), seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    tasks = generate("train", 24, 0)
    rows = [desk_row(task, Random(i), bool(i % 3 == 0)) for i, task in enumerate(tasks)]
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", rows)


def arguments(policy, rows, out, *more):
    return [f"model.path={policy}", f"data.path={rows}", f"out={out}", "batch_tokens=250", "checkpoint_every=2",
            "learning_rate=3e-3", "data.heldout=0.2", "epochs=3", "data.min_reward=1", *more]  # fmt: skip


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Killed(BaseException):
    pass


def test_it_learns_and_goes_on_after_a_kill_to_the_same_weights(policy, rows, tmp_path, capsys, monkeypatch):
    assert sft.main(arguments(policy, rows, tmp_path / "whole")) == 0
    told = capsys.readouterr().out
    assert f"model.path={tmp_path / 'whole'}" in told
    assert "left out    8 with a reward below 1" in told
    metrics = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert metrics[-1]["heldout/loss"] < metrics[0]["heldout/loss"] - 0.5
    assert [row["step"] for row in metrics] == list(range(len(metrics)))
    assert len(metrics) > 9
    assert [row["step"] for row in metrics if row["step"] and "heldout/loss" in row][-1] == len(metrics) - 1
    assert len([row for row in metrics if "heldout/loss" in row]) == 4
    assert Rendering(tmp_path / "whole").name == "qwen3"

    taken = FineTuning._step

    def dies(work):
        row = taken(work)
        if row["step"] == 5:
            raise Killed
        return row

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "_step", dies)
        with pytest.raises(Killed):
            sft.main(arguments(policy, rows, tmp_path / "cut"))
    assert not (tmp_path / "cut" / "config.json").exists()
    assert checkpoints.find(tmp_path / "cut" / "checkpoints")[0] == 4
    assert sft.main(["--resume", str(tmp_path / "cut")]) == 0
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    again = read_jsonl(tmp_path / "cut" / "metrics.jsonl")
    assert [row | {"seconds": 0} for row in metrics[1:]] == [row | {"seconds": 0} for row in again[1:]]
    assert not equal(weights(policy), weights(tmp_path / "whole"))
    capsys.readouterr()
    assert sft.main(["--resume", str(tmp_path / "cut")]) == 2
    assert "finished already" in capsys.readouterr().err


def test_an_interruption_ends_with_130_and_how_to_go_on(policy, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FineTuning, "run", lambda work: sft._interrupt())
    assert sft.main(arguments(policy, rows, tmp_path / "out")) == 130
    assert f"--resume {tmp_path / 'out'}" in capsys.readouterr().out
    assert sft.main(["--resume", str(tmp_path / "out"), "epochs=1"]) == 2
    assert "besides --resume" in capsys.readouterr().err


def test_it_does_not_go_on_with_other_data(policy, rows, tmp_path, capsys, monkeypatch):
    mine = tmp_path / "rows.jsonl"
    mine.write_bytes(rows.read_bytes())
    monkeypatch.setattr("algos.finetune._publish", lambda folder: None)
    assert sft.main(arguments(policy, mine, tmp_path / "out", "epochs=1")) == 0
    mine.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[1:]))
    # The first row is not good enough to be trained, so that nothing has changed.
    assert sft.main(["--resume", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    mine.write_bytes(b"\n".join(rows.read_bytes().split(b"\n")[2:]))
    assert sft.main(["--resume", str(tmp_path / "out")]) == 2
    assert f"error: {tmp_path / 'out'}: got other trajectories" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_and_a_place_that_cannot_be_written_are_told(policy, rows, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    (broken / "model.safetensors").unlink()
    assert sft.main(arguments(broken, rows, tmp_path / "out")) == 2
    (broken / "model.safetensors").write_bytes((policy / "model.safetensors").read_bytes()[:1000])
    assert sft.main(arguments(broken, rows, tmp_path / "out")) == 2
    assert sft.main(arguments(policy, rows, tmp_path / "out", "epochs=1")) == 0
    (broken / "config.json").write_text("{}")
    assert sft.main(arguments(broken, rows, tmp_path / "other")) == 2
    assert capsys.readouterr().err.count(f"model.path: {broken}") >= 1
    assert sft.main(arguments(policy, rows, rows / "below")) == 2
    assert "out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data.path=null"], ["data.path"]),
        (["data.heldut=0.1"], ["did you mean 'data.heldout'"]),
        (["model.path=/no/where"], ["model.path", "config.json"]),
        (["device=foo"], ["device: got 'foo'"]),
        (["device=cuda:99"], ["device: got cuda:99"]),
        (["learning_rate=-1"], ["learning_rate", "greater than 0"]),
        (["data.max_len=20"], ["line 2", "expected at most 20"]),
        (["model.renderer=qwen3.5"], ["model.renderer", "renderer: default"]),
    ],
)
def test_wrong_settings_end_before_anything_starts(policy, rows, tmp_path, capsys, more, words):
    assert sft.main(arguments(policy, rows, tmp_path / "out", *more)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_everything_and_writes_nothing(policy, rows, tmp_path, capsys):
    bad = write(tmp_path / "bad.jsonl", [GOOD, b"{"])
    listed = f"data.path=[{rows}, {bad}]"
    assert sft.main(["--dry-run", *arguments(policy, rows, tmp_path / "out", listed, "data.min_reward=null")]) == 2
    assert sft.main(["--dry-run", "--skip-bad", *arguments(policy, rows, tmp_path / "out", listed)]) == 0
    told = capsys.readouterr().out
    assert "left out    1 without a reward" in told
    assert "skipped" in told
    assert "optimiser steps" in told
    assert sorted(tmp_path.iterdir()) == [bad]


def test_a_result_is_not_written_over_anything(policy, rows, tmp_path, capsys):
    (tmp_path / "precious").touch()
    assert sft.main(arguments(policy, rows, tmp_path)) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_settings_file_is_valid_and_changes_no_default():
    assert load_as(SftConfig, sft.CONFIG) == SftConfig()
    assert load_as(SftConfig, sft.CONFIG, ["data.path=x"]).data.path == [Path("x")]


@pytest.mark.learning
@pytest.mark.timeout(1500)
def test_a_policy_with_bad_habits_learns_the_right_way_from_rows(tmp_path):
    """Held-out tasks of the quickstart's policy, by the chance of the right way, which has no sampling noise."""
    start = cold_policy()
    tasks = generate("train", 160, 5)
    rows = write(tmp_path / "rows.jsonl", [desk_row(task, Random(i)) for i, task in enumerate(tasks)])
    more = [f"model.path={start}", f"data.path={rows}", f"out={tmp_path / 'out'}"]
    assert sft.main([*more, "batch_tokens=1024", "learning_rate=1e-3", "epochs=3"]) == 0
    metrics = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert metrics[-1]["heldout/loss"] < 0.3 * metrics[0]["heldout/loss"]
    rendering = Rendering(tmp_path / "out")
    probe = [transcribe(rendering, task, expert(task, Random(0))) for task in generate("heldout", 64, 6)]
    before, after = (
        chances(AutoModelForCausalLM.from_pretrained(folder), probe) for folder in (start, tmp_path / "out")
    )
    assert sum(before.values()) / len(before) < 0.5
    assert sum(after.values()) / len(after) > 0.8
