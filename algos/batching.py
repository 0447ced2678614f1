"""From paths of trees to micro-batches under a token budget: padded rows, or packs that compute shared tokens once.

Invariant: every trained token of every path lands in exactly one micro-batch, preceded there by exactly the
tokens that the policy saw. Only padding is added, and only what follows a path's last trained token is left
out: no trained token can see either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from algos import tree_attention
from algos.logprobs import LOGIT_CHUNK, Scores, selected_logits, selected_scores
from trees.linearise import Path
from trees.packing import Pack, pack

Answer = TypeVar("Answer")
Layout = Literal["auto", "tree", "paths"]
"""``tree`` needs a model whose layers attend to their whole past; ``auto`` takes it where that saves enough."""
_SAVES_ENOUGH = 1.25
"""How many times more tokens paths must have for the tree to be taken. By ``python benchmarks/tree_attention.py
--crossover`` on a CPU, with trees of 256 to 2,048 tokens: at 1.14 the tree is as fast, from 1.27 on it is faster."""


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
    before: Tensor
    """int64 [N], the trained token before each on its path, by its number among those of the episode; see ``Path``."""
    old: Tensor
    """float32 [N], the trainer's log-probabilities before the step; like all below NaN until they are computed."""
    values: Tensor
    """float32 [N], the critic's values before the step of what precedes each token."""
    returns: Tensor
    """float32 [N], what the critic is to learn."""
    sequence: Tensor
    """float32 [N], log of the ratio theta/old of the episode as a whole."""
    normaliser: Tensor
    """float64 [N], what each token's loss is divided by."""


def column(samples: Sequence[Sample], name: str) -> Tensor:
    """A per-token field of samples, one entry for each of their trained tokens, in order."""
    return torch.cat([getattr(sample, name) for sample in samples])


def with_columns(samples: Sequence[Sample], **columns: Tensor) -> list[Sample]:
    """The samples with per-token fields replaced, each given for all their trained tokens in order."""
    sizes = [len(sample.targets) for sample in samples]
    parts = {name: values.split(sizes) for name, values in columns.items()}
    return [replace(sample, **{name: part[i] for name, part in parts.items()}) for i, sample in enumerate(samples)]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch(ABC):
    """Samples that are computed in one pass of a model."""

    samples: tuple[Sample, ...]

    @abstractmethod
    def ask(self, model: PreTrainedModel, question: Callable[..., Answer]) -> Answer:
        """``question(model, ids, select, **arguments)`` with what ``selected_logits`` takes.

        ``select`` chooses the positions that predict the trained tokens, in the order of ``gather``.
        """

    def logprobs_and_entropies(
        self, model: PreTrainedModel, logit_chunk: int = LOGIT_CHUNK, *, entropy_gradient: bool = False
    ) -> Scores:
        """Scores of the N trained tokens; see ``selected_scores``."""
        question = partial(
            selected_scores,
            targets=self.gather("targets"),
            temperature=self.gather("temperature"),
            chunk=logit_chunk,
            entropy_gradient=entropy_gradient,
        )
        return self.ask(model, question)

    def values(self, critic: PreTrainedModel) -> Tensor:
        """Values [N] of what precedes each trained token, by a model with a value head; see ``algos.critic``."""
        found = self.ask(critic, selected_logits)[:, 0]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    @property
    @abstractmethod
    def computed(self) -> int:
        """Tokens that the pass computes, padding included."""

    @property
    @abstractmethod
    def pairs(self) -> int:
        """Pairs of a token and one that it attends to, itself included."""

    def gather(self, name: str) -> Tensor:
        """A per-token field of the samples, one entry for each trained token of the micro-batch."""
        return column(self.samples, name)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch(MicroBatch):
    """B samples, padded on the right to the longest."""

    ids: Tensor
    """int64 [B, T]; padding is 0."""
    mask: Tensor
    """bool [B, T]; row-major order of its True entries is the order of ``gather``."""

    @property
    def computed(self) -> int:
        return self.ids.numel()

    @property
    def pairs(self) -> int:
        rows, width = self.ids.shape
        return rows * width * (width + 1) // 2

    def ask(self, model: PreTrainedModel, question: Callable[..., Answer]) -> Answer:
        # Causal attention keeps padding out of what stands before it, so no attention mask is needed.
        plain = tree_attention.unfit(model)
        with nullcontext() if plain else tree_attention.use(model, tree_attention.CAUSAL):
            return question(model, self.ids, lambda hidden: hidden[:, :-1][self.mask[:, 1:]])


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch(MicroBatch):
    """Samples in a pack: what they share from the first token on is computed once."""

    pack: Pack
    """Its members are the samples, in their order."""

    @property
    def computed(self) -> int:
        return len(self.pack)

    @property
    def pairs(self) -> int:
        return len(self.pack) + int(self.pack.positions.sum(dtype=np.int64))

    def ask(self, model: PreTrainedModel, question: Callable[..., Answer]) -> Answer:
        device = self.samples[0].ids.device
        ids, positions = (
            torch.tensor(part, dtype=torch.int64, device=device)[None] for part in (self.pack.ids, self.pack.positions)
        )
        trained = [sample.mask.nonzero()[:, 0].cpu().numpy() for sample in self.samples]
        predicting = [places[at - 1] for places, at in zip(self.pack.places, trained, strict=True)]
        index = torch.tensor(np.concatenate(predicting), dtype=torch.int64, device=device)
        layout = tree_attention.layout_of(self.pack, device)
        with tree_attention.use(model):
            return question(model, ids, lambda hidden: hidden[0, index], position_ids=positions, tree_layout=layout)


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
    unknown = torch.full_like(mu, torch.nan)
    return Sample(
        ids=ids,
        mask=mask,
        targets=ids[mask],
        mu=mu,
        temperature=torch.tensor(path.temperature[trained], dtype=torch.float32, device=device),
        versions=torch.tensor(path.versions[trained], dtype=torch.int64, device=device),
        advantages=advantage * torch.tensor(path.credit[trained], dtype=torch.float32, device=device),
        before=torch.tensor(path.before[trained], dtype=torch.int64, device=device),
        old=unknown,
        values=unknown,
        returns=unknown,
        sequence=unknown,
        normaliser=unknown.double(),
    )


def layout_for(model: PreTrainedModel, wanted: Layout) -> Layout:
    """``wanted``, or ``paths`` where the model cannot compute trees and that is left open.

    Raises ValueError where trees are wanted of a model that cannot, and for a model whose positions depend on the
    longest sequence of a call: what is computed beside a token would change its score.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    stretched = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if found := sorted(stretched & {"dynamic", "longrope"}):
        raise ValueError(
            f"{type(model).__name__}: got rope_type {found[0]!r}, expected positions that do not depend on the longest "
            "sequence computed beside: give the model's config a fixed scaling (default, linear, yarn or llama3)"
        )
    if wanted == "auto" and tree_attention.unfit(model):
        return "paths"
    if wanted == "tree":
        tree_attention.refuse(model)
    return wanted


def micro_batches(samples: Sequence[Sample], max_tokens: int, layout: Layout = "auto") -> Sequence[MicroBatch]:
    """Samples in micro-batches that compute at most ``max_tokens`` tokens each, padding included.

    A sample longer than ``max_tokens`` gets a micro-batch of its own. The same samples give the same micro-batches.
    """
    if layout == "tree":
        return tree_batches(samples, max_tokens)
    padded = padded_batches(samples, max_tokens)
    if layout == "paths":
        return padded
    packed = tree_batches(samples, max_tokens)
    spared = sum(batch.computed for batch in padded) >= _SAVES_ENOUGH * sum(batch.computed for batch in packed)
    return packed if spared else padded


def padded_batches(samples: Sequence[Sample], max_tokens: int) -> list[PaddedBatch]:
    """Rows, longest first, so that B * T stays within ``max_tokens``. Samples of equal length keep their order."""
    rest = sorted(samples, key=lambda sample: -len(sample.ids))
    batches = []
    while rest:
        width = len(rest[0].ids)
        rows = max(1, max_tokens // width)
        batches.append(_pad(rest[:rows], width))
        rest = rest[rows:]
    return batches


def tree_batches(samples: Sequence[Sample], max_tokens: int) -> list[TreeBatch]:
    """Packs of at most ``max_tokens`` tokens; see ``trees.packing``."""
    packs = pack([sample.ids.cpu().numpy().astype(np.int32) for sample in samples], max_tokens)
    return [TreeBatch(tuple(samples[member] for member in packed.members), packed) for packed in packs]


def _pad(samples: Sequence[Sample], width: int) -> PaddedBatch:
    ids = samples[0].ids.new_zeros(len(samples), width)
    mask = samples[0].mask.new_zeros(len(samples), width)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        mask[row, : len(sample.mask)] = sample.mask
    return PaddedBatch(tuple(samples), ids, mask)
