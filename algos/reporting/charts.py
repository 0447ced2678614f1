"""Charts as SVG.

Own code in place of a plotting package: what is needed is lines, bands and stacked bars on two axes, in the colours of
the page (light and dark, by its style sheet) and with the figures at hand for its script. A package's SVG carries its
own colours and texts as outlines, and would be one more thing to install on every machine that trains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from algos.reporting import axes
from algos.reporting.groups import Curve
from algos.reporting.markup import tag
from algos.reporting.numbers import figure, percent

COLOURS = 8
"""Colours of the style sheet."""
_BARS = 80
"""Bars side by side that are still told apart."""
_DOTTED = 12
"""Points up to which each is marked, where they are not of every step."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve with its look: the number of its colour and of its dash."""

    label: str
    curve: Curve
    colour: int
    dash: int = 0

    @property
    def style(self) -> str:
        return f"c{self.colour % COLOURS} d{(self.dash + self.colour // COLOURS) % 4}"


@dataclass(frozen=True, slots=True)
class Look:
    """How a chart of lines is drawn."""

    percent: bool = False
    within: tuple[float, float] | None = None
    """Beyond it, figures are drawn at the edge."""
    unit_range: bool = False
    """The axis is that of a reward: 0 to 1, where no figure lies outside."""
    zero: bool = False
    """The axis begins at 0."""
    large: bool = False

    @property
    def frame(self) -> axes.Frame:
        return axes.LARGE if self.large else axes.SMALL


def lines(
    title: str,
    about: str,
    shown: Sequence[Line],
    look: Look,
    keys: Sequence[tuple[str, str]] = (),
    marks: Sequence[int] = (),
) -> Element:
    """A figure of curves with bands; ``keys`` of its legend are (label, style), ``marks`` are steps with a line across.

    Of the curves each has a point.
    """
    frame = look.frame
    x = axes.across([step for line in shown for step in line.curve.steps], frame)
    values = [value for line in shown for part in (line.curve.low, line.curve.high) for value in part]
    inside = all(-0.001 <= value <= 1.001 for value in values if math.isfinite(value))
    y = axes.fixed(0.0, 1.0, frame) if look.unit_range and inside else axes.up(values, frame, look.within, look.zero)
    parts = axes.drawn(x, y, frame, look.percent)
    for mark in marks:
        if x.low <= mark <= x.high:
            parts.append(tag("line", class_="mark", x1=x(mark), x2=x(mark), y1=axes.TOP, y2=y.start))
    parts += [band for line in shown if (band := _band(line, x, y)) is not None]
    parts += [part for line in shown for part in _stroke(line, x, y)]
    legend = [_key(label, style, True) for label, style in keys]
    return _figure(title, about, legend, parts, _hover(shown, look), frame)


def bars(
    title: str, about: str, layers: Sequence[tuple[str, int, Curve]], unit: str = "", owner: Element | None = None
) -> Element | None:
    """A figure of stacked bars, one for each step: (label, colour, curve) from the bottom up. None: nothing to draw.

    ``owner`` stands below the title and says whose the figures are.
    """
    layers = [layer for layer in layers if any(value > 0 for value in layer[2].mean if math.isfinite(value))]
    steps = sorted({step for _, _, curve in layers for step in curve.steps})
    if not steps:
        return None
    each = math.ceil(len(steps) / _BARS)
    together = [steps[start : start + each] for start in range(0, len(steps), each)]
    heights = [[_mean(curve, part) for part in together] for _, _, curve in layers]
    frame = axes.SMALL
    x = axes.Scale(steps[0] - 0.5, steps[-1] + 0.5, axes.LEFT, frame.right)
    y = axes.up([sum(column) for column in zip(*heights, strict=True)], frame, zero=True)
    parts = axes.drawn(x, y, frame)
    base = [0.0] * len(together)
    for (_, colour, _), row in zip(layers, heights, strict=True):
        path = []
        for number, (part, value) in enumerate(zip(together, row, strict=True)):
            if value > 0:
                path.append(_bar(x(part[0] - 0.46), x(part[-1] + 0.46), y(base[number]), y(base[number] + value)))
            base[number] += value
        parts.append(tag("path", class_=f"fill c{colour % COLOURS}", d="".join(path)))
    legend = [_key(label, f"c{colour % COLOURS}", False) for label, colour, _ in layers]
    told = [
        {"name": label, "c": f"c{colour % COLOURS}", "y": [f"{figure(value)}{unit}" for value in row]}
        for (label, colour, _), row in zip(layers, heights, strict=True)
    ]
    hover = {"x": [_said(part) for part in together], "at": [x(_middle(part)) for part in together], "lines": told}
    return _figure(title, about, legend, parts, hover, frame, owner)


def share_bar(label: str, parts: Sequence[tuple[str, int, float]]) -> Element:
    """One bar of the whole, cut into (label, colour, amount)."""
    whole = sum(amount for _, _, amount in parts) or 1.0
    at = 0.0
    cuts = []
    for name, colour, amount in parts:
        wide = 1000 * amount / whole
        rect = tag("rect", x=at, y=0, width=max(0.0, wide - 1), height=18, class_=f"fill c{colour % COLOURS}")
        rect.append(tag("title", f"{name}: {percent(amount / whole)}"))
        cuts.append(rect)
        at += wide
    bar = tag("svg", cuts, viewBox="0 0 1000 18", preserveAspectRatio="none", role="img", aria_label=label)
    return tag("div", bar, class_="share")


def sparkline(curves: Sequence[tuple[int, Curve]]) -> Element:
    """The course of a figure without axes, for a row of a table; (colour, curve)."""
    high, wide = 18.0, 110.0
    steps = [step for _, curve in curves for step in curve.steps]
    values = [value for _, curve in curves for value in curve.mean if math.isfinite(value)]
    low, top = min(values, default=0.0), max(values, default=1.0)
    first, last = min(steps, default=0.0), max(steps, default=1.0)
    x = axes.Scale(first, last if last > first else first + 1, 1, wide - 1)
    y = axes.Scale(low, top if top > low else low + max(1.0, abs(low)), high - 2, 2)
    drawn = [
        tag("path", class_=f"line c{colour % COLOURS}", d=_path(curve.steps, curve.mean, x, y))
        for colour, curve in curves
    ]
    return tag("svg", drawn, viewBox=f"0 0 {wide:.0f} {high:.0f}", class_="spark", aria_hidden="true")


def named(label: str, colour: int) -> Element:
    """A group's name with its line."""
    return tag("span", swatch(f"c{colour % COLOURS} d{colour // COLOURS % 4}", True), label, class_="key")


def swatch(style: str, line: bool) -> Element:
    """The sign of a curve or a layer in a legend."""
    shape = (
        tag("path", class_=f"line {style}", d="M0 5H22")
        if line
        else tag("rect", class_=f"fill {style}", width=10, height=10)
    )
    return tag("svg", shape, viewBox=f"0 0 {22 if line else 10} 10", class_="swatch", aria_hidden="true")


def _key(label: str, style: str, line: bool) -> Element:
    return tag("span", swatch(style, line), label, class_="key")


def _figure(
    title: str,
    about: str,
    legend: list[Element],
    parts: list[Element],
    hover: dict[str, object],
    frame: axes.Frame,
    owner: Element | None = None,
) -> Element:
    guide = tag("line", class_="guide", x1=0, x2=0, y1=axes.TOP, y2=frame.floor)
    svg = tag(
        "svg",
        [*parts, guide],
        viewBox=f"0 0 {frame.width:.0f} {frame.height:.0f}",
        role="img",
        aria_label=f"{title}, by step",
    )
    head = tag("figcaption", tag("h3", title), owner, tag("p", about) if about else None)
    keys = tag("div", legend, class_="keys") if legend else None
    return tag("figure", head, keys, svg, class_="chart", data_hover=json.dumps(hover, separators=(",", ":")))


def _stroke(line: Line, x: axes.Scale, y: axes.Scale) -> list[Element]:
    curve = line.curve
    drawn = [tag("path", class_=f"line {line.style}", d=_path(curve.steps, curve.mean, x, y))]
    there = [(step, value) for step, value in zip(curve.steps, curve.mean, strict=True) if math.isfinite(value)]
    if len(there) <= _DOTTED and there[-1][0] - there[0][0] >= 2 * (len(there) - 1):
        drawn += [tag("circle", class_=f"dot {line.style}", cx=x(step), cy=y(value), r=2.8) for step, value in there]
    return drawn


def _band(line: Line, x: axes.Scale, y: axes.Scale) -> Element | None:
    curve = line.curve
    if not any(low < high for low, high in zip(curve.low, curve.high, strict=True)):
        return None
    outline = []
    for part in _unbroken(curve.mean):
        there = [(curve.steps[at], curve.low[at], curve.high[at]) for at in part]
        edge = [(x(step), y(high)) for step, _, high in there] + [(x(step), y(low)) for step, low, _ in reversed(there)]
        outline.append("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in edge) + "Z")
    return tag("path", class_=f"band {line.style}", d="".join(outline))


def _path(steps: Sequence[float], values: Sequence[float], x: axes.Scale, y: axes.Scale) -> str:
    """Lines through the points; a point that is missing is a gap."""
    return "".join(
        "M" + "L".join(f"{x(steps[at]):.1f} {y(values[at]):.1f}" for at in part) for part in _unbroken(values)
    )


def _unbroken(values: Sequence[float]) -> list[list[int]]:
    """Positions of the stretches without a missing value."""
    found: list[list[int]] = [[]]
    for at, value in enumerate(values):
        if math.isfinite(value):
            found[-1].append(at)
        elif found[-1]:
            found.append([])
    return [part for part in found if part]


def _bar(left: float, right: float, bottom: float, top: float) -> str:
    return f"M{left:.1f} {bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}Z"


def _mean(curve: Curve, steps: Sequence[float]) -> float:
    inside = [
        value
        for step, value in zip(curve.steps, curve.mean, strict=True)
        if steps[0] <= step <= steps[-1] and math.isfinite(value)
    ]
    return sum(inside) / len(inside) if inside else 0.0


def _middle(steps: Sequence[float]) -> float:
    return (steps[0] + steps[-1]) / 2


def _said(steps: Sequence[float]) -> str:
    return f"{steps[0]:.0f}" if len(steps) == 1 else f"{steps[0]:.0f} to {steps[-1]:.0f}"


def _hover(shown: Sequence[Line], look: Look) -> dict[str, object]:
    """What the page's script shows of the step under the pointer."""
    steps = sorted({step for line in shown for step in line.curve.steps})
    x = axes.across(steps, look.frame)
    told = []
    for line in shown:
        by_step = dict(zip(line.curve.steps, range(len(line.curve.steps)), strict=True))
        texts = [_point(line.curve, by_step[step], look) if step in by_step else None for step in steps]
        told.append({"name": line.label, "c": line.style, "y": texts})
    return {"x": [f"{step:.0f}" for step in steps], "at": [round(x(step), 1) for step in steps], "lines": told}


def _point(curve: Curve, at: int, look: Look) -> str:
    said = percent if look.percent else figure
    text = said(curve.mean[at])
    if curve.runs[at] > 1:
        text += f"  ({said(curve.low[at])} to {said(curve.high[at])}, {curve.runs[at]} seeds)"
    return text
