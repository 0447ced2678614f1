"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from algos.reporting import charts
from algos.reporting.groups import Curve, Group, at_ends, curve, figures
from algos.reporting.markup import Child, tag
from algos.reporting.numbers import duration, figure, percent, reward
from algos.reporting.panels import STEP_TIME
from algos.reporting.runs import Run
from algos.reporting.words import HELD_OUT


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], numeric: int | None = None, name: str = "") -> Element:
    """Columns from ``numeric`` on are figures, to the right; None: no column is."""
    texts = len(head) if numeric is None else numeric

    def cells(kind: str, row: Sequence[Child]) -> list[Element]:
        return [tag(kind, cell, class_="n" if at >= texts else None) for at, cell in enumerate(row)]

    body = [tag("tr", cells("td", row)) for row in rows]
    whole = tag("table", tag("thead", tag("tr", cells("th", head))), tag("tbody", body), class_=name or None)
    return tag("div", whole, class_="scroll")


def named(group: Group, several: bool) -> Child:
    """The group's name with its colour, where there are several."""
    return charts.named(group.label, group.number) if several else group.label


def evaluations(groups: Sequence[Group], families: bool) -> Element | None:
    """Every evaluation before and after; sets alone, or with their families and harnesses."""
    measured = {key for key in figures(groups) if key.startswith("eval/") and "/reward_" in key}
    places = {key.removeprefix("eval/").rpartition("/")[0] for key in measured}
    several = len(groups) > 1
    rows: list[list[Child]] = []
    # Of each set the whole, then its families, then "in" each harness.
    for place in sorted(places, key=lambda place: (place.split("/")[0], "/in " in place, place)):
        if "/" in place and not families:
            continue
        for group in groups:
            ends = [at_ends(group, f"eval/{place}/reward_{how}") for how in ("greedy", "sampled")]
            if not any(part for pair in ends for part in pair):
                continue
            name = tag("span", place.rpartition("/")[2], class_="inner" if "/" in place else "outer")
            label = tag("span", name, _how_many(group, place))
            cells = [_spread(part) for pair in ends for part in pair]
            rows.append([label, *([named(group, True)] if several else []), *cells])
    head = ["tasks", *(["runs"] if several else []), "greedy before", "after", "sampled before", "after"]
    return table(head, rows, 2 if several else 1, "evaluations") if rows else None


def _how_many(group: Group, place: str) -> Element | None:
    """The number of tasks of a set, where it is logged; where it changed, from which to which."""
    before, after = at_ends(group, f"eval/{place}/tasks")
    told = list(dict.fromkeys(figure(one) for one in [*before, *after]))
    return tag("small", f" n = {', '.join(told)}") if told else None


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
    rows: list[list[Child]] = []
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
    return table(head, rows, 3 if several else 2, "runs")


def _episodes(run: Run) -> tuple[str, str]:
    failed = sum(row.get("status") == "failed" for row in run.episodes)
    return str(len(run.episodes)), str(failed)


def _seconds(run: Run) -> float:
    """Of all steps and evaluations in the log."""
    spent = [row.get(key, math.nan) for row in run.rows for key, _, _ in STEP_TIME.layers]
    there = [value for value in spent if math.isfinite(value)]
    return sum(there) if there else math.nan


def times(groups: Sequence[Group]) -> Element | None:
    """One bar of the whole time for each group, and the seconds of each stage."""
    several = len(groups) > 1
    timed = [(group, [_total(group, key) for key, _, _ in STEP_TIME.layers]) for group in groups]
    timed = [(group, spent) for group, spent in timed if sum(spent) > 0]
    if not timed:
        return None
    bars: list[Element] = []
    for group, spent in timed:
        shares = [(label, colour, amount) for (_, label, colour), amount in zip(STEP_TIME.layers, spent, strict=True)]
        caption = tag("div", named(group, True)) if several else None
        bars.append(tag("div", caption, charts.share_bar(f"time by stage: {group.label}", shares)))
    rows: list[list[Child]] = []
    for at, (_, label, colour) in enumerate(STEP_TIME.layers):
        if any(spent[at] > 0 for _, spent in timed):
            key = tag("span", charts.swatch(f"c{colour}", False), label, class_="key")
            rows.append([key, *(f"{duration(spent[at])}, {percent(spent[at] / sum(spent))}" for _, spent in timed)])
    rows.append([tag("b", "all"), *(duration(sum(spent)) for _, spent in timed)])
    mean = " (mean of the seeds)" if any(len(group.runs) > 1 for group, _ in timed) else ""
    head = [f"stage, all steps{mean}", *(group.label if several else "time" for group, _ in timed)]
    return tag("div", bars, table(head, rows, 1), class_="times")


def _total(group: Group, key: str) -> float:
    """Of a run of the group, on average."""
    sums = [sum(value for value in run.values(key).values() if math.isfinite(value)) for run in group.runs]
    return sum(sums) / len(sums)


def others(groups: Sequence[Group], shown: set[str]) -> Element | None:
    """The course of every figure that no chart has."""
    rows: list[list[Child]] = []
    for key in sorted(figures(groups) - shown):
        if key == "step" or key.startswith(("eval/", "stage/")):
            continue
        curves = {group.number: curve(group, key) for group in groups}
        there = [(number, one) for number, one in curves.items() if not one.empty]
        if there:
            rows.append([tag("code", key), charts.sparkline(there), *map(_course, curves.values())])
    if not rows:
        return None
    ends = "first to last"
    return table(["figure", "course", *(f"{g.label}: {ends}" if len(groups) > 1 else ends for g in groups)], rows, 2)


def _course(of: Curve) -> str:
    there = [value for value in of.mean if math.isfinite(value)]
    return f"{figure(there[0])} → {figure(there[-1])}" if there else "–"
