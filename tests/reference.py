"""Slow, readable oracle: GRPO and PPO on trees, one path and one token at a time, in float64.

It knows nothing of packing, of linearised paths or of micro-batches. A trained token is named by its node and its place
there; it counts once, however many paths it is on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from algos.losses import Objective
from trees.tree import Tree

Token = tuple[int, int]


@dataclass(frozen=True)
class OracleEpisode:
    group: str
    reward: float
    tree: Tree


def trajectories(tree: Tree) -> list[list[Token]]:
    """The trained tokens on the path of each leaf; a leaf that adds none to those of another is no trajectory."""
    found = []
    for leaf in tree.leaves():
        path = [(node.id, at) for node in tree.path(leaf.id) if node.trained for at in range(len(node))]
        if path and path not in found:
            found.append(path)
    return [path for path in found if not any(path == other[: len(path)] for other in found if other is not path)]


def tokens(tree: Tree) -> list[Token]:
    return [(node.id, at) for node in tree.nodes if node.trained for at in range(len(node))]


# Advantages


def baselines(episodes: Sequence[OracleEpisode], estimator: str) -> list[float]:
    result = []
    for one in episodes:
        rewards = [other.reward for other in episodes if other.group == one.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        if std == 0:
            result.append(0.0)
        elif estimator == "grpo":
            result.append((one.reward - mean) / std)
        elif estimator == "dr_grpo":
            result.append(one.reward - mean)
        else:
            result.append(one.reward - (sum(rewards) - one.reward) / (len(rewards) - 1))
    return result


def path_gae(reward: float, values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Advantages of one trajectory whose reward comes at its end."""
    result = []
    for t in range(len(values)):
        advantage = 0.0
        for later in range(t, len(values)):
            last = later == len(values) - 1
            delta = (reward if last else gamma * values[later + 1]) - values[later]
            advantage += (gamma * lam) ** (later - t) * delta
        result.append(advantage)
    return result


def tree_gae(tree: Tree, reward: float, values: dict[Token, float], gamma: float, lam: float) -> dict[Token, float]:
    """The mean, over the leaves below a token, of what it has on their paths."""
    seen: dict[Token, list[float]] = {}
    for path in trajectories(tree):
        for token, advantage in zip(path, path_gae(reward, [values[t] for t in path], gamma, lam), strict=True):
            seen.setdefault(token, []).append(advantage)
    return {token: sum(found) / len(found) for token, found in seen.items()}


# What models say


def _forward(model, tree: Tree) -> Iterator[tuple[Token, float, int, torch.Tensor]]:
    """Each trained token once, with its temperature, its id and what ``model`` puts out before it."""
    seen = set()
    for leaf in tree.leaves():
        ids = torch.tensor(tree.ids(leaf.id), dtype=torch.int64)
        if len(ids) == 0:
            continue
        outputs = model(input_ids=ids[None]).logits[0].double()
        start = 0
        for node in tree.path(leaf.id):
            for at in range(len(node)):
                if node.trained and (node.id, at) not in seen:
                    seen.add((node.id, at))
                    temperature = node.temperature if node.temperature > 0 else 1.0
                    yield (node.id, at), temperature, int(node.ids[at]), outputs[start + at - 1]
            start += len(node)


def logprobs(model, tree: Tree) -> tuple[dict[Token, torch.Tensor], dict[Token, torch.Tensor]]:
    """Log-probability and entropy of each trained token."""
    chosen, entropies = {}, {}
    for token, temperature, ids, logits in _forward(model, tree):
        distribution = torch.log_softmax(logits / temperature, 0)
        chosen[token] = distribution[ids]
        entropies[token] = -(distribution.exp() * distribution).sum()
    return chosen, entropies


def values(critic, tree: Tree) -> dict[Token, torch.Tensor]:
    return {token: output[0] for token, _, _, output in _forward(critic, tree)}


# Losses


def importance_weight(old: float, mu: float, objective: Objective) -> float:
    if objective.tis_cap is None:
        return 1.0
    weight = math.exp(old - mu)
    if objective.tis_mode == "truncate":
        return min(weight, objective.tis_cap)
    floor = 1 / objective.tis_cap if objective.tis_floor is None else objective.tis_floor
    return weight if floor <= weight <= objective.tis_cap else 0.0


def surrogate(theta, old: float, sequence: float, advantage: float, objective: Objective):
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.loss == "cispo":
        weight = min(max(math.exp(float(theta.detach()) - old), low), high)
        return weight * advantage * theta
    ratio = (theta - old).exp() if objective.loss == "token" else sequence * (theta - theta.detach()).exp()
    value = min(ratio * advantage, ratio.clamp(low, high) * advantage, key=float)
    if objective.dual_clip is not None and advantage < 0:
        value = max(value, ratio.new_tensor(objective.dual_clip * advantage), key=float)
    return value


def divisor(sizes: Sequence[int], own: int, rule: str, constant: float | None) -> float:
    """What a token of an episode of ``own`` trained tokens is divided by; ``sizes``: those of all that have any."""
    return {"token": sum(sizes), "episode": own * len(sizes), "constant": (constant or 1) * len(sizes)}[rule]


def policy_loss(
    model,
    old_model,
    episodes: Sequence[OracleEpisode],
    advantages: Sequence[dict[Token, float]],
    objective: Objective,
    normalise: str = "token",
    constant: float | None = None,
) -> torch.Tensor:
    sizes = [size for size in (len(tokens(episode.tree)) for episode in episodes) if size]
    loss = torch.zeros((), dtype=torch.float64)
    for episode, advantage in zip(episodes, advantages, strict=True):
        theta, entropy = logprobs(model, episode.tree)
        with torch.no_grad():
            old = {token: float(x) for token, x in logprobs(old_model, episode.tree)[0].items()}
        sequence = math.exp(sum(float(theta[t].detach()) - old[t] for t in theta) / max(1, len(theta)))
        for token in theta:
            mu = float(episode.tree.nodes[token[0]].logprobs[token[1]])
            term = surrogate(theta[token], old[token], sequence, advantage[token], objective)
            change = theta[token] - old[token]
            term = term - objective.kl_coef * (change.exp() - 1 - change) + objective.entropy_coef * entropy[token]
            weight = importance_weight(old[token], mu, objective)
            loss = loss - weight * term / divisor(sizes, len(theta), normalise, constant)
    return loss


def value_loss(
    critic,
    old_critic,
    episodes: Sequence[OracleEpisode],
    returns: Sequence[dict[Token, float]],
    clip: float | None,
    normalise: str = "token",
    constant: float | None = None,
) -> torch.Tensor:
    sizes = [size for size in (len(tokens(episode.tree)) for episode in episodes) if size]
    loss = torch.zeros((), dtype=torch.float64)
    for episode, target in zip(episodes, returns, strict=True):
        now = values(critic, episode.tree)
        with torch.no_grad():
            old = {token: float(x) for token, x in values(old_critic, episode.tree).items()}
        for token, value in now.items():
            error = (value - target[token]) ** 2
            if clip is not None:
                held = value.clamp(old[token] - clip, old[token] + clip)
                error = max(error, (held - target[token]) ** 2, key=float)
            loss = loss + error / 2 / divisor(sizes, len(now), normalise, constant)
    return loss
