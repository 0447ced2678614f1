"""Whole episodes as the learner trains them: their samples, and what is known of an episode only as a whole.

Invariant: an episode is trained, rejected, or put into an optimiser step whole, and a number that belongs to it does
not depend on how its tokens are laid out in paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from algos.batching import Sample, column, with_columns
from algos.gae import gae
from algos.losses import rejected

T = TypeVar("T")
Episodes = Sequence[Sequence[Sample]]
"""The samples of each episode, in the order of ``linearise``."""


def flat(episodes: Sequence[Sequence[T]]) -> list[T]:
    """All samples, episode by episode."""
    return [sample for episode in episodes for sample in episode]


def nested(samples: Sequence[T], like: Sequence[Sequence[object]]) -> list[list[T]]:
    """Inverse of ``flat``, into episodes of the sizes of ``like``."""
    rest = iter(samples)
    return [[next(rest) for _ in episode] for episode in like]


def numbers(episodes: Episodes) -> Tensor:
    """The episode of each trained token of ``flat(episodes)``, int64 [N] on the samples' device."""
    found = [sample.before.new_full(sample.before.shape, i) for i, episode in enumerate(episodes) for sample in episode]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def with_gae(episodes: Episodes, rewards: Sequence[float], gamma: float, lam: float) -> list[list[Sample]]:
    """The samples, which have ``values``, with ``returns``, and ``advantages`` times what they were before.

    ``rewards`` is one for each episode; see ``algos.gae``.
    """
    samples = flat(episodes)
    if not samples:
        return [list(episode) for episode in episodes]
    values, before, number = column(samples, "values"), column(samples, "before"), numbers(episodes)
    # The numbers in ``before`` count from each episode's first token.
    first = torch.searchsorted(number, number)
    before = torch.where(before < 0, before, before + first)
    reward = torch.tensor(rewards, dtype=values.dtype, device=values.device)[number]
    advantages, returns = gae(reward, values, before, gamma=gamma, lam=lam)
    advantages = (advantages * column(samples, "advantages")).to(torch.promote_types(values.dtype, torch.float32))
    return nested(with_columns(samples, advantages=advantages, returns=returns), episodes)


def without_rejected(episodes: Episodes, mean: float | None, largest: float | None) -> tuple[list[list[Sample]], int]:
    """The episodes that are not too far from the engine that sampled them, and how many are; see ``rejected``.

    Samples have ``old``.
    """
    samples = flat(episodes)
    number = numbers(episodes)
    bad = set()
    if samples and not mean is largest is None:
        far = rejected(column(samples, "old"), column(samples, "mu"), number, mean=mean, largest=largest)
        bad = set(number[far].tolist())
    return [list(episode) for i, episode in enumerate(episodes) if i not in bad], len(bad)
