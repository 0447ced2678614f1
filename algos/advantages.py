"""Advantages of whole episodes from the rewards of their group.

Invariant: an episode enters its group's baseline once, however many leaves its tree has, and an episode's
advantage depends on nothing outside its group. All functions are pure and keep the dtype of ``rewards``.

A group is one (task, harness) instance. A group whose rewards do not differ says nothing about which episode
was better: its advantages are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPREAD = 1e-6
"""Rewards of a group that lie within this distance count as equal, so that rounding in a grader is not
blown up to an advantage of 1."""


def _by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of each episode's group, each group's size and each group's mean reward."""
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(
            f"got rewards of shape {tuple(rewards.shape)} and groups of shape {tuple(groups.shape)}, "
            "expected two vectors of one length: pass one reward and one group number per episode"
        )
    _, index, count = torch.unique(groups, return_inverse=True, return_counts=True)
    size = count.to(rewards.dtype)
    total = torch.zeros_like(size).index_add_(0, index, rewards)
    return index, size, total / size


def has_spread(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether the rewards of an episode's group differ: bool [N] for rewards [N] and groups [N]."""
    index, size, _ = _by_group(rewards, groups)
    low = torch.full_like(size, torch.inf).scatter_reduce_(0, index, rewards, "amin")
    high = torch.full_like(size, -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    return (high - low > SPREAD)[index]


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Normalise within the group: (r - mean) / std with the population's std (DeepSeekMath, section 4.1.2).

    Args: ``rewards`` float [N], ``groups`` int [N]. Returns float [N]. Raises ValueError on other shapes.
    """
    index, size, mean = _by_group(rewards, groups)
    centred = rewards - mean[index]
    variance = torch.zeros_like(size).index_add_(0, index, centred.square()) / size
    spread = has_spread(rewards, groups)
    std = torch.where(spread, variance[index], 1.0).sqrt()
    return torch.where(spread, centred / std, 0.0)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Centre within the group: r - mean, not divided by the std (Dr. GRPO, section 3.2).

    Shapes and errors as for ``grpo``.
    """
    index, _, mean = _by_group(rewards, groups)
    return torch.where(has_spread(rewards, groups), rewards - mean[index], 0.0)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Leave one out: r - mean of the group's other episodes ("Back to Basics", equation 8).

    Shapes and errors as for ``grpo``. An episode alone in its group has no baseline: its advantage is 0.
    """
    index, size, mean = _by_group(rewards, groups)
    others = (size / (size - 1).clamp_min(1))[index]
    return torch.where(has_spread(rewards, groups), others * (rewards - mean[index]), 0.0)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""By the name that ``learner.advantage`` of a config takes."""
