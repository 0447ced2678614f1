"""A tree to root-to-leaf paths for a trainer that packs sequences.

Invariant: every trained token of the tree is masked in on exactly one path, so a token that several
leaves share enters the loss once, however many paths repeat it as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trees.credit import AuxCredit, credits_of
from trees.tree import Node, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One root-to-leaf sequence of T tokens; the last is a trained one, unless the leaf sampled none."""

    ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T]: tokens that enter the loss on this path."""
    logprobs: np.ndarray
    """float32 [T]: the engine's log-probability of each sampled token, 0 where not sampled."""
    versions: np.ndarray
    """int32 [T]: the policy version that sampled each token, -1 where not sampled."""
    temperature: np.ndarray
    """float32 [T]: the temperature that ``logprobs`` refers to; 1 where not sampled and where decoding
    was greedy, since a greedy engine reports log-probabilities at temperature 1."""
    credit: np.ndarray
    """float32 [T]: the share of the episode's advantage that each token takes, 0 where it is not trained."""
    before: np.ndarray
    """int32 [T]: of a masked-in token the trained token before it on the path, which another path may train: its number
    among the masked-in tokens of all paths in order; -1 for none, and where not masked in."""
    leaf: int
    """Node id of the leaf in the tree."""


def live_leaves(tree: Tree) -> list[Node]:
    """Trained nodes with no trained node below them, in order of arrival."""
    inner = set()
    for node in reversed(tree.nodes):
        if node.trained or node.id in inner:
            inner.add(node.parent)
    return sorted((node for node in tree.nodes if node.trained and node.id not in inner), key=lambda node: node.ordinal)


def linearise(tree: Tree, aux_credit: AuxCredit = "outcome") -> list[Path]:
    """One path per live leaf. A shared token is masked in on the path of the earliest leaf below it.

    Paths that carry no trained token are left out. ``aux_credit``: see ``trees.credit``, which raises ``ValueError``.
    """
    share = credits_of(tree, aux_credit)
    paths = []
    taken: set[int] = set()
    last: dict[int, int] = {}
    count = 0
    for leaf in live_leaves(tree):
        nodes = tree.path(leaf.id)
        mine = {node.id for node in nodes if node.trained and node.id not in taken}
        if not any(len(tree.nodes[node]) for node in mine):
            continue
        taken |= mine
        paths.append(
            Path(
                ids=np.concatenate([node.ids for node in nodes]),
                loss_mask=np.concatenate([np.full(len(node), node.id in mine) for node in nodes]),
                logprobs=np.concatenate([_logprobs(node) for node in nodes]),
                versions=np.concatenate([_versions(node) for node in nodes]),
                temperature=np.concatenate([_temperature(node) for node in nodes]),
                credit=np.concatenate(
                    [np.full(len(node), share[node.id] if node.id in mine else 0, np.float32) for node in nodes]
                ),
                before=_before(nodes, mine, last, count),
                leaf=leaf.id,
            )
        )
        count += int(paths[-1].loss_mask.sum())
    return paths


def _before(nodes: Sequence[Node], mine: set[int], last: dict[int, int], count: int) -> np.ndarray:
    """``Path.before`` for a path after ``count`` masked-in tokens; ``last`` learns the last token of each node."""
    parts, tail = [], -1
    for node in nodes:
        part = np.full(len(node), -1, np.int32)
        if node.id in mine and len(node):
            part[0], part[1:] = tail, np.arange(count, count + len(node) - 1)
            count += len(node)
            last[node.id] = count - 1
        tail = last.get(node.id, tail)
        parts.append(part)
    return np.concatenate(parts)


def _logprobs(node: Node) -> np.ndarray:
    return node.logprobs if node.sampled else np.zeros(len(node), np.float32)


def _versions(node: Node) -> np.ndarray:
    versions = np.full(len(node), -1, np.int32)
    for span in node.versions:
        versions[span.start : span.end] = span.version
    return versions


def _temperature(node: Node) -> np.ndarray:
    scale = node.temperature if node.sampled and node.temperature > 0 else 1.0
    return np.full(len(node), scale, np.float32)
