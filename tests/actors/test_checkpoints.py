import pytest
import torch
from torch import nn

from actors import checkpoints


class Model(nn.Linear):
    """What ``save`` asks of a model."""

    def save_pretrained(self, path):
        path.mkdir()
        torch.save(self.state_dict(), path / "model.safetensors")
        (path / "config.json").write_text("the model's own")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    for name in (
        "tokenizer.json",
        "merges.txt",
        "config.json",
        "model.safetensors.index.json",
        "old.safetensors",
    ):
        (path / name).write_text("the source's")
    return path


def save(folder, step, source, keep=3):
    return checkpoints.save(folder, step, Model(2, 2), {"steps": step, "x": torch.ones(2)}, source, keep)


def test_what_was_saved_is_read_back(tmp_path, source):
    path = save(tmp_path / "c", 12, source)
    assert path.name == "step_000012"
    state = checkpoints.read_trainer(path)
    assert state["steps"] == 12
    assert state["x"].tolist() == [1, 1]


def test_tokenizer_files_come_along_and_weights_of_the_source_do_not(tmp_path, source):
    path = save(tmp_path / "c", 1, source)
    names = {file.name for file in path.iterdir()}
    assert names == {"tokenizer.json", "merges.txt", "config.json", "model.safetensors", "trainer.pt"}
    assert (path / "config.json").read_text() == "the model's own"


def test_the_newest_stay(tmp_path, source):
    for step in (5, 10, 15, 20):
        save(tmp_path / "c", step, source, keep=2)
    assert [step for step, _ in checkpoints.complete(tmp_path / "c")] == [15, 20]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_000015", "step_000020"]


def test_saving_a_step_again_replaces_it(tmp_path, source):
    first = save(tmp_path / "c", 5, source)
    (first / "mark").write_text("")
    assert not (save(tmp_path / "c", 5, source) / "mark").exists()


def test_what_a_killed_process_left_is_never_taken_and_is_cleared(tmp_path, source):
    folder = tmp_path / "c"
    save(folder, 5, source)
    for name in (".step_000010.partial", ".step_000009.removed"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    (folder / "step_000011.copy").mkdir()
    assert checkpoints.find(folder) == (5, folder / "step_000005")
    save(folder, 10, source)
    assert not list(folder.glob(".*"))
    assert checkpoints.find(folder) == (10, folder / "step_000010")


def test_steps_beyond_six_digits_sort_by_number(tmp_path, source):
    save(tmp_path / "c", 999_999, source)
    save(tmp_path / "c", 1_000_000, source)
    assert checkpoints.find(tmp_path / "c")[0] == 1_000_000


def test_a_named_step_must_exist(tmp_path, source):
    assert checkpoints.find(tmp_path / "nowhere") is None
    save(tmp_path / "c", 5, source)
    assert checkpoints.find(tmp_path / "c", 5) == (5, tmp_path / "c" / "step_000005")
    with pytest.raises(FileNotFoundError, match=r"got step 6, expected one with a checkpoint in .*: \[5\]"):
        checkpoints.find(tmp_path / "c", 6)
