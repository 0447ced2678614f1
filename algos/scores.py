"""From the lines of an evaluation's ``episodes.jsonl`` to its figures.

Invariant: an attempt that was asked for and has no grade, because it failed or has not ended, is counted as missing in
every figure that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from algos.estimates import Figure, Instance, figure, over, paired, pass_all, pass_at, solved

METHOD = (
    "Pass@1 is the mean over tasks of the share of passed runs; its standard error takes each task as one cluster, "
    "whatever the number of runs and harnesses (for one harness: the standard deviation of the tasks' means over the "
    "root of their number; Miller, arXiv:2411.00640). pass@k (at least one of k runs passes) and pass^k (all of them) "
    "are the unbiased estimates of arXiv:2107.03374 and arXiv:2406.12045. An attempt that failed for the "
    "infrastructure is in no figure. Where all tasks came to the same, the error reads 0 and says little: n tasks "
    "that all pass, or all fail, still allow for about 3/n of the other kind (at 95%)."
)


@dataclass(frozen=True, slots=True)
class Place:
    """What a figure is about; None: all of that kind."""

    ring: str
    harness: str | None = None
    tasks: str | None = None
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of one place."""

    place: Place
    pass_1: Figure
    pass_k: Figure
    """At least one of all runs passes."""
    pass_all: Figure
    """All runs pass."""
    reward: Figure
    runs: tuple[float | None, ...]
    """Pass@1 of each run alone."""


class Scores:
    """The attempts of one evaluation.

    Args:
        name: what tables call it.
        asked: of every attempt at least ``ring``, ``tasks``, ``harness``, ``task``, ``run`` and ``id``.
        rows: the lines of those that have ended, with ``status``, ``reward`` and ``category``.
        runs: independent runs that were asked for.
        success: reward from which on an attempt has passed.
    """

    def __init__(
        self,
        name: str,
        asked: Iterable[Mapping[str, Any]],
        rows: Iterable[Mapping[str, Any]],
        runs: int,
        success: float = 1.0,
    ) -> None:
        self.name = name
        self.runs = runs
        self.success = success
        ended = {row["id"]: row for row in rows}
        # What is asked for says where a figure belongs; a line of results adds to it.
        self.attempts: list[dict[str, Any]] = [dict(ended.get(one["id"], {})) | dict(one) for one in asked]
        """What was asked for, with what came of it where it has ended."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Attempts that failed for the infrastructure."""
        return [one for one in self.attempts if one.get("status") == "failed"]

    @property
    def unfinished(self) -> int:
        """Attempts that have not ended."""
        return sum("status" not in one for one in self.attempts)

    @property
    def complete(self) -> bool:
        return not self.failed and not self.unfinished

    def places(self) -> list[Place]:
        """Of each ring the whole, its harnesses and task sets, each pair of them, and its categories."""
        found: list[Place] = []
        for ring in _distinct(self.attempts, "ring"):
            mine = [one for one in self.attempts if one["ring"] == ring]
            harnesses, sets = _distinct(mine, "harness"), _distinct(mine, "tasks")
            categories = sorted(name for name in _distinct(mine, "category") if name is not None)
            found.append(Place(ring))
            pairs = [Place(ring, harness, name) for harness in harnesses for name in sets]
            if len(harnesses) > 1 and len(sets) > 1:
                found += [Place(ring, harness=harness) for harness in harnesses]
                found += [Place(ring, tasks=name) for name in sets]
            found += pairs if len(pairs) > 1 else []
            found += [Place(ring, category=name) for name in categories] if len(categories) > 1 else []
        return found

    def instances(self, place: Place) -> dict[str, Instance]:
        """The rewards of a place by instance: a task in a harness."""
        values: dict[str, list[float]] = {}
        missing: dict[str, int] = {}
        tasks: dict[str, str] = {}
        for one in self._of(place):
            name = f"{one['harness']}/{one['tasks']}/{one['task']}"
            tasks[name] = f"{one['tasks']}/{one['task']}"
            values.setdefault(name, [])
            missing.setdefault(name, 0)
            if one.get("reward") is None:
                missing[name] += 1
            else:
                values[name].append(one["reward"])
        return {name: Instance(tasks[name], tuple(values[name]), missing[name]) for name in values}

    def passes(self, place: Place) -> dict[str, Instance]:
        """``instances`` with 1 for a passed attempt and 0 for another."""
        return {name: solved(one, self.success) for name, one in self.instances(place).items()}

    def score(self, place: Place) -> Score:
        rewards = list(self.instances(place).values())
        by_run = [
            [
                one["reward"] >= self.success
                for one in self._of(place)
                if one["run"] == run and one.get("reward") is not None
            ]
            for run in range(self.runs)
        ]
        return Score(
            place,
            pass_1=figure(self.passes(place).values()),
            pass_k=over(rewards, self.runs, pass_at, self.success),
            pass_all=over(rewards, self.runs, pass_all, self.success),
            reward=figure(rewards),
            runs=tuple(sum(run) / len(run) if run else None for run in by_run),
        )

    def plain(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "name": self.name,
            "runs": self.runs,
            "success": self.success,
            "complete": self.complete,
            "episodes": {
                "asked": len(self.attempts),
                "graded": sum(one.get("reward") is not None for one in self.attempts),
                "failed": len(self.failed),
                "not_ended": self.unfinished,
            },
            "method": METHOD,
            "scores": [asdict(self.score(place)) for place in self.places()],
            "failed": [
                {key: one.get(key) for key in ("id", "ring", "harness", "tasks", "task", "run", "reason")}
                for one in self.failed
            ],
        }

    def _of(self, place: Place) -> list[dict[str, Any]]:
        wanted = {key: value for key, value in asdict(place).items() if value is not None}
        return [one for one in self.attempts if all(_same(one.get(key), value) for key, value in wanted.items())]


def difference(before: Scores, after: Scores, place: Place) -> Figure:
    """By how much Pass@1 of ``after`` is above that of ``before``, on the instances that both have."""
    return paired(before.passes(place), after.passes(place))


def _same(value: Any, wanted: str) -> bool:
    return value is not None and str(value) == wanted


def _distinct(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row.get(key) for row in rows))
