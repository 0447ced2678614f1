"""Which tasks a run practises and which it is measured on, from its settings.

Invariant: an evaluation set shares no task with the training set, unless the run trains nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from configs.eval import TaskSetConfig
from configs.schema import EvalConfig, TaskPathConfig, TasksConfig
from envs.tasks import desk, formats, word
from envs.tasks.clawgym import Loaded
from envs.tasks.task import Task

_BUILTIN = 96
"""Built-in tasks of a set that names no number."""


@dataclass(frozen=True, slots=True)
class TaskSets:
    """Training tasks and named evaluation sets; ``skipped`` says which broken folders were left out, and why."""

    train: list[Task]
    evaluation: dict[str, list[Task]]
    skipped: tuple[str, ...] = ()


def load_sets(tasks: TasksConfig, evaluation: EvalConfig, folder: Path, seed: int) -> TaskSets:
    """Read the tasks of ``tasks.path``, or write the built-in ones under ``folder`` and read them.

    Raises:
        ValueError: nothing to practise on, or a broken task folder (its file, field and what was expected).
    """
    if tasks.path is None:
        return (_desk if tasks.builtin == "desk" else _word)(tasks, evaluation, folder, seed)
    loaded = load_path(tasks, folder)
    found = loaded.tasks
    order = random.Random(seed).sample(found, len(found))
    n_heldout = max(1, round(len(order) * tasks.heldout)) if tasks.heldout else 0
    heldout = sorted(order[:n_heldout], key=lambda task: task.id)
    kept = {task.id for task in heldout}
    train = [task for task in found if task.id not in kept]
    if not train:
        raise ValueError(
            f"tasks.heldout: got {tasks.heldout} of {len(found)} tasks, which leaves none to practise on; lower it"
        )
    return TaskSets(train, {"heldout": heldout} if heldout else {}, loaded.skipped)


def load_path(tasks: TaskPathConfig, folder: Path) -> Loaded:
    """The tasks of ``tasks.path``; those that are not task folders already are written below ``folder``.

    Raises TaskError for a broken task, unless ``tasks.skip_bad``.
    """
    assert tasks.path is not None
    scripted = tasks.graded_by == "script"
    return formats.load(tasks.path, folder, tasks.format, tasks.skip_bad, tasks.limit, scripted)


def load_set(config: TaskSetConfig, folder: Path) -> tuple[list[Task], tuple[str, ...]]:
    """The tasks of a set, built-in ones written under ``folder``, and which were left out and why.

    Raises ValueError: nothing there, or broken tasks (file, field and what was expected).
    """
    if config.path is not None:
        loaded = load_path(config, folder)
        return loaded.tasks, loaded.skipped
    count = config.limit or _BUILTIN
    if config.builtin == "word":
        first = 0 if config.split == "train" else TasksConfig().train
        return word.generate(folder, count, first=first), ()
    return desk.write(desk.generate(config.split, count, config.seed, config.families, config.level), folder), ()


def _desk(tasks: TasksConfig, evaluation: EvalConfig, folder: Path, seed: int) -> TaskSets:
    def make(split: desk.Split, count: int) -> list[Task]:
        generated = desk.generate(split, count, seed, tasks.families, tasks.level, tasks.partial_credit)
        return desk.write(generated, folder / split)

    heldout: dict[str, desk.Split] = {"heldout": "heldout", "wording": "wording"}
    return TaskSets(
        make("train", tasks.train), {name: make(split, evaluation.tasks) for name, split in heldout.items()}
    )


def _word(tasks: TasksConfig, evaluation: EvalConfig, folder: Path, _: int) -> TaskSets:
    train, heldout = word.split(folder, tasks.train, evaluation.tasks)
    return TaskSets(train, {"heldout": heldout})
