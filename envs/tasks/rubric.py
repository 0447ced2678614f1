"""What a judge grades by: ``rubric.json`` in a task folder, beside ``data_entry.json``.

    {"criteria": [{"id": "total", "text": "The total is 91.", "weight": 2, "scale": "pass"}],
     "share": 1.0, "expected": "What a good outcome looks like."}

``scale`` is ``pass`` (met or not), ``fraction`` (0 to 1) or ``points`` (1 to 5, as quarters from 0 to 1). ``share`` is
the judge's part of the grade; the rest is that of ``reward/reward.sh``, which a task with share 1 need not have.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from envs.tasks.fields import Fields, line_of, parse_json, read_text

Scale = Literal["pass", "fraction", "points"]
SCALES: tuple[Scale, ...] = ("pass", "fraction", "points")
FILE = "rubric.json"
_FIELDS = ("criteria", "share", "expected")
_CRITERION = ("id", "text", "weight", "scale")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that is asked of the outcome."""

    id: str
    text: str
    weight: float = 1.0
    scale: Scale = "pass"


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria with weights. ``expected`` describes a good outcome, for the judge alone."""

    criteria: tuple[Criterion, ...]
    share: float = 1.0
    expected: str = ""

    def plain(self) -> dict[str, Any]:
        """What ``rubric.json`` holds."""
        return asdict(self) | {"criteria": [asdict(criterion) for criterion in self.criteria]}


def read_rubric(path: Path) -> Rubric:
    """The rubric in ``path``. Raises TaskError with file, line and field."""
    text = read_text(path)
    return rubric_in(Fields(parse_json(text, path), lambda name: f"{path}:{line_of(text, name)}"))


def rubric_in(fields: Fields) -> Rubric:
    """The rubric that ``fields`` are those of. Raises TaskError."""
    fields.only(_FIELDS)
    criteria = [_criterion(fields, number, entry) for number, entry in enumerate(fields.of("criteria", list))]
    return rubric_of(fields, criteria, fields.number("share", 1.0), fields.text("expected", ""))


def rubric_of(fields: Fields, criteria: list[Criterion], share: float, expected: str, name: str = "criteria") -> Rubric:
    """A rubric that can be graded by; ``name`` is the field that its faults are those of. Raises TaskError."""
    if not criteria:
        raise fields.fault(name, " is empty; expected at least one criterion")
    if len({criterion.id for criterion in criteria}) < len(criteria):
        raise fields.fault(name, ": two criteria have the same id")
    total = sum(criterion.weight for criterion in criteria)
    if not total > 0:
        raise fields.fault(name, ": every weight is 0; expected one above it")
    if not math.isfinite(total):
        raise fields.fault(name, ": the weights have no finite sum; expected smaller ones")
    if not 0 < share <= 1:
        raise fields.fault("share", f": got {share}, expected more than 0 and at most 1")
    return Rubric(tuple(criteria), share, expected)


def _criterion(fields: Fields, number: int, entry: object) -> Criterion:
    inner = fields.entry("criteria", number, entry)
    inner.only(_CRITERION)
    scale: Any = inner.choice("scale", SCALES, "pass")
    return Criterion(inner.identifier("id"), inner.text("text"), inner.number("weight", 1.0), scale)
