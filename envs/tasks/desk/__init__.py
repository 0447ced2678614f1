"""Desk tasks: eight families of small file work, made from a seed, graded by their exact outcome.

Invariant: the splits are disjoint by construction. Which split a combination of slots belongs to is a
function of its hash alone, so no seed and no count can move one into another; the phrasings of the
split ``wording`` are used nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from envs.tasks.desk.families import FAMILIES, LEVELS, Case, Files, Slots, Turn
from envs.tasks.desk.grading import write
from envs.tasks.desk.wordings import WORDINGS

__all__ = ["FAMILIES", "LEVELS", "DeskTask", "Split", "Turn", "expert", "generate", "write"]

Split = Literal["train", "heldout", "wording"]

FINAL = "Done."


@dataclass(frozen=True, slots=True)
class DeskTask:
    """One task with everything that its folder, its grader and its expert are made of."""

    id: str
    family: str
    level: int
    split: Split
    wording: int
    """Which phrasing of the family and level; held-out phrasings count on from the training ones."""
    instruction: str
    inputs: Files
    results: Files
    absent: tuple[str, ...]
    slots: Slots
    facts: Slots
    partial_credit: bool = False


def split_of(family: str, level: int, slots: Slots) -> Split:
    """The split that a combination belongs to: 80% train, 10% each for the two others."""
    bucket = _digest([family, level, slots])[0] % 10
    return "train" if bucket < 8 else "heldout" if bucket == 8 else "wording"


def generate(
    split: Split,
    count: int,
    seed: int,
    families: Sequence[str] | None = None,
    level: int = 1,
    partial_credit: bool = False,
) -> list[DeskTask]:
    """``count`` different tasks, families in turn; a function of the arguments alone.

    A smaller ``count`` gives the first tasks of a larger one.

    Raises:
        ValueError: for a split, family or level that does not exist, or a count that the split cannot give.
    """
    chosen = list(FAMILIES) if families is None else list(families)
    _check(split, count, chosen, level)
    tasks: dict[str, DeskTask] = {}
    for index in range(count):
        family = chosen[index % len(chosen)]
        for attempt in range(400):
            rng = Random(f"{seed} {split} {level} {family} {index} {attempt}")
            task = _draw(rng, family, level, split, partial_credit)
            if task is not None and task.id not in tasks:
                tasks[task.id] = task
                break
        else:
            raise ValueError(
                f"got count={count}; {split!r} has only {index} different tasks of {chosen}: ask for fewer"
            )
    return list(tasks.values())


def expert(task: DeskTask, rng: Random, bad_habit: bool = False) -> list[Turn]:
    """How an expert does the task, with the output that a real shell would print, ending on a final answer.

    With ``bad_habit`` it makes its family's one systematic mistake; the grade is then 0, without 1.
    """
    case = Case(task.slots, task.inputs, task.results, task.absent, task.facts)
    steps = FAMILIES[task.family].work(case, rng, bad_habit)
    return [*(Turn(command, output) for command, output in steps), Turn(text=FINAL)]


def _draw(rng: Random, family: str, level: int, split: Split, partial_credit: bool) -> DeskTask | None:
    """One draw; None when its combination belongs to another split."""
    case = FAMILIES[family].draw(rng, level)
    if split_of(family, level, case.slots) != split:
        return None
    wordings = WORDINGS[family, level]
    if split == "wording":
        wording = len(wordings.train) + rng.randrange(len(wordings.heldout))
    else:
        wording = rng.randrange(len(wordings.train))
    instruction = (*wordings.train, *wordings.heldout)[wording].format(**case.slots)
    digest = _digest([family, level, instruction, case.inputs, case.results, partial_credit]).hex()[:10]
    return DeskTask(
        id=f"desk-{family}-{digest}",
        family=family,
        level=level,
        split=split,
        wording=wording,
        instruction=instruction,
        inputs=case.inputs,
        results=case.results,
        absent=case.absent,
        slots=case.slots,
        facts=case.facts,
        partial_credit=partial_credit,
    )


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _check(split: str, count: int, families: list[str], level: int) -> None:
    if split not in get_args(Split):
        raise ValueError(f"got split={split!r}; expected one of {', '.join(get_args(Split))}")
    if count < 0:
        raise ValueError(f"got count={count}; expected 0 or more")
    unknown = [name for name in families if name not in FAMILIES]
    if unknown or not families:
        raise ValueError(f"got families={families}; expected some of {', '.join(FAMILIES)}")
    if level not in LEVELS:
        raise ValueError(f"got level={level}; expected one of {', '.join(map(str, LEVELS))}")
