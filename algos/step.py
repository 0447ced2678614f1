"""The arithmetic of one optimiser step: score samples, accumulate the losses' gradients, take the step.

Invariant: the gradient is that of one loss over all samples of the optimiser step, divided by what the step's episodes
say; how they are packed into micro-batches does not matter. Samples whose gradient is 0 (no advantage, no other term)
count as tokens but are not run backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algos.batching import Layout, MicroBatch, Sample, column, micro_batches, with_columns
from algos.critic import values_of
from algos.episodes import Episodes, flat, numbers
from algos.gae import value_loss
from algos.logprobs import LOGIT_CHUNK
from algos.losses import Normalise, Objective, normalisers, policy_loss, sequence_log_ratios


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the losses take, and how much is computed at once."""

    objective: Objective = field(default_factory=Objective)
    normalise: Normalise = "token"
    constant: float | None = None
    """See ``normalisers``."""
    value_clip: float | None = None
    value_coef: float = 1.0
    """Of the value loss."""
    max_tokens: int = 16384
    """Tokens that one micro-batch computes."""
    layout: Layout = "auto"
    logit_chunk: int = LOGIT_CHUNK
    """Tokens whose logits are held at once."""


@dataclass(slots=True)
class Pass:
    """What forward and backward over the samples of one optimiser step gave."""

    loss: float = 0.0
    """Of the policy."""
    value_loss: float = 0.0
    tokens: int = 0
    """Trained tokens of the optimiser step."""
    ran: int = 0
    """Micro-batches that were run backward."""
    theta: list[Tensor] = field(default_factory=list)
    """Log-probabilities [N] of each micro-batch that was run; ``old``, ``advantages``, ``sequence`` beside them."""
    old: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    sequence: list[Tensor] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0


@torch.no_grad()
def with_old(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    max_tokens: int,
    layout: Layout = "auto",
    logit_chunk: int = LOGIT_CHUNK,
    head: nn.Module | None = None,
) -> tuple[list[Sample], Tensor, int]:
    """Score samples under the present weights.

    Returns the samples with ``old``, and with ``values`` where a value ``head`` on the model's hidden states is given,
    in their order; all entropies [sum of N]; tokens computed.
    """
    entropies = []

    def score(batch: MicroBatch) -> dict[str, Tensor]:
        scores = batch.logprobs_and_entropies(model, logit_chunk)
        entropies.append(scores.entropies)
        return {"old": scores.logprobs} | ({"values": values_of(head, scores.hidden)} if head is not None else {})

    batches = micro_batches(samples, max_tokens, layout)
    filled = _filled(samples, batches, score)
    return filled, torch.cat(entropies) if entropies else torch.empty(0), sum(batch.computed for batch in batches)


@torch.no_grad()
def with_values(
    critic: PreTrainedModel, samples: Sequence[Sample], max_tokens: int, layout: Layout = "auto"
) -> list[Sample]:
    """The samples with ``values`` of a critic that is a model of its own, in their order."""
    batches = micro_batches(samples, max_tokens, layout)
    return _filled(samples, batches, lambda batch: {"values": batch.values(critic)})


def accumulate(
    model: PreTrainedModel, episodes: Episodes, settings: LossSettings, head: nn.Module | None = None
) -> Pass:
    """Add the policy loss's gradient over the samples of episodes, which have ``old``, to the parameters' ``grad``.

    With a value ``head`` on the model's hidden states the value loss is added; samples then have ``values`` and
    ``returns``. GSPO costs one more forward pass, since the ratio of an episode must be known before any of its
    tokens has a gradient.
    """
    samples = prepared(episodes, settings)
    objective = settings.objective
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    if objective.loss == "gspo":
        samples = _with_sequence(model, samples, numbers(episodes), settings)
    if objective.still and head is None:
        samples = [sample for sample in samples if sample.advantages.any()]
    for batch in micro_batches(samples, settings.max_tokens, settings.layout):
        began = time.perf_counter()
        scores = batch.logprobs_and_entropies(
            model, settings.logit_chunk, entropy_gradient=bool(objective.entropy_coef)
        )
        theta = scores.logprobs
        old, advantages, sequence, normaliser = map(batch.gather, ("old", "advantages", "sequence", "normaliser"))
        loss = policy_loss(
            theta,
            old,
            batch.gather("mu"),
            advantages,
            torch.ones_like(theta, dtype=torch.bool),
            objective,
            sequence=sequence,
            entropy=scores.entropies,
            normaliser=normaliser,
        )
        result.loss += loss.item()
        if head is not None:
            of_values = _value_loss(batch, values_of(head, scores.hidden), settings)
            result.value_loss += of_values.item()
            loss = loss + settings.value_coef * of_values
        _backward(loss, began, result)
        for name, found in (("theta", theta.detach()), ("old", old), ("advantages", advantages)):
            getattr(result, name).append(found)
        if objective.loss == "gspo":
            result.sequence.append(sequence)
    return result


def accumulate_values(critic: PreTrainedModel, episodes: Episodes, settings: LossSettings) -> Pass:
    """Add the value loss's gradient over samples, which have ``values`` and ``returns``, to the critic's ``grad``."""
    samples = prepared(episodes, settings)
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    for batch in micro_batches(samples, settings.max_tokens, settings.layout):
        began = time.perf_counter()
        loss = _value_loss(batch, batch.values(critic), settings)
        result.value_loss += loss.item()
        _backward(settings.value_coef * loss, began, result)
    return result


def prepared(episodes: Episodes, settings: LossSettings) -> list[Sample]:
    """The samples of all episodes of an optimiser step, each token with its ``normaliser``."""
    samples = flat(episodes)
    return with_columns(samples, normaliser=normalisers(numbers(episodes), settings.normalise, settings.constant))


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


def _filled(
    samples: Sequence[Sample], batches: Iterable[MicroBatch], score: Callable[[MicroBatch], dict[str, Tensor]]
) -> list[Sample]:
    """The samples in their order, with the columns that ``score`` gives for each micro-batch of them."""
    place = {id(sample): i for i, sample in enumerate(samples)}
    filled = list(samples)
    for batch in batches:
        for before, after in zip(batch.samples, with_columns(batch.samples, **score(batch)), strict=True):
            filled[place[id(before)]] = after
    return filled


@torch.no_grad()
def _with_sequence(
    model: PreTrainedModel, samples: Sequence[Sample], episode: Tensor, settings: LossSettings
) -> list[Sample]:
    if not samples:
        return []

    def score(batch: MicroBatch) -> dict[str, Tensor]:
        return {"sequence": batch.logprobs_and_entropies(model, settings.logit_chunk).logprobs}

    batches = micro_batches(samples, settings.max_tokens, settings.layout)
    theta = column(_filled(samples, batches, score), "sequence")
    return with_columns(samples, sequence=sequence_log_ratios(theta, column(samples, "old"), episode))


def _value_loss(batch: MicroBatch, values: Tensor, settings: LossSettings) -> Tensor:
    return value_loss(
        values,
        batch.gather("values"),
        batch.gather("returns"),
        torch.ones_like(values, dtype=torch.bool),
        clip=settings.value_clip,
        normaliser=batch.gather("normaliser"),
    )


def _backward(loss: Tensor, began: float, result: Pass) -> None:
    forward = time.perf_counter()
    loss.backward()
    result.ran += 1
    result.backward_s += time.perf_counter() - forward
    result.forward_s += forward - began
