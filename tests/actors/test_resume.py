"""R1: what had ended before a run was killed is trained once, and not run again."""

import asyncio
import json
from collections import Counter

import numpy as np
import pytest
from test_coordinator import Log, Parts, config, tasks

from actors.coordinator import Coordinator
from actors.resume import taken_over
from algos.runlog import read_jsonl, rewind
from trees import codec
from trees.tree import Node, Tree

SETTINGS = (
    "steps=8",
    "rollout.groups=1",
    "rollout.group_size=1",
    "learner.minibatches=1",
    "async.max_staleness=2",
    "eval.every=0",
    "checkpoint.every=2",
)


def tree(**meta):
    return codec.encode(Tree((Node(0, -1, np.arange(3, dtype=np.int32)),), meta))


class DiskLog(Log):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def _write(self, name, row):
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def episode(self, row):
        super().episode(row)
        self._write("episodes.jsonl", row)

    def step(self, row):
        super().step(row)
        self._write("metrics.jsonl", row)


class KilledError(Exception):
    """Stands for the end of the process."""


class DiskParts(Parts):
    """Trees lie on disk, and training ``dies_at`` a step, once the episodes that may have ended have."""

    def __init__(self, folder, dies_at=None, **more):
        super().__init__(**more)
        self.folder = folder
        self.dies_at = dies_at

    async def build_tree(self, spec, outcome):
        path = self.folder / "trees" / f"step_{spec.step:06d}" / f"{spec.id}.tree"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tree(episode=spec.id, status=outcome.status, reward=outcome.reward))
        return await super().build_tree(spec, outcome)

    async def train(self, step, groups):
        if step == self.dies_at:
            await asyncio.sleep(0.2)
            raise KilledError
        return await super().train(step, groups)


async def go(parts, settings, n_tasks=8, start=0, finished=None):
    log = parts.log = DiskLog(parts.folder)
    parts.version = start
    await Coordinator(settings, parts, log, tasks(n_tasks), {}, start, finished).run()


async def test_of_eight_tasks_the_two_that_waited_are_trained_once_like_the_rest(tmp_path):
    """Tasks 0..7, four generated, two trained, checkpoint, killed, resumed: 2..7 are each trained exactly once."""
    settings = config(*SETTINGS)
    first = DiskParts(tmp_path, dies_at=2)
    with pytest.raises(KilledError):
        await go(first, settings)
    assert first.checkpoints == [2]
    assert [step for step, _ in first.trained] == [0, 1]
    rows = read_jsonl(tmp_path / "episodes.jsonl")
    waited = {row["id"] for row in rows if row["step"] >= 2}
    assert {row["step"] for row in rows} == {0, 1, 2, 3, 4}
    finished = taken_over(rows, settings, tasks(8), tmp_path, 2)
    assert set(finished) == waited
    rewind(tmp_path, 2, finished)
    second = DiskParts(tmp_path)
    await go(second, settings, start=2, finished=finished)
    trained = [name for parts in (first, second) for _, groups in parts.trained for name in groups]
    assert len(trained) == len(set(trained)) == 8
    done = {row["id"]: row["task"] for row in read_jsonl(tmp_path / "episodes.jsonl")}
    assert sorted(done[name] for name in trained) == sorted(f"t{i}" for i in range(8))
    assert [step for step, _ in second.trained] == [2, 3, 4, 5, 6, 7]
    assert not waited & {name for name, *_ in second.started}
    counts = Counter(row["id"] for row in read_jsonl(tmp_path / "episodes.jsonl"))
    assert set(counts.values()) == {1}
    assert len(counts) == 8


async def ended(folder, settings):
    parts = DiskParts(folder, dies_at=2)
    with pytest.raises(KilledError):
        await go(parts, settings)
    return read_jsonl(folder / "episodes.jsonl")


async def test_steps_since_the_checkpoint_are_trained_again_on_the_episodes_that_they_had(tmp_path):
    settings = config(*SETTINGS, "checkpoint.every=3")
    rows = await ended(tmp_path, settings)
    assert set(taken_over(rows, settings, tasks(8), tmp_path, 0)) == {row["id"] for row in rows}


async def test_what_cannot_be_trained_as_the_schedule_wants_it_is_run_again(tmp_path):
    settings = config(*SETTINGS)
    rows = {row["step"]: row for row in await ended(tmp_path, settings)}
    (tmp_path / "trees" / "step_000002" / f"{rows[2]['id']}.tree").unlink()
    failed = rows[3] | {"status": "failed"}
    stale = rows[4] | {"report": rows[4]["report"] | {"version": 1}}
    untold = rows[3] | {"report": None}
    assert taken_over([rows[2], failed, stale, untold], settings, tasks(8), tmp_path, 2) == {}
    assert set(taken_over([rows[3], rows[4]], settings, tasks(8), tmp_path, 2)) == {rows[3]["id"], rows[4]["id"]}
    assert taken_over([rows[3]], config(*SETTINGS, "seed=1"), tasks(8), tmp_path, 2) == {}
    assert taken_over([rows[3]], config(*SETTINGS, "steps=3"), tasks(8), tmp_path, 2) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda name, data: data[: len(data) // 2],
        lambda name, data: b"",
        lambda name, data: bytes(len(data)),
        lambda name, data: data + data,
        lambda name, data: tree(episode="another", status="completed", reward=1.0),
        lambda name, data: tree(episode=name, status="truncated", reward=1.0),
        lambda name, data: tree(episode=name, status="completed", reward=0.5),
        lambda name, data: tree(episode=name, status="completed", reward=None),
    ],
)
async def test_an_episode_whose_tree_is_damaged_or_of_another_is_run_again(tmp_path, spoil):
    settings = config(*SETTINGS)
    rows = {row["step"]: row for row in await ended(tmp_path, settings)}
    path = tmp_path / "trees" / "step_000002" / f"{rows[2]['id']}.tree"
    path.write_bytes(spoil(rows[2]["id"], path.read_bytes()))
    assert set(taken_over(rows.values(), settings, tasks(8), tmp_path, 2)) == {rows[3]["id"], rows[4]["id"]}


@pytest.mark.parametrize(
    ("in_row", "in_tree"),
    [
        ({"reward": round(1 / 3, 6)}, {"reward": 1 / 3}),
        ({"reward": None}, {"reward": float("nan")}),
        ({"status": "dropped"}, {"status": "truncated"}),
    ],
)
async def test_a_tree_says_what_a_row_says_shorter(tmp_path, in_row, in_tree):
    settings = config(*SETTINGS)
    row = next(row for row in await ended(tmp_path, settings) if row["step"] == 2) | in_row
    path = tmp_path / "trees" / "step_000002" / f"{row['id']}.tree"
    path.write_bytes(tree(**{"episode": row["id"], "status": "completed", "reward": 1.0} | in_tree))
    assert set(taken_over([row], settings, tasks(8), tmp_path, 2)) == {row["id"]}
