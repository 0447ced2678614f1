"""The coordinator: rollouts run ahead of the learner within the staleness bound, and every episode is accounted for.

Invariants: rollouts of step ``s`` start only when the engine serves at least version ``s - max_staleness``; an
evaluation sees one version of the policy, since nothing is trained while it runs; the statuses of a step's
episodes add up to the number that the schedule asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors.assignment import Assignment
from actors.schedule import Schedule, evaluation
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.harnesses.sets import apart, harnesses, neighbours
from envs.tasks.task import Task

_LOG_CHARACTERS = 600


class NothingWorksError(RuntimeError):
    """All episodes of a step or an evaluation failed; the message holds the reason of one of them."""


class Parts(Protocol):
    """What the coordinator steers: the actors of one run, behind calls that survive their restarts."""

    async def run_episode(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """Run once; infrastructure trouble comes back as status ``failed``."""
        ...

    async def build_tree(self, spec: EpisodeSpec, outcome: EpisodeOutcome) -> dict[str, Any] | None:
        """Finish the episode's tree and send it to the learner; None: its records are lost."""
        ...

    async def discard(self, spec: EpisodeSpec) -> None:
        """Forget the calls of an episode that failed."""
        ...

    async def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        """Learn from the episodes (id -> group) of a step and publish version ``step + 1``."""
        ...

    async def update_engine(self, version: int) -> None:
        """Make the engine serve a published version."""
        ...

    async def checkpoint(self, step: int, score: float | None = None, wait: bool = False) -> None:
        """Save the learner's state after ``step`` steps; ``score``: the greedy reward on tasks held out, if measured.

        Training may go on before it is on disk, unless ``wait`` is set.
        """
        ...

    async def statistics(self) -> dict[str, float]:
        """Counters of engine and proxy for the step's log."""
        ...


class Log(Protocol):
    """Where a run's rows go: files, terminal, tracker."""

    def episode(self, row: dict[str, Any]) -> None: ...

    def step(self, row: dict[str, Any]) -> None: ...

    def evaluation(self, done: int, total: int, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode with what its tree came to. ``tree`` is None for failed episodes and for evaluations that failed."""

    spec: EpisodeSpec
    outcome: EpisodeOutcome
    tree: dict[str, Any] | None
    failures: tuple[str, ...] = ()
    """Why earlier attempts failed."""


class Coordinator:
    """Drives one run from ``start`` (steps already trained) to ``config.steps``."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        log: Log,
        train_tasks: Sequence[Task],
        eval_sets: Mapping[str, Sequence[Task]],
        start: int = 0,
        finished: Mapping[str, Finished] | None = None,
    ) -> None:
        """``finished``: episodes by id that had ended and are in the log already; they are trained, not run."""
        self._finished = finished or {}
        self._config = config
        self._parts = parts
        self._log = log
        self._eval_sets = eval_sets
        self._start = start
        self._version = start
        self._newer = asyncio.Condition()
        capacity = config.sandbox.actors * config.sandbox.concurrency
        self._slots = asyncio.Semaphore(capacity)
        self._eval_slots = asyncio.Semaphore(capacity)
        self._schedule = schedule_of(config, train_tasks)
        self._collected: dict[int, asyncio.Queue[Finished | Exception]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Evaluate, train, evaluate. Raises what a part raises for good; nothing is left running."""
        rollouts = asyncio.create_task(self._produce())
        try:
            if self._start == 0:
                self._log.step({"step": 0, "policy_version": 0} | await self._evaluate(0))
            for step in range(self._start, self._config.steps):
                await self._one_step(step, rollouts)
        finally:
            rollouts.cancel()
            for task in list(self._running):
                task.cancel()
            await asyncio.gather(rollouts, *self._running, return_exceptions=True)

    async def _one_step(self, step: int, rollouts: asyncio.Task[None]) -> None:
        began = time.monotonic()
        finished = await self._collect(step, rollouts)
        stop_if_all_failed(finished, f"step {step + 1}")
        waited = time.monotonic() - began
        groups = {f.spec.id: f.spec.group for f in finished if trainable(f)}
        learned = await self._parts.train(step, groups)
        trained = time.monotonic()
        await self._parts.update_engine(step + 1)
        async with self._newer:
            self._version = step + 1
            self._newer.notify_all()
        row: dict[str, Any] = {"step": step + 1, "policy_version": step + 1}
        row |= summarise(finished) | self._schedule.balance(step) | learned
        row["seconds/rollout_wait"] = waited
        row["seconds/train"] = trained - began - waited
        row["seconds/update"] = time.monotonic() - trained
        last = step + 1 == self._config.steps
        if last or (self._config.eval.every and (step + 1) % self._config.eval.every == 0):
            row |= await self._evaluate(step + 1)
        row |= await self._parts.statistics()
        row["seconds/step"] = time.monotonic() - began
        self._log.step(row)
        # After the row: a run that is killed in between goes on before this step, whose row is then written again.
        if last or (step + 1) % self._config.checkpoint.every == 0:
            await self._parts.checkpoint(step + 1, row.get("eval/heldout/reward_greedy"), wait=last)

    async def _collect(self, step: int, rollouts: asyncio.Task[None]) -> list[Finished]:
        """All episodes of a step, in the order of the schedule."""
        queue = self._collected.setdefault(step, asyncio.Queue())
        wanted = [spec.id for spec in self._schedule.step(step)]
        by_id: dict[str, Finished] = {}
        while len(by_id) < len(wanted):
            arrival = asyncio.create_task(queue.get())
            await asyncio.wait({arrival, rollouts}, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                if rollouts.done() and rollouts.exception() is not None:
                    arrival.cancel()
                    rollouts.result()
                await arrival
            finished = arrival.result()
            if isinstance(finished, Exception):
                raise finished
            by_id[finished.spec.id] = finished
        del self._collected[step]
        return [by_id[name] for name in wanted]

    async def _produce(self) -> None:
        """Start episodes in schedule order, as slots and the staleness bound allow."""
        for step in range(self._start, self._config.steps):
            oldest = step - self._config.async_.max_staleness
            async with self._newer:
                while self._version < oldest:
                    await self._newer.wait()
            queue = self._collected.setdefault(step, asyncio.Queue())
            for spec in self._schedule.step(step):
                if spec.id in self._finished:
                    queue.put_nowait(self._finished[spec.id])
                    continue
                await self._slots.acquire()
                task = asyncio.create_task(self._deliver(spec, queue))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        await asyncio.Event().wait()

    async def _deliver(self, spec: EpisodeSpec, queue: asyncio.Queue[Finished | Exception]) -> None:
        try:
            queue.put_nowait(await self._episode(spec, self._slots))
        except Exception as error:  # handed to whoever waits for the step, who stops the run
            queue.put_nowait(error)

    async def _episode(self, spec: EpisodeSpec, slots: asyncio.Semaphore) -> Finished:
        """One episode, on a fresh sandbox again when infrastructure failed; logged once. Begins with a slot held."""
        failures: list[str] = []
        for attempt in range(self._config.sandbox.retries + 1):
            if attempt:
                await slots.acquire()
            tried = replace(spec, attempt=attempt)
            try:
                outcome = await self._parts.run_episode(tried)
            finally:
                # The tree may wait for the learner, which takes none while it trains: the sandbox is free already.
                slots.release()
            tree = None
            if outcome.status != "failed":
                tree = await self._parts.build_tree(tried, outcome)
                if tree is None:
                    outcome = replace(outcome, status="failed", reason="call records lost", reward=None, grade=None)
            if outcome.status != "failed":
                break
            failures.append(outcome.reason)
            await self._parts.discard(tried)
        if tree is not None and tree["dropped"]:
            outcome = replace(outcome, status="dropped", reason=str(tree["dropped"]))
        finished = Finished(spec, outcome, tree, tuple(failures[: self._config.sandbox.retries]))
        self._log.episode(episode_row(finished))
        return finished

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Greedy and sampled reward on every evaluation set, by family, under one version of the policy."""
        config = self._config.eval
        full = step in (0, self._config.steps)
        began = time.monotonic()
        specs: list[EpisodeSpec] = []
        for name, tasks in self._eval_sets.items():
            if not full and name != "heldout":
                continue
            chosen = tasks[: config.tasks if full else config.curve_tasks]
            for temperature in (0.0, self._config.rollout.temperature) if config.sampled else (0.0,):
                specs += evaluation(
                    name,
                    chosen,
                    harnesses=list(harnesses(self._config)),
                    temperature=temperature,
                    step=step,
                    seed=self._config.seed,
                    each=self._config.space is None,
                )
        done = 0

        async def one(spec: EpisodeSpec) -> Finished:
            nonlocal done
            await self._eval_slots.acquire()
            finished = await self._episode(spec, self._eval_slots)
            done += 1
            self._log.evaluation(done, len(specs), spec.split)
            return finished

        finished = await gather_or_cancel([one(spec) for spec in specs])
        stop_if_all_failed(finished, f"the evaluation after step {step}")
        return evaluation_means(finished) | {"seconds/eval": time.monotonic() - began}


def schedule_of(config: RunConfig, tasks: Sequence[Task]) -> Schedule:
    """The training episodes of a run."""
    return Schedule(
        tasks,
        assignment=assignment_of(config),
        groups=config.rollout.groups,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        seed=config.seed,
    )


def assignment_of(config: RunConfig) -> Assignment:
    """Which harnesses the tasks of a run are practised in. Raises ValueError for a set that cannot be."""
    return Assignment(
        config.assignment,
        list(harnesses(config)),
        seed=config.seed,
        distance=apart,
        neighbours=lambda name: neighbours(config, name),
    )


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


def trainable(finished: Finished) -> bool:
    """Whether an episode reaches the learner; whether truncated ones are trained is the learner's setting."""
    return finished.outcome.status in ("completed", "truncated")


def episode_row(finished: Finished) -> dict[str, Any]:
    """The line of ``episodes.jsonl``."""
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


def summarise(finished: Sequence[Finished]) -> dict[str, float]:
    """Counts of statuses, kinds and filters of a step, and its mean reward over graded episodes."""
    status = Counter(f.outcome.status for f in finished)
    row: dict[str, float] = {"episodes/scheduled": len(finished)}
    row |= {f"episodes/{name}": status[name] for name in ("completed", "truncated", "failed", "dropped")}
    row["episodes/retries"] = sum(len(f.failures) for f in finished)
    rewards = [f.outcome.reward for f in finished if f.outcome.reward is not None]
    row["train/reward"] = sum(rewards) / len(rewards) if rewards else float("nan")
    row |= _by_harness(finished) | _of_the_judge(finished)
    row["train/flagged"] = sum(bool(f.outcome.flags) for f in finished)
    row["train/calls"] = sum(f.outcome.calls for f in finished) / max(1, len(finished))
    counts: Counter[str] = Counter()
    for f in finished:
        for key, value in (f.tree or {}).items():
            if "/" in key:
                counts[key] += value
    for stage in ("create", "run", "grade", "destroy"):
        spent = [f.outcome.seconds.get(stage, 0.0) for f in finished]
        row[f"seconds/episode_{stage}"] = sum(spent) / max(1, len(spent))
    return row | dict(counts)


def _by_harness(finished: Sequence[Finished]) -> dict[str, float]:
    """Reward, calls and status of each harness, where there are several."""
    names = sorted({f.spec.harness for f in finished})
    row: dict[str, float] = {}
    for name in names if len(names) > 1 else ():
        mine = [f.outcome for f in finished if f.spec.harness == name]
        rewards = [outcome.reward for outcome in mine if outcome.reward is not None]
        row[f"harness/{name}/reward"] = sum(rewards) / len(rewards) if rewards else float("nan")
        row[f"harness/{name}/calls"] = sum(outcome.calls for outcome in mine) / len(mine)
        row[f"harness/{name}/failed"] = sum(outcome.status == "failed" for outcome in mine)
    return row


def _of_the_judge(finished: Sequence[Finished]) -> dict[str, float]:
    """What judging cost and how far its votes were apart, where anything was judged."""
    judged = [f.outcome.judge for f in finished if f.outcome.judge is not None]
    if not judged:
        return {}
    row = {"judge/disagreement": sum(verdict["disagreement"] for verdict in judged) / len(judged)}
    for name in ("requests", "cached", "tokens_in", "tokens_out", "usd"):
        spent = [verdict["cost"][name] for verdict in judged if verdict["cost"][name] is not None]
        if spent:
            row[f"judge/{name}"] = float(sum(spent))
    return row


def evaluation_means(finished: Sequence[Finished]) -> dict[str, float]:
    """``eval/<set>/reward_greedy`` and ``_sampled``, also by family, and by harness where there are several.

    Failed episodes are counted, not graded.
    """
    several = len({f.spec.harness for f in finished}) > 1
    rewards: dict[str, list[float]] = {}
    failed: Counter[str] = Counter()
    for f in finished:
        name, how = f.spec.split.split("/")
        failed[f"eval/{name}/failed"] += f.outcome.reward is None
        if f.outcome.reward is None:
            continue
        rewards.setdefault(f"eval/{name}/reward_{how}", []).append(f.outcome.reward)
        family = f.spec.task.metadata.get("family")
        for part in (family, f"in {f.spec.harness}" if several else None):
            if part:
                rewards.setdefault(f"eval/{name}/{part}/reward_{how}", []).append(f.outcome.reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()} | dict(failed)
