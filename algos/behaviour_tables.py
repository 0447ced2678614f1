"""Behaviour before and after, as tables and a picture."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from algos.behaviour import MEANINGS, Rate
from algos.estimates import Figure, ratio
from algos.score_tables import Table, page, with_error

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#bbbb44")

_FAULT = 200


@dataclass(slots=True)
class Series:
    """What was found at one place, episode by episode, in the same order."""

    name: str
    tasks: list[str] = field(default_factory=list)
    rates: list[Mapping[str, Rate]] = field(default_factory=list)
    without_words: int = 0
    """Episodes whose words are not kept."""
    scores: list[Mapping[str, float]] = field(default_factory=list)
    """A judge's grades of a sample, in [0, 1]."""
    judged_tasks: list[str] = field(default_factory=list)
    ungraded: int = 0
    """Episodes of the sample that the judge could not grade."""
    fault: str = ""
    """Why the last of them."""

    def figure(self, indicator: str) -> Figure:
        """The pooled rate, tasks being the sample."""
        mine = [rates.get(indicator, Rate(0, 0)) for rates in self.rates]
        return ratio(self.tasks, [rate.count for rate in mine], [rate.of for rate in mine])

    def score(self, dimension: str) -> Figure:
        """The mean grade of a judged dimension."""
        graded = [(task, one[dimension]) for task, one in zip(self.judged_tasks, self.scores, strict=True)]
        return ratio([task for task, _ in graded], [value for _, value in graded], [1.0] * len(graded))

    def plain(self, dimensions: Sequence[str]) -> dict[str, Any]:
        names = dict.fromkeys(name for rates in self.rates for name in rates)
        return {
            "name": self.name,
            "episodes": len(self.rates),
            "without_words": self.without_words,
            "indicators": {name: asdict(self.figure(name)) for name in names},
            "judged_episodes": len(self.scores),
            "ungraded_episodes": self.ungraded,
            "dimensions": {name: asdict(self.score(name)) for name in dimensions} if self.scores else {},
        }


def indicator_table(series: Sequence[Series]) -> Table:
    """Every indicator at every place."""
    made = Table("Behaviour, from trees", ("", *(one.name for one in series)))
    names = list(dict.fromkeys(name for one in series for rates in one.rates for name in rates))
    for name in names:
        cells = [_rate(one.figure(name)) for one in series]
        made.rows.append((int(name.startswith("skipped: ")), (name.replace("_", " "), *cells)))
    made.notes.extend(f"{name.replace('_', ' ')}: {meaning}" for name, meaning in MEANINGS.items())
    made.notes.append("Rates are pooled over episodes; the standard error takes each task as one cluster.")
    for one in series:
        if one.without_words:
            total = len(one.rates) + one.without_words
            made.notes.append(f"{one.name}: {one.without_words} of {total} episodes have no words and are left out")
    return made


def dimension_table(series: Sequence[Series], dimensions: Mapping[str, str]) -> Table:
    """The judge's grades at every place. ``dimensions``: what each is, by its name."""
    made = Table("Behaviour, graded by a judge (0 worst, 1 best)", ("", *(one.name for one in series)))
    for name in dimensions:
        made.rows.append((0, (name.replace("_", " "), *(with_error(one.score(name)) for one in series))))
    made.notes.extend(f"{name.replace('_', ' ')}: {meaning}" for name, meaning in dimensions.items())
    made.notes.append("Grades of 1 to 5 points as (points - 1) / 4, over a sample of " + _sampled(series) + ".")
    made.notes.extend(
        f"{one.name}: {one.ungraded} episodes got no grade and are left out: {one.fault[:_FAULT]}"
        for one in series
        if one.ungraded
    )
    return made


def radar(series: Sequence[Series], dimensions: Sequence[str], size: int = 420) -> str:
    """The judge's grades as an inline SVG: an axis for each dimension, 0 in the middle, 1 at the rim."""
    middle, rim = size / 2, size / 2 - 90
    angles = [2 * math.pi * index / len(dimensions) for index in range(len(dimensions))]

    def at(share: float, angle: float) -> tuple[float, float]:
        return middle + rim * share * math.sin(angle), middle - rim * share * math.cos(angle)

    def ring(shares: Sequence[float]) -> str:
        places = (at(share, angle) for share, angle in zip(shares, angles, strict=True))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    parts = [
        f'<polygon points="{ring([level] * len(angles))}" fill="none" stroke="currentColor" opacity=".25"/>'
        for level in (0.25, 0.5, 0.75, 1.0)
    ]
    for name, angle in zip(dimensions, angles, strict=True):
        (x, y), (tx, ty) = at(1, angle), at(1.12, angle)
        anchor = "middle" if abs(tx - middle) < 1 else "start" if tx > middle else "end"
        parts.append(
            f'<line x1="{middle}" y1="{middle}" x2="{x:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".25"/>'
        )
        parts.append(
            f'<text x="{tx:.1f}" y="{ty:.1f}" text-anchor="{anchor}" dominant-baseline="middle" font-size="12" '
            f'fill="currentColor">{html.escape(name.replace("_", " "))}</text>'
        )
    for index, one in enumerate(one for one in series if one.scores):
        colour = _COLOURS[index % len(_COLOURS)]
        # A dimension without a grade cannot be: every graded episode has all of them.
        points = ring([one.score(name).value or 0.0 for name in dimensions])
        parts.append(
            f'<polygon points="{points}" fill="{colour}" fill-opacity=".18" stroke="{colour}" stroke-width="2">'
            f"<title>{html.escape(one.name)}</title></polygon>"
        )
        parts.append(
            f'<rect x="8" y="{8 + 18 * index}" width="12" height="12" fill="{colour}"/>'
            f'<text x="26" y="{18 + 18 * index}" font-size="12" fill="currentColor">{html.escape(one.name)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}" '
        f'role="img" aria-label="Behaviour by dimension">{"".join(parts)}</svg>'
    )


def behaviour_page(tables: Sequence[Table], picture: str = "") -> str:
    """One self-contained page."""
    return page(tables[0], *tables[1:], picture=picture)


def _rate(figure: Figure) -> str:
    return "no chance" if figure.value is None else f"{with_error(figure)} of {figure.graded}"


def _sampled(series: Sequence[Series]) -> str:
    return ", ".join(f"{len(one.scores)} episodes of {one.name}" for one in series)
