import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.engines import weights


def test_nothing_published(tmp_path: Path):
    assert weights.latest(tmp_path / "weights") is None


def test_publish_then_latest(tmp_path: Path):
    path = weights.publish({"w": torch.arange(3.0)}, tmp_path / "weights", 7)
    assert path.name == "v00000007"
    assert weights.latest(tmp_path / "weights") == (7, path)
    assert torch.equal(weights.read(path)["w"], torch.arange(3.0))


def names(folder: Path) -> list[str]:
    """What lies in ``folder``, without the random ends of hidden names."""
    return sorted(p.name.partition("-")[0] for p in folder.iterdir())


def test_old_versions_go_and_the_latest_stays(tmp_path: Path):
    for version in (1, 2, 5, 9):
        weights.publish({"w": torch.ones(1)}, tmp_path, version, keep=2)
    assert names(tmp_path) == [".v00000005", ".v00000009", "LATEST", "v00000005", "v00000009"]
    weights.publish({"w": torch.ones(1)}, tmp_path, 3, keep=2)
    assert names(tmp_path) == [".v00000003", ".v00000009", "LATEST", "v00000003", "v00000009"]
    weights.publish({"w": torch.ones(1)}, tmp_path, 4, keep=1)
    assert names(tmp_path) == [".v00000004", "LATEST", "v00000004"]
    assert weights.latest(tmp_path) == (4, tmp_path / "v00000004")


def test_a_version_published_again_is_replaced(tmp_path: Path):
    weights.publish({"w": torch.zeros(2)}, tmp_path, 4)
    path = weights.publish({"w": torch.ones(2)}, tmp_path, 4)
    assert torch.equal(weights.read(path)["w"], torch.ones(2))
    assert names(tmp_path) == [".v00000004", "LATEST", "v00000004"]


def test_a_copied_folder_is_a_version_too(tmp_path: Path):
    path = weights.publish({"w": torch.zeros(2)}, tmp_path / "a", 4)
    for version in (4, 5):
        shutil.copytree(path, tmp_path / "b" / f"v{version:08d}")
    path = weights.publish({"w": torch.ones(2)}, tmp_path / "b", 4, keep=2)
    assert torch.equal(weights.read(path)["w"], torch.ones(2))
    assert torch.equal(weights.read(tmp_path / "b" / "v00000005")["w"], torch.zeros(2))
    weights.publish({"w": torch.ones(2)}, tmp_path / "b", 6, keep=1)
    assert names(tmp_path / "b") == [".v00000006", "LATEST", "v00000006"]


def test_left_overs_of_a_killed_writer_are_invisible_and_removed(tmp_path: Path):
    for name in (".v00000002-0123", ".removed.v00000001-4567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert weights.latest(tmp_path) is None
    weights.publish({"w": torch.ones(1)}, tmp_path, 2)
    assert names(tmp_path) == [".v00000002", "LATEST", "v00000002"]


def test_tied_tensors_are_stored_once(tmp_path: Path):
    shared = torch.randn(4, 2)
    path = weights.publish({"embed": shared, "head": shared, "other": shared[0]}, tmp_path, 0)
    assert set(weights.read(path)) == {"embed", "other"}


def test_tensors_that_overlap_are_all_stored(tmp_path: Path):
    shared = torch.arange(8.0).view(4, 2)
    state = {
        "a": shared[:3],
        "b": shared[1:],
        "turned": shared.T,
        "flat": shared.view(8),
        "bits": shared.view(torch.int32),
        "none": torch.ones(0, 2),
        "scalar": torch.tensor(True),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    for shard_mb in (1, 2e-5):
        found = weights.read(weights.publish(state, tmp_path, 0, shard_mb=shard_mb))
        assert set(found) == set(state)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert all(found[name].dtype == tensor.dtype for name, tensor in state.items())


@pytest.mark.parametrize("text", ["v00000003", "../elsewhere", ""])
def test_a_pointer_to_nothing_is_an_error(tmp_path: Path, text: str):
    (tmp_path / "LATEST").write_text(text)
    with pytest.raises(ValueError, match=r"expected the name of a sub-folder"):
        weights.latest(tmp_path)


@pytest.mark.parametrize(("version", "keep", "shard_mb"), [(-1, 3, 1), (0, 0, 1), (0, 1, 0)])
def test_bad_arguments(tmp_path: Path, version: int, keep: int, shard_mb: float):
    with pytest.raises(ValueError, match="expected version >= 0 and keep >= 1 and shard_mb > 0"):
        weights.publish({"w": torch.ones(1)}, tmp_path, version, keep, shard_mb)


def test_nothing_to_publish(tmp_path: Path):
    with pytest.raises(ValueError, match="got no tensors"):
        weights.publish({}, tmp_path, 0)


def test_read_shards(tmp_path: Path):
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(weights.read(tmp_path)) == {"a", "b"}


def test_read_nothing(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        weights.read(tmp_path)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


EMBED = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize(
    "given",
    [
        {"embed.weight": EMBED},
        {"head.weight": EMBED},
        {"embed.weight": EMBED, "head.weight": EMBED.clone()},
        {"embed.weight": EMBED.double()},
    ],
)
def test_fit_takes_a_tied_weight_under_any_name(given: dict[str, torch.Tensor]):
    fitted = weights.fit(given, Tied(), Path("x"))
    assert len(fitted) == 1
    assert all(torch.equal(t, EMBED) and t.dtype == torch.float32 for t in fitted.values())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"embed.weight: missing"),
        ({"embed.weight": EMBED, "extra": EMBED}, r"extra: unknown"),
        ({"embed.weight": torch.zeros(2, 2)}, r"got shape \[2, 2\], expected \[3, 2\]"),
        ({"embed.weight": EMBED, "head.weight": EMBED + 1}, r"head.weight: differs from embed.weight"),
    ],
)
def test_fit_names_what_is_wrong(given: dict[str, torch.Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        weights.fit(given, Tied(), Path("x"))
