"""PPO's advantages and value loss on trees.

Invariant: the leaves of an episode are independent trajectories, each with the episode's reward at its own end;
nothing passes between branches but through the tokens that they share, and a shared token counts once. A trajectory
is the trained tokens of a path; tokens that the policy only observed are no part of it and have no value.

A token that several leaves share has one advantage: the mean of those that it has on the leaves' paths. With
gamma = lambda = 1 these are all the same, reward - value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algos.losses import total


def gae(
    rewards: Tensor, values: Tensor, before: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, equation 16) over trees of trained tokens.

    On each leaf's path delta_t = gamma V_{t+1} - V_t, at the leaf's last token reward - V_t, and
    A_t = delta_t + gamma lam A_{t+1}. Every sum is linear, so the mean over the leaves below a token is found in
    one pass from the last token to the first, each successor weighted by its leaves.

    Args:
        rewards: float [N], the reward of each token's episode.
        values: float [N], the critic's value of what precedes each token.
        before: int64 [N], the trained token before each on its path, -1 for none; smaller than the token's own place.
        gamma: discount of one trained token.
        lam: lambda, between the one-step error (0) and the whole outcome (1).

    Returns:
        Advantages and returns (advantage + value, what the critic is to learn), float [N] in the dtype of ``values``.

    Raises:
        ValueError: shapes differ, or a token stands before the one that it follows.
    """
    if not rewards.shape == values.shape == before.shape or rewards.ndim != 1:
        raise ValueError(
            f"got shapes {tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(before.shape)}, expected one shape "
            "[N]: pass one entry per trained token"
        )
    if (before >= torch.arange(len(before), device=before.device)).any():
        raise ValueError("before: got a token that does not stand before its own, expected the order of the paths")
    if gamma == lam == 1.0:
        return rewards.to(values.dtype) - values, rewards.to(values.dtype)
    reward, value, parent = rewards.double().tolist(), values.double().tolist(), before.tolist()
    leaves, ahead, advantage = [0] * len(value), [0.0] * len(value), [0.0] * len(value)
    for token in range(len(value) - 1, -1, -1):
        future = ahead[token] / leaves[token] if leaves[token] else reward[token]
        advantage[token] = future - value[token]
        leaves[token] = leaves[token] or 1
        if parent[token] >= 0:
            leaves[parent[token]] += leaves[token]
            ahead[parent[token]] += leaves[token] * (gamma * value[token] + gamma * lam * advantage[token])
    advantages = torch.tensor(advantage, dtype=values.dtype, device=values.device)
    return advantages, advantages + values


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    normaliser: float | Tensor | None = None,
) -> Tensor:
    """sum_t max((V_t - R_t)^2, (clip(V_t, old_t - clip, old_t + clip) - R_t)^2) / 2 / normaliser_t.

    The clip holds the critic near what it said before the step, as PPO's holds the policy (Engstrom et al.,
    "Implementation Matters in Deep Policy Gradients").

    Args:
        values: float [T], with a gradient.
        old_values: float [T], before the step.
        returns: float [T].
        mask: bool [T], True where a token is trained; what stands elsewhere does not matter.
        clip: how far a value may move; None leaves it open.
        normaliser: as for ``algos.losses.policy_loss``.

    Returns:
        A scalar; 0 when nothing is trained.
    """
    value, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns.detach()))
    error = (value - target).square()
    if clip is not None:
        error = torch.maximum(error, (old + (value - old).clamp(-clip, clip) - target).square())
    return total(error / 2, mask, normaliser)
