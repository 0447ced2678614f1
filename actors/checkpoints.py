"""Checkpoints of the learner on disk: ``step_000012/`` holds the state after 12 training steps.

Invariant: a folder with such a name is whole. It is written under another name, flushed, and renamed; what a
killed process leaves behind has a name that is never read and is cleared by the next save. Each folder is
also a complete Hugging Face model, tokenizer included, so it can be the ``model.path`` of another run.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

TRAINER = "trainer.pt"
_NAME = re.compile(r"step_(\d{6,})")
_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}


def save(folder: Path, step: int, model: Any, trainer: dict[str, Any], source: Path, keep: int) -> Path:
    """Write ``folder/step_<step>`` and remove all but the newest ``keep``.

    ``trainer`` is what ``torch.load(weights_only=True)`` can read back; tokenizer files come from ``source``.
    A checkpoint of the same step is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover)
    target = folder / f"step_{step:06d}"
    partial = folder / f".{target.name}.partial"
    model.save_pretrained(partial)
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED and not file.name.endswith(".index.json")
        if file.is_file() and wanted and not (partial / file.name).exists():
            shutil.copyfile(file, partial / file.name)
    torch.save(trainer, partial / TRAINER)
    _flush(partial)
    if target.exists():
        target.rename(folder / f".{target.name}.replaced")
    partial.rename(target)
    for leftover in folder.glob(".step_*"):
        shutil.rmtree(leftover)
    for _, old in complete(folder)[:-keep]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint under its name.
        shutil.rmtree(old.rename(folder / f".{old.name}.removed"))
    return target


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(steps trained, folder) of every checkpoint, oldest first; empty when there is none."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and (path / TRAINER).is_file())


def find(folder: Path, step: int | None = None) -> tuple[int, Path] | None:
    """The checkpoint after ``step`` steps, or the newest; None when there is no checkpoint to take.

    Raises:
        FileNotFoundError: a step was named and has no checkpoint; the message lists those that exist.
    """
    there = complete(folder)
    if step is None:
        return there[-1] if there else None
    for number, path in there:
        if number == step:
            return number, path
    raise FileNotFoundError(
        f"got step {step}, expected one with a checkpoint in {folder}: {[number for number, _ in there]}"
    )


def read_trainer(path: Path) -> dict[str, Any]:
    """The ``trainer`` state that ``save`` was given."""
    return torch.load(path / TRAINER, map_location="cpu", weights_only=True)


def _flush(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
