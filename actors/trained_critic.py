"""The critic in training: a model of its own, or a head on the policy's hidden states.

Invariant: the learner treats both alike. Values are those before the step, advantages and returns follow from them,
and whatever the critic trains is in its state, so that a restored learner goes on with the same critic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from actors.trained_model import TrainedModel, causal_model
from algos.batching import Layout, Sample, column
from algos.critic import as_critic, value_head
from algos.episodes import Episodes, flat, nested, with_gae
from algos.losses import Objective
from algos.ranks import Ranks
from algos.statistics import value_statistics
from algos.step import LossSettings, Pass, accumulate_values, apply, with_values
from configs.learner import CriticConfig, LearnerConfig


def loss_settings(settings: LearnerConfig, layout: Layout) -> LossSettings:
    """What the settings say of the losses, for a model that computes in this layout."""
    critic = settings.critic
    return LossSettings(
        objective=Objective(
            loss=settings.loss,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            tis_cap=settings.tis_cap,
            tis_mode=settings.tis_mode,
            tis_floor=settings.tis_floor,
            kl_coef=settings.kl_coef,
            entropy_coef=settings.entropy_coef,
        ),
        normalise=settings.normalise,
        constant=settings.normalise_constant,
        value_clip=critic.value_clip if critic else None,
        value_coef=critic.coef if critic else 1.0,
        max_tokens=settings.max_tokens_per_microbatch,
        layout=layout,
        logit_chunk=settings.logit_chunk,
    )


class OwnCritic:
    """A critic that is a model of its own; begins as the policy began, with a head at zero."""

    head: nn.Linear | None = None
    """The head on the policy's hidden states: none."""

    def __init__(self, settings: CriticConfig, model: TrainedModel, loss: LossSettings, ranks: Ranks) -> None:
        self._settings = settings
        self._model = model
        self._loss = loss
        self._ranks = ranks

    def open(self, path: Path) -> None:
        """Begin anew from the policy's folder, with a fresh optimiser."""
        self._model.open(path)

    def begin(self, step: int) -> bool:
        """Take the learning rate of a training step; whether the critic learns alone in it."""
        self._model.begin(step)
        return step < self._settings.warmup_steps

    def judged(self, episodes: Episodes, rewards: Sequence[float]) -> tuple[list[list[Sample]], dict[str, float]]:
        """The samples with values, returns and advantages times the credit that they come with, and metrics."""
        known = nested(self._valued(flat(episodes)), episodes)
        found = with_gae(known, rewards, self._settings.gamma, self._settings.gae_lambda)
        samples = flat(found)
        if not samples:
            return found, {}
        advantages = column(samples, "advantages").double()
        metrics = value_statistics(column(samples, "values"), column(samples, "returns"))
        metrics |= {
            "advantage_mean": advantages.mean().item(),
            "advantage_std": advantages.std(correction=0).item(),
            "advantage_max": advantages.abs().max().item(),
        }
        return found, {f"train/{name}": value for name, value in metrics.items()}

    def learn(self, episodes: Episodes, done: Pass | None, shuffler: random.Random) -> tuple[float, float]:  # noqa: ARG002
        """The optimiser steps that go with one of the policy's.

        ``done`` is what the policy's step on the same episodes gave; None where there was none. ``shuffler`` says how
        they fall into minibatches, on every rank alike. Returns the mean value loss of the first pass and the gradient
        norm of the last step, NaN where it was not finite and was not taken.
        """
        losses, norm = [], math.nan
        shares = min(self._settings.minibatches, len(episodes))
        for _ in range(self._settings.epochs):
            order = shuffler.sample(episodes, len(episodes)) if shares > 1 else episodes
            for share in range(shares):
                mine = order[share::shares]
                losses.append(accumulate_values(self._model.model, mine, self._loss, self._ranks).value_loss)
                norm = self._model.apply(losses[-1])
        return sum(losses[:shares]) / shares, norm

    @property
    def stepped(self) -> bool:
        """Whether the optimiser has a state."""
        return self._model.stepped

    def state(self, stepped: bool) -> dict[str, Any]:
        """As of ``TrainedModel``."""
        return self._model.state(stepped)

    def restore(self, state: dict[str, Any]) -> None:
        """As of ``TrainedModel``."""
        self._model.restore(state)

    def _valued(self, samples: list[Sample]) -> list[Sample]:
        return with_values(self._model.model, samples, self._loss, self._ranks)


class SharedCritic(OwnCritic):
    """A head on the policy's hidden states; the policy's pass computes its values and their gradient with its own."""

    def __init__(
        self,
        path: Path,
        settings: CriticConfig,
        policy: TrainedModel,
        loss: LossSettings,
        ranks: Ranks,
        learner: LearnerConfig,
    ) -> None:
        self._learner = learner
        super().__init__(settings, policy, loss, ranks)
        self.open(path)

    def open(self, path: Path) -> None:  # noqa: ARG002
        self.head = value_head(self._model.model.config.hidden_size).to(self._learner.device)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self._settings.learning_rate,
            betas=self._learner.betas,
            weight_decay=self._learner.weight_decay,
        )

    def begin(self, step: int) -> bool:
        share = self._model.learning_rate(step) / self._learner.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * share
        return step < self._settings.warmup_steps

    def learn(self, episodes: Episodes, done: Pass | None, shuffler: random.Random) -> tuple[float, float]:  # noqa: ARG002
        assert self.head is not None
        if done is None:
            done = accumulate_values(self._model.model, episodes, self._loss, self._ranks, self.head)
        for parameter in self.head.parameters():
            # No part of a sharded model, which would add up what the ranks found.
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = self._ranks.exchange(mine.cpu())
            parameter.grad = torch.stack(found).sum(0).to(parameter.device)
        norm = apply([self._optimizer], self.head.parameters(), done.value_loss, self._learner.grad_clip)
        return done.value_loss, norm

    @property
    def stepped(self) -> bool:
        return bool(self._optimizer.state)

    def state(self, stepped: bool) -> dict[str, Any]:
        assert self.head is not None
        if not stepped:
            return {"model": self.head.state_dict()}
        model, optimizer = get_state_dict(self.head, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        assert self.head is not None
        set_state_dict(
            self.head,
            self._optimizer if "optimizer" in state else [],
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
        )

    def _valued(self, samples: list[Sample]) -> list[Sample]:
        return samples


def critic_of(
    path: Path, settings: LearnerConfig, total_steps: int, policy: TrainedModel, loss: LossSettings, ranks: Ranks
) -> OwnCritic | None:
    """The critic that the settings ask for; None where they ask for none."""
    critic = settings.critic
    if critic is None:
        return None
    if critic.shared:
        return SharedCritic(path, critic, policy, loss, ranks, settings)
    own = settings.model_copy(update={"learning_rate": critic.learning_rate, "optimizer": "adamw", "lora": None})

    def build(folder: Path) -> Any:
        return as_critic(causal_model(folder))

    return OwnCritic(critic, TrainedModel(path, own, total_steps, build, ranks), loss, ranks)
