"""Published weights on disk: ``v%08d`` for each version, and ``LATEST``, a file with the name of the newest.

``v%08d`` is a link to a hidden folder ``.v%08d-<token>``, which was written and flushed before the link named it.

Invariant: the folder behind a link is complete and its files never change; ``LATEST`` names a link that exists. Links
and ``LATEST`` are replaced atomically, so that a reader needs no lock. One writer at a time.

Whenever the writer is killed, a reader finds the publication before or the one after, whole. What it reads may be
removed meanwhile: that is a VersionGoneError, never a mixture.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from actors.engines.published import VersionGoneError, flush, has_weights, read, seal, verify

__all__ = ["VersionGoneError", "fit", "latest", "publish", "read", "verify"]

_NAME = re.compile(r"v(\d{8,})")


def publish(
    state_dict: Mapping[str, torch.Tensor], folder: Path, version: int, keep: int = 3, shard_mb: float = 5000
) -> Path:
    """Write ``state_dict`` as ``folder/v%08d`` and point ``LATEST`` at it; returns that path.

    One ``model.safetensors``, or from ``shard_mb`` megabytes (10^6 bytes) on ``model-%05d-of-%05d.safetensors`` with
    ``model.safetensors.index.json``; a tensor is never split. Beside them lies ``weights.manifest`` with sizes and
    checksums. Of names for the same tensor (tied embeddings) the first is kept.

    ``keep`` versions stay: the one just published and the highest others. Publishing a version again replaces it: a
    reader of the path gets the old folder or the new one, both whole. What goes is removed last; whoever still reads
    it gets a VersionGoneError.

    Raises ValueError for a negative version, ``keep`` below 1, ``shard_mb`` not above 0, or no tensors.
    """
    if version < 0 or keep < 1 or not shard_mb > 0:
        raise ValueError(
            f"got version {version}, keep {keep} and shard_mb {shard_mb}, "
            f"expected version >= 0 and keep >= 1 and shard_mb > 0"
        )
    if not state_dict:
        raise ValueError("got no tensors, expected a state_dict; publish the weights of a model")
    folder.mkdir(parents=True, exist_ok=True)
    # What a killed writer left might be the room that this publication needs.
    _sweep(folder)
    target = folder / f"v{version:08d}"
    whole = folder / f".{target.name}-{secrets.token_hex(4)}"
    whole.mkdir()
    save_torch_state_dict(_untied(state_dict), whole, max_shard_size=int(shard_mb * 10**6))
    seal(whole, version)
    flush(folder)
    if not target.is_symlink():
        # A link does not replace a folder, which somebody may have copied there.
        _withdraw(target)
    link = whole / ".link"
    link.symlink_to(whole.name)
    link.replace(target)
    flush(folder)
    pointer = folder / ".LATEST"
    pointer.write_text(target.name + "\n", encoding="utf-8")
    flush(pointer)
    pointer.replace(folder / "LATEST")
    flush(folder)
    others = sorted((number, path) for number, path in _versions(folder) if path != target)
    for _, path in others[: max(0, len(others) - keep + 1)]:
        _withdraw(path)
    _sweep(folder)
    return target


def latest(folder: Path) -> tuple[int, Path] | None:
    """Version and folder of the newest published weights; None when nothing has been published.

    By the time the folder is read it may be gone (VersionGoneError); then ask again. Raises ValueError when
    ``LATEST`` names no published weights.
    """
    pointer = folder / "LATEST"
    if not pointer.exists():
        return None
    name = None
    # A version may go right after its name was read, but not before the file names another.
    while name != (name := pointer.read_text(encoding="utf-8").strip()):
        match = _NAME.fullmatch(name)
        if match and has_weights(folder / name):
            return int(match[1]), folder / name
    raise ValueError(
        f"{pointer}: got {name!r}, expected the name of a sub-folder v%08d with weights; "
        f"publish again, or delete LATEST to start from the model's own weights"
    )


def fit(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module, source: Path) -> dict[str, torch.Tensor]:
    """Check ``tensors`` against ``model`` and bring them to its dtypes and device.

    Every weight must be there with its shape, under any one of its names when it is tied; under two names it
    must be equal. Raises ValueError that names ``source`` and what is wrong.
    """
    expected = model.state_dict()
    wrong = [f"{name}: unknown" for name in tensors if name not in expected]
    owner: dict[tuple[int, torch.Size], str] = {}
    fitted: dict[str, torch.Tensor] = {}
    for name, held in expected.items():
        key = (held.data_ptr(), held.shape)
        if name not in tensors:
            continue
        given = tensors[name]
        if given.shape != held.shape:
            wrong.append(f"{name}: got shape {list(given.shape)}, expected {list(held.shape)}")
        elif key in owner and not torch.equal(given, tensors[owner[key]]):
            wrong.append(f"{name}: differs from {owner[key]}, to which it is tied")
        elif key not in owner:
            fitted[name] = given.to(device=held.device, dtype=held.dtype)
        owner.setdefault(key, name)
    wrong += [f"{name}: missing" for name, held in expected.items() if (held.data_ptr(), held.shape) not in owner]
    if wrong:
        shown = "; ".join(sorted(wrong)[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise ValueError(
            f"{source}: the weights do not fit {type(model).__name__} ({shown}); "
            f"publish the state_dict of the same architecture. The weights in use stay."
        )
    return fitted


def _versions(folder: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match]


def _withdraw(path: Path) -> None:
    """Take a version's name away at once, whether it is a link or a folder that somebody copied there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rename(path.with_name(f".{path.name}-{secrets.token_hex(4)}"))


def _sweep(folder: Path) -> None:
    """Remove the hidden folders that no version names.

    Renamed first: to a reader, a folder is there with all its files or gone.
    """
    named = {path.resolve() for _, path in _versions(folder)}
    for path in folder.glob(".v*"):
        if path.resolve() not in named:
            path.rename(path.with_name(f".removed{path.name}"))
    for path in folder.glob(".removed*"):
        shutil.rmtree(path)


def _untied(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without further names of the same one, none sharing memory with another.

    Tensors that only overlap are copied: the library would drop all but one of them.
    """
    seen: set[tuple[object, ...]] = set()
    storages: set[tuple[torch.device, int]] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        storage = tensor.untyped_storage()
        place = (tensor.device, storage.data_ptr())
        view = (*place, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and view in seen:
            continue
        alone = place not in storages and storage.nbytes() == tensor.nbytes
        kept[name] = tensor.detach() if alone else tensor.detach().clone(memory_format=torch.contiguous_format)
        seen.add(view)
        storages.add(place)
    return kept
