"""The arithmetic of one optimiser step: score samples, accumulate the policy loss's gradient, take the step.

Invariant: the gradient is that of one loss over all samples of the optimiser step, divided by all their
trained tokens; how they are packed into micro-batches, and which rank computes them, does not matter. Samples with
advantage 0 count as tokens but are not run backward, since their gradient is 0. Every rank is given all samples, and
gets the same result; each ``grad`` is the rank's own share, which a sharded model adds up by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algos.batching import Layout, Sample
from algos.logprobs import token_entropies, token_logprobs
from algos.losses import policy_loss
from algos.ranks import ALONE, Ranks, deal


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the loss and its clips take; see ``policy_loss``."""

    clip_low: float = 0.20
    clip_high: float = 0.28
    tis_cap: float | None = 2.0
    max_tokens: int = 16384
    """Tokens that one micro-batch computes."""
    layout: Layout = "auto"


@dataclass(slots=True)
class Pass:
    """What forward and backward over the samples of one optimiser step gave."""

    loss: float = 0.0
    tokens: int = 0
    """Trained tokens, the normaliser of the loss."""
    theta: list[Tensor] = field(default_factory=list)
    """Log-probabilities [N] of each micro-batch that was run; ``old`` and ``advantages`` beside them."""
    old: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0


@torch.no_grad()
def with_old(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    max_tokens: int,
    layout: Layout = "auto",
    ranks: Ranks = ALONE,
) -> tuple[list[Sample], Tensor, int]:
    """The samples with ``old`` under the present weights, in their order; all entropies [sum of N]; tokens computed."""
    place = {id(sample): i for i, sample in enumerate(samples)}
    known: list[tuple[int, Tensor]] = []
    entropies = []
    computed = 0
    for batch, own in deal(samples, max_tokens, layout, ranks, model.config.hidden_size):
        logits, temperature = batch.logits(model), batch.gather("temperature")
        if not own:
            continue
        computed += batch.computed
        old = token_logprobs(logits, batch.gather("targets"), temperature)
        entropies.append(token_entropies(logits, temperature).cpu())
        for before, after in zip(batch.samples, batch.with_old(old), strict=True):
            known.append((place[id(before)], after.old.cpu()))
    filled: list[Sample] = list(samples)
    found = ranks.exchange((known, entropies, computed))
    for i, old in (pair for pairs, _, _ in found for pair in pairs):
        filled[i] = replace(samples[i], old=old.to(samples[i].mu.device))
    every = [part for _, parts, _ in found for part in parts]
    return filled, torch.cat(every) if every else torch.empty(0), sum(count for _, _, count in found)


def accumulate(model: PreTrainedModel, samples: Sequence[Sample], settings: LossSettings, ranks: Ranks = ALONE) -> Pass:
    """Add the policy loss's gradient over ``samples``, which have ``old``, to the parameters' ``grad``."""
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    moving = [sample for sample in samples if sample.advantages.any()]
    for batch, own in deal(moving, settings.max_tokens, settings.layout, ranks, model.config.hidden_size):
        began = time.perf_counter()
        logits = batch.logits(model)
        theta = token_logprobs(logits, batch.gather("targets"), batch.gather("temperature"))
        if not own:
            (0.0 * theta.sum()).backward()
            continue
        old, advantages = batch.gather("old"), batch.gather("advantages")
        loss = policy_loss(
            theta,
            old,
            batch.gather("mu"),
            advantages,
            torch.ones_like(theta, dtype=torch.bool),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            tis_cap=settings.tis_cap,
            normaliser=result.tokens,
        )
        forward = time.perf_counter()
        loss.backward()
        result.loss += loss.item()
        result.backward_s += time.perf_counter() - forward
        result.forward_s += forward - began
        for kept, tensor in ((result.theta, theta), (result.old, old), (result.advantages, advantages)):
            kept.append(tensor.detach().cpu())
    return _together(result, ranks)


def _together(mine: Pass, ranks: Ranks) -> Pass:
    """The pass of all ranks; its seconds are those of this one."""
    found = ranks.exchange((mine.loss, mine.theta, mine.old, mine.advantages))
    theta, old, advantages = ([part for each in found for part in each[i]] for i in (1, 2, 3))  # type: ignore[union-attr]
    return replace(mine, loss=sum(each[0] for each in found), theta=theta, old=old, advantages=advantages)


def apply(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor], loss: float, grad_clip: float
) -> float:
    """Clip the gradient, step and clear it. Returns the gradient's norm before clipping.

    With a loss or norm that is not finite nothing is stepped, so that weights and moments stay as they are;
    the caller sees it by the returned norm, which is then NaN.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), grad_clip).item()
    finite = math.isfinite(norm) and math.isfinite(loss)
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm if finite else math.nan
