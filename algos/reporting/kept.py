"""The trees that a run kept, with the tokenizer that makes texts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from algos.behaviour import Rate, indicators, pooled, steps
from algos.reporting.runs import Run
from trees.viewer import wording
from trees.viewer.catalogue import Catalogue, PlaceError
from trees.viewer.wording import Wording

_READ = 2000
"""Trees of a run that are read for its behaviour, spread evenly: a report is to take seconds."""


@dataclass(frozen=True, slots=True)
class Kept:
    """``words`` is None where no tokenizer is found."""

    run: Run
    catalogue: Catalogue
    words: Wording | None


def kept(run: Run, notes: list[str]) -> Kept | None:
    """None where the run has no tree; ``notes`` is told of what cannot be read."""
    try:
        catalogue = Catalogue(run.folder)
    except (PlaceError, OSError):
        return None
    path = wording.find(run.folder)
    if path is None:
        return Kept(run, catalogue, None)
    try:
        return Kept(run, catalogue, Wording(Tokenizer.from_file(str(path))))
    except Exception as error:
        # The library has no error of its own.
        notes.append(f"{run.name}: {path.name} cannot be read, so the trees show ids: {error}")
        return Kept(run, catalogue, None)


def add_behaviour(trees: Kept) -> None:
    """Give the run's lines the shares of ``algos.behaviour`` at their step, as ``behaviour/...``."""
    rows = {int(row["step"]): row for row in trees.run.rows}
    for step, found in _by_step(trees):
        if step in rows:
            rows[step] |= {f"behaviour/{name}": rate.value for name, rate in found.items() if rate.value is not None}


def _by_step(trees: Kept) -> Iterator[tuple[int, dict[str, Rate]]]:
    words = trees.words
    if words is None:
        return
    names: dict[int, list[str]] = {}
    for row in trees.run.episodes:
        if row.get("split") == "train" and isinstance(row.get("step"), int):
            # The step that an episode is trained in counts from 0, lines of metrics from 1.
            names.setdefault(row["step"] + 1, []).append(row["id"])
    there = set(trees.catalogue.names())
    most = max(1, _READ // max(1, len(names)))
    for step, mine in names.items():
        chosen = [name for name in mine if name in there]
        yield step, pooled(_read(trees, words, name) for name in chosen[:: max(1, -(-len(chosen) // most))])


def _read(trees: Kept, words: Wording, name: str) -> Mapping[str, Rate]:
    try:
        tree = trees.catalogue.open(name)
    except (OSError, ValueError):
        # A damaged tree is told where it is shown; here it is one of many.
        return {}
    return indicators(steps(tree, _Whole(words)), workflow=())


class _Whole:
    """``algos.behaviour.Words`` without the policy's own template: a reply that something was heard after is a call."""

    def __init__(self, words: Wording) -> None:
        self._words = words

    def said(self, ids: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
        text = self._words.text(ids)
        return text, [("", text)]

    def heard(self, ids: Sequence[int]) -> list[str]:
        return [self._words.text(ids)]
