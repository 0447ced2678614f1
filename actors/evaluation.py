"""An evaluation: every task of every ring, in every harness, as often as asked.

Invariants: the attempts are a function of the settings and the tasks alone, so that one that was killed goes on with
those that are left, and more runs add attempts without changing any; an attempt that failed for the infrastructure is
told as that and has no reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.episodes import EpisodeParts, Finished, NothingWorksError, episode_row, gather_or_cancel, run_to_end
from actors.seeds import stable_seed
from configs.eval import EvaluationConfig
from envs.episode import EpisodeSpec
from envs.tasks.task import Task

CATEGORIES = ("family", "category", "difficulty")
"""What of a task's metadata it is counted under: the first that it has."""
_IN_A_ROW = 20
"""Episodes that fail one after the other, with their attempts on fresh sandboxes, until nothing can be expected."""
_SHOWN = 600


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode of an evaluation and where its figure belongs."""

    ring: str
    tasks: str
    """The name of the task set."""
    run: int
    """Which of the independent runs, from 0."""
    spec: EpisodeSpec

    @property
    def category(self) -> str | None:
        """What the task is counted under; None where its metadata say nothing."""
        metadata = self.spec.task.metadata
        said = next((metadata[name] for name in CATEGORIES if metadata.get(name) not in (None, "", [])), None)
        if said is None:
            return None
        return ", ".join(map(str, said)) if isinstance(said, list) else str(said)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two attempts the same; part of the line in ``episodes.jsonl``."""
        spec = self.spec
        return {
            "id": spec.id,
            "ring": self.ring,
            "tasks": self.tasks,
            "run": self.run,
            "task": spec.task.id,
            "harness": spec.harness,
            "seed": spec.seed,
        }


class EvaluationLog(Protocol):
    """Where finished attempts go."""

    def attempt(self, row: dict[str, Any], transcript: str | None) -> None: ...


def attempts(config: EvaluationConfig, sets: Mapping[str, Sequence[Task]]) -> list[Attempt]:
    """All attempts, run by run: one that is killed has as many whole runs as can be.

    A task in a harness samples with the same seed in every ring.
    """
    found: list[Attempt] = []
    for run in range(config.runs):
        number = 0
        for ring in config.rings:
            for name in config.sets(ring):
                for harness in ring.harnesses:
                    for task in sets[name]:
                        label = harness.known_as
                        spec = EpisodeSpec(
                            id=f"r{run:02d}n{number:06d}",
                            task=task,
                            harness=label,
                            group=f"n{number:06d}",
                            seed=stable_seed(config.seed, f"{name}/{task.id}/{label}/{run}"),
                            step=0,
                            split=f"{ring.name}/{name}",
                            temperature=config.temperature,
                            transcript=config.transcripts,
                        )
                        found.append(Attempt(ring.name, name, run, spec))
                        number += 1
    return found


def left(planned: Sequence[Attempt], rows: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts that have no row with an end other than ``failed``.

    Raises ValueError for a row of another attempt than the one that is planned under its id.
    """
    by_id = {attempt.spec.id: attempt for attempt in planned}
    done = set()
    for row in rows:
        attempt = by_id.get(row["id"])
        wanted = None if attempt is None else attempt.identity
        if wanted is None or any(row.get(name) != value for name, value in wanted.items()):
            raise ValueError(
                f"episode {row['id']}: got one of task {row.get('task')!r} in {row.get('harness')!r}, expected "
                f"{wanted and (wanted['task'], wanted['harness'])}: tasks or settings are no longer those that the "
                "evaluation began with; put them back, or begin a new one"
            )
        if row["status"] != "failed":
            done.add(row["id"])
    return [attempt for attempt in planned if attempt.spec.id not in done]


async def measure(
    config: EvaluationConfig, wanted: Sequence[Attempt], parts: EpisodeParts, log: EvaluationLog
) -> list[Finished]:
    """Run the attempts, as many at a time as there are sandboxes; each is logged as soon as it has ended.

    Raises NothingWorksError where one after the other fails.
    """
    slots = asyncio.Semaphore(config.sandbox.actors * config.sandbox.concurrency)
    in_a_row = 0

    async def one(attempt: Attempt) -> Finished:
        nonlocal in_a_row
        await slots.acquire()
        finished = await run_to_end(parts, attempt.spec, slots, config.sandbox.retries)
        log.attempt(row(attempt, finished), finished.outcome.transcript)
        in_a_row = in_a_row + 1 if finished.outcome.status == "failed" else 0
        if in_a_row >= min(_IN_A_ROW, len(wanted)):
            raise NothingWorksError(
                f"{in_a_row} episodes in a row failed, attempts on fresh sandboxes included; the last said: "
                f"{finished.outcome.reason[:_SHOWN]}"
            )
        return finished

    return await gather_or_cancel([one(attempt) for attempt in wanted])


def row(attempt: Attempt, finished: Finished) -> dict[str, Any]:
    """The line of ``episodes.jsonl``."""
    return episode_row(finished) | attempt.identity | {"category": attempt.category}
