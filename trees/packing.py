"""Paths of trees to packs for a trainer that computes shared tokens once.

Invariant: every sequence is in exactly one pack, whole; a beginning that sequences of a pack share is there once, and
the tokens before a token on its path are exactly those of its sequence.

A pack holds its sequences in depth-first order. Token ``k`` is on the path of token ``q`` exactly when
``k <= q < reach[k]``, which is all that an attention mask has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trees.build import common


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """N tokens of several sequences that are computed at once; a beginning that sequences share is there once."""

    ids: np.ndarray
    """int32 [N]."""
    positions: np.ndarray
    """int32 [N]: of each token in its sequence, from 0."""
    before: np.ndarray
    """int32 [N]: the token before it in its sequence, whose logits predict it; -1 for a first token."""
    reach: np.ndarray
    """int32 [N]: one past the last token whose sequence it is in."""
    members: tuple[int, ...]
    """The sequences, by their place among those given."""
    places: tuple[np.ndarray, ...]
    """int64 [T] of each member: where its tokens are."""

    def __len__(self) -> int:
        return len(self.ids)

    def mask(self) -> np.ndarray:
        """Bool [N, N]: whether a token (row) sees another (column)."""
        index = np.arange(len(self.ids))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.reach[None, :])


@dataclass(eq=False, slots=True)
class _Run:
    """Tokens without a fork among them."""

    ids: np.ndarray
    depth: int
    """Tokens before it."""
    parent: _Run | None
    children: dict[int, _Run] = field(default_factory=dict)
    order: int = -1


def pack(sequences: Sequence[np.ndarray], max_tokens: int) -> list[Pack]:
    """Sequences (int [T] each, T at least 1) in packs of at most ``max_tokens`` tokens; a longer one is alone.

    Those of one group share their prompt, so give a group at a time, or all groups of a step.

    Raises ``ValueError`` for ``max_tokens`` below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1")
    root = _Run(np.zeros(0, np.int32), 0, None)
    for ids in sequences:
        _insert(root, ids)
    _number(root)
    routes = [(_route(root, ids), member) for member, ids in enumerate(sequences)]
    routes.sort(key=lambda route: (route[0][-1].order, route[1]))
    return [_laid_out(share) for share in _shares(routes, max_tokens)]


Route = tuple[list[_Run], int]
"""The runs of a sequence from the first on, and its place among those given."""


def _insert(root: _Run, ids: np.ndarray) -> None:
    """Make room for a path; runs end where paths part and where one ends."""
    place, at = root, 0
    while at < len(ids):
        child = place.children.get(int(ids[at]))
        if child is None:
            place.children[int(ids[at])] = _Run(ids[at:], at, place)
            return
        shared = common(child.ids, ids[at:])
        if shared < len(child.ids):
            upper = _Run(child.ids[:shared], child.depth, place, {int(child.ids[shared]): child})
            place.children[int(child.ids[0])] = upper
            child.ids, child.depth, child.parent = child.ids[shared:], child.depth + shared, upper
            child = upper
        place, at = child, at + shared


def _number(root: _Run) -> None:
    """Depth-first order, children in the order in which they came."""
    open_runs, count = [root], 0
    while open_runs:
        run = open_runs.pop()
        run.order = count
        count += 1
        open_runs.extend(reversed(run.children.values()))


def _route(root: _Run, ids: np.ndarray) -> list[_Run]:
    place, at, runs = root, 0, []
    while at < len(ids):
        place = place.children[int(ids[at])]
        runs.append(place)
        at += len(place.ids)
    return runs


def _shares(routes: Sequence[Route], max_tokens: int) -> Iterator[list[Route]]:
    """Paths in order, cut where the tokens of a pack would be too many."""
    share: list[Route] = []
    held: set[int] = set()
    size = 0
    for route in routes:
        new = sum(len(run.ids) for run in route[0] if run.order not in held)
        if share and size + new > max_tokens:
            yield share
            share, held, size = [], set(), 0
            new = sum(len(run.ids) for run in route[0])
        share.append(route)
        held.update(run.order for run in route[0])
        size += new
    if share:
        yield share


def _laid_out(share: Sequence[Route]) -> Pack:
    start: dict[int, int] = {}
    reach: dict[int, int] = {}
    runs: list[_Run] = []
    size = 0
    for route, _ in share:
        for run in route:
            if run.order not in start:
                start[run.order] = size
                runs.append(run)
                size += len(run.ids)
        for run in route:
            reach[run.order] = size
    return Pack(
        ids=_joined([run.ids for run in runs], np.int32),
        positions=_joined([np.arange(run.depth, run.depth + len(run.ids)) for run in runs], np.int32),
        before=_joined([_predecessors(run, start) for run in runs], np.int32),
        reach=_joined([np.full(len(run.ids), reach[run.order]) for run in runs], np.int32),
        members=tuple(member for _, member in share),
        places=tuple(
            np.concatenate([start[run.order] + np.arange(len(run.ids)) for run in route]) for route, _ in share
        ),
    )


def _predecessors(run: _Run, start: dict[int, int]) -> np.ndarray:
    places = start[run.order] + np.arange(len(run.ids)) - 1
    assert run.parent is not None
    places[0] = start[run.parent.order] + len(run.parent.ids) - 1 if run.parent.order in start else -1
    return places


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
