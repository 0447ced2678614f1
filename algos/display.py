"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_FAILED = re.compile(r"episodes/failed|eval/[^/]+/failed")
_TASKS = re.compile(r"eval/[^/]+/tasks")
_REASON = 200
_REASONS = 5
_STAGES = {
    "rollout": "seconds/rollout_wait",
    "train": "seconds/train",
    "update": "seconds/update",
    "eval": "seconds/eval",
}


def sparkline(values: list[float], width: int = 60) -> str:
    """Values in [0, 1] as block characters, the newest ``width`` of them; a missing one is a dot."""
    return "".join(
        "·" if math.isnan(v) else _BLOCKS[round(max(0.0, min(1.0, v)) * (len(_BLOCKS) - 1))] for v in values[-width:]
    )


class LiveDisplay:
    """Progress, reward sparkline, stage times and counts. Use as a context manager around the run."""

    def __init__(self, steps: int, title: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self._title = title
        self._rewards: list[float] = []
        self._greedy: list[tuple[int, float]] = []
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._counts = {"completed": 0, "truncated": 0, "failed": 0, "dropped": 0}
        self._note = "starting"
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]step {task.completed}/{task.total}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._task = self._progress.add_task("train", total=steps)
        self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """What is going on right now."""
        self._note = text
        self._refresh(force=True, plain=text)

    def episode(self, row: dict[str, Any]) -> None:
        """An ended episode."""
        self._counts[row["status"]] += 1
        if row["split"] == "train":
            self._note = f"rollouts of step {row['step'] + 1}"
        self._refresh()

    def evaluation(self, done: int, total: int, name: str) -> None:
        """Progress of an evaluation."""
        self._note = f"evaluating {name}: {done}/{total}"
        self._refresh(plain=self._note)

    def step(self, row: dict[str, Any]) -> None:
        """A finished step, or the evaluation before the first."""
        greedy = row.get("eval/heldout/reward_greedy")
        if greedy is not None:
            self._greedy.append((row.get("eval/step", row["step"]), greedy))
        for stage, key in _STAGES.items():
            self._seconds[stage] += row.get(key, 0.0)
        self._progress.update(self._task, completed=row["step"])
        reward = row.get("train/reward")
        if reward is not None:
            self._rewards.append(reward)
        if not self._console.is_terminal:
            parts = [f"step {row['step']}/{self._steps}"]
            parts += [f"reward {reward:.2f}"] if reward is not None else []
            parts += [f"held-out greedy {greedy:.2f}"] if greedy is not None else []
            parts += [f"{row['seconds/step']:.1f} s"] if "seconds/step" in row else []
            failed = sum(value for key, value in row.items() if _FAILED.fullmatch(key))
            parts += [f"{failed} episodes failed"] if failed else []
            self.say("  ".join(parts))
            self._last_line = time.monotonic()
        self._refresh(force=True)

    def _refresh(self, force: bool = False, plain: str | None = None) -> None:
        now = time.monotonic()
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=force)
        elif plain is not None and now - self._last_line > 5:
            self.say(plain)
            self._last_line = now

    def _render(self) -> Panel:
        lines = Table.grid(padding=(0, 2))
        lines.add_column(style="bold")
        lines.add_column()
        if self._rewards:
            lines.add_row("reward", f"{sparkline(self._rewards)}  {self._rewards[-1]:.2f}")
        if self._greedy:
            lines.add_row("held out, greedy", "  ".join(f"{step}: {value:.2f}" for step, value in self._greedy))
        total = sum(self._seconds.values())
        if total:
            lines.add_row("time", "  ".join(f"{k} {v:.0f} s ({v / total:.0%})" for k, v in self._seconds.items()))
        lines.add_row("episodes", "  ".join(f"{n} {name}" for name, n in self._counts.items() if n))
        lines.add_row("now", self._note)
        return Panel(Group(self._progress, lines), title=self._title, title_align="left")


def before_after(rows: list[dict[str, Any]]) -> Table | None:
    """The first and the last evaluation side by side, or the only one, by set and family; None without any."""
    columns, data = evaluations(rows)
    if not data:
        return None
    last = evaluated(rows)[-1]["step"]
    when = f", before and after {last} step{'s' if last != 1 else ''}" if "greedy after" in columns else ""
    table = Table(title=f"Reward on tasks never trained{when}", title_justify="left", caption_justify="left")
    table.add_column("tasks", no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for place, *values in data:
        name, _, family = place.partition("/")
        cells = [
            "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value) for value in values
        ]
        # Not as markup: families are words of the tasks' authors.
        table.add_row(Text(f"  {family}" if family else name, "" if family else "bold"), *cells)
        if len({count for column, count in zip(columns[1:], values, strict=True) if column.startswith("n ")}) > 1:
            table.caption = "Before and after are not of the same number of tasks (n)."
    return table


def evaluations(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and lines of the table of the first and the last evaluation, or of the only one; no lines without any.

    ``n``: graded tasks of a set, where the row says it.
    """
    found = evaluated(rows)
    if not found:
        return ["tasks"], []
    first, last = found[0], found[-1]
    shown = [("", first)] if len(found) == 1 else [(" before", first), (" after", last)]
    figures = {"greedy": "reward_greedy", "sampled": "reward_sampled"}
    if any(_TASKS.fullmatch(key) for row in (first, last) for key in row):
        figures = {"n": "tasks"} | figures
    columns = ["tasks", *(how + name for how in figures for name, _ in shown)]
    places = {key.removeprefix("eval/").rpartition("/")[0] for key in first if "/reward_" in key}
    return columns, [
        [place, *(row.get(f"eval/{place}/{key}") for key in figures.values() for _, row in shown)]
        # Of each set the whole, then its families, then "in" each harness.
        for place in sorted(places, key=lambda p: (p.split("/")[0], "/in " in p, p))
    ]


def evaluated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the figures of an evaluation; one that was left out has a key of its own and none."""
    return [row for row in rows if any(key.startswith("eval/") and "/reward_" in key for key in row)]


def failures(rows: list[dict[str, Any]]) -> str:
    """How many episodes failed, in which harness and why, the most frequent first; empty where none did."""
    failed = [row for row in rows if row["status"] == "failed"]
    if not failed:
        return ""
    why = Counter((row["harness"], (row["reason"].splitlines() or [""])[0][:_REASON]) for row in failed)
    lines = [f"{len(failed)} of {len(rows)} episodes failed and are in no mean (reason in episodes.jsonl):"]
    lines += [f"  {count} in {harness}: {reason}" for (harness, reason), count in why.most_common(_REASONS)]
    return "\n".join(lines + ([f"  and {len(why) - _REASONS} more reasons"] if len(why) > _REASONS else []))
