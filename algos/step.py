"""The arithmetic of one optimiser step: score samples, accumulate the losses' gradients, take the step.

Invariant: the gradient is that of one loss over all samples of the optimiser step, divided by what the step's episodes
say; how they are packed into micro-batches, and which rank computes them, does not matter. Samples whose gradient is 0
(no advantage, no other term) count as tokens but are not run backward. Every rank is given all samples, and gets the
same result; each ``grad`` is the rank's own share, which a sharded model adds up by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from algos.batching import Layout, MicroBatch, Sample, column, with_columns
from algos.critic import values_of
from algos.episodes import Episodes, flat, numbers
from algos.gae import value_loss
from algos.logprobs import LOGIT_CHUNK
from algos.losses import Normalise, Objective, normalisers, policy_loss, sequence_log_ratios
from algos.ranks import ALONE, Ranks, deal


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
    """What forward and backward over the samples of one optimiser step gave, all ranks together."""

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
    settings: LossSettings,
    ranks: Ranks = ALONE,
    head: nn.Module | None = None,
) -> tuple[list[Sample], Tensor, int]:
    """Score samples under the present weights.

    Returns the samples with ``old``, and with ``values`` where a value ``head`` on the model's hidden states is given,
    in their order; all entropies [sum of N]; tokens computed.
    """

    def score(batch: MicroBatch) -> dict[str, Tensor]:
        scores = batch.logprobs_and_entropies(model, settings.logit_chunk)
        found = {"old": scores.logprobs, "entropies": scores.entropies}
        return found if head is None else found | {"values": values_of(head, scores.hidden)}

    columns, computed = _columns(model, samples, settings, ranks, score)
    entropies = columns.pop("entropies", torch.empty(0))
    return with_columns(samples, **columns), entropies, computed


@torch.no_grad()
def with_values(
    critic: PreTrainedModel, samples: Sequence[Sample], settings: LossSettings, ranks: Ranks = ALONE
) -> list[Sample]:
    """The samples with ``values`` of a critic that is a model of its own, in their order."""
    columns, _ = _columns(critic, samples, settings, ranks, lambda batch: {"values": batch.values(critic)})
    return with_columns(samples, **columns)


def accumulate(
    model: PreTrainedModel,
    episodes: Episodes,
    settings: LossSettings,
    ranks: Ranks = ALONE,
    head: nn.Module | None = None,
) -> Pass:
    """Add the policy loss's gradient over the samples of episodes, which have ``old``, to the parameters' ``grad``.

    With a value ``head`` on the model's hidden states the value loss is added; samples then have ``values`` and
    ``returns``. GSPO costs one more forward pass, since the ratio of an episode must be known before any of its
    tokens has a gradient.
    """
    samples = _divided(episodes, settings)
    objective = settings.objective
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    if objective.loss == "gspo":
        samples = _with_sequence(model, samples, numbers(episodes), settings, ranks)
    if objective.still and head is None:
        samples = [sample for sample in samples if sample.advantages.any()]
    for batch, own in deal(samples, settings.max_tokens, settings.layout, ranks, model.config.hidden_size):
        began = time.perf_counter()
        scores = batch.logprobs_and_entropies(
            model, settings.logit_chunk, entropy_gradient=bool(objective.entropy_coef)
        )
        values = None if head is None else values_of(head, scores.hidden)
        if not own:
            (0.0 * scores.logprobs.sum() + (0.0 if values is None else 0.0 * values.sum())).backward()
            continue
        theta = scores.logprobs
        loss = policy_loss(
            theta,
            batch.gather("old"),
            batch.gather("mu"),
            batch.gather("advantages"),
            torch.ones_like(theta, dtype=torch.bool),
            objective,
            sequence=batch.gather("sequence"),
            entropy=scores.entropies,
            normaliser=batch.gather("normaliser"),
        )
        result.loss += loss.item()
        if values is not None:
            of_values = _value_loss(batch, values, settings)
            result.value_loss += of_values.item()
            loss = loss + settings.value_coef * of_values
        _backward(loss, began, result)
        result.theta.append(theta.detach().cpu())
        for name in ("old", "advantages", *(["sequence"] if objective.loss == "gspo" else [])):
            getattr(result, name).append(batch.gather(name).cpu())
    return _together(result, ranks)


def accumulate_values(
    critic: PreTrainedModel,
    episodes: Episodes,
    settings: LossSettings,
    ranks: Ranks = ALONE,
    head: nn.Module | None = None,
) -> Pass:
    """Add the value loss's gradient over samples, which have ``values`` and ``returns``, to the critic's ``grad``.

    With a ``head`` on the hidden states of ``critic`` only the head gets a gradient.
    """
    samples = _divided(episodes, settings)
    result = Pass(tokens=sum(len(sample.targets) for sample in samples))
    for batch, own in deal(samples, settings.max_tokens, settings.layout, ranks, critic.config.hidden_size):
        began = time.perf_counter()
        if head is None:
            values = batch.values(critic)
        else:
            with torch.no_grad():
                hidden = batch.logprobs_and_entropies(critic, settings.logit_chunk).hidden
            values = values_of(head, hidden)
        if not own:
            (0.0 * values.sum()).backward()
            continue
        loss = _value_loss(batch, values, settings)
        result.value_loss += loss.item()
        _backward(settings.value_coef * loss, began, result)
    return _together(result, ranks)


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


def _divided(episodes: Episodes, settings: LossSettings) -> list[Sample]:
    """The samples of all episodes of an optimiser step, each token with its ``normaliser``."""
    samples = flat(episodes)
    return with_columns(samples, normaliser=normalisers(numbers(episodes), settings.normalise, settings.constant))


def _columns(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    settings: LossSettings,
    ranks: Ranks,
    score: Callable[[MicroBatch], dict[str, Tensor]],
) -> tuple[dict[str, Tensor], int]:
    """What ``score`` finds for micro-batches, as columns over ``samples`` in order; tokens computed. Empty for none."""
    place = {id(sample): i for i, sample in enumerate(samples)}
    known: dict[int, dict[str, Tensor]] = {}
    computed = 0
    for batch, own in deal(samples, settings.max_tokens, settings.layout, ranks, model.config.hidden_size):
        found = score(batch)
        if not own:
            continue
        computed += batch.computed
        sizes = [len(sample.targets) for sample in batch.samples]
        parts = {name: values.cpu().split(sizes) for name, values in found.items()}
        for i, sample in enumerate(batch.samples):
            # Copied: a part that is a view would be sent with all that it is a part of.
            known[place[id(sample)]] = {name: part[i].clone() for name, part in parts.items()}
    exchanged = ranks.exchange((known, computed))
    every = {i: found for others, _ in exchanged for i, found in others.items()}
    device = samples[0].mu.device if samples else None
    names = every[0] if every else ()
    columns = {name: torch.cat([every[i][name] for i in range(len(samples))]).to(device) for name in names}
    return columns, sum(count for _, count in exchanged)


@torch.no_grad()
def _with_sequence(
    model: PreTrainedModel, samples: Sequence[Sample], episode: Tensor, settings: LossSettings, ranks: Ranks
) -> list[Sample]:
    if not samples:
        return []

    def score(batch: MicroBatch) -> dict[str, Tensor]:
        return {"theta": batch.logprobs_and_entropies(model, settings.logit_chunk).logprobs}

    theta = _columns(model, samples, settings, ranks, score)[0]["theta"]
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


def _together(mine: Pass, ranks: Ranks) -> Pass:
    """The pass of all ranks; its seconds are those of this one."""
    found = ranks.exchange(mine)
    return Pass(
        loss=sum(one.loss for one in found),
        value_loss=sum(one.value_loss for one in found),
        tokens=mine.tokens,
        ran=sum(one.ran for one in found),
        theta=[part for one in found for part in one.theta],
        old=[part for one in found for part in one.old],
        advantages=[part for one in found for part in one.advantages],
        sequence=[part for one in found for part in one.sequence],
        forward_s=mine.forward_s,
        backward_s=mine.backward_s,
    )
