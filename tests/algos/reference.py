"""Slow, readable oracle: GRPO over the paths of episodes, one path and one token at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trees.linearise import Path


@dataclass(frozen=True)
class OracleEpisode:
    group: str
    reward: float
    paths: Sequence[Path]


def grpo_advantages(episodes: Sequence[OracleEpisode]) -> list[float]:
    result = []
    for episode in episodes:
        rewards = [other.reward for other in episodes if other.group == episode.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        result.append(0.0 if std == 0 else (episode.reward - mean) / std)
    return result


def path_logprobs(model, path: Path) -> dict[int, torch.Tensor]:
    """Position -> log-probability of the trained token there, from a forward pass over this path alone."""
    logits = model(input_ids=torch.tensor(path.ids, dtype=torch.int64)[None]).logits[0].double()
    scored = {}
    for position in range(len(path.ids)):
        if path.loss_mask[position]:
            temperature = float(path.temperature[position]) or 1.0
            scores = logits[position - 1] / temperature
            scored[position] = scores[int(path.ids[position])] - torch.logsumexp(scores, 0)
    return scored


def grpo_loss(
    model, old_model, episodes: Sequence[OracleEpisode], clip_low: float, clip_high: float, tis_cap: float
) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for episode, advantage in zip(episodes, grpo_advantages(episodes), strict=True):
        for path in episode.paths:
            theta = path_logprobs(model, path)
            with torch.no_grad():
                old = path_logprobs(old_model, path)
            for position in theta:
                ratio = (theta[position] - old[position]).exp()
                clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
                weight = min(math.exp(float(old[position]) - float(path.logprobs[position])), tis_cap)
                total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
                tokens += 1
    return total / max(1, tokens)
