"""Which trees a place holds: a run folder, any folder with ``.tree`` files below it, or one such file.

Invariant: a file is opened by the entry that a scan of the place made for it; a name that comes from outside is only
looked up, so no path is ever made of it.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trees import codec
from trees.linearise import live_leaves
from trees.tree import Tree

_LOGGED = ("step", "split", "task", "family", "harness", "status", "reward", "calls", "leaves")
"""What a line of ``episodes.jsonl`` and a row of the list name alike."""


class PlaceError(ValueError):
    """A place or an episode that is not there; says what was got, what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tree of the place."""

    path: Path
    position: int
    """Which tree of its file, from 0."""
    stamp: int
    """When the file was written, in nanoseconds."""

    def open(self) -> Tree:
        """Raises OSError, or ValueError (``codec.CodecError``) for a damaged file."""
        with self.path.open("rb") as file:
            tree = next(islice(codec.read(file), self.position, None), None)
        if tree is None:
            raise codec.CodecError(f"got no tree at position {self.position}, expected one: the file is empty or cut")
        return tree

    @property
    def current(self) -> bool:
        """Whether the file is still the one that was found."""
        try:
            return self.path.stat().st_mtime_ns == self.stamp
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file holds: the episode that each tree names, its figures, and why no more could be read."""

    episodes: list[str]
    rows: list[dict[str, Any]]
    error: str


class Catalogue:
    """The trees of a place and a row of figures for each; ``scan`` finds those that came since.

    Raises PlaceError when there is no tree.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.without_tree = 0
        """Episodes that the run's log knows and of which no tree is kept."""
        self._entries: dict[str, Entry] = {}
        self._log: dict[str, dict[str, Any]] = {}
        self._counts: dict[tuple[Path, int], int] = {}
        """Trees in a file, by the file and the time at which it was written."""
        self._contents: dict[tuple[Path, int], _Contents] = {}
        """Of files that had to be read, likewise."""
        self.scan()

    def scan(self) -> None:
        """Look again at what is there; raises PlaceError."""
        self._log = {row["id"]: row for row in _logged_rows(self.place / "episodes.jsonl")}
        self._entries = dict(self._found())
        self.without_tree = sum(name not in self._entries for name in self._log)

    def names(self) -> list[str]:
        """In the order of their paths, which in a run folder is that of the steps."""
        return list(self._entries)

    def only(self, name: str) -> None:
        """Keep one episode; raises PlaceError."""
        self._entries = {name: self.entry(name)}

    def entry(self, name: str) -> Entry:
        """Raises PlaceError."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.4) or list(islice(self._entries, 3))
            raise PlaceError(f"got episode {name!r}, expected one of the {len(self._entries)} here, such as {near}")
        return self._entries[name]

    def open(self, name: str) -> Tree:
        """The tree of an episode, found again when its file was written anew. Raises as ``entry`` and ``Entry``."""
        if not self.entry(name).current:
            self.scan()
        return self.entry(name).open()

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is a file of a tree here."""
        return path.resolve() in {entry.path.resolve() for entry in self._entries.values()}

    def rows(self, start: int = 0, count: int | None = None) -> list[dict[str, Any]]:
        """Rows ``[start, start + count)`` of the list; a file that cannot be read has its ``error`` in its row.

        A row that the run's log has costs nothing; any other reads its tree once.
        """
        stop = None if count is None else start + count
        return [self._row(name, entry) for name, entry in islice(self._entries.items(), start, stop)]

    def _found(self) -> Iterator[tuple[str, Entry]]:
        found = [pair for path in _files(self.place) for pair in self._of_file(path)]
        often = Counter(name for name, _ in found)
        for name, entry in found:
            if often[name] == 1:
                yield name, entry
            else:
                place = entry.path.relative_to(self.place).with_suffix("").as_posix()
                yield place if entry.path.stem == name else f"{place}:{name}", entry

    def _of_file(self, path: Path) -> list[tuple[str, Entry]]:
        try:
            stamp = path.stat().st_mtime_ns
            key = (path, stamp)
            count = self._counts[key] = self._counts.get(key) or _count(path)
        except OSError:
            # A run that goes on removes the trees of its old steps.
            return []
        if count == 1:
            return [(self._name_of_one(path, stamp), Entry(path, 0, stamp))]
        told = self._read(path, stamp).episodes
        names = told + [f"{path.stem}:{position + 1}" for position in range(len(told), count)]
        if len(set(names)) < count or not all(names):
            names = [f"{path.stem}:{position + 1}" for position in range(count)]
        return [(name, Entry(path, position, stamp)) for position, name in enumerate(names)]

    def _name_of_one(self, path: Path, stamp: int) -> str:
        """A file of one tree has its name, but that of a group of one episode has the group's."""
        if not self._log or path.stem in self._log:
            return path.stem
        told = self._read(path, stamp).episodes
        return told[0] if told and told[0] in self._log else path.stem

    def _read(self, path: Path, stamp: int) -> _Contents:
        """All of a file in one go: tree by tree, each would be read behind those before it."""
        if (path, stamp) not in self._contents:
            contents = _Contents([], [], error := "")
            try:
                with path.open("rb") as file:
                    for tree in codec.read(file):
                        contents.episodes.append(str(tree.meta.get("episode", "")))
                        contents.rows.append(_row_of_tree(tree))
            except (OSError, ValueError) as damage:
                error = str(damage)
            self._contents[path, stamp] = replace(contents, error=error or "the file is empty or cut")
        return self._contents[path, stamp]

    def _row(self, name: str, entry: Entry) -> dict[str, Any]:
        logged = self._log.get(name)
        if logged is not None:
            return {"episode": name, **_row_of_log(logged)}
        contents = self._read(entry.path, entry.stamp)
        if entry.position >= len(contents.rows):
            return {"episode": name, "status": "unreadable", "error": contents.error}
        return {"episode": name, **contents.rows[entry.position]}


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise PlaceError(f"{place}: not there; expected a run folder, a folder with .tree files, or a .tree file")
    paths = sorted(path for path in place.rglob("*.tree") if path.is_file())
    if not paths:
        raise PlaceError(
            f"{place}: no .tree file in it; expected a run folder whose first training step has ended (it keeps "
            "trees/step_NNNNNN/EPISODE.tree), or what python -m actors.serve --record DIR kept"
        )
    return paths


def _count(path: Path) -> int:
    """Trees in a file, at least one; a damaged one is the last, since nothing after it can be found."""
    count = 0
    with path.open("rb") as file:
        try:
            for _ in codec.heads(file):
                count += 1
        except ValueError:
            return count + 1
    return max(1, count)


def _logged_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows of the log; a run that is writing it may have left half a line at the end."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            yield row


def _row_of_log(row: dict[str, Any]) -> dict[str, Any]:
    parts = [row.get(key) for key in ("tokens_prompt", "tokens_sampled")]
    tokens = sum(part for part in parts if isinstance(part, int))
    return {**{key: row.get(key) for key in _LOGGED}, "tokens": tokens, "trained": row.get("tokens_trained")}


def _row_of_tree(tree: Tree) -> dict[str, Any]:
    counts = tree.counts()
    return {
        **{key: tree.meta.get(key) for key in _LOGGED},
        "calls": counts.calls,
        "leaves": len(live_leaves(tree)),
        "tokens": counts.tokens,
        "trained": counts.trained,
    }
