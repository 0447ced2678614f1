"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from algos.reporting import charts
from algos.reporting.groups import Curve, Group, at_ends, curve, differing
from algos.reporting.markup import Child, tag
from algos.reporting.numbers import duration, figure, percent, reward
from algos.reporting.panels import TIME, Stack
from algos.reporting.runs import Run
from algos.reporting.words import HELD_OUT

_LONGEST = 120


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], numeric: int = 1, name: str = "") -> Element:
    """Columns from ``numeric`` on are figures, to the right."""

    def cells(kind: str, row: Sequence[Child]) -> list[Element]:
        return [tag(kind, cell, class_="n" if at >= numeric else None) for at, cell in enumerate(row)]

    body = [tag("tr", cells("td", row)) for row in rows]
    whole = tag("table", tag("thead", tag("tr", cells("th", head))), tag("tbody", body), class_=name or None)
    return tag("div", whole, class_="scroll")


def named(group: Group, several: bool) -> Child:
    """The group's name with its colour, where there are several."""
    if not several:
        return group.label
    return tag("span", charts.swatch(f"c{group.number % charts.COLOURS}", True), group.label, class_="key")


def evaluations(groups: Sequence[Group], families: bool) -> Element | None:
    """Every evaluation before and after; sets alone, or with their families and harnesses."""
    keys = dict.fromkeys(
        key for group in groups for run in group.runs for row in run.rows for key in row if "/reward_" in key
    )
    places = dict.fromkeys(key.removeprefix("eval/").rpartition("/")[0] for key in keys if key.startswith("eval/"))
    places = dict.fromkeys(sorted(places, key=lambda place: (place.split("/")[0], "/in " in place, place)))
    if not families:
        places = dict.fromkeys(place for place in places if "/" not in place)
    several = len(groups) > 1
    rows = []
    for place in places:
        for group in groups:
            ends = [at_ends(group, f"eval/{place}/reward_{how}") for how in ("greedy", "sampled")]
            if not any(part for pair in ends for part in pair):
                continue
            label = tag("span", place.rpartition("/")[2], class_="inner" if "/" in place else "outer")
            cells = [_spread(part) for pair in ends for part in pair]
            rows.append([label, *([named(group, True)] if several else []), *cells])
    head = ["tasks", *(["runs"] if several else []), "greedy before", "after", "sampled before", "after"]
    return table(head, rows, 2 if several else 1, "evaluations") if rows else None


def _spread(values: Sequence[float]) -> Child:
    if not values:
        return "–"
    mean = reward(sum(values) / len(values))
    if len(values) == 1:
        return mean
    return tag("span", mean, tag("small", f" {reward(min(values))} to {reward(max(values))}"))


def runs(groups: Sequence[Group]) -> Element:
    """A line for each run."""
    several = len(groups) > 1
    rows = []
    for group in groups:
        for run in group.runs:
            before, after = at_ends(Group("", 0, [run]), HELD_OUT)
            course = [value for value in run.values("train/reward").values() if math.isfinite(value)]
            rows.append(
                [
                    run.name,
                    *([named(group, True)] if several else []),
                    run.told,
                    str(run.settings.get("seed", "–")),
                    str(run.last_step),
                    reward(course[0]) if course else "–",
                    reward(course[-1]) if course else "–",
                    reward(before[0]) if before else "–",
                    reward(after[0]) if after else "–",
                    *_episodes(run),
                    duration(_seconds(run)),
                ]
            )
    head = ["run", *(["settings"] if several else []), "state", "seed", "steps", "first reward", "newest"]
    head += ["held out before", "after", "episodes", "failed", "time"]
    return table(head, rows, 3 if several else 2)


def _episodes(run: Run) -> tuple[str, str]:
    failed = sum(row.get("status") == "failed" for row in run.episodes)
    return str(len(run.episodes)), str(failed)


def _seconds(run: Run) -> float:
    """Of all steps and evaluations in the log."""
    stages = next(panel for panel in TIME if isinstance(panel, Stack)).layers
    spent = [row.get(key, math.nan) for row in run.rows for key, _, _ in stages]
    there = [value for value in spent if math.isfinite(value)]
    return sum(there) if there else math.nan


def times(groups: Sequence[Group]) -> Element | None:
    """One bar of the whole time for each group, and the seconds of each stage."""
    stages = next(panel for panel in TIME if isinstance(panel, Stack)).layers
    bars: list[Element] = []
    columns = []
    for group in groups:
        spent = [_total(group, key) for key, _, _ in stages]
        if sum(spent) <= 0:
            continue
        columns.append((group, spent))
        shares = [(label, colour, amount) for (_, label, colour), amount in zip(stages, spent, strict=True) if amount > 0]
        caption = tag("div", named(group, True)) if len(groups) > 1 else None
        bars.append(tag("div", caption, charts.share_bar(f"time by stage: {group.label}", shares)))
    if not columns:
        return None
    rows = []
    for at, (_, label, colour) in enumerate(stages):
        if any(spent[at] > 0 for _, spent in columns):
            key = tag("span", charts.swatch(f"c{colour}", False), label, class_="key")
            cells = [f"{duration(spent[at])}, {percent(spent[at] / sum(spent))}" for _, spent in columns]
            rows.append([key, *cells])
    rows.append(["all", *(duration(sum(spent)) for _, spent in columns)])
    head = ["stage, all steps" + (" (mean of the seeds)" if any(len(g.runs) > 1 for g, _ in columns) else "")]
    head += [group.label if len(groups) > 1 else "time" for group, _ in columns]
    return tag("div", bars, table(head, rows), class_="times")


def _total(group: Group, key: str) -> float:
    """Of a run of the group, on average."""
    sums = [sum(value for value in run.values(key).values() if math.isfinite(value)) for run in group.runs]
    return sum(sums) / len(sums)


def others(groups: Sequence[Group], shown: set[str]) -> Element | None:
    """First, last, lowest and highest of every figure that no chart has."""
    keys = dict.fromkeys(key for group in groups for run in group.runs for row in run.rows for key in row)
    rows: list[list[Child]] = []
    for key in sorted(key for key in keys if key not in shown and not key.startswith(("eval/", "stage/")) and key != "step"):
        curves = [(group, curve(group, key)) for group in groups]
        curves = [(group, one) for group, one in curves if not one.empty]
        if curves:
            rows.append([tag("code", key), charts.sparkline([(group.number, one) for group, one in curves])])
            rows[-1] += [_course(group, dict((g.number, c) for g, c in curves)) for group in groups]
    if not rows:
        return None
    head = ["figure", "course", *(f"{group.label}: first to last" if len(groups) > 1 else "first to last" for group in groups)]
    return table(head, rows, 2)


def _course(group: Group, curves: dict[int, Curve]) -> str:
    if group.number not in curves:
        return "–"
    there = [value for value in curves[group.number].mean if math.isfinite(value)]
    return f"{figure(there[0])} → {figure(there[-1])}"


def settings(groups: Sequence[Group], defaults: dict[str, Any]) -> list[Element]:
    """What tells the groups apart, what a resume changed, what differs from the defaults, and everything."""
    found = []
    head = ["setting", *(group.label for group in groups)]
    if len(groups) > 1:
        rows = [[tag("code", key), *(_value(group, key) for group in groups)] for key in differing(groups)]
        if rows:
            found += [tag("h3", "What tells them apart"), table(head, rows, 99)]
    changed = [
        [run.name, str(change.step), tag("code", key), _short(before), _short(after)]
        for group in groups
        for run in group.runs
        for change in run.changes
        for key, before, after in change.settings
    ]
    if changed:
        found += [
            tag("h3", "Changed by a resume"),
            table(["run", "after step", "setting", "before", "from then on"], changed, 99),
        ]
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    own = [key for key in keys if any(group.settings.get(key) != defaults.get(key) for group in groups)]
    if own:
        told = [
            [tag("code", key), *(_value(group, key) for group in groups), _short(defaults[key]) if key in defaults else ""]
            for key in own
        ]
        found += [tag("h3", "Other than the defaults"), table([*head, "default"], told, 99)]
    every = [[tag("code", key), *(_value(group, key) for group in groups)] for key in keys]
    if every:
        found.append(tag("details", tag("summary", f"All {len(every)} settings"), table(head, every, 99)))
    return found


def _value(group: Group, key: str) -> str:
    values = group.differs(key)
    return ", ".join(map(_short, values)) if values else "none" if key in group.settings else ""


def _short(value: Any) -> str:
    if value is None:
        return "none"
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"
