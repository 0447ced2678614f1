"""Checkpoints of the learner on disk: ``step_000012/`` holds the state after 12 training steps.

Invariant: a folder with such a name was written whole. It is written under another name, sealed with checksums,
flushed, and renamed; what a killed process leaves behind has a name that is never read and is cleared by the next save,
but for one that was to be replaced, which takes its name again. One that was damaged later is not read: the newest
before it is taken. Each folder is also a complete Hugging Face model, tokenizer included, so it can be the
``model.path`` of another run; its weights are links to published ones. The state is that of
``torch.distributed.checkpoint``, so another number of ranks can go on from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from actors.engines import published
from algos.ranks import ALONE, Ranks

TRAINER = "trainer.pt"
_NAME = re.compile(r"step_(\d{6,})")
_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
_STATE = {".distcp", ".pt", ".metadata", ".manifest"}

logger = logging.getLogger(__name__)


class Checkpoints:
    """The writer of one run's checkpoints, on each rank; all methods are called on all ranks in the same order.

    Args:
        folder: where they lie.
        keep: newest that stay.
        keep_best: of highest score that stay besides.
    """

    def __init__(self, folder: Path, keep: int, keep_best: int = 0, ranks: Ranks = ALONE) -> None:
        self._folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._ranks = ranks
        # Written while training goes on, whose messages must not be mixed with these.
        self._group = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._begun = self._whole = 0
        if ranks.rank == 0:
            self._put_back()

    def save(
        self, step: int, state: dict[str, Any], trainer: dict[str, Any], weights: Path, source: Path, dtype: str
    ) -> None:
        """Begin to write ``step_<step>``, after the last one is written.

        ``state`` may change as soon as this returns. ``trainer`` is what ``torch.load(weights_only=True)`` can read
        back, with the ``score`` or None. The model's files are linked from ``weights`` and copied from ``source``;
        ``dtype`` is that of the weights. A checkpoint of the same step is replaced, and those of later steps go: they
        belong to a future that this run does not have. Raises RuntimeError where it, or the last one, could not be
        written.
        """
        self.finish()
        target = self._folder / f"step_{step:06d}"
        partial = self._folder / f".{target.name}.partial"
        if self._ranks.rank == 0:
            with self._explained(step, (OSError, RuntimeError)):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._put_back()
                self._clear()
                partial.mkdir()
                _put_model(partial, weights, source, dtype)
                torch.save(trainer, partial / TRAINER)
        self._ranks.exchange(None)
        written = cast(
            "Future[None]",
            dcp.async_save(
                state,
                storage_writer=dcp.FileSystemWriter(partial, overwrite=True),
                process_group=self._group,
                no_dist=self._group is None,
            ),
        )
        first = self._ranks.rank == 0
        self._pending = self._closing.submit(self._complete, written, step, partial, target) if first else written
        self._begun = step

    def finish(self) -> int:
        """Wait until nothing is being written; the last step written whole, 0 for none.

        Raises RuntimeError with what went wrong.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            # The first is no Exception.
            with self._explained(self._begun, (CheckpointException, Exception)):
                pending.result()
            self._whole = self._begun
        return self._whole

    def _complete(self, written: Future[None], step: int, partial: Path, target: Path) -> None:
        # All ranks have written when the first is done: it writes the metadata last.
        written.result()
        published.seal(partial, step)
        if target.exists():
            target.rename(self._folder / f".{target.name}.replaced")
        partial.rename(target)
        published.flush(self._folder)
        self._clear()
        there = complete(self._folder)
        past = [(number, path) for number, path in there if number <= step]
        later = [path for number, path in there if number > step]
        for path in later + surplus(past, self._keep, self._keep_best, score, has_sizes):
            # Renamed first: a removal that is cut short must not leave half a checkpoint under its name.
            shutil.rmtree(path.rename(self._folder / f".{path.name}.removed"))

    def _put_back(self) -> None:
        # A process killed between the two renames left the checkpoint that it was replacing without its name.
        for replaced in self._folder.glob(".step_*.replaced"):
            target = self._folder / replaced.name.removeprefix(".").removesuffix(".replaced")
            if not target.exists():
                replaced.rename(target)

    @contextlib.contextmanager
    def _explained(self, step: int, kinds: tuple[type[BaseException], ...]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            of_ranks = error.failures if isinstance(error, CheckpointException) else {}
            reason = next((first for first, _ in of_ranks.values()), error)
            raise RuntimeError(
                f"checkpoint of step {step} could not be written to {self._folder}: {type(reason).__name__}: {reason}; "
                "make room, then go on with --resume"
            ) from error

    def _clear(self) -> None:
        for leftover in self._folder.glob(".step_*"):
            shutil.rmtree(leftover)


def surplus(
    there: list[tuple[int, Path]],
    keep: int,
    keep_best: int,
    scored_by: Callable[[Path], float | None],
    is_good: Callable[[Path], bool],
) -> list[Path]:
    """Those of ``there``, oldest first, that are neither among the newest ``keep`` nor the best ``keep_best``.

    Of equal scores the newer is better; without a score a checkpoint is never among the best. One that is not good
    takes no place of either, and goes once ``keep`` good ones came after it.
    """
    good = [(step, path) for step, path in there if is_good(path)]
    if len(good) < keep:
        return []
    scored = [(value, step) for step, path in good if (value := scored_by(path)) is not None] if keep_best else []
    best = {step for _, step in sorted(scored)[-keep_best:]}
    return [path for step, path in there if step < good[-keep][0] and step not in best]


def load(path: Path, state: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Fill the tensors of ``state``, or this rank's shards of them, in place."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=ranks.size == 1)


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(steps trained, folder) of every checkpoint, oldest first; empty when there is none."""
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def find(folder: Path, step: int | None = None) -> tuple[int, Path] | None:
    """The checkpoint after ``step`` steps, or the newest that is undamaged; None when there is no checkpoint to take.

    Raises:
        FileNotFoundError: a step was named and has no checkpoint; the message lists those that exist.
        ValueError: a step was named whose checkpoint is damaged.
    """
    there = complete(folder)
    for number, path in reversed(there):
        if step is not None and number != step:
            continue
        try:
            check(path)
        except (ValueError, FileNotFoundError) as error:
            if step is not None:
                raise ValueError(f"{path}: damaged ({error}); name another: {[n for n, _ in there]}") from None
            logger.warning("checkpoint %s is damaged and left out: %s", path.name, str(error).splitlines()[0])
            continue
        return number, path
    if step is None:
        return None
    raise FileNotFoundError(
        f"got step {step}, expected one with a checkpoint in {folder}: {[number for number, _ in there]}"
    )


def check(path: Path) -> None:
    """Compare every file with its checksum. Raises ValueError or FileNotFoundError that names what differs."""
    if not (path / published.MANIFEST).is_file():
        raise FileNotFoundError(f"{path}: got no {published.MANIFEST}, expected that of a checkpoint")
    published.verify(path)


def has_sizes(path: Path) -> bool:
    """Whether every file is there with its size: what can be known of a damage without reading a large model."""
    try:
        published.measure(path)
    except (ValueError, FileNotFoundError):
        return False
    return True


def read_trainer(path: Path) -> dict[str, Any]:
    """The ``trainer`` state that ``save`` was given."""
    return torch.load(path / TRAINER, map_location="cpu", weights_only=True)


def score(path: Path) -> float | None:
    """By which the best are told; None where it was not measured or cannot be read."""
    try:
        return read_trainer(path).get("score")
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning(
            "checkpoint %s has a damaged %s and counts as one without a score: %s", path.name, TRAINER, reason
        )
        return None


def model_files(path: Path) -> list[Path]:
    """The files of a checkpoint that make the Hugging Face model, without the trainer's state."""
    return sorted(file for file in path.iterdir() if file.is_file() and not {file.suffix, file.name} & _STATE)


def _put_model(partial: Path, weights: Path, source: Path, dtype: str) -> None:
    for file in sorted(weights.iterdir()):
        if file.suffix in {".safetensors", ".json"}:
            try:
                os.link(file, partial / file.name)
            except OSError:
                # Some file systems have no links.
                shutil.copyfile(file, partial / file.name)
    for file in sorted(source.iterdir()):
        wanted = file.suffix in _COPIED and not file.name.endswith(".index.json")
        if file.is_file() and wanted and not (partial / file.name).exists():
            shutil.copyfile(file, partial / file.name)
    config = partial / "config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    told.pop("torch_dtype", None)
    config.write_text(json.dumps(told | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")
