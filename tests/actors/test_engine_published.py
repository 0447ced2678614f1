"""Published weights whose writer is killed, whose files are altered, or which go while they are read."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import killed_writers
import pytest
import torch
from killed_writers import publish
from safetensors.torch import save_file
from tiny_models import make
from transformers import AutoModelForCausalLM

from actors.engines import published, weights

STATE = {name: torch.randn(100, 100, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abcde")}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return weights.publish(STATE, tmp_path / "weights", 1, shard_mb=0.1)


@pytest.fixture(scope="module")
def kill():
    """A function that has an order of ``killed_writers`` carried out and returns the exit code of the writer."""
    program = [sys.executable, killed_writers.__file__]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def order(**given) -> int:
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield order
        process.stdin.close()


def value_of(found: dict[str, torch.Tensor]) -> float:
    """The one value that all of a publication of ``killed_writers`` has."""
    assert set(found) == {"version", "a", "b", "c"}
    values = {value for name in "abc" for value in found[name].unique().tolist()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize("version", [2, 3], ids=["published again", "new"])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, kill, version: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    for old in (1, 2):
        publish(tmp_path / "before", old, 0, keep=2, rows=1)
    seen: Counter[tuple[int, float]] = Counter()
    for step in itertools.count(1):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(step), symlinks=True)
        code = kill(folder=str(folder), version=version, value=7, keep=1, rows=1, step=step)
        newest, path = weights.latest(folder)
        found = weights.read(path)
        assert found["version"] == newest
        seen[newest, value_of(found)] += 1
        for other in folder.glob("v*"):
            weights.verify(other)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        publish(folder, 4, 9, keep=1, rows=1)
        assert visible(folder) == ["LATEST", "v00000004"]
        assert len(list(folder.iterdir())) == 3
    assert set(seen) == {(2, 0.0), (version, 7.0)}
    assert min(seen.values()) > 5


def test_no_reader_sees_a_torn_version_while_writers_are_killed(tmp_path: Path, kill):
    publish(tmp_path, 0, 0, keep=1, rows=512)
    ended = threading.Event()
    values: set[float] = set()
    trouble: list[Exception] = []

    def reader() -> None:
        while not ended.is_set():
            try:
                version, path = weights.latest(tmp_path)
                found = weights.read(path)
                assert found["version"] == version
                values.add(value_of(found))
            except weights.VersionGoneError:
                continue
            except Exception as error:
                trouble.append(error)
                return

    thread = threading.Thread(target=reader)
    thread.start()
    draw = random.Random(0)
    codes = [
        kill(folder=str(tmp_path), value=1 + 1000 * nth, keep=1 + nth % 2, rows=512, seconds=draw.uniform(0.05, 0.4))
        for nth in range(10)
    ]
    ended.set()
    thread.join()
    assert not trouble
    assert codes == [-signal.SIGKILL] * 10
    assert len(values) > 5
    for path in tmp_path.glob("v*"):
        value_of(weights.read(path))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_all_is_on_the_disk_before_a_name_points_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[Path] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        done.append(Path(f"/proc/self/fd/{handle}").readlink())

    def noted_replace(self: Path, target: Path) -> Path:
        done.append(target)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    path = weights.publish(STATE, tmp_path, 1, shard_mb=0.1)
    whole = path.resolve()
    assert set(done[: done.index(path)]) == {tmp_path, whole, *whole.iterdir()}
    assert done[done.index(path) + 1 :] == [tmp_path, tmp_path / ".LATEST", tmp_path / "LATEST", tmp_path]


def test_shards_are_those_of_hugging_face(sharded: Path):
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert visible(sharded) == [*names, "model.safetensors.index.json", "weights.manifest"]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(STATE)
    manifest = json.loads((sharded / "weights.manifest").read_text())
    assert (manifest["format"], manifest["version"]) == (1, 1)
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        name: (sharded / name).stat().st_size for name in [*names, "model.safetensors.index.json"]
    }
    found = weights.read(sharded)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    assert weights.verify(sharded) == sharded.resolve()


@pytest.mark.parametrize("shard_mb", [5000, 0.03])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_model_is_read_and_loads_in_transformers(tmp_path: Path, shard_mb: float, dtype: torch.dtype):
    model = make("qwen3", tmp_path / "model", seed=3).to(dtype)
    path = weights.publish(model.state_dict(), tmp_path / "weights", 1, shard_mb=shard_mb)
    assert (path / "model.safetensors").exists() == (shard_mb == 5000)
    shutil.copyfile(tmp_path / "model" / "config.json", path / "config.json")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    read = weights.read(weights.verify(path))
    assert "lm_head.weight" not in read
    fitted = weights.fit(read, model, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert name == "lm_head.weight" or torch.equal(fitted[name], tensor)
        assert name not in read or read[name].dtype == dtype


def test_a_flipped_bit_is_found_in_each_file(sharded: Path):
    draw = random.Random(0)
    for file in sharded.iterdir():
        whole = file.read_bytes()
        everywhere = file.name == "weights.manifest"
        places = range(len(whole)) if everywhere else [0, 8, len(whole) - 1, *draw.choices(range(len(whole)), k=30)]
        for place in places:
            data = bytearray(whole)
            data[place] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
            with pytest.raises(ValueError, match=r"The weights in use stay\.") as error:
                weights.verify(sharded)
            assert file.name in str(error.value) or everywhere
        file.write_bytes(whole)
    assert set(weights.read(sharded)) == set(STATE)


def test_a_truncated_or_missing_file_is_found(sharded: Path):
    for file in sharded.iterdir():
        whole = file.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 2):
            os.truncate(file, size)
            with pytest.raises(ValueError, match=rf"{file.name}: got .*, expected .*The weights in use stay\."):
                weights.read(sharded)
            file.write_bytes(whole)
    for file in sharded.glob("model*"):
        whole = file.read_bytes()
        file.unlink()
        for check in (weights.read, weights.verify):
            with pytest.raises(ValueError, match=rf"{file.name}: got no such file, expected \d+ bytes"):
                check(sharded)
        file.write_bytes(whole)


def test_a_file_that_other_programs_would_read_instead_is_found(sharded: Path):
    save_file(STATE, sharded / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: got a file that the manifest does not list"):
        weights.verify(sharded)


def test_a_manifest_of_another_format_is_refused(sharded: Path):
    file = sharded / "weights.manifest"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2').replace('"format":1', '"format":2'))
    with pytest.raises(ValueError, match=r"weights\.manifest: got 'Input should be 1' at format"):
        weights.read(sharded)


@pytest.mark.parametrize("check", [weights.read, weights.verify])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x00\x01"),
        ("model.safetensors", b"garbage" * 100),
        ("model.safetensors.index.json", b"{"),
        ("model.safetensors.index.json", b'{"weight_map": 1}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model.safetensors"}}'),
    ],
)
def test_garbage_without_a_manifest_is_named(tmp_path: Path, check, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors.*: got .*, expected .*The weights in use stay\."):
        check(tmp_path)


def test_truncation_without_a_manifest_is_found(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file(STATE, file)
    assert weights.verify(tmp_path) == tmp_path
    for size in (file.stat().st_size - 1, 100, 5):
        os.truncate(file, size)
        with pytest.raises(ValueError, match=r"model\.safetensors: got a broken file"):
            weights.read(tmp_path)


@pytest.mark.parametrize("newer", [1, 2], ids=["published again", "removed"])
def test_a_version_that_goes_while_it_is_read_says_so(sharded: Path, monkeypatch: pytest.MonkeyPatch, newer: int):
    other = {name: tensor + 1 for name, tensor in STATE.items()}
    load = published.load_file

    def load_and_publish(file: Path) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(published, "load_file", load)
        found = load(file)
        weights.publish(other, sharded.parent, newer, keep=1, shard_mb=0.1)
        return found

    monkeypatch.setattr(published, "load_file", load_and_publish)
    with pytest.raises(weights.VersionGoneError, match=r"v00000001: got no such folder.*ask weights\.latest"):
        weights.read(sharded)
    version, path = weights.latest(sharded.parent)
    assert version == newer
    assert torch.equal(weights.read(path)["a"], other["a"])


def test_what_is_not_there_is_gone(tmp_path: Path):
    for check in (weights.read, weights.verify):
        with pytest.raises(weights.VersionGoneError, match="nothing: got no such folder"):
            check(tmp_path / "nothing")


def test_the_newest_goes_right_after_its_name_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights.publish(STATE, tmp_path, 1)

    def publish_first(path: Path) -> bool:
        monkeypatch.undo()
        weights.publish(STATE, tmp_path, 2, keep=1)
        return published.has_weights(path)

    monkeypatch.setattr(weights, "has_weights", publish_first)
    assert weights.latest(tmp_path) == (2, tmp_path / "v00000002")
