"""What one watches while a policy learns: pure functions from trained tokens to named numbers.

Invariant: nothing here touches a gradient, and of no tokens there are no numbers rather than zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algos.losses import Objective, importance_weights, log_ratio, outside


def _every(tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor, dtype=torch.bool)


def _share(condition: Tensor) -> float:
    return condition.double().mean().item()


@torch.no_grad()
def mismatch_statistics(old: Tensor, mu: Tensor, objective: Objective) -> dict[str, float]:
    """How far the engine that sampled is from the trainer, over trained tokens: ``old`` and ``mu`` float [T].

    ``tis_mean`` is the mean of the weights that the loss takes; ``tis_capped`` and ``tis_masked`` the shares of tokens
    whose weight was cut to the cap or set to 0; ``kl_mu_old`` estimates KL(mu || old) by the non-negative k3 form;
    ``mu_old_max`` is the largest absolute difference of log-probabilities. Empty tensors give an empty dict.
    """
    if old.numel() == 0:
        return {}
    change = log_ratio(old, mu, _every(old))
    weight = change.exp()
    masks = objective.tis_mode == "mask"
    return {
        "tis_mean": importance_weights(old, mu, _every(old), objective).mean().item(),
        "tis_capped": 0.0 if masks or objective.tis_cap is None else _share(weight > objective.tis_cap),
        "tis_masked": _share(outside(weight, objective)) if masks else 0.0,
        "kl_mu_old": (weight - 1 - change).mean().item(),
        "mu_old_max": (old - mu).abs().max().item(),
    }


@torch.no_grad()
def ratio_statistics(
    theta: Tensor, old: Tensor, advantages: Tensor, objective: Objective, sequence: Tensor | None = None
) -> dict[str, float]:
    """How far a step moved the policy, over trained tokens: all float [T]; ``sequence``: see ``policy_loss``.

    The ratio is the one that the loss clips. ``clip_high`` and ``clip_low`` are the shares of tokens that it clips:
    above 1 + clip_high with a positive advantage, below 1 - clip_low with a negative one, whose gradient is gone;
    for cispo with any advantage but 0, since it clips a weight. ``clip_dual`` is the share that the dual clip cuts.
    ``kl_old_theta`` estimates KL(old || theta) by the k3 form. Empty tensors give an empty dict.
    """
    if theta.numel() == 0:
        return {}
    change = log_ratio(theta, old, _every(theta))
    ratio = change.exp() if sequence is None else sequence.exp()
    up, down = (advantages > 0, advantages < 0) if objective.loss != "cispo" else (advantages != 0,) * 2
    dual = torch.inf if objective.dual_clip is None else objective.dual_clip
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "ratio_min": ratio.min().item(),
        "clip_high": _share((ratio > 1 + objective.clip_high) & up),
        "clip_low": _share((ratio < 1 - objective.clip_low) & down),
        "clip_dual": _share((ratio > dual) & (advantages < 0)),
        "kl_old_theta": (change.exp() - 1 - change).mean().item(),
    }


@torch.no_grad()
def value_statistics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """How well the critic knew the returns before the step, over trained tokens: float [T] both.

    ``explained_variance`` is 1 - Var(returns - values) / Var(returns): 1 knows all, 0 no more than the mean, below 0
    less; left out where the returns do not differ. Empty tensors give an empty dict.
    """
    if values.numel() == 0:
        return {}
    values, returns = values.double(), returns.double()
    found = {"value_mean": values.mean().item(), "return_mean": returns.mean().item()}
    spread = returns.var(correction=0)
    if spread > 1e-12:
        found["explained_variance"] = (1 - (returns - values).var(correction=0) / spread).item()
    return found
