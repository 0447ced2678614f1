"""The coordinator: rollouts run ahead of the learner within the staleness bound, and every episode is accounted for.

Invariants: rollouts of step ``s`` start only when the engine serves at least version ``s - max_staleness``; an
evaluation that training waits for sees one version of the policy, and the row of one that it does not wait for says
which versions it saw; the statuses of a step's episodes add up to the number that the schedule asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from actors.assignment import Assignment
from actors.episodes import EpisodeParts, Finished, episode_row, gather_or_cancel, run_to_end, stop_if_all_failed
from actors.schedule import Schedule, evaluation
from configs.schema import RunConfig
from envs.episode import EpisodeSpec
from envs.harnesses.sets import apart, harnesses, neighbours
from envs.tasks.task import Task


class Parts(EpisodeParts, Protocol):
    """What the coordinator steers: the actors of one run, behind calls that survive their restarts."""

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
        lost_evaluation: bool = False,
    ) -> None:
        """``finished``: episodes by id that had ended and are in the log already; they are trained, not run.

        ``lost_evaluation``: one that training did not wait for has not come to its end, so one begins at ``start``.
        """
        self._finished = finished or {}
        self._lost_evaluation = lost_evaluation
        self._config = config
        self._parts = parts
        self._log = log
        self._eval_sets = eval_sets
        self._start = start
        self._version = start
        self._logged = start
        self._newer = asyncio.Condition()
        capacity = config.sandbox.actors * config.sandbox.concurrency
        self._slots = asyncio.Semaphore(capacity)
        self._eval_slots = asyncio.Semaphore(capacity)
        self._schedule = schedule_of(config, train_tasks)
        self._collected: dict[int, asyncio.Queue[Finished | Exception]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._beside: asyncio.Task[None] | None = None
        """The evaluation that training does not wait for."""

    async def run(self) -> None:
        """Evaluate, train, evaluate. Raises what a part raises for good; nothing is left running."""
        rollouts = asyncio.create_task(self._produce())
        try:
            if self._start == 0:
                self._log.step({"step": 0, "policy_version": 0} | await self._evaluate(0))
            elif self._lost_evaluation:
                self._evaluate_beside(self._start)
            for step in range(self._start, self._config.steps):
                await self._one_step(step, rollouts)
        finally:
            rollouts.cancel()
            left = [*self._running, *([self._beside] if self._beside is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(rollouts, *left, return_exceptions=True)

    async def _one_step(self, step: int, rollouts: asyncio.Task[None]) -> None:
        if self._beside is not None and self._beside.done():
            self._beside.result()
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
        if last:
            if self._beside is not None:
                await self._beside
            row |= await self._evaluate(step + 1)
        elif self._config.eval.every and (step + 1) % self._config.eval.every == 0:
            row |= await self._evaluate(step + 1) if self._config.eval.wait else self._evaluate_beside(step + 1)
        row |= await self._parts.statistics()
        row["seconds/step"] = time.monotonic() - began
        self._log.step(row)
        self._logged = step + 1
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
        """One episode to its end, logged once. Begins with a slot held."""
        finished = await run_to_end(self._parts, spec, slots, self._config.sandbox.retries)
        self._log.episode(episode_row(finished))
        return finished

    def _evaluate_beside(self, step: int) -> dict[str, float]:
        """Begin an evaluation that training goes on beside; one that comes due while another runs is left out.

        Its row comes when it ends: ``eval/step`` is when it began, ``eval/version_first`` and ``_last`` are the oldest
        and the newest version of which it has tokens, and ``step`` is the last step before the row.
        """
        if self._beside is not None:
            if not self._beside.done():
                return {"eval/skipped": 1}
            self._beside.result()

        async def measure() -> None:
            began = time.monotonic()
            finished = await self._measure(step)
            trees = [f.tree for f in finished if f.tree is not None and f.tree["version"] is not None]
            row: dict[str, Any] = {"step": self._logged, "policy_version": self._version, "eval/step": step}
            row["eval/version_first"] = min((tree["version"] for tree in trees), default=None)
            row["eval/version_last"] = max((tree["version_last"] for tree in trees), default=None)
            self._log.step(row | evaluation_means(finished) | {"seconds/eval_beside": time.monotonic() - began})

        self._beside = asyncio.create_task(measure())
        return {}

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Means of an evaluation under one version of the policy."""
        began = time.monotonic()
        return evaluation_means(await self._measure(step)) | {"seconds/eval": time.monotonic() - began}

    async def _measure(self, step: int) -> list[Finished]:
        """The episodes of an evaluation, greedy and sampled: before and after training on every set."""
        config = self._config.eval
        full = step in (0, self._config.steps)
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
        return finished


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


def trainable(finished: Finished) -> bool:
    """Whether an episode reaches the learner; whether truncated ones are trained is the learner's setting."""
    return finished.outcome.status in ("completed", "truncated")


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

    ``eval/<set>/tasks`` is the number of tasks that they are of. Failed episodes are counted, not graded.
    """
    several = len({f.spec.harness for f in finished}) > 1
    rewards: dict[str, list[float]] = {}
    failed: Counter[str] = Counter()
    tasks: dict[str, set[str]] = {}
    for f in finished:
        name, how = f.spec.split.split("/")
        failed[f"eval/{name}/failed"] += f.outcome.reward is None
        if f.outcome.reward is None:
            continue
        rewards.setdefault(f"eval/{name}/reward_{how}", []).append(f.outcome.reward)
        tasks.setdefault(f"eval/{name}/tasks", set()).add(f.spec.task.id)
        family = f.spec.task.metadata.get("family")
        for part in (family, f"in {f.spec.harness}" if several else None):
            if part:
                rewards.setdefault(f"eval/{name}/{part}/reward_{how}", []).append(f.outcome.reward)
    means = {key: sum(values) / len(values) for key, values in rewards.items()}
    return means | {key: len(ids) for key, ids in tasks.items()} | dict(failed)
