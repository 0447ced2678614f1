"""The folder of one set of weights: sealed by its writer, checked by its readers.

Invariant: nothing is returned from a folder with a manifest unless every file in it has the size and the checksum
that its writer saw.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

# Not .json: a checkpoint takes the .json files of the model that it began from along, and this one fits no other files.
MANIFEST = "weights.manifest"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CHUNK = 1 << 20
_AGAIN = "write the weights again. The weights in use stay."


class VersionGoneError(FileNotFoundError):
    """The folder is not there, or went away while it was read: a newer publication took its place. Ask for the
    newest version again.
    """


class FileSum(BaseModel):
    """``size`` in bytes and ``xxh3_128`` in hexadecimal digits of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int
    xxh3_128: str


class Manifest(BaseModel):
    """What lies in a folder: a sum for each file by its name, and ``checksum`` over all the rest of the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    version: int
    files: dict[str, FileSum]
    checksum: str = ""


class _Index(BaseModel):
    weight_map: dict[str, str]


Parsed = TypeVar("Parsed", bound=BaseModel)


def seal(folder: Path, version: int) -> None:
    """Write the manifest over all files of ``folder``; returns when they are on the disk under their names."""
    files = sorted(folder.iterdir())
    manifest = Manifest(version=version, files={file.name: _sum(file) for file in files})
    manifest = manifest.model_copy(update={"checksum": _own_sum(manifest)})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for path in [*files, folder / MANIFEST, folder]:
        flush(path)


def flush(path: Path) -> None:
    """Return when the file, or the names in the folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def has_weights(path: Path) -> bool:
    """Whether ``path`` is a folder that ``read`` would look into."""
    return any((path / name).is_file() for name in (MANIFEST, SINGLE, INDEX))


def verify(path: Path) -> Path:
    """Check the weights in ``path`` without loading them; returns the folder that was checked, links resolved.

    A program that reads the files itself is to be given the returned folder: its files never change, while
    ``path`` may be a link that a publication turns to another folder.

    With a manifest every file must have its size and checksum, and no other safetensors may lie beside them. Without
    one (a folder from ``save_pretrained``) all that is checked is that the files of the index are there and that each
    is as long as its header says. Raises as ``read`` does.
    """
    folder = path.resolve()
    with _gone(path, folder):
        _checked(folder)
    return folder


def measure(path: Path) -> None:
    """Compare only the sizes in a folder with a manifest, without reading its files. Raises as ``verify``."""
    folder = path.resolve()
    with _gone(path, folder):
        _sizes(folder)


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors in ``path``, on the CPU, after the checks of ``verify``.

    The tensors of ``model.safetensors``, or else of the shards in ``model.safetensors.index.json``.

    Raises:
        ValueError: a file is missing, truncated, altered or no safetensors; the message names it.
        VersionGoneError: ``path`` is not there, or was replaced or removed meanwhile; ask for the newest again.
        FileNotFoundError: the folder has no weights.
    """
    folder = path.resolve()
    with _gone(path, folder):
        return {name: tensor for file in _checked(folder) for name, tensor in load_file(file).items()}


def _checked(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, each found to be good."""
    if (folder / MANIFEST).is_file():
        files = _sealed(folder)
    elif (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(_parsed(_Index, folder / INDEX).weight_map.values()))]
    elif folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: got neither {SINGLE} nor {INDEX}, expected one of them; "
            f"save the weights with weights.publish or save_pretrained"
        )
    else:
        raise FileNotFoundError(folder)
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: got no such file, expected the one that {INDEX} names; {_AGAIN}")
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file}: got a broken file ({error}), expected safetensors; {_AGAIN}") from error
    return files


def _sealed(folder: Path) -> list[Path]:
    """The safetensors files that the manifest lists, after all that it lists was compared."""
    listed = _sizes(folder)
    for file, expected in listed.items():
        if (found := _sum(file)) != expected:
            raise _differs(file, f"xxh3_128 {found.xxh3_128}", expected.xxh3_128)
    return sorted(file for file in listed if file.suffix == ".safetensors")


def _sizes(folder: Path) -> dict[Path, FileSum]:
    """What the manifest lists, after their sizes were compared."""
    manifest = _parsed(Manifest, folder / MANIFEST)
    if manifest.checksum != (own := _own_sum(manifest)):
        raise _differs(folder / MANIFEST, f"checksum {own}", manifest.checksum)
    listed = {folder / name: expected for name, expected in manifest.files.items()}
    for file, expected in listed.items():
        if not file.is_file():
            raise _differs(file, "no such file", f"{expected.size} bytes")
        if (size := file.stat().st_size) != expected.size:
            raise _differs(file, f"{size} bytes", f"{expected.size} bytes")
    for file in sorted({*folder.glob("*.safetensors"), *folder.glob(INDEX)} - set(listed)):
        raise _differs(file, "a file that the manifest does not list", "none, since other programs would read it")
    return listed


def _differs(file: Path, got: str, expected: str) -> ValueError:
    return ValueError(
        f"{file}: got {got}, expected {expected}; write the weights again, or delete {MANIFEST} if the folder was "
        f"changed on purpose. The weights in use stay."
    )


def _parsed(kind: type[Parsed], file: Path) -> Parsed:
    try:
        return kind.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise ValueError(f"{file}: got {first['msg']!r} at {where}, expected a whole file; {_AGAIN}") from error


def _sum(file: Path) -> FileSum:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    size = 0
    # Not mapped into memory: a file that is truncated under a mapping kills the process.
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileSum(size=size, xxh3_128=digest.hexdigest())


def _own_sum(manifest: Manifest) -> str:
    rest = manifest.model_dump(exclude={"checksum"})
    return xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _gone(path: Path, folder: Path) -> Iterator[None]:
    """Whatever fails on a ``folder`` that is no longer there failed for that reason."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if folder.is_dir():
            raise
        raise VersionGoneError(
            f"{path}: got no such folder, expected published weights; a newer publication removes older ones, so ask "
            f"weights.latest for the newest and read that. The weights in use stay."
        ) from error
