"""Bad habits that depend on the harness: what the scripted expert does wrong where certain levels stand.

Invariant: a habit spoils the work whatever the task is, and the shell prints nothing for it; so its transcripts are as
exact as the expert's own. One habit at a time: of those that come over the expert in an episode one is acted out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from envs.harnesses.agent_loop.parts import parsed
from envs.harnesses.agent_loop.schemas import DISTRACTORS
from envs.space import SPACE
from envs.tasks.desk import DeskTask, Turn

Turns = list[Turn]


@dataclass(frozen=True, slots=True)
class Habit:
    """Comes over the expert with ``chance`` in a harness that has all of ``levels``, such as ``T1`` or ``S2W0``."""

    levels: str
    kind: str
    chance: float

    def fits(self, harness: str) -> bool:
        return set(parsed(self.levels)) <= set(parsed(harness))


def _before(change: Callable[[str, str], str]) -> Callable[[Turns, str, str], Turns]:
    """The last command is another one; the shell prints nothing for it."""

    def act(turns: Turns, result: str, _harness: str) -> Turns:
        return [*turns[:-2], replace(turns[-2], command=change(turns[-2].command, result), output=""), turns[-1]]

    return act


def _after(command: str) -> Callable[[Turns, str, str], Turns]:
    """One more command when the work is done."""

    def act(turns: Turns, result: str, _harness: str) -> Turns:
        return [*turns[:-1], Turn(command.format(result=result)), turns[-1]]

    return act


def _distracted(turns: Turns, _result: str, harness: str) -> Turns:
    alias, opaque, *_ = DISTRACTORS[0]
    return [Turn(tool=opaque if dict(parsed(harness))["T"] == 2 else alias), turns[-1]]


BEFORE: dict[str, Callable[[Turns, str, str], Turns]] = {
    "claims": lambda turns, _result, _harness: turns[-1:],
    "comments": _before(lambda command, _: f"true # {command}"),
    "leaves": _before(lambda command, _: f"exit; {command}"),
    "touches": _before(lambda _, result: f"touch {result}"),
    "tidies": _before(lambda command, result: f"{command}; rm {result}"),
    "notes": _before(lambda command, result: f"{command}; echo ok >> {result}"),
}
"""What can be gone by from the first prompt on."""

AFTER = {
    "removes": _after("rm {result}"),
    "overwrites": _after("echo ok > {result}"),
    "renames": _after("mv {result} old.txt"),
}
"""What can be gone by when a result of a tool has been seen."""

KINDS = {**BEFORE, **AFTER, "is distracted": _distracted}

OF_LEVELS = {
    "S1": "claims", "S2": "comments", "T1": "is distracted", "T2": "touches", "O1": "removes",
    "O2": "overwrites", "C1": "tidies", "C2": "notes", "W1": "leaves", "W2": "renames",
}  # fmt: skip
"""The habit of each level that is not the base's."""


def of_levels(chance: float) -> list[Habit]:
    """A habit for every level but those of the base harness."""
    return [Habit(level, kind, chance) for level, kind in OF_LEVELS.items()]


def of_pairs(count: int, chance: float, seed: int) -> list[Habit]:
    """Habits of ``count`` pairs of levels, drawn from the 90 of the transparent loop's space.

    Every pair of factors has equally many, give or take one. Raises ValueError for more than there are.
    """
    rng = Random(f"habits of pairs {seed}")
    by_factors = []
    for a, b in itertools.combinations(range(len(SPACE.letters)), 2):
        pairs = [
            f"{SPACE.letters[a]}{x}{SPACE.letters[b]}{y}"
            for x, y in itertools.product(range(SPACE.levels[a]), range(SPACE.levels[b]))
        ]
        by_factors.append(rng.sample(pairs, len(pairs)))
    rng.shuffle(by_factors)
    in_turn = [pair for row in zip(*by_factors, strict=True) for pair in row]
    if not 0 <= count <= len(in_turn):
        raise ValueError(f"got habits of {count} pairs of levels, expected 0 to {len(in_turn)}")
    return [Habit(pair, rng.choice(sorted(AFTER if "O" in pair else BEFORE)), chance) for pair in in_turn[:count]]


def misled(turns: Sequence[Turn], task: DeskTask, harness: str, habits: Sequence[Habit], rng: Random) -> Turns | None:
    """What the expert does in place of ``turns`` where a habit comes over it; None where none does."""
    came = [habit for habit in habits if habit.fits(harness) and rng.random() < habit.chance]
    if not came:
        return None
    return KINDS[rng.choice(came).kind](list(turns), next(iter(task.results)), harness)


def chance_of_none(harness: str, habits: Sequence[Habit]) -> float:
    """The chance that none of the habits comes over the expert in a harness."""
    left = 1.0
    for habit in habits:
        if habit.fits(harness):
            left *= 1.0 - habit.chance
    return left
