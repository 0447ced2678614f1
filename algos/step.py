"""The arithmetic of one optimiser step: score samples, accumulate the policy loss's gradient, take the step.

Invariant: the gradient is that of one loss over all samples of the optimiser step, divided by all their
trained tokens; how they are packed into micro-batches does not matter. Samples with advantage 0 count as
tokens but are not run backward, since their gradient is 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algos.batching import Layout, Sample, micro_batches
from algos.logprobs import LOGIT_CHUNK
from algos.losses import policy_loss


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the loss and its clips take; see ``policy_loss``."""

    clip_low: float = 0.20
    clip_high: float = 0.28
    tis_cap: float | None = 2.0
    max_tokens: int = 16384
    """Tokens that one micro-batch computes."""
    layout: Layout = "auto"
    logit_chunk: int = LOGIT_CHUNK
    """Tokens whose logits are held at once."""


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
    logit_chunk: int = LOGIT_CHUNK,
) -> tuple[list[Sample], Tensor, int]:
    """The samples with ``old`` under the present weights, in their order; all entropies [sum of N]; tokens computed."""
    place = {id(sample): i for i, sample in enumerate(samples)}
    filled: list[Sample] = list(samples)
    entropies = []
    computed = 0
    for batch in micro_batches(samples, max_tokens, layout):
        computed += batch.computed
        scores = batch.logprobs_and_entropies(model, logit_chunk)
        entropies.append(scores.entropies)
        for before, after in zip(batch.samples, batch.with_old(scores.logprobs), strict=True):
            filled[place[id(before)]] = after
    return filled, torch.cat(entropies) if entropies else torch.empty(0), computed


def accumulate(model: PreTrainedModel, samples: Sequence[Sample], settings: LossSettings) -> Pass:
    """Add the policy loss's gradient over ``samples``, which have ``old``, to the parameters' ``grad``."""
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    moving = [sample for sample in samples if sample.advantages.any()]
    for batch in micro_batches(moving, settings.max_tokens, settings.layout):
        began = time.perf_counter()
        theta = batch.logprobs_and_entropies(model, settings.logit_chunk).logprobs
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
        result.theta.append(theta.detach())
        result.old.append(old)
        result.advantages.append(advantages)
    return result


def apply(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], loss: float, grad_clip: float) -> float:
    """Clip the gradient, step and clear it. Returns the gradient's norm before clipping.

    With a loss or norm that is not finite nothing is stepped, so that weights and moments stay as they are;
    the caller sees it by the returned norm, which is then NaN.
    """
    norm = nn.utils.clip_grad_norm_(list(parameters), grad_clip).item()
    finite = math.isfinite(norm) and math.isfinite(loss)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else math.nan
