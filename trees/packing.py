"""Trees to sequences for a trainer that computes shared tokens once.

Invariant: in every pack the tokens before a token on its path are exactly what the policy saw before it; every
trained token of every tree is a target in exactly one pack, and targets of different episodes stay apart even where
their tokens are the same.

A pack is a forest of paths in depth-first order. Token ``k`` is on the path of token ``q`` exactly when
``k <= q < reach[k]``, which is all that an attention mask has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trees.build import common
from trees.credit import AuxCredit
from trees.linearise import Path, linearise
from trees.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """N tokens that are computed at once, M of them targets."""

    ids: np.ndarray
    """int32 [N]."""
    positions: np.ndarray
    """int32 [N]: of each token on its path, from 0."""
    before: np.ndarray
    """int32 [N]: the token before it on its path, whose logits predict it; -1 for a first token."""
    reach: np.ndarray
    """int32 [N]: one past the last token whose path it is on."""
    targets: np.ndarray
    """int32 [M]: which tokens are trained. One may stand here several times, for several episodes."""
    episodes: np.ndarray
    """int32 [M]: the tree that each target is of, by its place among those given."""
    logprobs: np.ndarray
    """float32 [M]: the engine's."""
    versions: np.ndarray
    """int32 [M]."""
    temperature: np.ndarray
    """float32 [M]."""
    credit: np.ndarray
    """float32 [M]: share of the episode's advantage."""

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


def pack(trees: Sequence[Tree], max_tokens: int, aux_credit: AuxCredit = "outcome") -> list[Pack]:
    """The trained paths of ``trees`` in packs of at most ``max_tokens`` tokens; a longer path has one of its own.

    Trees of one group share their prompt, so give a group at a time, or all groups of a step. Raises ``ValueError``
    for ``max_tokens`` below 1, and as ``trees.credit`` does.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, expected at least 1")
    root = _Run(np.zeros(0, np.int32), 0, None)
    paths = [(episode, path) for episode, tree in enumerate(trees) for path in linearise(tree, aux_credit)]
    for _, path in paths:
        _insert(root, path.ids)
    _number(root)
    routes = [(_route(root, path.ids), episode, path) for episode, path in paths]
    routes.sort(key=lambda route: (route[0][-1].order, route[1], route[2].leaf))
    return [_laid_out(share) for share in _shares(routes, max_tokens)]


Route = tuple[list[_Run], int, Path]
"""The runs of a path from the first on, its episode, and the path."""


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
            new = len(route[2].ids)
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
    for route, _, _ in share:
        for run in route:
            if run.order not in start:
                start[run.order] = size
                runs.append(run)
                size += len(run.ids)
        for run in route:
            reach[run.order] = size
    before = [_predecessors(run, start) for run in runs]
    targets = [np.concatenate([start[run.order] + np.arange(len(run.ids)) for run in route]) for route, _, _ in share]
    trained = [path.loss_mask for _, _, path in share]
    return Pack(
        ids=_joined([run.ids for run in runs], np.int32),
        positions=_joined([np.arange(run.depth, run.depth + len(run.ids)) for run in runs], np.int32),
        before=_joined(before, np.int32),
        reach=_joined([np.full(len(run.ids), reach[run.order]) for run in runs], np.int32),
        targets=_joined([places[mask] for places, mask in zip(targets, trained, strict=True)], np.int32),
        episodes=_joined([np.full(int(path.loss_mask.sum()), episode) for _, episode, path in share], np.int32),
        logprobs=_joined([path.logprobs[path.loss_mask] for _, _, path in share], np.float32),
        versions=_joined([path.versions[path.loss_mask] for _, _, path in share], np.int32),
        temperature=_joined([path.temperature[path.loss_mask] for _, _, path in share], np.float32),
        credit=_joined([path.credit[path.loss_mask] for _, _, path in share], np.float32),
    )


def _predecessors(run: _Run, start: dict[int, int]) -> np.ndarray:
    places = start[run.order] + np.arange(len(run.ids)) - 1
    assert run.parent is not None
    places[0] = start[run.parent.order] + len(run.parent.ids) - 1 if run.parent.order in start else -1
    return places


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
