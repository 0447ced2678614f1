"""Six dimensions of behaviour in a harness, graded by a judge in five points over what was said and done.

The dimensions are those of the Harness Scaling paper; what the points mean is ours. Invariant: an episode that the
judge could not grade has no grade, and is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algos.spoken import Spoken, text_of
from envs.judge.client import JudgeError
from envs.judge.judge import Judge
from envs.tasks.rubric import Criterion, Rubric

DIMENSIONS = {
    "state_tracking": "keeps in mind what was done, what is where and what is left, and acts by it",
    "workflow_compliance": "works in the order and by the rules that the harness prescribes, and skips no step",
    "error_recovery": "notices what failed, finds out why and does something else",
    "instruction_following": "does what was asked for, all of it, and nothing else",
    "interface_handling": "calls the right tools with well-formed arguments that make sense",
    "observation_reading": "takes from results what they say, also when they are long, cut or unexpected",
}
"""What each dimension asks of a policy."""

_POINTS = {
    "state_tracking": "1: loses track, repeats or contradicts itself. 3: small slips, mended. 5: never loses track.",
    "workflow_compliance": "1: ignores it. 3: most steps, some skipped or out of order. 5: every step in its order.",
    "error_recovery": "1: repeats what failed, or gives up. 3: recovers after detours. 5: at once and well; 5 also "
    "where nothing failed.",
    "instruction_following": "1: does something else. 3: the main part, details missed. 5: everything, to the letter.",
    "interface_handling": "1: calls fail for their form or tool. 3: works, clumsily. 5: fitting and well-formed.",
    "observation_reading": "1: acts against results, or without looking. 3: misses something. 5: uses them all.",
}

RUBRIC = Rubric(tuple(Criterion(name, f"{DIMENSIONS[name]}. {_POINTS[name]}", 1.0, "points") for name in DIMENSIONS))
_QUESTION = """An agent worked on a task inside a harness, which told it how to work and which tools it has. The \
material is what it was told, its answers and calls, and their results. Grade how it behaved, not what came of it."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The grades of some episodes, each in [0, 1], None where there is none; and why the last one has none."""

    scores: tuple[dict[str, float] | None, ...]
    fault: str


async def grade(judge: Judge, episodes: Sequence[Spoken], tick: Callable[[], object]) -> Graded:
    """Every episode in every dimension. ``tick`` is called for each that is done."""
    fault = ""

    async def one(spoken: Spoken) -> dict[str, float] | None:
        nonlocal fault
        try:
            verdict = await judge.grade_words(_QUESTION, RUBRIC, text_of(spoken, judge.config.evidence_chars))
        except JudgeError as error:
            # One that cannot be graded must not cost the grades that are paid for already.
            fault = str(error)
            return None
        finally:
            tick()
        return {name: graded["score"] for name, graded in verdict.criteria.items()}

    return Graded(tuple(await asyncio.gather(*map(one, episodes))), fault)
