"""What run folders hold, read as leniently as a report needs.

Invariant: whatever a file holds, the figures of its good lines are in and every line that is left out is in ``notes``.
A figure that is missing, null or not finite is NaN; nothing is made up in its place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from actors.one_writer import is_held
from algos.reporting.stages import derived

Row = dict[str, float]
_BEFORE_RESUME = re.compile(r"config\.until_step_(\d+)\.yaml")
_HUGE = 1e100
"""From here on a figure is as good as infinite; sums and squares of smaller ones stay finite."""
_MOST_STEPS = 10**9
_OF_THE_LINE = ("step", "policy_version")
"""What the line of an evaluation beside the training says of when it ended."""
_TOLD = 5
"""Faults of one file that are told one by one."""


class ReportError(ValueError):
    """A folder that is none of a run; says what was got, what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that a resume changed after ``step``: (key, before, after)."""

    step: int
    settings: list[tuple[str, Any, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder."""

    folder: Path
    settings: dict[str, Any]
    """By dotted key; empty where ``config.yaml`` is missing or damaged."""
    rows: list[Row]
    """The lines of ``metrics.jsonl`` by ascending step, figures only, with those of ``derived``.

    An evaluation beside the training has a line of its own, and its figures belong to the step at which it began.
    """
    episodes: list[dict[str, Any]]
    """The lines of ``episodes.jsonl``."""
    changes: list[Change]
    state: Literal["done", "running", "stopped", "failed", "empty"]
    told: str
    """The state in words."""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def last_step(self) -> int:
        """Training steps in the log."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def values(self, key: str) -> dict[int, float]:
        """A figure by step, of the steps that logged it."""
        return {int(row["step"]): row[key] for row in self.rows if key in row}


def read_run(folder: Path) -> Run:
    """Raises ReportError where the folder is none of a run."""
    folder = folder.resolve()
    if not (folder / "config.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise ReportError(f"{folder}: {_missing(folder)}")
    notes: list[str] = []
    settings = _settings(folder / "config.yaml", notes)
    rows = _rows(folder / "metrics.jsonl", notes)
    episodes = [row for _, row in _lines(folder / "episodes.jsonl", notes) if isinstance(row.get("id"), str)]
    state, told = _state(folder, settings, rows)
    return Run(folder, settings, rows, episodes, _changes(folder, settings, notes), state, told, notes)


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder; expected a run folder, as python -m algos.run makes them"
    inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    hint = f", such as {inside[0]} in it ({len(inside)} there: {folder}/*)" if inside else ""
    return f"got a folder without config.yaml and metrics.jsonl, expected a run folder{hint}"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= flat(inner, f"{prefix}.{name}" if prefix else str(name))
    return found


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"{path.name} is missing: the settings are not known")
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0]
        notes.append(f"{path.name} is not valid YAML and is left out: {first}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name}: got {type(found).__name__}, expected a mapping of settings; it is left out")
        return {}
    return flat(found)


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, row) of what can be read; the rest is noted."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    faults = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            cut = number == len(lines)
            faults.append(f"line {number} is {'cut short' if cut else 'not JSON'}")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            faults.append(f"line {number} is no row of names and values")
    _tell(path, faults, notes)


def _tell(path: Path, faults: list[str], notes: list[str]) -> None:
    notes += [f"{path.name}: {fault}; left out" for fault in faults[:_TOLD]]
    if len(faults) > _TOLD:
        notes.append(f"{path.name}: {len(faults) - _TOLD} more lines are left out")


def _rows(path: Path, notes: list[str]) -> list[Row]:
    by_step: dict[int, Row] = {}
    numbers: dict[int, int] = {}
    faults = []
    beside: list[tuple[int, Row]] = []
    for number, row in _lines(path, notes):
        key = "eval/step" if "eval/step" in row else "step"
        step = row.get(key)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MOST_STEPS:
            faults.append(f"line {number}: {key} is {str(step)[:40]!r}, expected a number of steps")
            continue
        figures = {key: _number(value) for key, value in row.items() if _is_figure(value)}
        if key == "eval/step":
            beside.append((step, {key: value for key, value in figures.items() if key not in _OF_THE_LINE}))
            continue
        if step in by_step:
            faults.append(f"line {numbers[step]}: step {step} comes again in line {number}, which counts")
        numbers[step] = number
        by_step[step] = figures | derived(figures)
    for step, figures in beside:
        by_step.setdefault(step, {"step": float(step)}).update(figures)
    _tell(path, faults, notes)
    return [by_step[step] for step in sorted(by_step)]


def _is_figure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) < _HUGE else math.nan


def _changes(folder: Path, settings: dict[str, Any], notes: list[str]) -> list[Change]:
    kept = sorted((int(name[1]), path) for path in folder.iterdir() if (name := _BEFORE_RESUME.fullmatch(path.name)))
    parts = [(step, _settings(path, notes)) for step, path in kept] + [(-1, settings)]
    changes = []
    for (step, old), (_, new) in pairwise(parts):
        if old and new:
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            changes.append(Change(step, [(key, old.get(key), new.get(key)) for key in keys]))
    return changes


def _state(folder: Path, settings: dict[str, Any], rows: list[Row]) -> tuple[Any, str]:
    steps = settings.get("steps")
    last = int(rows[-1]["step"]) if rows else 0
    of = f" of {steps}" if isinstance(steps, int) else ""
    if rows and isinstance(steps, int) and last >= steps:
        return "done", f"all {steps} steps done" if steps else "evaluation only, done"
    if is_held(folder):
        return "running", f"going on: step {last}{of} so far"
    if fault := _fault(folder):
        return "failed", f"stopped by an error after step {last}{of}: {fault}"
    if not rows:
        return "empty", "no step and no evaluation has ended yet"
    return "stopped", f"stopped after step {last}{of}"


def _fault(folder: Path) -> str:
    """What the newest part of the run was stopped by, in a line."""
    path, log = folder / "fault.txt", folder / "metrics.jsonl"
    if not path.is_file() or (log.is_file() and path.stat().st_mtime < log.stat().st_mtime):
        return ""
    said = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return said[-1][:200] if said else ""
