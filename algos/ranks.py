"""Several processes that compute one optimiser step together: who computes which micro-batch.

Invariant: every rank is given the same samples and decides the same division without a message, each micro-batch is
computed by exactly one rank, and all ranks run the same number of forward and backward passes, so that no collective
of a sharded model waits for a rank that has nothing left to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch.distributed as dist

from algos.batching import Layout, MicroBatch, PaddedBatch, Sample, micro_batches

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among ``size``; what they tell each other goes through ``group``, which takes CPU tensors."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def exchange(self, mine: T) -> list[T]:
        """What each rank has, in order of rank, on every rank. Tensors must lie on the CPU."""
        if self.size == 1:
            return [mine]
        found: list[T] = [mine] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found


ALONE = Ranks()


def deal(
    samples: Sequence[Sample], max_tokens: int, layout: Layout, ranks: Ranks, hidden: int
) -> list[tuple[MicroBatch, bool]]:
    """The micro-batches of ``samples`` that this rank runs, its own ones first.

    The others, marked False, only keep step with ranks that have more; their result is to be multiplied by 0.
    Where a budget of ``max_tokens`` gives fewer micro-batches than ranks, it is lowered. ``hidden``: see ``cost``.
    """
    batches = micro_batches(samples, max_tokens, layout)
    if ranks.size == 1 or not batches:
        return [(batch, True) for batch in batches]
    if len(batches) < ranks.size:
        batches = micro_batches(samples, math.ceil(sum(batch.computed for batch in batches) / ranks.size), layout)
    hands = balanced([cost(batch, hidden) for batch in batches], ranks.size)
    mine = hands[ranks.rank]
    missing = max(map(len, hands)) - len(mine)
    return [(batches[i], True) for i in mine] + [(filler(samples[0]), False)] * missing


def cost(batch: MicroBatch, hidden: int) -> float:
    """Work of a pass in units of one token's matrix products.

    A token costs 24 h^2 per layer, a pair of attention 4 h: tokens + pairs / 6 h (Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix, without the head).
    """
    return batch.computed + batch.pairs / (6 * hidden)


def balanced(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Places of ``costs``, the longest first, each to the hand with the least so far (Graham 1969, LPT).

    Equal ones in order of place and of hand, so that the same costs give the same division everywhere.
    """
    held = [0.0] * hands
    found: list[list[int]] = [[] for _ in range(hands)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        hand = held.index(min(held))
        held[hand] += costs[place]
        found[hand].append(place)
    return found


def filler(sample: Sample) -> PaddedBatch:
    """The smallest micro-batch that there is: the first two tokens of a sample."""
    mask = sample.mask[:2].clone()
    mask[1] = True
    ids = sample.ids[:2]
    others = [one.name for one in fields(sample) if one.name not in ("ids", "mask", "targets")]
    short = {name: getattr(sample, name)[:1] for name in others}
    return PaddedBatch((replace(sample, ids=ids, mask=mask, targets=ids[1:], **short),), ids[None], mask[None])
