import logging
import shutil

import pytest
import torch
from test_learner import give, make, model_path, published, rollouts, same  # noqa: F401
from transformers import AutoModelForCausalLM

from actors import checkpoints
from actors.checkpoints import surplus
from actors.learner import Learner
from algos import export
from configs.learner import LearnerConfig


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory):  # noqa: F811
    """The run of a learner with checkpoints after steps 1 to 3, and what it had published by then."""
    run_dir = tmp_path_factory.mktemp("trained")
    learner = make(model_path, run_dir, keep=9)
    history = [None]
    for step in range(3):
        batch, groups = rollouts(model_path, step, version=0, size=3)
        give(learner, batch)
        learner.train(step, groups)
        learner.save(step + 1, score=[0.2, 0.9, 0.5][step], wait=False)
        history.append(published(run_dir)[1])
    learner._checkpoints.finish()
    return run_dir, history


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it to do harm to."""
    shutil.copytree(trained[0], tmp_path / "run", symlinks=True)
    return tmp_path / "run", trained[1]


def folder_of(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:06d}"


def test_what_is_saved_is_the_state_at_the_call_though_training_goes_on(run, model_path):  # noqa: F811
    run_dir, history = run
    for step in (1, 2, 3):
        again = make(model_path, run_dir)
        assert again.load(step) == step
        assert same(published(run_dir)[1], history[step])


@pytest.mark.parametrize("name", ["__0_0.distcp", "model.safetensors", "trainer.pt", "weights.manifest", ".metadata"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_makes_way_for_the_one_before(run, name, harm, caplog):
    run_dir, _ = run
    file = folder_of(run_dir, 3) / name
    data = file.read_bytes()
    file.unlink()
    if harm == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif harm == "changed":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with caplog.at_level(logging.WARNING):
        assert checkpoints.find(run_dir / "checkpoints") == (2, folder_of(run_dir, 2))
    assert "step_000003 is damaged" in caplog.text
    with pytest.raises(ValueError, match="damaged"):
        checkpoints.find(run_dir / "checkpoints", 3)


def test_what_a_killed_writer_left_is_never_read_and_is_cleared(run, model_path):  # noqa: F811
    run_dir, _ = run
    shutil.copytree(folder_of(run_dir, 3), run_dir / "checkpoints" / ".step_000004.partial")
    assert checkpoints.find(run_dir / "checkpoints")[0] == 3
    learner = make(model_path, run_dir, keep=9)
    learner.load()
    learner.save(3)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        f"step_{step:06d}" for step in (1, 2, 3)
    ]


def test_the_newest_and_the_best_stay(model_path, tmp_path):  # noqa: F811
    learner = Learner(model_path, tmp_path, LearnerConfig(), total_steps=4, keep=1, keep_best=1)
    for step, score in enumerate([0.5, 0.9, None, 0.7]):
        learner.train(step, {})
        learner.save(step + 1, score=score)
    assert [step for step, _ in checkpoints.complete(tmp_path / "checkpoints")] == [2, 4]


@pytest.mark.parametrize(
    ("scores", "keep", "keep_best", "gone"),
    [
        ([1, 2, 3, 4], 2, 0, [0, 1]),
        ([4, 3, 2, 1], 1, 1, [1, 2]),
        ([4, 4, 2, 1], 1, 1, [0, 2]),
        ([None, None, None], 1, 2, [0, 1]),
        ([1, 9, 8, 0], 1, 2, [0]),
        ([1, 2], 5, 1, []),
    ],
)
def test_which_checkpoints_go(tmp_path, scores, keep, keep_best, gone):
    there = [(i, tmp_path / str(i)) for i in range(len(scores))]
    found = surplus(there, keep, keep_best, lambda path: scores[int(path.name)])
    assert found == [tmp_path / str(i) for i in gone]


def test_weights_take_no_room_twice(trained):
    run_dir, _ = trained
    assert (folder_of(run_dir, 3) / "model.safetensors").stat().st_nlink == 2


@pytest.mark.parametrize(("arguments", "step"), [((), 3), (("--best",), 2), (("--step", "1"), 1)])
def test_an_export_is_a_model_and_nothing_else(run, arguments, step, capsys):
    run_dir, history = run
    out = run_dir / "out"
    assert export.main([str(run_dir), str(out), *arguments]) == 0
    assert f"step_{step:06d}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in history[step].items())
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [path for path in out.iterdir() if path.suffix in {".distcp", ".pt", ".manifest"}]
    assert export.main([str(run_dir), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_an_export_may_change_the_number_format(run):
    run_dir, history = run
    assert export.main([str(folder_of(run_dir, 2)), str(run_dir / "out"), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(run_dir / "out").state_dict()
    assert all(torch.equal(model[name], tensor.bfloat16()) for name, tensor in history[2].items())


def test_an_export_of_nothing_says_so(tmp_path, capsys):
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "expected a run folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
