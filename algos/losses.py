"""The clipped policy loss with truncated importance weights, and the numbers that say how a step went.

Invariant: the loss is a sum over trained tokens divided by one normaliser of the whole optimiser step, so how
tokens are laid out (micro-batches, order, packing, forks) cannot change it. Positions that are not trained
are replaced before any ``exp``: what stands there, also inf or NaN, reaches neither loss nor gradient.

Three log-probabilities of a sampled token: ``mu`` the engine's when it sampled, ``old`` the trainer's before
the step, ``theta`` the current one, with a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp of it is finite in float32; beyond it the gradient of a token is 0 instead of inf * 0."""


def _ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """exp(above - below) where ``mask`` holds, else 1."""
    log_ratio = torch.where(mask, above, 0.0) - torch.where(mask, below, 0.0)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def policy_loss(
    theta: Tensor,
    old: Tensor,
    mu: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.20,
    clip_high: float = 0.28,
    tis_cap: float | None = 2.0,
    normaliser: float | Tensor | None = None,
) -> Tensor:
    """-sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / normaliser.

    r = theta/old is PPO's ratio with DAPO's asymmetric clip (section 3.1 there); w = min(old/mu, tis_cap),
    without gradient, corrects the engine that sampled against the trainer that learns.

    Args:
        theta: current log-probabilities, float [T], natural log; the only ones that get a gradient.
        old: the trainer's before the step, float [T].
        mu: the engine's at sampling, float [T].
        advantages: float [T], the episode's advantage at each of its tokens.
        mask: bool [T], True where a token is trained.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        tis_cap: C of the truncation; None leaves the weights out.
        normaliser: the number of trained tokens of the whole optimiser step; None takes those of this call,
            which is right only when this call is the whole step.

    Returns:
        The loss, a scalar in the dtype of ``theta``; 0 when nothing is trained.
    """
    shapes = {tuple(x.shape) for x in (theta, old, mu, advantages, mask)}
    if len(shapes) != 1 or mask.dtype != torch.bool:
        raise ValueError(
            f"got shapes {sorted(shapes)} and a mask of {mask.dtype}, expected one shape [T] and a bool "
            "mask: pass one entry per token"
        )
    ratio = _ratio(theta, old.detach(), mask)
    advantage = torch.where(mask, advantages, 0.0)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if tis_cap is not None:
        surrogate = surrogate * _ratio(old, mu, mask).clamp(max=tis_cap).detach()
    count = mask.sum().clamp_min(1) if normaliser is None else normaliser
    return -torch.where(mask, surrogate, 0.0).sum() / count


@torch.no_grad()
def mismatch_statistics(old: Tensor, mu: Tensor, *, tis_cap: float | None = 2.0) -> dict[str, float]:
    """How far the engine that sampled is from the trainer, over trained tokens: ``old`` and ``mu`` float [T].

    ``tis_mean`` and ``tis_capped`` are the mean truncated weight and the share of tokens at the cap;
    ``kl_mu_old`` estimates KL(mu || old) by the non-negative k3 form; ``mu_old_max`` is the largest absolute
    difference of log-probabilities. Empty tensors give an empty dict.
    """
    if old.numel() == 0:
        return {}
    every = torch.ones_like(old, dtype=torch.bool)
    weight = _ratio(old, mu, every)
    cap = torch.inf if tis_cap is None else tis_cap
    return {
        "tis_mean": weight.clamp(max=cap).mean().item(),
        "tis_capped": (weight > cap).to(old.dtype).mean().item(),
        "kl_mu_old": (weight - 1 - (old - mu)).mean().item(),
        "mu_old_max": (old - mu).abs().max().item(),
    }


@torch.no_grad()
def ratio_statistics(
    theta: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 0.20, clip_high: float = 0.28
) -> dict[str, float]:
    """How far a step moved the policy, over trained tokens: all float [T].

    ``clip_high`` and ``clip_low`` are the shares of tokens whose gradient the clip removes: above
    1 + clip_high with a positive advantage, below 1 - clip_low with a negative one. ``kl_old_theta``
    estimates KL(old || theta) by the k3 form. Empty tensors give an empty dict.
    """
    if theta.numel() == 0:
        return {}
    ratio = _ratio(theta, old, torch.ones_like(theta, dtype=torch.bool))
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "clip_high": high.to(theta.dtype).mean().item(),
        "clip_low": low.to(theta.dtype).mean().item(),
        "kl_old_theta": (ratio - 1 - (theta - old)).mean().item(),
    }
