"""What of a tree is trained: pure functions from a tree to a tree with fewer trained nodes, and a report.

Invariant: a filter only ever takes sampled nodes out of training and states a reason for each, so
``kept`` and ``removed`` of a report add up to all sampled nodes and tokens of the tree.

An *interaction segment* is the set of calls that answer the same point of a conversation: they extend
the same call (or start a conversation), are of one kind, and the later ones are retries or go on
without the earlier reply. Forks that keep the earlier replies (an edited history, another list of
tools) and branches that start a sub-agent open segments of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from trees.forks import NOT_A_RETRY, OTHER_AGENT
from trees.linearise import live_leaves
from trees.record import Kind
from trees.tree import Node, Tree

SUPERSEDED = "dead: superseded"
ABORTED = "dead: aborted"
OVER_BRANCHING = "over-branching"


@dataclass(frozen=True, slots=True)
class Count:
    """Sampled nodes and the tokens in them."""

    nodes: int = 0
    tokens: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.nodes + other.nodes, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Report:
    """What one filter, or a chain of them, did to the sampled nodes of a tree."""

    total: Count
    kept: Count
    removed: Mapping[str, Count] = field(default_factory=dict)
    """By reason. For a single filter also what was out of training before it."""
    leaves: int = 0
    """Live leaves: trained nodes, after the filter, with no trained node below."""
    dropped: str = ""
    """Why the episode is dropped whole; empty when it is not."""


def dead_leaves(tree: Tree) -> tuple[Tree, Report]:
    """Take retried, regenerated and aborted answers out of training.

    Of each interaction segment the branch that continues furthest stays, counted in calls that were not
    aborted; of equals the one with the newest call. A losing branch goes with all that hangs below it. An
    aborted call is dead, but what continues it is judged by itself.
    """
    reach, newest = _reach(tree)
    marks = {node.id: ABORTED for node in tree.nodes if node.sampled and node.finish == "abort"}
    superseded: set[int] = set()
    for segment in _segments(tree):
        best = max(segment, key=lambda node: (reach[node.id], newest[node.id]))
        superseded.update(node.id for node in segment if node is not best)
    for node in tree.nodes[1:]:
        if node.id in superseded or node.parent in superseded:
            superseded.add(node.id)
            marks.setdefault(node.id, SUPERSEDED)
    return _mark(tree, marks)


def auxiliary(tree: Tree, train_kinds: Collection[str] = ("main",)) -> tuple[Tree, Report]:
    """Take every branch whose kind is not in ``train_kinds`` out of training."""
    unknown = set(train_kinds) - set(get_args(Kind))
    if unknown:
        raise ValueError(f"train_kinds: got {sorted(unknown)}, expected some of {list(get_args(Kind))}")
    outside = {node.id: f"auxiliary: {node.kind}" for node in tree.nodes if node.kind not in train_kinds}
    return _mark(tree, outside)


def over_branching(tree: Tree, max_leaves: int) -> tuple[Tree, Report]:
    """Drop the episode whole when more than ``max_leaves`` live leaves are left.

    Only leaves that would still be trained count, so what other filters removed before costs nothing.
    """
    if max_leaves < 1:
        raise ValueError(f"max_leaves: got {max_leaves}, expected at least 1")
    leaves = len(live_leaves(tree))
    if leaves <= max_leaves:
        return _mark(tree, {})
    marked, report = _mark(tree, {node.id: OVER_BRANCHING for node in tree.nodes})
    return marked, replace(report, dropped=f"over-branching: {leaves} leaves, at most {max_leaves}")


def apply(
    tree: Tree, max_leaves: int, train_kinds: Collection[str] = ("main",), *, drop_dead: bool = True
) -> tuple[Tree, Report]:
    """Dead leaves, then auxiliary branches, then over-branching, in one report.

    ``max_leaves`` therefore counts leaves after the other two: a storm of retries, or a harness that asks
    for a title, does not cost an episode whose main line is sound.
    """
    if drop_dead:
        tree, _ = dead_leaves(tree)
    tree, _ = auxiliary(tree, train_kinds)
    return over_branching(tree, max_leaves)


def _mark(tree: Tree, marks: Mapping[int, str]) -> tuple[Tree, Report]:
    """Untrain the marked nodes that are still trained, and count all sampled nodes by what became of them."""
    nodes = tuple(
        replace(node, trained=False, reason=marks[node.id]) if node.trained and node.id in marks else node
        for node in tree.nodes
    )
    marked = Tree(nodes, dict(tree.meta))
    kept = total = Count()
    removed: dict[str, Count] = {}
    for node in nodes:
        if not node.sampled:
            continue
        one = Count(1, len(node))
        total += one
        if node.trained:
            kept += one
        else:
            removed[node.reason] = removed.get(node.reason, Count()) + one
    return marked, Report(total, kept, removed, leaves=len(live_leaves(marked)))


def _reach(tree: Tree) -> tuple[list[int], list[int]]:
    """Per node: calls on the longest way down from it, itself included, and the newest ordinal below it."""
    reach, newest = [0] * len(tree.nodes), [-1] * len(tree.nodes)
    for node in reversed(tree.nodes):
        if node.sampled:
            reach[node.id] += node.finish != "abort"
            newest[node.id] = max(newest[node.id], node.ordinal)
        if node.parent >= 0:
            reach[node.parent] = max(reach[node.parent], reach[node.id])
            newest[node.parent] = max(newest[node.parent], newest[node.id])
    return reach, newest


def _segments(tree: Tree) -> list[list[Node]]:
    """The interaction segments that hold more than one call."""
    siblings: dict[tuple[int, Kind], list[Node]] = {}
    for node in tree.calls():
        siblings.setdefault((tree.call_parents[node.id], node.kind), []).append(node)
    segments: list[list[Node]] = []
    for (parent, kind), calls in siblings.items():
        starts_subagent = kind == "subagent" and (parent < 0 or tree.nodes[parent].kind != "subagent")
        if len(calls) > 1 and not starts_subagent:
            segments.extend(_split_by_fork(tree, calls))
    return [segment for segment in segments if len(segment) > 1]


def _split_by_fork(tree: Tree, calls: list[Node]) -> list[list[Node]]:
    """Calls of one kind under one call, in order of arrival, as segments.

    The same prompt is the same segment, unless another agent asked. Otherwise a fork that is no retry opens one, and
    any other call joins the newest segment whose prompt it extends or, failing that, the newest of all.
    """
    segments: list[list[Node]] = []
    by_prompt: dict[int, list[Node]] = {}
    for call in calls:
        segment = by_prompt.get(call.parent) if call.fork != OTHER_AGENT else None
        if segment is None and segments and call.fork not in NOT_A_RETRY:
            extended = _observations_above(tree, call)
            segment = next(
                (known for known in reversed(segments) if any(node.parent in extended for node in known)),
                segments[-1],
            )
        if segment is None:
            segment = []
            segments.append(segment)
        segment.append(call)
        by_prompt[call.parent] = segment
    return segments


def _observations_above(tree: Tree, call: Node) -> set[int]:
    """The observation nodes between a call and the call that it extends, and that call itself."""
    above = set()
    node = tree.nodes[call.parent]
    while True:
        above.add(node.id)
        if node.sampled or node.parent < 0:
            return above
        node = tree.nodes[node.parent]
