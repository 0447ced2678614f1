"""Scores of several policies in several places, as one page: a picture and a table for each comparison.

Invariant: a bar is a mean over seeds, its whisker the standard error over seeds, and each seed is a point; what was not
measured is empty, never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from algos.reporting import axes
from algos.reporting.charts import COLOURS, Line, Look, lines, swatch
from algos.reporting.groups import Curve
from algos.reporting.markup import tag
from algos.reporting.numbers import percent
from algos.reporting.sheet import sheet
from algos.reporting.tables import table

_FRAME = axes.Frame(760.0, 250.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to train. ``scores``: by place, those of its seeds, from 0 to 1; ``course``: of each seed, by step."""

    label: str
    scores: Mapping[str, Sequence[float]]
    course: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies side by side; ``remark`` says what comes out."""

    title: str
    places: Sequence[str]
    policies: Sequence[Policy]
    remark: str = ""


def mean_and_error(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean and standard error, sample deviation / sqrt(n), which is NaN of one value; None of none."""
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def document(heading: str, about: str, compared: Sequence[Comparison]) -> str:
    """The page. It loads nothing and has no script."""
    head = tag("header", tag("h1", heading), tag("p", about))
    return sheet(heading, tag("body", tag("main", head, [_section(one) for one in compared])))


def _section(compared: Comparison) -> Element:
    remark = tag("p", compared.remark) if compared.remark else None
    drawn = tag("div", picture(compared), courses(compared), class_="compared")
    return tag("section", tag("h2", compared.title), remark, drawn, figures(compared))


def courses(compared: Comparison) -> Element | None:
    """Reward while training: the mean over seeds, with the lowest and highest as a band; up to where all seeds are."""
    shown = []
    for number, policy in enumerate(compared.policies):
        together = list(zip(*policy.course, strict=False))
        if together:
            mean, low, high = ([over(values) for values in together] for over in (statistics.mean, min, max))
            steps = [float(step) for step in range(1, len(together) + 1)]
            shown.append(Line(policy.label, Curve(steps, mean, low, high, [len(policy.course)] * len(steps)), number))
    if not shown:
        return None
    return lines("Reward while training", "", shown, Look(percent=True, unit_range=True))


def figures(compared: Comparison) -> Element:
    """The table."""
    rows = []
    for number, policy in enumerate(compared.policies):
        name = tag("span", swatch(f"c{number % COLOURS}", False), policy.label, class_="key")
        cells = [_cell(policy.scores.get(place, ())) for place in compared.places]
        seeds = max((len(values) for values in policy.scores.values()), default=0)
        rows.append([name, *cells, str(seeds)])
    return table(["trained in", *compared.places, "seeds"], rows, 1)


def _cell(values: Sequence[float]) -> Element | str:
    found = mean_and_error(values)
    if found is None:
        return "–"
    error = "" if math.isnan(found[1]) else f" ± {100 * found[1]:.1f}"
    return tag("span", percent(found[0]), tag("small", error))


def picture(compared: Comparison) -> Element:
    """Groups of bars, one group for each place."""
    y = axes.fixed(0.0, 1.0, _FRAME)
    x = axes.Scale(0.0, float(len(compared.places)), axes.LEFT, _FRAME.right)
    # An axis of places has no ticks of its own: only the lines across are drawn.
    parts = axes.drawn(axes.Scale(0.25, 0.75, axes.LEFT, _FRAME.right), y, _FRAME, True)
    wide = 0.84 / max(1, len(compared.policies))
    for at, place in enumerate(compared.places):
        parts.append(
            tag("text", place, class_="tick", x=x(at + 0.5), y=_FRAME.floor + 16, text_anchor="middle"),
        )
        for number, policy in enumerate(compared.policies):
            left = at + 0.08 + number * wide
            parts += _bar(policy, place, number, (x(left + 0.04 * wide), x(left + 0.96 * wide)), y)
    keys = [
        tag("span", swatch(f"c{number % COLOURS}", False), policy.label, class_="key")
        for number, policy in enumerate(compared.policies)
    ]
    box = f"0 0 {_FRAME.width:.0f} {_FRAME.height:.0f}"
    svg = tag("svg", parts, viewBox=box, role="img", aria_label=f"{compared.title}, as bars; figures in the table")
    return tag("figure", tag("div", keys, class_="keys"), svg, class_="chart")


def _bar(policy: Policy, place: str, number: int, edges: tuple[float, float], y: axes.Scale) -> list[Element]:
    values = policy.scores.get(place, ())
    found = mean_and_error(values)
    if found is None:
        return []
    (left, right), (mean, error) = edges, found
    middle, wide = (left + right) / 2, right - left
    rect = tag("rect", x=left, y=y(mean), width=wide, height=y(0.0) - y(mean), class_=f"fill c{number % COLOURS}")
    rect.append(tag("title", f"{policy.label}, {place}: {percent(mean)}"))
    parts = [rect]
    if math.isfinite(error):
        parts.append(tag("line", class_="whisker", x1=middle, x2=middle, y1=y(mean - error), y2=y(mean + error)))
    # Beside each other, so that equal ones are told apart.
    apart = wide / (len(values) + 1)
    parts += [tag("circle", class_="seed", cx=left + apart * (n + 1), cy=y(v), r=2.2) for n, v in enumerate(values)]
    return parts
