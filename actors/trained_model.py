"""A model in training: its weights, its optimiser and the schedule of its learning rate.

Invariant: weights and the optimiser's state are all that training changes, and only ``apply`` changes them; the
learning rate depends on the step alone. Policy and critic of a learner are two of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from actors.sharding import further_names, matrices, merged, prepare
from algos.batching import layout_for
from algos.muon import Muon
from algos.ranks import ALONE, Ranks
from algos.step import apply
from configs.learner import LearnerConfig

_TRAINED = StateDictOptions(ignore_frozen_params=True)
_LOADED = StateDictOptions(ignore_frozen_params=True, strict=False)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def causal_model(path: Path) -> Any:
    """The causal language model in a Hugging Face folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def shape_of(settings: LearnerConfig) -> dict[str, Any]:
    """The settings that say which tensors a learner trains, or how they make the policy, as they are in checkpoints."""
    lora, critic = settings.lora, settings.critic
    return {
        "optimizer": settings.optimizer,
        "lora": lora and {**lora.model_dump(), "targets": sorted(set(lora.targets))},
        "critic": critic and ("shared" if critic.shared else "own"),
    }


def check_shape(checkpoint: Path, was: Mapping[str, Any], settings: LearnerConfig) -> None:
    """Raise ValueError where a learner cannot go on from a checkpoint of shape ``was``; it may drop the critic."""
    now = shape_of(settings)
    pairs = {f"learner.{name}": (now[name], was[name]) for name in now if name != "critic" or now[name]}
    if now["lora"] and was["lora"]:
        del pairs["learner.lora"]
        pairs |= {f"learner.lora.{name}": (now["lora"][name], was["lora"][name]) for name in now["lora"]}
    differ = [f"{name}: got {got}, expected {old}" for name, (got, old) in pairs.items() if got != old]
    if differ:
        raise ValueError(
            f"{'; '.join(differ)}, as in the checkpoint {checkpoint}: put it back, or begin a new run with "
            f"model.path={checkpoint}"
        )


class TrainedModel:
    """One model with its optimiser.

    Args:
        path: Hugging Face folder that it begins with.
        settings: see ``LearnerConfig``.
        total_steps: steps of the whole run, over which the learning rate decays.
        build: makes the model from such a folder.
        ranks: with whom it is shared; with several, every method is called on all of them in the same order.
    """

    def __init__(
        self,
        path: Path,
        settings: LearnerConfig,
        total_steps: int,
        build: Callable[[Path], Any] = causal_model,
        ranks: Ranks = ALONE,
    ) -> None:
        self._settings = settings
        self._total_steps = total_steps
        self._build = build
        self._ranks = ranks
        self.open(path)

    def open(self, path: Path) -> None:
        """Begin with the weights in a folder and a fresh optimiser."""
        # Evaluation mode also while training: dropout would make the ratio theta/old differ from 1 by chance.
        model = self._build(path).eval()
        self.layout = layout_for(model, self._settings.layout)
        self.model: Any = prepare(model, self._settings, self._ranks)
        self._optimizers = self._fresh_optimizers()

    def begin(self, step: int) -> None:
        """Take the learning rate of a training step."""
        for optimizer in self._optimizers:
            full = self._settings.muon_learning_rate if isinstance(optimizer, Muon) else self._settings.learning_rate
            for group in optimizer.param_groups:
                group["lr"] = full * self._share(step)

    def apply(self, loss: float) -> float:
        """One optimiser step on the gradients accumulated, which are cleared; returns as ``algos.step.apply``."""
        return apply(self._optimizers, self.model.parameters(), loss, self._settings.grad_clip)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights to publish, by the names of the model; nothing on other ranks than the first.

        Adapters are merged; the dtype is that of compute, so that engines get what the learner computes with.
        """
        sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        whole: Any = get_model_state_dict(self.model, options=_WHOLE) if sharded else self.model.state_dict()
        if self._ranks.rank:
            return {}
        # Gathered, a tensor of several names is several tensors.
        further = further_names(self.model) if sharded else set()
        alone = {name: tensor for name, tensor in whole.items() if name not in further}
        return _as(merged(alone, self._settings.lora), self._settings.dtype)

    @property
    def stepped(self) -> bool:
        """Whether the optimiser has a state."""
        return any(optimizer.state for optimizer in self._optimizers)

    def state(self, stepped: bool) -> dict[str, Any]:
        """Trained weights and, of one that has ``stepped``, the optimiser's state; tensors are the live ones or shards.

        ``torch.distributed.checkpoint`` saves it, or loads into it.
        """
        if not stepped:
            return {"model": get_model_state_dict(self.model, options=_TRAINED)}
        model, optimizer = get_state_dict(self.model, list(self._optimizers), options=_TRAINED)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what was loaded into ``state``, on the model that was opened first."""
        set_state_dict(
            self.model,
            list(self._optimizers) if "optimizer" in state else [],
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
            options=_LOADED,
        )

    def learning_rate(self, step: int) -> float:
        """AdamW's in a training step: a linear warm-up, then a decay to ``final_lr_factor`` at the last step."""
        return self._settings.learning_rate * self._share(step)

    def _share(self, step: int) -> float:
        settings = self._settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        span = max(1, self._total_steps - 1 - settings.warmup_steps)
        done = min(1.0, max(0.0, (step - settings.warmup_steps) / span))
        fall = done if settings.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
        return warm * (1 - (1 - settings.final_lr_factor) * fall)

    def _fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        settings = self._settings
        inner, others = matrices(self.model)
        optimizers: list[torch.optim.Optimizer] = []
        if settings.optimizer == "muon":
            optimizers.append(Muon(inner, settings.muon_learning_rate))
        else:
            others = [p for p in self.model.parameters() if p.requires_grad]
        if others:
            optimizers.append(
                torch.optim.AdamW(
                    others, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
                )
            )
        return optimizers


def _as(weights: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Cast, where names of one tensor stay names of one tensor."""
    if dtype == "float32":
        return weights
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in weights.values():
        cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(torch.bfloat16))
    return {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in weights.items()}
