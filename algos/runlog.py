"""The run folder's rows: ``metrics.jsonl`` and ``episodes.jsonl``, the terminal, and Weights & Biases.

Invariant: a line is written whole and flushed before the next step begins; after ``rewind(n)`` the files hold
exactly what a run of ``n`` steps would have written, and the episodes of later steps that are named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from algos.display import evaluated
from algos.run_folder import RunError
from algos.tracking import Tracker
from configs.schema import RunConfig

_REMEDY = "take the line out to go on without what it told"
_NUMBERS = ("step", "run")


class Display(Protocol):
    """What people see while a run goes on."""

    def step(self, row: dict[str, Any]) -> None: ...

    def evaluation(self, done: int, total: int, name: str) -> None: ...

    def episode(self, row: dict[str, Any]) -> None: ...


class RunLog:
    """Writes rows to files, shows them, and hands the metrics to W&B."""

    def __init__(self, folder: Path, config: RunConfig, display: Display) -> None:
        self._display = display
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._episodes = (folder / "episodes.jsonl").open("a", encoding="utf-8")
        self._folder = folder
        self._tracker = None if config.wandb.mode == "disabled" else Tracker(folder, config)

    def episode(self, row: dict[str, Any]) -> None:
        """One ended episode."""
        _write(self._episodes, row)
        self._display.episode(row)

    def step(self, row: dict[str, Any]) -> None:
        """One step's metrics; step 0 is the policy before training."""
        _write(self._metrics, row)
        self._display.step(row)
        if self._tracker is not None:
            self._tracker.log(row)

    def evaluation(self, done: int, total: int, name: str) -> None:
        """Progress of an evaluation."""
        self._display.evaluation(done, total, name)

    def close(self) -> None:
        """Flush and close everything."""
        self._metrics.close()
        self._episodes.close()
        if self._tracker is not None:
            self._tracker.finish(read_jsonl(self._folder / "metrics.jsonl"))


def read_jsonl(path: Path, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """All whole lines of a file of rows; a last line that a kill cut short is left out.

    Raises RunError for a line that is damaged, or in which one of ``keys`` is missing or cannot be what it is called.
    """
    if not path.exists():
        return []
    # Not splitlines: a text in a row may hold a separator that is no line end in JSON.
    return [_row(f"{path}, line {at}", text, keys) for at, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1)]


def _row(where: str, text: bytes, keys: Collection[str]) -> dict[str, Any]:
    try:
        row = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: got no JSON ({error}), expected a row; {_REMEDY}") from None
    if not isinstance(row, dict):
        raise RunError(f"{where}: got {str(row)[:40]}, expected names with values; {_REMEDY}")
    if missing := [key for key in keys if key not in row]:
        raise RunError(f"{where}: got no {missing[0]!r}, expected a row with {', '.join(keys)}; {_REMEDY}")
    for key in keys:
        if expected := _unlike(key, row[key]):
            raise RunError(f"{where}: {key}: got {str(row[key])[:40]}, expected {expected}; {_REMEDY}")
    return row


def _unlike(key: str, value: Any) -> str:
    """What was expected; empty where ``value`` is that."""
    if key == "reward":
        # No number is between these where it is not finite.
        fits = value is None or (isinstance(value, int | float) and 0 <= value <= 1)
        return "" if fits else "a number in [0, 1], or null"
    kind, called = (int, "a whole number") if key in _NUMBERS else (str, "a text")
    return "" if isinstance(value, kind) else called


def rewind(folder: Path, steps: int, episodes: Collection[str] = ()) -> None:
    """Keep the rows of the first ``steps`` steps, and of these ``episodes``, by id, of later ones.

    Episodes of an evaluation stay where its figures do. A resumed run writes all others again.
    """
    metrics = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] <= steps]
    of = measured(metrics)
    ended = [row for row in read_jsonl(folder / "episodes.jsonl") if _belongs(row, steps, of) or row["id"] in episodes]
    for name, rows in (("metrics.jsonl", metrics), ("episodes.jsonl", ended)):
        partial = folder / f".{name}.partial"
        partial.write_text("".join(line(row) for row in rows), encoding="utf-8")
        partial.replace(folder / name)


def measured(rows: list[dict[str, Any]]) -> set[int]:
    """The numbers of steps after which the evaluations began that ``rows`` hold the figures of."""
    return {row.get("eval/step", row["step"]) for row in evaluated(rows)}


def _belongs(row: dict[str, Any], steps: int, evaluations: set[int]) -> bool:
    """Training rows carry the step that they are trained in, evaluation rows the number of steps before them."""
    return row["step"] < steps if row["split"] == "train" else row["step"] in evaluations


def line(row: Mapping[str, Any]) -> str:
    """A row as it stands in a file."""
    # Agents have a say in the texts: half of a surrogate pair, which no file holds, must not end a run.
    return json.dumps(_finite(row), ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"


def _write(file: Any, row: dict[str, Any]) -> None:
    file.write(line(row))
    file.flush()


def _finite(value: Any) -> Any:
    """JSON has no NaN; a figure that does not exist is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
