"""Drawing tokens.

Invariant: the log-probability of a drawn token is that of the full distribution at the sampling
temperature, ``log_softmax(logits / temperature)``; ``top_p`` restricts what can be drawn and
changes no log-probability.
"""

from __future__ import annotations

import torch


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``uniform``.

    Args: logits [rows, vocabulary] of any float dtype; temperature [rows] float32, 0 for greedy (its
    log-probability is at temperature 1); top_p [rows] float32 in (0, 1]; uniform [rows] float64 in [0, 1).
    Returns ids [rows] int64 and log-probabilities [rows] float32 (natural log).
    """
    logits = logits.float()
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    if bool(greedy.all()):
        ids = logits.argmax(dim=-1)
    else:
        probs = logprobs.exp()
        if bool((top_p < 1).any()):
            probs = nucleus(probs, top_p)
        # float32 sums over a large vocabulary would shift the boundaries between rare tokens.
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # Rounding can lift uniform * total to total itself, which no token owns.
        at = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        # NaN compares with nothing; its row must still name a token, whose log-probability is NaN then.
        ids = torch.searchsorted(cumulative, at, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
        if bool(greedy.any()):
            ids = torch.where(greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def nucleus(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of most probable tokens whose mass reaches ``top_p`` (nucleus
    sampling, Holtzman et al. 2020, section 3.1); rows with top_p 1 are kept whole. Shapes as in ``draw``.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    kept = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    return torch.zeros_like(probs).scatter(1, order, torch.where(kept, ordered, 0.0))
