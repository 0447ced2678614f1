"""Example episodes: the best, the worst, the longest and the most branched of each group, with their trees.

Invariant: only episodes whose tree is kept are chosen, so that each can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algos.behaviour import MAIN
from algos.reporting.groups import Group
from algos.reporting.kept import Kept
from algos.reporting.runs import Run
from trees.tree import Node, Tree
from trees.viewer.catalogue import Catalogue
from trees.viewer.page import standalone
from trees.viewer.payload import describe
from trees.viewer.wording import Wording

_HEARD, _SAMPLED = 700, 3000
"""Characters that are shown of one run of tokens."""
_PIECES = 24
_EXTREMES: Sequence[tuple[str, Callable[[dict[str, Any]], tuple[float, ...]]]] = (
    ("best", lambda row: (_figure(row, "reward"), _figure(row, "step"))),
    ("worst", lambda row: (-_figure(row, "reward"), _figure(row, "step"))),
    ("longest", lambda row: (_figure(row, "calls"), _tokens(row), _figure(row, "step"))),
    ("most branched", lambda row: (_figure(row, "leaves"), _figure(row, "calls"), _figure(row, "step"))),
)
"""Of equals the newest: what the policy does now says more than what it did."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens of the main line as text."""

    text: str
    sampled: bool
    left_out: int = 0
    """Characters in the middle that are not in ``text``."""


@dataclass(slots=True)
class Example:
    """An episode; ``why`` says what it is an extreme of."""

    why: list[str]
    group: Group
    run: Run
    row: dict[str, Any]
    name: str
    """What it is called on the page of trees."""
    pieces: list[Piece] = field(default_factory=list)
    payload: dict[str, Any] | None = None
    """The tree as the viewer takes it; None where it cannot be read."""

    @property
    def tokens(self) -> int:
        return int(_tokens(self.row))


def chosen(groups: Sequence[Group], trees: Mapping[Path, Kept], notes: list[str]) -> list[Example]:
    """The extremes of each group, each episode once.

    ``trees``: of the runs that kept some, by folder; ``notes`` is told what cannot be read.
    """
    several = sum(len(group.runs) for group in groups) > 1
    found = []
    for group in groups:
        rows = [
            (run, row)
            for run in group.runs
            if run.folder in trees
            for row in _with_tree(run, trees[run.folder].catalogue)
        ]
        for example in _extremes(group, rows, several):
            _open(example, trees[example.run.folder], notes)
            found.append(example)
    return found


def tree_page(examples: Sequence[Example]) -> Iterator[str]:
    """The viewer's page with the trees of the examples, in parts."""
    there = [example for example in examples if example.payload is not None]
    rows = [{**example.row, "episode": example.name, "tokens": example.tokens} for example in there]
    place = " and ".join(dict.fromkeys(example.run.name for example in there))
    return standalone(rows, {"place": place}, (example.payload or {} for example in there))


def _with_tree(run: Run, catalogue: Catalogue) -> list[dict[str, Any]]:
    names = set(catalogue.names())
    graded = [row for row in run.episodes if row.get("split") == "train" and math.isfinite(_figure(row, "reward"))]
    return [row for row in graded if row["id"] in names]


def _extremes(group: Group, rows: Sequence[tuple[Run, dict[str, Any]]], several: bool) -> list[Example]:
    found: dict[tuple[Path, str], Example] = {}
    for why, key in _EXTREMES if rows else ():
        run, row = max(rows, key=lambda pair: key(pair[1]))
        if why == "most branched" and _figure(row, "leaves") <= 1:
            continue
        name = f"{run.name}/{row['id']}" if several else row["id"]
        found.setdefault((run.folder, row["id"]), Example([], group, run, row, name)).why.append(why)
    return list(found.values())


def _open(example: Example, trees: Kept, notes: list[str]) -> None:
    try:
        tree = trees.catalogue.open(example.row["id"])
        example.payload = describe(example.name, tree, trees.words)
    except Exception as error:
        # One odd tree must not cost the others.
        notes.append(f"{example.run.name}: the tree of {example.row['id']} cannot be read: {error}")
        return
    if trees.words is not None:
        example.pieces = list(_pieces(tree, trees.words))


def _pieces(tree: Tree, words: Wording) -> Iterator[Piece]:
    path = _main_path(tree)
    middle = len(path) - _PIECES
    for at, node in enumerate(path):
        if middle > 0 and _PIECES // 2 <= at < _PIECES // 2 + middle:
            if at == _PIECES // 2:
                yield Piece(f"… {middle} more pieces …", False)
            continue
        text = words.text(node.ids.tolist())
        most = _SAMPLED if node.sampled else _HEARD
        cut = max(0, len(text) - most)
        yield Piece(f"{text[: most // 2]} … {text[-most // 2 :]}" if cut else text, node.sampled, cut)


def _main_path(tree: Tree) -> list[Node]:
    """From the root to the newest call of the main line, or of the tree where it has no main line; may be empty."""
    calls = tree.calls()
    main = [call for call in calls if call.kind in MAIN] or calls
    return [node for node in tree.path(main[-1].id) if len(node)] if main else []


def _figure(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _tokens(row: dict[str, Any]) -> float:
    return sum(value for key in ("tokens_prompt", "tokens_sampled") if math.isfinite(value := _figure(row, key)))
