"""Runs of the same settings but the seed are one group, and a group is one curve.

Invariant: a point of a curve is the mean over the runs of the group that logged the figure at that step; the band spans
the lowest and the highest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algos.reporting.runs import Run

POINTS = 400
"""Points of a curve; more are put together by neighbours, since a screen shows no more."""
_NAMED = 3
"""Settings that a label names."""
_LABEL_VALUE = 24
_NOT_SETTINGS = ("seed", "dir", "name", "coldstart.seed", "coldstart.cache", "sandbox.root")


@dataclass(frozen=True, slots=True)
class Group:
    """``number`` counts the groups of a report from 0 and decides the colour."""

    label: str
    number: int
    runs: list[Run]

    def values(self, key: str) -> list[Any]:
        """The values that a setting has in the runs, each once."""
        return list({repr(run.settings[key]): run.settings[key] for run in self.runs if key in run.settings}.values())

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings


@dataclass(frozen=True, slots=True)
class Curve:
    """Lists of one length. A NaN in ``mean`` is a gap. ``runs``: how many runs a point is the mean of."""

    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]

    @property
    def empty(self) -> bool:
        return not any(map(math.isfinite, self.mean))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order in which the settings first appear; labels are all different."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        key = (
            repr((sorted(_compared(run).items(), key=lambda item: item[0]), run.changes)) if run.settings else run.name
        )
        by_settings.setdefault(key, []).append(run)
    members = list(by_settings.values())
    labels = _labels([group[0] for group in members])
    return [Group(label, number, group) for number, (label, group) in enumerate(zip(labels, members, strict=True))]


def differing(groups: Sequence[Group]) -> list[str]:
    """Settings that are not alike in all groups, in the order of the file."""
    keys = dict.fromkeys(key for group in groups for key in _compared(group.runs[0]))
    return [key for key in keys if len({repr(group.settings.get(key)) for group in groups}) > 1]


def figures(groups: Sequence[Group]) -> set[str]:
    """What is logged."""
    return {key for group in groups for run in group.runs for row in run.rows for key in row}


def curve(group: Group, key: str) -> Curve:
    """The curve of a figure."""
    of_runs = [run.values(key) for run in group.runs]
    steps = sorted({step for values in of_runs for step in values})
    mean, low, high, count = [], [], [], []
    for step in steps:
        there = [values[step] for values in of_runs if math.isfinite(values.get(step, math.nan))]
        mean.append(sum(there) / len(there) if there else math.nan)
        low.append(min(there, default=math.nan))
        high.append(max(there, default=math.nan))
        count.append(len(there))
    return _thinned(Curve([float(step) for step in steps], mean, low, high, count))


def at_ends(group: Group, key: str) -> tuple[list[float], list[float]]:
    """A figure before training and at its last measurement after, for each run that has both or one."""
    before, after = [], []
    for run in group.runs:
        values = {step: value for step, value in run.values(key).items() if math.isfinite(value)}
        if 0 in values:
            before.append(values.pop(0))
        if values:
            after.append(values[max(values)])
    return before, after


def _thinned(whole: Curve) -> Curve:
    each = math.ceil(len(whole.steps) / POINTS)
    if each <= 1:
        return whole
    parts = [slice(start, start + each) for start in range(0, len(whole.steps), each)]
    return Curve(
        [_mean(whole.steps[part]) for part in parts],
        [_mean(whole.mean[part]) for part in parts],
        [min(filter(math.isfinite, whole.low[part]), default=math.nan) for part in parts],
        [max(filter(math.isfinite, whole.high[part]), default=math.nan) for part in parts],
        [max(whole.runs[part]) for part in parts],
    )


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if math.isfinite(value)]
    return sum(there) / len(there) if there else math.nan


def _compared(run: Run) -> dict[str, Any]:
    return {
        key: value for key, value in run.settings.items() if key not in _NOT_SETTINGS and not key.startswith("wandb.")
    }


def _labels(firsts: Sequence[Run]) -> list[str]:
    """The name in the settings; what tells equal names apart is added."""
    names = [str(run.settings.get("name", run.name)) for run in firsts]
    labels = []
    for run, name in zip(firsts, names, strict=True):
        alike = [other for other, its in zip(firsts, names, strict=True) if its == name]
        keys = [key for key in _compared(run) if len({repr(other.settings.get(key)) for other in alike}) > 1]
        told = [f"{key.rpartition('.')[2]}={str(run.settings[key])[:_LABEL_VALUE]}" for key in keys[:_NAMED]]
        labels.append(" ".join([name, *told]))
    return [
        label if labels.count(label) == 1 else f"{label} ({run.name})"
        for label, run in zip(labels, firsts, strict=True)
    ]
