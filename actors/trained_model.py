"""A model in training: its weights, its optimiser and the schedule of its learning rate.

Invariant: weights and the optimiser's state are all that training changes, and only ``apply`` changes them; the
learning rate depends on the step alone. Policy and critic of a learner are two of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from algos.batching import layout_for
from algos.step import apply
from configs.learner import LearnerConfig


def causal_model(path: Path) -> Any:
    """The causal language model in a Hugging Face folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


class TrainedModel:
    """One model with its optimiser.

    Args:
        path: Hugging Face folder that it begins with.
        settings: see ``LearnerConfig``.
        total_steps: steps of the whole run, over which the learning rate decays.
        build: makes the model from such a folder.
    """

    def __init__(
        self, path: Path, settings: LearnerConfig, total_steps: int, build: Callable[[Path], Any] = causal_model
    ) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._build = build
        self.open(path)

    def open(self, path: Path) -> None:
        """Begin with the weights in a folder and a fresh optimiser."""
        # Evaluation mode also while training: dropout would make the ratio theta/old differ from 1 by chance.
        self.model: Any = self._build(path).eval().to(self._settings.device)
        self.layout = layout_for(self.model, self._settings.layout)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
        )

    def begin(self, step: int) -> None:
        """Take the learning rate of a training step."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)

    def apply(self, loss: float) -> float:
        """One optimiser step on the gradients accumulated, which are cleared; returns as ``algos.step.apply``."""
        return apply(self._optimizer, self.model.parameters(), loss, self._settings.grad_clip)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights to publish, by the names of the model."""
        return self.model.state_dict()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the weights, for ``restore``."""
        return self._optimizer.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the optimiser's state of a checkpoint, whose weights were opened."""
        self._optimizer.load_state_dict(state)

    def learning_rate(self, step: int) -> float:
        """Of a training step: a linear warm-up, then a decay to ``final_lr_factor`` at the last step."""
        settings = self._settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        span = max(1, self._total_steps - 1 - settings.warmup_steps)
        done = min(1.0, max(0.0, (step - settings.warmup_steps) / span))
        fall = done if settings.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
        return settings.learning_rate * warm * (1 - (1 - settings.final_lr_factor) * fall)
