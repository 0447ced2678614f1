"""Supervised fine-tuning, step by step, on disk.

Invariant: the state after step ``n`` depends on nothing but the model, the trajectories, the settings and ``n``. A run
that was killed at any moment and goes on from its last checkpoint ends in the same weights as one that was not (same
machine, same number of threads).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from actors import checkpoints
from actors.engines import weights
from algos.batching import layout_for
from algos.runlog import read_jsonl
from algos.step import apply
from algos.supervised import accumulate, batches, learning_rate, measure
from algos.trajectories import DataError, Trajectory
from configs.sft import SftConfig

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
Row = dict[str, Any]


class FineTuning:
    """One run in ``folder``, which holds ``metrics.jsonl``, ``checkpoints/`` and in the end the model itself.

    Args:
        config: see ``SftConfig``; its model is the start.
        folder: where it happens; goes on from its newest checkpoint, where there is one.
        training: what is trained.
        heldout: what is only measured.
        seen: called with the row of each step.

    Raises ``DataError`` when it would go on with other trajectories than those that it began with, and ``ValueError``
    for a layout that the model cannot compute.
    """

    def __init__(
        self,
        config: SftConfig,
        folder: Path,
        training: Sequence[Trajectory],
        heldout: Sequence[Trajectory],
        seen: Callable[[Row], None],
    ) -> None:
        assert config.model.path is not None
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()
        self._config = config
        self._folder = folder
        self._training = training
        self._heldout = [sample for each in heldout for sample in each.samples]
        self._seen = seen
        epochs = batches([each.tokens for each in training], config.epochs, config.batch_tokens, config.seed)
        self._steps = [step for epoch in epochs for step in epoch]
        self._ends = list(itertools.accumulate(map(len, epochs)))
        self._digest = hashlib.sha256(b"".join(each.digest for each in (*training, *heldout))).hexdigest()
        self._checkpoints = checkpoints.Checkpoints(folder / CHECKPOINTS, keep=1)
        self.done, source = checkpoints.find(folder / CHECKPOINTS) or (0, config.model.path)
        # Evaluation mode also while training, as the learner does: the same step gives the same loss again.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
        self._model: Any = model.to(config.device)
        self._layout = layout_for(model, config.layout)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        if self.done:
            self._restore(source)
        self._rewind()

    def run(self) -> None:
        """Train what is left, and put the model into ``folder``."""
        if not read_jsonl(self._folder / METRICS):
            self._log({"step": 0, **self._measured()})
        while self.done < len(self._steps):
            self._log(self._step())
            if self.done % self._config.checkpoint_every == 0 or self.done == len(self._steps):
                self._save()
        _publish(self._folder)

    def _step(self) -> Row:
        began = time.perf_counter()
        config, total = self._config, len(self._steps)
        rate = learning_rate(
            self.done,
            total,
            peak=config.learning_rate,
            warmup=config.warmup,
            decay=config.decay,
            final_factor=config.final_lr_factor,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        samples = [sample for place in self._steps[self.done] for sample in self._training[place].samples]
        sums = accumulate(self._model, samples, config.max_tokens_per_microbatch, self._layout)
        norm = apply([self._optimizer], self._model.parameters(), sums.loss, config.grad_clip)
        self.done += 1
        row: Row = {
            "step": self.done,
            "epoch": 1 + bisect.bisect_left(self._ends, self.done),
            "loss": sums.loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": sums.tokens,
            "tokens_of_paths": sum(len(sample.ids) for sample in samples),
            "tokens_computed": sums.computed,
            "not_finite": int(math.isnan(norm)),
            "seconds": time.perf_counter() - began,
        }
        return row | (self._measured() if self.done in self._ends else {})

    def _measured(self) -> Row:
        if not self._heldout:
            return {}
        sums = measure(self._model, self._heldout, self._config.max_tokens_per_microbatch, self._layout)
        return {"heldout/loss": sums.loss, "heldout/tokens": sums.tokens}

    def _log(self, row: Row) -> None:
        # JSON has no NaN; a figure that does not exist is null.
        plain = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        with (self._folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
        self._seen(plain)

    def _save(self) -> None:
        trainer = {"data": self._digest, "score": None}
        assert self._config.model.path is not None
        tensors = self._model.state_dict()
        published = weights.publish(tensors, self._folder / CHECKPOINTS / "weights", self.done, keep=1)
        self._checkpoints.save(self.done, self._state(), trainer, published, self._config.model.path, "float32")
        self._checkpoints.finish()

    def _state(self) -> Row:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _restore(self, path: Path) -> None:
        if checkpoints.read_trainer(path)["data"] != self._digest:
            raise DataError(
                f"{self._folder}: got other trajectories than those that its checkpoint was trained on, expected the "
                "same: put the data back, or begin anew in another folder"
            )
        state = self._state()
        checkpoints.load(path, state)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _rewind(self) -> None:
        """Keep the rows of the steps that are done: the later ones are written again."""
        path = self._folder / METRICS
        rows = [row for row in read_jsonl(path) if row["step"] <= self.done] if self.done else []
        partial = path.with_name(f".{METRICS}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(path)


def _publish(folder: Path) -> None:
    """The newest checkpoint's model as that of ``folder`` itself: whole as soon as its ``config.json`` is there."""
    found = checkpoints.find(folder / CHECKPOINTS)
    assert found is not None
    for file in sorted(checkpoints.model_files(found[1]), key=lambda file: file.name == "config.json"):
        partial = folder / f".{file.name}.partial"
        shutil.copyfile(file, partial)
        partial.replace(folder / file.name)
