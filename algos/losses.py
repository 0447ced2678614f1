"""The policy losses, their importance weights and their normalisers: pure functions on trained tokens.

Invariant: a loss is a sum over the trained tokens of one optimiser step, each divided by a normaliser that depends on
the step's episodes alone, so how tokens are laid out (micro-batches, order, packing, forks) cannot change it.
Positions that are not trained are replaced before any ``exp``: what stands there, also inf or NaN, reaches neither
loss nor gradient.

Three log-probabilities of a sampled token: ``mu`` the engine's when it sampled, ``old`` the trainer's before
the step, ``theta`` the current one, with a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["token", "gspo", "cispo"]
TisMode = Literal["truncate", "mask"]
Normalise = Literal["token", "episode", "constant"]

LOG_RATIO_LIMIT = 20.0
"""exp of it is finite in float32; beyond it the gradient of a token is 0 instead of inf * 0."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a token adds to the objective; see ``policy_loss``."""

    loss: LossKind = "token"
    clip_low: float = 0.20
    """How far the ratio may fall below 1."""
    clip_high: float = 0.28
    """How far the ratio may rise above 1."""
    dual_clip: float | None = None
    """c > 1: a token with a negative advantage A adds at least c * A; None leaves that open. Not for cispo."""
    tis_cap: float | None = 2.0
    """C: the largest importance weight old/mu; None leaves the weights out."""
    tis_mode: TisMode = "truncate"
    """A weight above C becomes C, or the token drops out, as it then does below ``tis_floor`` too."""
    tis_floor: float | None = None
    """The smallest weight that is not masked; None: 1/C."""
    kl_coef: float = 0.0
    """Of the estimated KL(old || theta)."""
    entropy_coef: float = 0.0

    @property
    def still(self) -> bool:
        """Whether a token without an advantage has no gradient."""
        return not self.kl_coef and not self.entropy_coef


def log_ratio(above: Tensor, below: Tensor, mask: Tensor) -> Tensor:
    """Above - below where ``mask`` holds, else 0, within ``LOG_RATIO_LIMIT``: float [T]."""
    difference = torch.where(mask, above, 0.0) - torch.where(mask, below, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@torch.no_grad()
def importance_weights(old: Tensor, mu: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """W = old/mu, truncated at C or masked outside [floor, C]: float [T], 1 where there is no cap or no mask.

    Truncation: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025); masking
    with the weight kept inside: IcePop ("Every Step Evolves", Ling Team, 2025).
    """
    if objective.tis_cap is None:
        return torch.ones_like(old)
    weight = log_ratio(old, mu, mask).exp()
    if objective.tis_mode == "truncate":
        return weight.clamp(max=objective.tis_cap)
    return torch.where(outside(weight, objective), 0.0, weight)


def outside(weight: Tensor, objective: Objective) -> Tensor:
    """Whether mode ``mask`` drops a token of this weight: bool [T]; never where there is no cap."""
    if objective.tis_cap is None:
        return torch.zeros_like(weight, dtype=torch.bool)
    floor = 1 / objective.tis_cap if objective.tis_floor is None else objective.tis_floor
    return (weight > objective.tis_cap) | (weight < floor)


def policy_loss(
    theta: Tensor,
    old: Tensor,
    mu: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective = Objective(),
    *,
    sequence: Tensor | None = None,
    entropy: Tensor | None = None,
    normaliser: float | Tensor | None = None,
) -> Tensor:
    """-sum_t w_t (S_t - kl_coef k3_t + entropy_coef H_t) / normaliser_t.

    w is ``importance_weights``: the engine that sampled against the trainer that learns; it has no gradient. S is, with
    r = theta/old, [low, high] = [1 - clip_low, 1 + clip_high] (asymmetric: DAPO, section 3.1), sg() without gradient:

    - ``token``: min(r A, clip(r, low, high) A) (PPO, equation 7); with ``dual_clip`` c and A < 0 at least c A
      (dual-clip PPO: Ye et al., "Mastering Complex Control in MOBA Games").
    - ``gspo``: the same with s = exp(``sequence``) in place of r and s theta/sg(theta) for its gradient (GSPO,
      equations 7 and 14): the length-normalised ratio of the whole sequence, which is every trained token of the
      episode, so that it does not matter on which path a shared token is trained.
    - ``cispo``: sg(clip(r, low, high)) A log theta (MiniMax-M1, equation 4).

    k3 = r - 1 - log r estimates KL(old || theta) by tokens of old; it does not need a reference model.

    Args:
        theta: current log-probabilities, float [T], natural log; the only ones that get a gradient, with ``entropy``.
        old: the trainer's before the step, float [T].
        mu: the engine's at sampling, float [T].
        advantages: float [T].
        mask: bool [T], True where a token is trained.
        objective: which loss, and its numbers.
        sequence: float [T], the mean of log(theta/old) over the token's episode; ``gspo`` needs it.
        entropy: float [T] in nats, with a gradient; an ``entropy_coef`` needs it.
        normaliser: one for all tokens or one each, [T], see ``normalisers``; None takes the number of trained tokens
            of this call, which is right only when this call is the whole optimiser step.

    Returns:
        The loss, a scalar in the dtype of ``theta``; 0 when nothing is trained.

    Raises:
        ValueError: shapes differ, the mask is not bool, or what the objective needs was not given.
    """
    _check([theta, old, mu, advantages, mask], mask)
    old = old.detach()
    advantage = torch.where(mask, advantages, 0.0)
    change = log_ratio(theta, old, mask)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":
        value = change.exp().clamp(low, high).detach() * advantage * torch.where(mask, theta, 0.0)
    else:
        ratio = change.exp() if objective.loss == "token" else _sequence_ratio(theta, mask, sequence)
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if objective.dual_clip is not None:
            value = torch.where(advantage < 0, torch.maximum(value, objective.dual_clip * advantage), value)
    if objective.kl_coef:
        value = value - objective.kl_coef * (change.exp() - 1 - change)
    if objective.entropy_coef:
        if entropy is None:
            raise ValueError("entropy: got none, expected one with a gradient: entropy_coef needs it")
        value = value + objective.entropy_coef * torch.where(mask, entropy, 0.0)
    return -total(importance_weights(old, mu, mask, objective) * value, mask, normaliser)


def _sequence_ratio(theta: Tensor, mask: Tensor, sequence: Tensor | None) -> Tensor:
    if sequence is None:
        raise ValueError("sequence: got none, expected each token's episode's mean log-ratio: gspo needs it")
    current = torch.where(mask, theta, 0.0)
    whole = torch.where(mask, sequence.detach(), 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return whole * (1 + current - current.detach())


def total(terms: Tensor, mask: Tensor, normaliser: float | Tensor | None) -> Tensor:
    """The sum of masked ``terms`` [T] over ``normaliser``: a number, one each [T], or None for the mask's own count."""
    if normaliser is None:
        normaliser = mask.sum().clamp_min(1)
    elif isinstance(normaliser, Tensor) and normaliser.ndim:
        normaliser = torch.where(mask, normaliser, 1.0)
    divisor = normaliser.to(terms.dtype) if isinstance(normaliser, Tensor) else normaliser
    return (torch.where(mask, terms, 0.0) / divisor).sum()


def normalisers(episode: Tensor, rule: Normalise, constant: float | None = None) -> Tensor:
    """What each trained token of an optimiser step is divided by, float64 [T], for its episode's number, int64 [T].

    - ``token``: T, so that every token weighs the same (DAPO, section 3.3).
    - ``episode``: the tokens of its episode times the number of episodes: the mean over episodes of their token means
      (GRPO, equation 3).
    - ``constant``: ``constant`` times the number of episodes: the mean over episodes of their token sums over a fixed
      number, such as the longest length allowed (Dr. GRPO, section 3.2).

    Raises ValueError where ``constant`` is missing.
    """
    if rule == "token":
        return torch.full(episode.shape, float(len(episode)), dtype=torch.float64, device=episode.device)
    _, index, count = torch.unique(episode, return_inverse=True, return_counts=True)
    if rule == "episode":
        return count.double()[index] * len(count)
    if constant is None:
        raise ValueError("constant: got none, expected the number of tokens that a sum is divided by")
    return torch.full(episode.shape, constant * len(count), dtype=torch.float64, device=episode.device)


def episode_means(terms: Tensor, episode: Tensor) -> Tensor:
    """The mean of ``terms`` float [T] over each token's episode, int64 [T]: float [T]."""
    _, index, count = torch.unique(episode, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=terms.dtype, device=terms.device).index_add_(0, index, terms)
    return (sums / count)[index]


@torch.no_grad()
def sequence_log_ratios(theta: Tensor, old: Tensor, episode: Tensor) -> Tensor:
    """Log s of GSPO's equation 7 with the episode as the sequence: mean of theta - old, float [T].

    ``theta`` and ``old`` float [T], ``episode`` int64 [T]; all trained tokens of every episode must be there.
    """
    return episode_means(log_ratio(theta, old, torch.ones_like(episode, dtype=torch.bool)), episode)


@torch.no_grad()
def rejected(
    old: Tensor, mu: Tensor, episode: Tensor, *, mean: float | None = None, largest: float | None = None
) -> Tensor:
    """Whether a token's episode is too far from the engine that sampled it: bool [T].

    ``old`` and ``mu`` float [T], ``episode`` int64 [T]. With ``mean`` b: the geometric mean of the episode's weights
    old/mu lies outside [1/b, b]; with ``largest``: any of its tokens' weights does.
    """
    change = log_ratio(old, mu, torch.ones_like(episode, dtype=torch.bool)).double()
    bad = torch.zeros_like(episode, dtype=torch.bool)
    if mean is not None:
        bad |= episode_means(change, episode).abs() > torch.tensor(mean, dtype=torch.float64).log()
    if largest is not None:
        beyond = change.abs() > torch.tensor(largest, dtype=torch.float64).log()
        bad |= episode_means(beyond.double(), episode) > 0
    return bad


def _check(tensors: list[Tensor], mask: Tensor) -> None:
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) != 1 or mask.dtype != torch.bool:
        raise ValueError(
            f"got shapes {sorted(shapes)} and a mask of {mask.dtype}, expected one shape [T] and a bool "
            "mask: pass one entry per token"
        )
