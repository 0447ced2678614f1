"""From figures to pixels: domains, ticks and the two axes of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from algos.reporting.markup import tag
from algos.reporting.numbers import figure

LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 10.0, 24.0
_ROOM_ACROSS, _ROOM_UP = 52.0, 32.0
"""Pixels that a label needs."""
_LETTERS = 7
"""Of a label beside the axis."""
_DECADES = 3
"""Positive figures that span more than these are drawn on a logarithmic axis."""


_NOTHING = 1e-200
"""A difference that is none: a tenth of it is still a number."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Pixels of a chart."""

    width: float = 400.0
    height: float = 190.0

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def floor(self) -> float:
        return self.height - BOTTOM


SMALL, LARGE = Frame(), Frame(620.0, 240.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear or logarithmic map of ``[low, high]`` to pixels ``[start, end]``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            low = math.log(self.low)
            share = (math.log(max(value, self.low)) - low) / (math.log(self.high) - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, room: float) -> list[float]:
        """Round figures inside of the domain, ``room`` pixels apart or more."""
        count = max(1.0, abs(self.end - self.start) / room)
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            each = max(1, math.ceil((last - first) / count))
            return [10.0**power for power in range(first, last + 1, each)]
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def across(steps: Sequence[float], frame: Frame) -> Scale:
    """The axis of the steps."""
    low, high = (min(steps), max(steps)) if steps else (0.0, 1.0)
    return Scale(low, high if high > low else low + 1.0, LEFT, frame.right)


def up(values: Sequence[float], frame: Frame, within: tuple[float, float] | None = None, zero: bool = False) -> Scale:
    """The axis of the figures. ``within``: beyond it figures are drawn at the edge; ``zero``: the axis begins there."""
    there = [value for value in values if math.isfinite(value)] or [0.0]
    if within:
        there = [min(within[1], max(within[0], value)) for value in there]
    low, high = min(there), max(there)
    if low > 0 and not zero and high / low > 10**_DECADES:
        return Scale(low, high, frame.floor, TOP, log=True)
    if zero:
        low = min(0.0, low)
    if high - low <= max(1e-9 * max(abs(high), abs(low)), _NOTHING):
        room = abs(high) * 0.5 or 1.0
        low, high = (low - room if low < 0 or not (zero or low == 0) else low), high + room
    room = 0.06 * (high - low)
    return Scale(low - (room if low else 0.0), high + (room if high else 0.0), frame.floor, TOP)


def fixed(low: float, high: float, frame: Frame) -> Scale:
    """An axis of figures whose range is known."""
    return Scale(low, high, frame.floor, TOP)


def drawn(x: Scale, y: Scale, frame: Frame, percent: bool = False) -> list[Element]:
    """Grid lines and labels."""
    found = []
    ticks = y.ticks(_ROOM_UP)
    for value, said in zip(ticks, labels(ticks, percent), strict=True):
        at = y(value)
        found.append(tag("line", class_="grid", x1=LEFT, x2=frame.right, y1=at, y2=at))
        found.append(tag("text", said, class_="tick", x=LEFT - 6, y=at + 4, text_anchor="end"))
    for value in x.ticks(_ROOM_ACROSS):
        if value == int(value):
            found.append(
                tag("text", figure(value), class_="tick", x=x(value), y=frame.floor + 16, text_anchor="middle")
            )
    found.append(tag("line", class_="axis", x1=LEFT, x2=frame.right, y1=frame.floor, y2=frame.floor))
    return found


def labels(ticks: Sequence[float], percent: bool = False) -> list[str]:
    """No two alike: with more digits where they lie close together or, where these have no room, above the lowest."""
    nothing = 1e-6 * min((after - before for before, after in pairwise(ticks)), default=0.0)
    shown = [(100 * value if percent else value) if abs(value) > nothing else 0.0 for value in ticks]
    said = [figure(value) for value in shown]
    if len(set(said)) < len(said):
        said = [f"{value:.5g}" for value in shown]
    if len(set(said)) < len(said) or max(map(len, said), default=0) > _LETTERS:
        said = [figure(value) if value == shown[0] else f"+{figure(value - shown[0])}" for value in shown]
    return [f"{text}%" if percent else text for text in said]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= rough * 0.999)
