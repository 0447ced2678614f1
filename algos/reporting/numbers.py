"""How figures are written: three significant digits, and no more zeros than people read."""

from __future__ import annotations

import math

_BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
_HUGE = 1e15
_SMALL = 1e-3
_TENTH = 0.1
_MINUTE = 60.0
_HOUR = 3600.0


def figure(value: float) -> str:
    """``0.156``, ``12.3k``, ``2.1e-5``; a dash for what is missing."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= _HUGE or size < _SMALL:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+", "e").replace(".0e", "e")
    for limit, letter in _BIG:
        if size >= limit:
            return f"{_digits(value / (1e3 if letter == 'k' else limit))}{letter}"
    return _digits(value)


def _digits(value: float) -> str:
    size = abs(value)
    if value == int(value) or size >= 1000:
        return f"{value:.0f}"
    text = f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}" if size >= 1 else f"{value:.3f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def reward(value: float) -> str:
    """Two digits after the point, so that columns line up."""
    return f"{value:.2f}" if math.isfinite(value) else "–"


def percent(value: float) -> str:
    """A share: ``73 %``, ``8.4 %``, ``0.03 %``."""
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:.0f} %" if abs(value) >= _TENTH else f"{float(f'{100 * value:.2g}'):g} %"


def duration(seconds: float) -> str:
    """``7.9 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < _MINUTE:
        return f"{figure(seconds)} s"
    whole = round(seconds)
    if seconds < _HOUR:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
