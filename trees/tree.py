"""The prefix tree of one episode.

Invariant: concatenating the nodes on the path from the root to a call's sampled node gives exactly
the ids that the model saw and then sampled in that call. A run of tokens that several calls share is
one node. Every call has exactly one sampled node; sampled runs are never merged and never split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from trees.record import Finish, Kind, VersionSpan

ROOT = 0
NO_IDS = np.zeros(0, np.int32)
NO_LOGPROBS = np.zeros(0, np.float32)
NO_IDS.setflags(write=False)
NO_LOGPROBS.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A run of tokens: either one call's sampled run or a piece of what the harness fed in."""

    id: int
    parent: int
    """-1 for the root, which carries no tokens; otherwise smaller than ``id``."""
    ids: np.ndarray
    """int32 [n]."""
    sampled: bool = False
    logprobs: np.ndarray = field(default_factory=lambda: NO_LOGPROBS)
    """float32 [n] when sampled, natural log at ``temperature``; float32 [0] otherwise."""
    versions: tuple[VersionSpan, ...] = ()
    """Policy versions over this run, in order and without gaps, when sampled."""
    temperature: float = 1.0
    call: str = ""
    """The call that sampled the run or, for an observation, the earliest call that was fed it."""
    ordinal: int = -1
    """Order of arrival of ``call`` in its session; -1 for the root."""
    kind: Kind = "main"
    why: str = ""
    fork: str = ""
    """Why the call does not extend the newest call of its line; empty when it does."""
    drift: int = 0
    finish: Finish = "stop"
    clean: bool = True
    trained: bool = False
    """Whether these tokens enter the loss. Only sampled nodes can."""
    reason: str = ""
    """For a sampled node: why it is not trained. Empty when it is."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a tree. A token shared by several calls counts once."""

    calls: int
    leaves: int
    nodes: int
    tokens: int
    observed: int
    sampled: int
    trained: int
    paths: int
    """Tokens of all root-to-leaf paths one by one: what the leaves would cost without sharing."""


@dataclass(eq=False)
class Tree:
    """Nodes in topological order (``nodes[i].id == i``, parents first) and what is known of the episode.

    ``meta`` is a plain dictionary: episode id, task, harness, group, seed, step, split, status, reward,
    version.
    Raises ValueError when the nodes are not a tree.
    """

    nodes: tuple[Node, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = tuple(self.nodes)
        for index, node in enumerate(self.nodes):
            good_parent = node.parent == -1 if index == ROOT else 0 <= node.parent < index
            if node.id != index or not good_parent:
                raise ValueError(
                    f"node {node.id} with parent {node.parent} at position {index}: expected id {index} and "
                    "a parent before it (-1 for the root only)"
                )
            if node.sampled and len(node.logprobs) != len(node.ids):
                raise ValueError(
                    f"node {node.id}: got {len(node.logprobs)} log-probabilities, expected {len(node.ids)}"
                )
        if not self.nodes:
            raise ValueError("a tree has at least its root: got no node")

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Ids of the children of each node."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes[1:]:
            found[node.parent].append(node.id)
        return tuple(tuple(ids) for ids in found)

    @cached_property
    def call_parents(self) -> tuple[int, ...]:
        """For each node the nearest sampled node above it, -1 where there is none."""
        above = [-1] * len(self.nodes)
        for node in self.nodes[1:]:
            above[node.id] = node.parent if self.nodes[node.parent].sampled else above[node.parent]
        return tuple(above)

    @cached_property
    def by_call(self) -> dict[str, int]:
        """Call id -> id of its sampled node."""
        return {node.call: node.id for node in self.nodes if node.sampled}

    def calls(self) -> list[Node]:
        """The sampled nodes in order of arrival."""
        return sorted((node for node in self.nodes if node.sampled), key=lambda node: node.ordinal)

    def leaves(self) -> list[Node]:
        """Nodes without children, the root excepted."""
        return [node for node in self.nodes[1:] if not self.children[node.id]]

    def path(self, node: int) -> list[Node]:
        """Nodes from the root down to ``node``, both included."""
        return list(self._upwards(node))[::-1]

    def ids(self, node: int) -> np.ndarray:
        """All ids from the root through ``node``, int32 [T]."""
        return np.concatenate([part.ids for part in self.path(node)])

    def prompt_ids(self, call: str) -> np.ndarray:
        """The whole prompt of a call, int32 [T]."""
        return self.ids(self.nodes[self.by_call[call]].parent)

    def counts(self) -> Counts:
        """Sizes, in one pass."""
        depth = [0] * len(self.nodes)
        for node in self.nodes[1:]:
            depth[node.id] = depth[node.parent] + len(node)
        leaves = self.leaves()
        sampled = [node for node in self.nodes if node.sampled]
        tokens = sum(map(len, self.nodes))
        in_sampled = sum(map(len, sampled))
        return Counts(
            calls=len(sampled),
            leaves=len(leaves),
            nodes=len(self.nodes),
            tokens=tokens,
            observed=tokens - in_sampled,
            sampled=in_sampled,
            trained=sum(len(node) for node in sampled if node.trained),
            paths=sum(depth[leaf.id] for leaf in leaves),
        )

    def _upwards(self, node: int) -> Iterator[Node]:
        while node >= 0:
            yield self.nodes[node]
            node = self.nodes[node].parent
