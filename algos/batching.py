"""From paths of trees to right-padded micro-batches under a token budget.

Invariant: every trained token of every path lands in exactly one micro-batch, preceded there by exactly the
tokens that the policy saw. Only padding is added, and only what follows a path's last trained token is left
out: no trained token can see either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trees.linearise import Path


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A path as the learner reads it: T tokens up to the last trained one, N of them trained."""

    ids: Tensor
    """int64 [T]."""
    mask: Tensor
    """bool [T], N times True, never at position 0."""
    targets: Tensor
    """int64 [N], the trained tokens; like all below in the order of the path."""
    mu: Tensor
    """float32 [N], the engine's log-probabilities."""
    temperature: Tensor
    """float32 [N]."""
    versions: Tensor
    """int64 [N], the policy version that sampled each."""
    advantages: Tensor
    """float32 [N]."""
    old: Tensor
    """float32 [N], the trainer's log-probabilities before the step; NaN until they are computed."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B samples, padded on the right to the longest."""

    samples: tuple[Sample, ...]
    ids: Tensor
    """int64 [B, T]; padding is 0."""
    mask: Tensor
    """bool [B, T]; row-major order of its True entries is the order of ``gather``."""

    def gather(self, name: str) -> Tensor:
        """A per-token field of the samples, one entry for each trained token of the micro-batch."""
        return torch.cat([getattr(sample, name) for sample in self.samples])

    def with_old(self, old: Tensor) -> list[Sample]:
        """The samples with ``old`` [N of the micro-batch] filled in."""
        parts = old.split([len(sample.targets) for sample in self.samples])
        return [replace(sample, old=part) for sample, part in zip(self.samples, parts, strict=True)]


def sample_of(path: Path, advantage: float, device: str = "cpu") -> Sample | None:
    """The path with the advantage of its episode; None when nothing of it is trained.

    Raises:
        ValueError: the first token is to be trained, which nothing predicts, or a trained one has no version or no
            finite log-probability.
    """
    trained = path.loss_mask.nonzero()[0]
    if len(trained) == 0:
        return None
    if trained[0] == 0:
        raise ValueError("got a path that trains its first token, expected a prompt before it: mend its loss_mask")
    if path.versions[trained].min() < 0:
        raise ValueError("got a trained token without a version, expected only sampled tokens: mend its loss_mask")
    if not np.isfinite(path.logprobs[trained]).all():
        raise ValueError("got a trained token without a log-probability, expected one of the engine's: mend loss_mask")
    end = int(trained[-1]) + 1
    ids = torch.tensor(path.ids[:end], dtype=torch.int64, device=device)
    mask = torch.tensor(path.loss_mask[:end], dtype=torch.bool, device=device)
    mu = torch.tensor(path.logprobs[trained], dtype=torch.float32, device=device)
    return Sample(
        ids=ids,
        mask=mask,
        targets=ids[mask],
        mu=mu,
        temperature=torch.tensor(path.temperature[trained], dtype=torch.float32, device=device),
        versions=torch.tensor(path.versions[trained], dtype=torch.int64, device=device),
        advantages=advantage * torch.tensor(path.credit[trained], dtype=torch.float32, device=device),
        old=torch.full_like(mu, torch.nan),
    )


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[MicroBatch]:
    """Pack samples, longest first, so that B * T of each micro-batch stays within ``max_tokens``.

    A sample longer than ``max_tokens`` gets a micro-batch of its own. Samples of equal length keep their
    order, so the same samples give the same micro-batches.
    """
    rest = sorted(samples, key=lambda sample: -len(sample.ids))
    batches = []
    while rest:
        width = len(rest[0].ids)
        rows = max(1, max_tokens // width)
        batches.append(_pad(rest[:rows], width))
        rest = rest[rows:]
    return batches


def _pad(samples: Sequence[Sample], width: int) -> MicroBatch:
    ids = samples[0].ids.new_zeros(len(samples), width)
    mask = samples[0].mask.new_zeros(len(samples), width)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        mask[row, : len(sample.mask)] = sample.mask
    return MicroBatch(tuple(samples), ids, mask)
