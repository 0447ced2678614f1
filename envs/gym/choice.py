"""Which tasks an environment has, and which of them an episode does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.tasks import clawgym, desk, formats
from envs.tasks.task import Task

BUILT_IN = 64
"""Desk tasks of an environment that is given none."""


def tasks_of(task: Task | str | Path | None, tasks: Sequence[Task] | str | Path | None, folder: Path) -> list[Task]:
    """The tasks that ``task`` or ``tasks`` names; with neither, desk tasks, the same ones every time.

    Task folders stay where they are; what comes in another form is written below ``folder``. Raises ValueError where
    both are given or nothing is found, TaskError (one) for tasks that are broken.
    """
    if task is not None and tasks is not None:
        raise ValueError("task, tasks: got both, expected one of the two")
    if isinstance(task, Task):
        return [task]
    if isinstance(task, str | Path):
        return [clawgym.read(Path(task).expanduser().resolve())]
    if task is not None:
        raise ValueError(f"task: got {task!r}, expected a task folder or a Task")
    if isinstance(tasks, str | Path):
        return formats.load(Path(tasks).expanduser(), folder).tasks
    if tasks is None:
        return desk.write(desk.generate("train", BUILT_IN, seed=0), folder)
    found = [one for one in tasks if isinstance(one, Task)] if isinstance(tasks, Sequence) else []
    if not found or len(found) < len(tasks):
        raise ValueError(f"tasks: got {tasks!r}, expected a folder or file of tasks, or a list of at least one Task")
    return found


def chosen(tasks: Sequence[Task], options: dict[str, Any] | None, random: np.random.Generator) -> Task:
    """The task that ``options["task"]`` names by its id, or one drawn at random. Raises ValueError."""
    options = {} if options is None else options
    if not isinstance(options, dict) or options.keys() - {"task"}:
        raise ValueError(f"options: got {options!r}, expected {{'task': ID}} or nothing")
    drawn = tasks[int(random.integers(len(tasks)))]
    if "task" not in options:
        return drawn
    for task in tasks:
        if task.id == options["task"]:
            return task
    some = ", ".join(task.id for task in tasks[:5])
    raise ValueError(f"options['task']: got {options['task']!r}, expected the id of one of the tasks, such as {some}")
