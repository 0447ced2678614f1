"""Running the episodes that are asked for, again on fresh sandboxes where infrastructure failed, and telling of each.

Invariant: every episode ends as exactly one ``Finished``; one that failed to its last attempt has no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.episode import EpisodeOutcome, EpisodeSpec

_LOG_CHARACTERS = 600


class NothingWorksError(RuntimeError):
    """All episodes of a step or an evaluation failed; the message holds the reason of one of them."""


class EpisodeParts(Protocol):
    """What runs an episode and makes its tree, behind calls that survive the restarts of actors."""

    async def run_episode(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Run once; infrastructure trouble comes back as status ``failed``."""
        ...

    async def build_tree(self, spec: EpisodeSpec, outcome: EpisodeOutcome) -> dict[str, Any] | None:
        """Finish the episode's tree and send it to the learner; None: its records are lost."""
        ...

    async def discard(self, spec: EpisodeSpec) -> None:
        """Forget the calls of an episode that failed."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode with what its tree came to. ``tree`` is None for failed episodes and for evaluations that failed."""

    spec: EpisodeSpec
    outcome: EpisodeOutcome
    tree: dict[str, Any] | None
    failures: tuple[str, ...] = ()
    """Why earlier attempts failed."""


async def run_to_end(parts: EpisodeParts, spec: EpisodeSpec, slots: asyncio.Semaphore, retries: int) -> Finished:
    """One episode, up to ``retries`` times again on a fresh sandbox while it fails. Begins with a slot held."""
    failures: list[str] = []
    for attempt in range(retries + 1):
        if attempt:
            await slots.acquire()
        tried = replace(spec, attempt=attempt)
        try:
            outcome = await parts.run_episode(tried)
        finally:
            # The tree may wait for the learner, which takes none while it trains: the sandbox is free already.
            slots.release()
        tree = None
        if outcome.status != "failed":
            tree = await parts.build_tree(tried, outcome)
            if tree is None:
                outcome = replace(outcome, status="failed", reason="call records lost", reward=None, grade=None)
        if outcome.status != "failed":
            break
        failures.append(outcome.reason)
        await parts.discard(tried)
    if tree is not None and tree["dropped"]:
        outcome = replace(outcome, status="dropped", reason=str(tree["dropped"]))
    return Finished(spec, outcome, tree, tuple(failures[:retries]))


async def gather_or_cancel(coroutines: Sequence[Any]) -> list[Any]:
    """Like ``asyncio.gather``; when one fails the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise


def stop_if_all_failed(finished: Sequence[Finished], when: str) -> None:
    """Raise NothingWorksError when there are episodes and every one of them failed."""
    if finished and all(f.outcome.status == "failed" for f in finished):
        raise NothingWorksError(
            f"every one of the {len(finished)} episodes of {when} failed, attempts on fresh sandboxes included; "
            f"the last said: {finished[-1].outcome.reason[:_LOG_CHARACTERS]}"
        )


def episode_row(finished: Finished) -> dict[str, Any]:
    """The line of ``episodes.jsonl``. ``version`` and ``version_last``: the oldest and the newest that sampled."""
    spec, outcome, tree = finished.spec, finished.outcome, finished.tree
    return {
        "id": spec.id,
        "step": spec.step,
        "split": spec.split,
        "task": spec.task.id,
        "family": spec.task.metadata.get("family"),
        "harness": spec.harness,
        "seed": spec.seed,
        "group": spec.group,
        "version": tree and tree["version"],
        "version_last": tree and tree.get("version_last"),
        "status": outcome.status,
        "reason": outcome.reason,
        "reward": outcome.reward,
        "grade": outcome.grade,
        "clean_end": outcome.clean_end,
        "retries": len(finished.failures),
        "failures": list(finished.failures),
        "calls": outcome.calls,
        "leaves": tree and tree["leaves"],
        "tokens_prompt": outcome.prompt_tokens,
        "tokens_sampled": outcome.sampled_tokens,
        "tokens_trained": tree["tokens_trained"] if tree and spec.split == "train" else 0,
        "seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
        "flags": list(outcome.flags),
        "mcp": list(outcome.mcp),
        "judge": outcome.judge,
        "log": outcome.log[-_LOG_CHARACTERS:],
        "report": tree if spec.split == "train" else None,
    }
