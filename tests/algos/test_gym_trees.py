"""What an agent of one's own did in the environment can be imitated."""

import runpy
import sys
from pathlib import Path

import pytest
from needs import require

from actors.rendering import Rendering
from algos import sft
from algos.runlog import read_jsonl
from algos.tiny import build_model, build_tokenizer
from envs.sandbox.create import unavailable
from trees import codec

EXAMPLE = Path(__file__).parents[1] / "examples" / "gym_record.py"


@pytest.fixture
def policy(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    build_tokenizer(folder)
    build_model(len(Rendering(folder).tokenizer), seed=0).save_pretrained(folder)
    return folder


def test_recorded_trees_train_a_policy(policy, tmp_path, monkeypatch, capsys):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gym_record.py", str(policy)])
    runpy.run_path(str(EXAMPLE))
    with Path("mine.tree").open("rb") as file:
        trees = list(codec.read(file))
    assert len(trees) > 2
    assert {tree.meta["reward"] for tree in trees} == {1.0}
    arguments = [f"model.path={policy}", "data.path=mine.tree", "data.heldout=0", f"out={tmp_path / 'tuned'}"]
    assert sft.main([*arguments, "epochs=3", "learning_rate=3e-3"]) == 0, capsys.readouterr().out
    rows = read_jsonl(tmp_path / "tuned" / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[1]["loss"]
