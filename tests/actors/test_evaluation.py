import asyncio
from pathlib import Path

import pytest

from actors.episodes import NothingWorksError
from actors.evaluation import attempts, left, measure
from configs.eval import EvaluationConfig
from envs.episode import EpisodeOutcome
from envs.tasks.task import Task


def config(**settings):
    rings = [
        {"name": "training", "harnesses": [{"name": "agent_loop"}], "tasks": ["a"]},
        {
            "name": "outside",
            "harnesses": [{"name": "agent_loop", "label": "short", "max_turns": 2}, {"name": "agent_loop"}],
        },
    ]
    data = {"tasks": {"a": {}, "b": {}}, "rings": rings, "runs": 3, "sandbox": {"concurrency": 4}} | settings
    return EvaluationConfig.model_validate(data)


def sets(n=3):
    return {name: [Task(f"{name}{i}", "do it", Path("/t"), "/w", {"family": "f"}) for i in range(n)] for name in "ab"}


class Parts:
    def __init__(self, failing=(), delay=0.001):
        self.failing, self.delay = failing, delay
        self.started, self.running, self.most = [], 0, 0

    async def run_episode(self, spec):
        self.started.append((spec.id, spec.attempt))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay)
        self.running -= 1
        failed = spec.id in self.failing
        graded = None if failed else 1.0
        status = "failed" if failed else "completed"
        reason = "no socket" if failed else ""
        return EpisodeOutcome(spec.id, status, reason, graded, graded, True, 1, 1, 1, 0, transcript="said\n")

    async def build_tree(self, spec, outcome):
        return {"version": 0, "version_last": 0, "leaves": 1, "dropped": "", "tokens_trained": 0}

    async def discard(self, spec):
        pass


class Log:
    def __init__(self):
        self.rows, self.transcripts = [], {}

    def attempt(self, row, transcript):
        self.rows.append(row)
        self.transcripts[row["id"]] = transcript


def test_every_task_of_a_ring_is_done_in_each_of_its_harnesses_as_often_as_asked():
    planned = attempts(config(), sets())
    assert len(planned) == 3 * (3 + 2 * 2 * 3)
    assert len({one.spec.id for one in planned}) == len(planned)
    first = [one for one in planned if one.run == 0]
    assert planned[: len(first)] == first, "run by run"
    asked = {(one.ring, one.tasks, one.spec.harness) for one in planned}
    assert ("training", "b", "agent_loop") not in asked
    assert ("outside", "b", "short") in asked


def test_runs_sample_with_seeds_of_their_own_and_more_runs_change_none():
    three, five = attempts(config(), sets()), attempts(config(runs=5), sets())
    assert five[: len(three)] == three
    one_task = [one for one in five if (one.ring, one.spec.task.id) == ("training", "a0")]
    assert len({one.spec.seed for one in one_task}) == 5
    assert attempts(config(seed=1), sets())[0].spec.seed != three[0].spec.seed


async def test_as_many_run_at_a_time_as_there_are_sandboxes_and_each_is_logged_with_its_place():
    planned = attempts(config(), sets())
    parts, log = Parts(), Log()
    await measure(config(), planned, parts, log)
    assert parts.most == 4
    assert {row["id"] for row in log.rows} == {one.spec.id for one in planned}
    assert log.rows[0].keys() >= {"ring", "tasks", "run", "task", "harness", "category", "reward", "status"}
    assert log.transcripts[planned[0].spec.id] == "said\n"
    assert left(planned, log.rows) == []


async def test_what_failed_is_tried_on_fresh_sandboxes_has_no_reward_and_is_left_to_do():
    planned = attempts(config(), sets())
    bad = planned[5].spec.id
    parts, log = Parts({bad}), Log()
    await measure(config(), planned, parts, log)
    assert [name for name, _ in parts.started].count(bad) == 3
    row = next(row for row in log.rows if row["id"] == bad)
    assert (row["status"], row["reward"], row["reason"]) == ("failed", None, "no socket")
    assert [one.spec.id for one in left(planned, log.rows)] == [bad]


async def test_an_evaluation_in_which_nothing_works_stops_early():
    planned = attempts(config(), sets(20))
    parts, log = Parts({one.spec.id for one in planned}), Log()
    with pytest.raises(NothingWorksError, match=r"20 episodes in a row failed.*no socket"):
        await measure(config(sandbox={"concurrency": 4, "retries": 0}), planned, parts, log)
    assert len(log.rows) < 30


async def test_what_is_cancelled_leaves_nothing_running():
    planned = attempts(config(), sets())
    parts, log = Parts(delay=0.05), Log()
    task = asyncio.create_task(measure(config(), planned, parts, log))
    await asyncio.sleep(0.12)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    began = len(parts.started)
    await asyncio.sleep(0.1)
    assert len(parts.started) == began


@pytest.mark.parametrize(
    ("metadata", "category"),
    [
        ({"category": ["mail", "files"]}, "mail, files"),
        ({"category": {"a": 1}}, "{'a': 1}"),
        ({"family": None, "category": "", "difficulty": 3}, "3"),
        ({}, None),
    ],
)
def test_a_category_is_a_word_whatever_the_authors_of_a_task_wrote(metadata, category):
    tasks = {"a": [Task("t", "do it", Path("/t"), "/w", metadata)], "b": []}
    assert attempts(config(), tasks)[0].category == category


@pytest.mark.parametrize("changed", [{"task": "other"}, {"seed": 1}, {"harness": "x"}, {"id": "r99n000000"}])
def test_rows_of_another_evaluation_are_refused(changed):
    planned = attempts(config(), sets())
    row = planned[0].identity | {"status": "completed"} | changed
    with pytest.raises(ValueError, match="no longer those that the evaluation began with"):
        left(planned, [row])
