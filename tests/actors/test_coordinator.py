import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from actors.coordinator import Coordinator, evaluation_means, summarise
from actors.episodes import Finished, NothingWorksError
from configs.loader import load
from envs.episode import EpisodeOutcome
from envs.tasks.task import Task


def tasks(n):
    return [Task(f"t{i}", "do it", Path("/t"), "/workspace", {"family": f"f{i % 2}"}) for i in range(n)]


def config(*overrides):
    base = [
        "steps=4",
        "rollout.groups=2",
        "rollout.group_size=3",
        "eval.every=2",
        "eval.tasks=4",
        "eval.curve_tasks=2",
        "sandbox.concurrency=4",
        "checkpoint.every=3",
    ]
    return load(None, [*base, *overrides])


def outcome(spec, status="completed", reward=1.0):
    graded = None if status == "failed" else reward
    return EpisodeOutcome(spec.id, status, "", graded, graded, True, 2, 10, 5, 0, {"run": 0.1})


class Parts:
    """Records what is asked; ``faults`` maps (episode id, attempt) to a status or an exception."""

    def __init__(self, faults=None, delay=0.001):
        self.faults = faults or {}
        self.delay = delay
        self.version = 0
        self.training = False
        self.trained = []
        self.checkpoints = []
        self.started = []
        self.discarded = []
        self.lost = set()
        self.evaluated_while_training = 0

    async def run_episode(self, spec):
        self.started.append((spec.id, self.version, spec.step, spec.split))
        self.evaluated_while_training += spec.split != "train" and self.training
        await asyncio.sleep(self.delay)
        fault = self.faults.get((spec.id, spec.attempt), "completed")
        if isinstance(fault, Exception):
            raise fault
        return outcome(spec, fault)

    async def build_tree(self, spec, outcome):
        if (spec.id, spec.attempt) in self.lost:
            return None
        dropped = self.faults.get(("drop", spec.id), "")
        return {
            "version": self.version,
            "version_last": self.version,
            "leaves": 1,
            "dropped": dropped,
            "tokens_trained": 5,
            "kind/main": 5,
        }

    async def discard(self, spec):
        self.discarded.append((spec.id, spec.attempt))

    async def train(self, step, groups):
        self.training = True
        await asyncio.sleep(self.delay)
        self.training = False
        self.trained.append((step, dict(groups)))
        return {"loss": 0.0}

    async def update_engine(self, version):
        self.version = version

    async def checkpoint(self, step, score=None, wait=False):
        assert self.log.steps[-1]["step"] == step, "a checkpoint without the row of its step"
        self.checkpoints.append(step)

    async def statistics(self):
        return {}


class Log:
    def __init__(self):
        self.steps, self.episodes = [], []

    def episode(self, row):
        self.episodes.append(row)

    def step(self, row):
        self.steps.append(row)

    def evaluation(self, done, total, name):
        pass


async def run(parts, settings=None, start=0):
    log = parts.log = Log()
    sets = {"heldout": tasks(4), "wording": tasks(4)}
    await Coordinator(settings or config(), parts, log, tasks(6), sets, start).run()
    return log


async def test_every_step_trains_its_own_episodes_once_and_counts_add_up():
    parts = Parts()
    log = await run(parts)
    assert [step for step, _ in parts.trained] == [0, 1, 2, 3]
    ids = [name for _, groups in parts.trained for name in groups]
    assert len(ids) == len(set(ids)) == 4 * 6
    assert [row["step"] for row in log.steps] == [0, 1, 2, 3, 4]
    for row in log.steps[1:]:
        statuses = [row[f"episodes/{s}"] for s in ("completed", "truncated", "failed", "dropped")]
        assert sum(statuses) == row["episodes/scheduled"] == 6
    assert parts.checkpoints == [3, 4]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_rollouts_start_within_the_staleness_bound(staleness):
    parts = Parts()
    await run(parts, config(f"async.max_staleness={staleness}"))
    behind = [step - version for _, version, step, split in parts.started if split == "train"]
    assert max(behind) <= staleness
    if staleness:
        assert max(behind) > 0


async def test_an_evaluation_sees_one_version_only():
    parts = Parts()
    log = await run(parts)
    assert parts.evaluated_while_training == 0
    for _, version, step, split in parts.started:
        if split != "train":
            assert version == step
    assert "eval/wording/reward_sampled" in log.steps[0]
    assert "eval/heldout/reward_greedy" in log.steps[2]
    assert "eval/wording/reward_greedy" not in log.steps[2]
    assert "eval/wording/f0/reward_greedy" in log.steps[4]


class Slow(Parts):
    """Evaluations in between hang until ``until`` steps are trained."""

    def __init__(self, until):
        super().__init__()
        self.until, self.hanging, self.enough = until, asyncio.Event(), asyncio.Event()

    async def run_episode(self, spec):
        if spec.split != "train" and 0 < spec.step < 6:
            self.hanging.set()
            await self.enough.wait()
        return await super().run_episode(spec)

    async def train(self, step, groups):
        learned = await super().train(step, groups)
        if len(self.trained) >= self.until:
            self.enough.set()
        return learned


BESIDE = ("eval.wait=false", "steps=6", "eval.every=2", "checkpoint.every=2")


async def test_training_goes_on_beside_an_evaluation_whose_row_says_which_versions_it_saw():
    parts = Slow(until=5)
    log = await asyncio.wait_for(run(parts, config(*BESIDE)), 10)
    beside = [row for row in log.steps if "eval/step" in row]
    assert [row["eval/step"] for row in beside] == [2]
    assert beside[0]["eval/version_last"] >= beside[0]["eval/version_first"] >= 4
    assert beside[0]["eval/heldout/reward_greedy"] == 1.0
    # The one due at step 4 found the first still running.
    assert [row["step"] for row in log.steps if "eval/skipped" in row] == [4]
    steps = [row["step"] for row in log.steps]
    assert steps == sorted(steps), "trackers take no step that goes back"
    assert "eval/wording/reward_greedy" in log.steps[-1]
    assert log.steps[-1]["step"] == 6


async def test_the_evaluations_before_and_after_are_of_one_version_also_when_training_does_not_wait():
    parts = Parts()
    await run(parts, config(*BESIDE))
    for _, version, step, split in parts.started:
        if split != "train" and step in (0, 6):
            assert version == step


async def test_a_run_ends_when_the_evaluation_beside_its_last_steps_has():
    parts = Slow(until=6)
    log = await asyncio.wait_for(run(parts, config(*BESIDE)), 10)
    assert [row.get("eval/step") for row in log.steps][-2:] == [2, None]


async def test_an_evaluation_that_a_kill_ended_begins_again_at_the_step_where_the_run_goes_on():
    parts = Slow(until=2)
    log = parts.log = Log()
    coordinator = Coordinator(config(*BESIDE), parts, log, tasks(6), {"heldout": tasks(4)}, 2, None, True)
    await asyncio.wait_for(coordinator.run(), 10)
    assert [row["eval/step"] for row in log.steps if "eval/step" in row] == [2]
    assert len({row["id"] for row in log.episodes}) == len(log.episodes)


async def test_an_evaluation_beside_training_in_which_nothing_works_stops_the_run():
    parts = Parts()

    async def run_episode(spec, ran=parts.run_episode):
        done = await ran(spec)
        return replace(done, status="failed", reason="no socket", reward=None) if spec.id.startswith("e00002") else done

    parts.run_episode = run_episode
    with pytest.raises(NothingWorksError, match="no socket"):
        await asyncio.wait_for(run(parts, config(*BESIDE)), 10)
    assert len(asyncio.all_tasks()) == 1


async def test_a_fault_of_an_evaluation_beside_is_told_also_where_the_next_one_comes_due():
    coordinator = Coordinator(config(*BESIDE), Parts(), Log(), tasks(6), {"heldout": tasks(4)})
    coordinator._beside = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 0))
    await asyncio.wait([coordinator._beside])
    with pytest.raises(TimeoutError):
        coordinator._evaluate_beside(2)


async def test_a_cancelled_run_ends_its_evaluation_beside():
    parts = Slow(until=99)
    task = asyncio.create_task(run(parts, config(*BESIDE)))
    await parts.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_a_failed_episode_runs_again_and_is_forgotten_before():
    name = "s00001g000m001"
    parts = Parts({(name, 0): "failed"})
    log = await run(parts)
    assert (name, 0) in parts.discarded
    assert log.steps[2]["episodes/retries"] == 1
    assert log.steps[2]["episodes/completed"] == 6
    assert next(row for row in log.episodes if row["id"] == name)["failures"] == [""]


async def test_lost_records_count_as_failure_and_run_again():
    parts = Parts()
    parts.lost = {("s00000g000m000", 0)}
    log = await run(parts)
    assert log.steps[1]["episodes/retries"] == 1


async def test_a_slot_is_free_while_a_tree_waits_for_the_learner():
    parts = Parts()
    build_tree, everybody = parts.build_tree, asyncio.Event()

    async def waiting(spec, outcome):
        if spec.split == "train":
            await everybody.wait()
        return await build_tree(spec, outcome)

    async def run_episode(spec, ran=parts.run_episode):
        done = await ran(spec)
        if sum(split == "train" for *_, split in parts.started) == 6:
            everybody.set()
        return done

    parts.build_tree, parts.run_episode = waiting, run_episode
    log = await asyncio.wait_for(run(parts, config("steps=1", "async.max_staleness=0")), 10)
    assert log.steps[1]["episodes/completed"] == 6


@pytest.mark.parametrize("split", ["train", "evaluation"])
async def test_never_more_episodes_than_slots_run_at_once_retries_included(split):
    parts = Parts(delay=0.002)
    running, most = 0, 0

    async def run_episode(spec, ran=parts.run_episode):
        nonlocal running, most
        if (spec.split == "train") != (split == "train"):
            return await ran(spec)
        running += 1
        most = max(most, running)
        done = await ran(spec)
        running -= 1
        failing = spec.attempt == 0 and spec.seed % 2
        return replace(done, status="failed", reward=None) if failing else done

    parts.run_episode = run_episode
    log = await run(parts, config("async.max_staleness=2"))
    assert most == 4
    if split == "train":
        assert sum(row["episodes/retries"] for row in log.steps[1:]) > 3
    assert {row["status"] for row in log.episodes} == {"completed"}


async def test_an_episode_that_keeps_failing_is_reported_and_not_trained_or_graded():
    name = "s00000g001m002"
    parts = Parts({(name, attempt): "failed" for attempt in range(9)})
    log = await run(parts)
    assert log.steps[1]["episodes/failed"] == 1
    assert name not in parts.trained[0][1]
    assert len(parts.trained[0][1]) == 5
    assert log.steps[1]["train/reward"] == 1.0
    assert [row["reward"] for row in log.episodes if row["id"] == name] == [None]


@pytest.mark.parametrize("where", ["s00001", "e00000"])
async def test_a_run_in_which_nothing_works_stops_and_says_why(where):
    parts = Parts()
    run_episode = parts.run_episode

    async def failing(spec):
        done = await run_episode(spec)
        return replace(done, status="failed", reason="no socket", reward=None) if spec.id.startswith(where) else done

    parts.run_episode = failing
    with pytest.raises(NothingWorksError, match="no socket"):
        await run(parts)


async def test_a_dropped_episode_is_counted_and_not_trained():
    name = "s00002g000m000"
    parts = Parts({("drop", name): "over-branching"})
    log = await run(parts)
    assert log.steps[3]["episodes/dropped"] == 1
    assert name not in parts.trained[2][1]


async def test_a_resumed_run_goes_on_with_the_same_schedule():
    whole, rest = Parts(), Parts()
    rest.version = 2
    await run(whole)
    await run(rest, start=2)
    assert rest.trained == whole.trained[2:]


@pytest.mark.parametrize("where", ["s00001g000m001", "e00002heldoutgreedy0001"])
async def test_a_fault_of_our_own_stops_the_run_and_leaves_nothing_running(where):
    parts = Parts({(where, 0): RuntimeError("broken")}, delay=0.002)
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(run(parts), 10)
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_run_leaves_nothing_running():
    parts = Parts(delay=0.05)
    task = asyncio.create_task(run(parts))
    await asyncio.sleep(0.12)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_several_harnesses_are_told_apart():
    log = await run(Parts(), config("rollout.groups=4", "mix=[{name: agent_loop}, {name: agent_loop, label: other}]"))
    row = log.steps[-1]
    assert row["episodes/scheduled"] == 12
    for name in ("agent_loop", "other"):
        assert row[f"harness/{name}/reward"] == row[f"eval/heldout/in {name}/reward_greedy"] == 1.0
        assert row[f"harness/{name}/failed"] == 0
    assert not any("harness/" in key or "/in " in key for key in (await run(Parts())).steps[-1])


async def test_no_training_step_evaluates_only():
    log = await run(Parts(), config("steps=0"))
    assert len(log.steps) == 1
    assert "eval/wording/reward_greedy" in log.steps[0]


def test_summaries_leave_failed_episodes_out_of_the_mean():
    spec = type("S", (), {"id": "x", "split": "heldout/greedy", "harness": "one", "task": tasks(1)[0]})()
    finished = [
        Finished(spec, outcome(spec, reward=r, status=s), {"leaves": 1, "filter/kept": 3})
        for s, r in (("completed", 1.0), ("truncated", 0.0), ("failed", None))
    ]
    row = summarise(finished)
    assert row["train/reward"] == 0.5
    assert row["filter/kept"] == 9
    means = evaluation_means(finished)
    assert means["eval/heldout/reward_greedy"] == 0.5
    assert means["eval/heldout/failed"] == 1
    assert means["eval/heldout/tasks"] == 1
