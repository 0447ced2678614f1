"""Conversations with an engine, and the trainer's log-probabilities of what it sampled in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from actors.engines.base import Generate, Generated, Sampler
from algos.batching import Sample, sample_of
from algos.step import LossSettings, with_old
from trees.linearise import Path


@dataclass(frozen=True)
class Plan:
    """A conversation to be had: before each turn come the ids of ``tails``, in it at most ``lengths`` are sampled.

    With a ``seed`` turn i is asked for with the seed that ``turn_seed(i)`` says.
    """

    tails: Sequence[Sequence[int]]
    lengths: Sequence[int]
    temperature: float
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None

    def turn_seed(self, turn: int) -> int | None:
        return None if self.seed is None else 1000 * self.seed + turn


@dataclass(frozen=True)
class Conversation:
    plan: Plan
    turns: tuple[Generated, ...]

    def mu(self) -> torch.Tensor:
        """The engine's log-probabilities of all sampled tokens, float32 [N]."""
        return torch.tensor([logprob for turn in self.turns for logprob in turn.logprobs])

    def sample(self) -> Sample:
        """What the learner makes of it: one sequence in which all that was sampled is trained."""
        ids, sampled, logprobs = [], [], []
        for tail, turn in zip(self.plan.tails, self.turns, strict=True):
            ids += [*tail, *turn.ids]
            sampled += [False] * len(tail) + [True] * len(turn.ids)
            logprobs += [0.0] * len(tail) + turn.logprobs
        path = Path(
            ids=np.array(ids, np.int32),
            loss_mask=np.array(sampled),
            logprobs=np.array(logprobs, np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            temperature=np.where(sampled, self.plan.temperature, 1.0).astype(np.float32),
            credit=np.array(sampled, np.float32),
            leaf=0,
            before=np.full(len(ids), -1, np.int32),
        )
        sample = sample_of(path, 0.0)
        assert sample is not None
        return sample


async def converse(engine: Sampler, plans: Sequence[Plan]) -> list[Conversation]:
    """All conversations at once, so that the turns of some are sampled beside those of others."""

    async def one(name: int, plan: Plan) -> Conversation:
        ids: list[int] = []
        turns = []
        for nth, (tail, length) in enumerate(zip(plan.tails, plan.lengths, strict=True)):
            ids = [*ids, *tail]
            seed = plan.turn_seed(nth)
            request = Generate(
                ids,
                length,
                plan.temperature,
                stop_ids=plan.stop_ids,
                session=f"c{name}",
                request=f"c{name}.{nth}",
                seed=seed,
            )
            turns.append(await engine.generate(request))
            ids = [*ids, *turns[-1].ids]
        return Conversation(plan, tuple(turns))

    return list(await asyncio.gather(*(one(*numbered) for numbered in enumerate(plans))))


def trainer_logprobs(
    model: nn.Module, conversations: Sequence[Conversation], max_tokens: int = 16384
) -> list[torch.Tensor]:
    """``old`` as the learner computes it before a step, for each conversation float32 [N]."""
    settings = LossSettings(max_tokens=max_tokens)
    filled, *_ = with_old(model, [conversation.sample() for conversation in conversations], settings)
    return [sample.old for sample in filled]
