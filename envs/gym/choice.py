"""Which tasks an environment has, and which of them an episode does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.tasks import clawgym, desk
from envs.tasks.task import Task

BUILT_IN = 64
"""Desk tasks of an environment that is given none."""


def tasks_of(task: Task | str | Path | None, tasks: Sequence[Task] | str | Path | None) -> list[Task]:
    """The tasks that ``task`` or ``tasks`` names; none with neither.

    Raises ValueError where both are given or nothing is found, TaskError (one) for task folders that are broken.
    """
    if task is not None and tasks is not None:
        raise ValueError("task, tasks: got both, expected one of the two")
    if isinstance(task, Task):
        return [task]
    if task is not None:
        return [clawgym.read(Path(task).expanduser().resolve())]
    if isinstance(tasks, str | Path):
        return clawgym.load(Path(tasks).expanduser()).tasks
    if tasks is not None:
        if not tasks or not all(isinstance(one, Task) for one in tasks):
            raise ValueError(f"tasks: got {tasks!r}, expected a folder of task folders, or a list of at least one Task")
        return list(tasks)
    return []


def built_in(folder: Path) -> list[Task]:
    """Desk tasks, written under ``folder``: the same ones every time."""
    return desk.write(desk.generate("train", BUILT_IN, seed=0), folder)


def chosen(tasks: Sequence[Task], options: dict[str, Any] | None, random: np.random.Generator) -> Task:
    """The task that ``options["task"]`` names by its id, or one drawn at random. Raises ValueError."""
    options = options or {}
    if unknown := sorted(options.keys() - {"task"}):
        raise ValueError(f"options: got {', '.join(map(repr, unknown))}, expected 'task' or nothing")
    drawn = tasks[int(random.integers(len(tasks)))]
    if "task" not in options:
        return drawn
    for task in tasks:
        if task.id == options["task"]:
            return task
    some = ", ".join(task.id for task in tasks[:5])
    raise ValueError(f"options['task']: got {options['task']!r}, expected the id of one of the tasks, such as {some}")
