"""The arithmetic of supervised fine-tuning: which trajectories make a step, its loss and gradient, its learning rate.

Invariant: the loss of an optimiser step is the mean over all of its trained tokens of minus their log-probability at
temperature 1, in nats; neither the order of the samples nor their packing into micro-batches changes it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from algos.batching import Layout, Sample, micro_batches, sample_of
from trees.linearise import Path, linearise
from trees.tree import Tree


@dataclass(frozen=True, slots=True)
class Sums:
    """What one pass over samples gave. ``loss``: mean over ``tokens``, NaN without any."""

    loss: float
    tokens: int
    """Trained tokens, the normaliser of the loss."""
    computed: int
    """Tokens that the passes computed, padding included."""


def samples_of(tree: Tree, everything: bool = False, device: str = "cpu") -> list[Sample]:
    """One sample for each path of a tree with trained tokens; a token that paths share is trained on the first.

    ``everything``: train what the policy was fed as well, but for a path's first token, which nothing predicts.
    """
    found, taken = [], set[int]()
    for path in linearise(tree):
        mask = path.loss_mask
        if everything:
            nodes = tree.path(path.leaf)
            wanted = {node.id for node in nodes if node.id not in taken and (node.trained or not node.sampled)}
            mask = np.concatenate([np.full(len(node), node.id in wanted) for node in nodes])
            mask[0] = False
            taken |= {node.id for node in nodes}
        sample = sample_of(_unsampled(path, mask), 1.0, device)
        if sample is not None:
            found.append(sample)
    return found


def _unsampled(path: Path, mask: np.ndarray) -> Path:
    """The path as one whose tokens are to be imitated: who sampled them, and how, does not matter."""
    return replace(
        path,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.zeros(len(mask), np.int32),
        temperature=np.ones(len(mask), np.float32),
        credit=mask.astype(np.float32),
    )


def accumulate(model: PreTrainedModel, samples: Sequence[Sample], max_tokens: int, layout: Layout = "auto") -> Sums:
    """Add the gradient of the samples' loss to the parameters' ``grad``; without grad mode only compute the loss."""
    tokens = sum(len(sample.targets) for sample in samples)
    total, computed = 0.0, 0
    for batch in micro_batches(samples, max_tokens, layout):
        loss = -batch.logprobs_and_entropies(model).logprobs.sum() / tokens
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
        computed += batch.computed
    return Sums(total if tokens else math.nan, tokens, computed)


@torch.no_grad()
def measure(model: PreTrainedModel, samples: Sequence[Sample], max_tokens: int, layout: Layout = "auto") -> Sums:
    """The samples' loss alone."""
    return accumulate(model, samples, max_tokens, layout)


def batches(tokens: Sequence[int], epochs: int, batch_tokens: int, seed: int) -> list[list[list[int]]]:
    """Which trajectories, by their place in ``tokens``, each optimiser step of each epoch takes.

    Every epoch has all of them once, in an order of its own, in as few steps as ``batch_tokens`` allows on average, of
    about equal size.
    """
    found: list[list[list[int]]] = []
    total = sum(tokens)
    share = total / max(1, math.ceil(total / batch_tokens))
    for epoch in range(epochs):
        order = list(range(len(tokens)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        parts: dict[int, list[int]] = {}
        begun = 0
        for place in order:
            # By its middle, so that no step is one trajectory beyond its share on average.
            parts.setdefault(int((begun + tokens[place] / 2) / share), []).append(place)
            begun += tokens[place]
        found.append(list(parts.values()))
    return found


def learning_rate(
    step: int, total: int, *, peak: float, warmup: float, decay: str = "cosine", final_factor: float = 0.1
) -> float:
    """Of optimiser step ``step`` of ``total``: a linear rise over the share ``warmup``, then a decay.

    The last step has ``final_factor`` of ``peak``, unless the rise takes all of them.
    """
    rise = math.ceil(warmup * total)
    done = max(0, step - rise) / max(1, total - 1 - rise)
    fall = done if decay == "linear" else (1 - math.cos(math.pi * done)) / 2
    return peak * min(1.0, (step + 1) / max(1, rise)) * (1 - (1 - final_factor) * fall)
