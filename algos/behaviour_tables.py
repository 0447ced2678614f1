"""Behaviour before and after, as tables and a picture."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from algos.behaviour import MEANINGS, Rate
from algos.estimates import Figure, ratio
from algos.score_tables import Table, page, plain, with_error

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#bbbb44")
_RIM, _ACROSS, _LINE = 130.0, 600.0, 20.0
"""Pixels of the picture: radius and width, with room for the words beside the rim, and the height of a line."""
_LEVELS = (0.25, 0.5, 0.75, 1.0)
_FAINT = 'stroke="currentColor" opacity=".25"'
_NAME = 70
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


def radar(series: Sequence[Series], dimensions: Sequence[str]) -> str:
    """The judge's grades as an inline SVG: an axis for each dimension, 0 in the middle, 1 at the rim."""
    shown = [one for one in series if one.scores]
    x0, y0 = _ACROSS / 2, _RIM + 2 * _LINE
    bottom = y0 + _RIM + 2 * _LINE
    angles = [2 * math.pi * index / len(dimensions) for index in range(len(dimensions))]

    def at(share: float, angle: float) -> tuple[float, float]:
        return x0 + _RIM * share * math.sin(angle), y0 - _RIM * share * math.cos(angle)

    def ring(shares: Sequence[float], look: str) -> str:
        places = (at(share, angle) for share, angle in zip(shares, angles, strict=True))
        return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" {look}/>'

    parts = [ring([level] * len(angles), f'fill="none" {_FAINT}') for level in _LEVELS]
    for name, angle in zip(dimensions, angles, strict=True):
        (x, y), (tx, ty) = at(1, angle), at(1.12, angle)
        anchor = "middle" if abs(tx - x0) < 1 else "start" if tx > x0 else "end"
        parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x:.1f}" y2="{y:.1f}" {_FAINT}/>')
        parts.append(_text(tx, ty, name.replace("_", " "), anchor))
    parts += [_text(x0 + 4, y0 - _RIM * level, f"{level:g}", "start", 'opacity=".6"') for level in _LEVELS]
    for index, one in enumerate(shown):
        colour = _COLOURS[index % len(_COLOURS)]
        # A dimension without a grade cannot be: every graded episode has all of them.
        shares = [one.score(name).value or 0.0 for name in dimensions]
        parts.append(ring(shares, f'fill="{colour}" fill-opacity=".1" stroke="{colour}" stroke-width="2"'))
        y = bottom + _LINE * index
        parts.append(f'<rect x="0" y="{y - 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(20, y, plain(one.name, _NAME), "start"))
    high = bottom + _LINE * len(shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_ACROSS} {high}" width="{_ACROSS}" '
        f'style="max-width: 100%; height: auto" font-size="12" fill="currentColor" role="img" '
        f'aria-label="Behaviour by dimension">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="middle"'
    return f"<text {place} {more}>{html.escape(words)}</text>"


def behaviour_page(tables: Sequence[Table], picture: str = "") -> str:
    """One self-contained page."""
    return page(tables[0], *tables[1:], picture=picture)


def _rate(figure: Figure) -> str:
    return "no chance" if figure.value is None else f"{with_error(figure)} of {figure.graded}"


def _sampled(series: Sequence[Series]) -> str:
    return ", ".join(f"{len(one.scores)} episodes of {one.name}" for one in series)
