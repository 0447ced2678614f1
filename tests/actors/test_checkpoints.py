import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    found = surplus(there, keep, keep_best, lambda path: scores[int(path.name)], lambda path: True)
    assert found == [tmp_path / str(i) for i in gone]


def test_one_that_is_not_good_takes_no_place_and_goes_when_enough_came_after_it(tmp_path):
    there = [(i, tmp_path / str(i)) for i in range(5)]

    def gone(keep):
        return [
            int(p.name) for p in surplus(there, keep, 1, lambda path: 9 - int(path.name), lambda p: p.name in "134")
        ]

    assert {keep: gone(keep) for keep in (1, 2, 3, 4)} == {1: [0, 2, 3], 2: [0, 2], 3: [0], 4: []}


def harmed(file, harm):
    data = file.read_bytes()
    file.unlink()
    if harm == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif harm == "zeros":
        file.write_bytes(bytes(len(data)))
    elif harm == "older":
        torch.save({"stepped": True}, file)


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("damaged", [(2,), (2, 3)])
@pytest.mark.parametrize("harm", ["cut", "zeros"])
def test_saves_go_on_past_damaged_checkpoints_and_the_newest_good_ones_stay(run, model_path, keep, damaged, harm):  # noqa: F811
    run_dir, _ = run
    for step in damaged:
        harmed(folder_of(run_dir, step) / "trainer.pt", harm)
    learner = Learner(model_path, run_dir, LearnerConfig(), total_steps=9, keep=keep, keep_best=1)
    began = learner.load()
    assert began == max({1, 2, 3} - {*damaged})
    for step in (began, began + 1):
        learner.train(step, {})
        learner.save(step + 1)
        assert checkpoints.find(run_dir / "checkpoints") == (step + 1, folder_of(run_dir, step + 1))
    for step in range(began + 3 - keep, began + 3):
        checkpoints.check(folder_of(run_dir, step))


@pytest.mark.parametrize("harm", ["cut", "zeros", "older", "gone"])
def test_a_checkpoint_whose_score_cannot_be_read_has_none(run, harm, caplog):
    harmed(folder_of(run[0], 2) / "trainer.pt", harm)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.score(folder_of(run[0], 2)) is None
    assert ("step_000002 has a damaged trainer.pt" in caplog.text) == (harm != "older")


def test_a_later_checkpoint_displaces_nothing(run, model_path):  # noqa: F811
    run_dir, _ = run
    folder_of(run_dir, 3).rename(folder_of(run_dir, 20))
    learner = make(model_path, run_dir, keep=1)
    learner.load(2)
    learner.train(2, {})
    learner.save(3)
    assert [n for n, _ in checkpoints.complete(run_dir / "checkpoints")] == [3]


def test_a_checkpoint_whose_replacement_was_cut_short_is_found_again(run, model_path):  # noqa: F811
    run_dir, history = run
    folder = run_dir / "checkpoints"
    shutil.copytree(folder_of(run_dir, 3), folder / ".step_000003.partial")
    folder_of(run_dir, 3).rename(folder / ".step_000003.replaced")
    shutil.copytree(folder_of(run_dir, 2), folder / ".step_000002.replaced")
    learner = make(model_path, run_dir, keep=9)
    assert learner.load() == 3
    assert same(published(run_dir)[1], history[3])
    learner.save(3)
    assert sorted(path.name for path in folder.iterdir()) == [f"step_{step:06d}" for step in (1, 2, 3)]


@pytest.mark.parametrize("place", ["before", "behind"])
def test_what_cannot_be_written_is_named_with_its_remedy(model_path, tmp_path, monkeypatch, place):  # noqa: F811
    learner = make(model_path, tmp_path)
    if place == "before":
        (tmp_path / "checkpoints").write_text("a file where the folder should be")
    else:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoints.dcp.FileSystemWriter, "write_data", full)
    expected = f"checkpoint of step 0 could not be written to {tmp_path / 'checkpoints'}: .*; make room, then go on"
    with pytest.raises(RuntimeError, match=expected) as raised:
        learner.save(0)
    assert ("FileExistsError" if place == "before" else "No space left") in str(raised.value)
    assert "\n" not in str(raised.value)


LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
OWN, SHARED = ({"advantage": "gae", "critic": {"shared": shared}} for shared in (False, True))


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, OWN, "learner.critic: got own, expected None"),
        (SHARED, OWN, "learner.critic: got own, expected shared"),
        ({}, {"optimizer": "muon"}, "learner.optimizer: got muon, expected adamw"),
        ({}, {"lora": LORA}, "learner.lora: got {'rank': 4"),
        ({"lora": LORA}, {}, "learner.lora: got None, expected {'rank': 4"),
        ({"lora": LORA}, {"lora": LORA | {"rank": 8}}, "learner.lora.rank: got 8, expected 4, as"),
        ({"lora": LORA}, {"lora": LORA | {"alpha": 9}}, "learner.lora.alpha: got 9.0, expected 8.0, as"),
        ({"lora": LORA}, {"lora": LORA | {"targets": ["q_proj"]}}, "learner.lora.targets: got ['q_proj'], expected"),
        ({"lora": LORA}, {"lora": LORA | {"targets": ["v_proj", "q_proj"]}, "learning_rate": 1.0}, None),
        (OWN, {}, None),
        (SHARED, {}, None),
    ],
)
def test_another_shape_of_the_learner_is_named_when_it_goes_on(model_path, tmp_path, before, after, named):  # noqa: F811
    learner = make(model_path, tmp_path, **before)
    batch, groups = rollouts(model_path, 0, size=2)
    give(learner, batch)
    learner.train(0, groups)
    learner.save(1)
    trained = published(tmp_path)[1]
    again = make(model_path, tmp_path, **after)
    if named is None:
        assert again.load() == 1
        assert same(published(tmp_path)[1], trained)
        return
    with pytest.raises(ValueError, match=r"begin a new run with model\.path=.*step_000001") as raised:
        again.load()
    assert named in str(raised.value)


def test_adapters_on_a_layer_that_the_model_lacks_are_refused(model_path, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match=r"targets: got \['q_projj', 'proj'\], expected .*'down_proj'.*'v_proj'"):
        make(model_path, tmp_path, lora={"targets": ["q_projj", "q_proj", "proj", "self_attn.v_proj"]})


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


@pytest.mark.parametrize("name", ["trainer.pt", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["cut", "zeros", "older"])
def test_the_best_that_is_exported_is_undamaged(run, name, harm, capsys):
    run_dir, _ = run
    harmed(folder_of(run_dir, 2) / name, harm)
    assert export.main([str(run_dir), str(run_dir / "out"), "--best"]) == 0
    assert "step_000003" in capsys.readouterr().out


def test_without_an_undamaged_best_the_steps_are_named(run, capsys):
    run_dir, _ = run
    for step in (1, 2, 3):
        harmed(folder_of(run_dir, step) / "trainer.pt", "zeros")
    assert export.main([str(run_dir), str(run_dir / "out"), "--best"]) == 2
    assert "no undamaged checkpoint with a held-out reward; export one by --step: [1, 2, 3]" in capsys.readouterr().err


def test_an_interrupted_export_leaves_nothing(run, monkeypatch):
    run_dir, _ = run

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_cast", interrupt)
    assert export.main([str(run_dir), str(run_dir / "there" / "out"), "--dtype", "bfloat16"]) == 130
    assert not list((run_dir / "there").iterdir())


def test_a_link_to_nothing_is_no_place_for_an_export(run, capsys):
    run_dir, _ = run
    (run_dir / "out").symlink_to(run_dir / "away")
    assert export.main([str(run_dir), str(run_dir / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert not (run_dir / ".out.partial").exists()


def test_only_floating_numbers_change_their_format(tmp_path):
    save_file({"places": torch.arange(300), "weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    export._cast(tmp_path, "bfloat16")
    found = load_file(tmp_path / "model.safetensors")
    assert found["weight"].dtype == torch.bfloat16
    assert torch.equal(found["places"], torch.arange(300))


def test_an_export_of_a_run_that_is_not_there_says_so(tmp_path, capsys):
    assert export.main([str(tmp_path / "runn"), str(tmp_path / "out")]) == 2
    assert "runn: got no such folder" in capsys.readouterr().err


def test_an_export_of_nothing_says_so(tmp_path, capsys):
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "expected a run folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
