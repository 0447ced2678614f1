import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ray.exceptions import RayActorError

from actors.tree_builder import TreeBuilderActor
from configs.schema import TreesConfig
from trees import codec
from trees.record import CallRecord, VersionSpan


class Learner:
    def __init__(self, dead=False):
        self.dead, self.trees = dead, []

    async def add(self, data):
        if self.dead:
            raise RayActorError
        self.trees.append(codec.decode(data))


def record(ordinal, parent=None, session="s", finish="stop", kind="main", version=3):
    return CallRecord(
        session=session,
        call=f"{session}c{ordinal}",
        parent=parent,
        ordinal=ordinal,
        prompt_ids=np.array([1, 2, 3], np.int32),
        sampled_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=(VersionSpan(version, 0, 2),),
        temperature=1.0,
        finish=finish,
        kind=kind,
    )


def meta(split="train", step=4):
    return {"episode": "e1", "step": step, "split": split, "status": "completed", "reward": 1.0, "group": "g"}


def builder(tmp_path, learner, **settings):
    return TreeBuilderActor(tmp_path, learner, TreesConfig(**settings))


def packed(*records):
    return codec.encode_records(list(records))


async def test_a_finished_tree_goes_to_the_learner_and_to_disk(tmp_path: Path):
    learner = Learner()
    actor = builder(tmp_path, learner)
    actor.add(packed(record(0)))
    actor.add(packed(record(1, "sc0")))
    report = await actor.finish("s", 2, meta())
    assert report["leaves"] == 1
    assert report["version"] == 3
    assert report["tokens_trained"] == report["tokens/sampled"] == report["kind/main"] == 4
    stored = codec.decode((tmp_path / "trees" / "step_000004" / "e1.tree").read_bytes())
    assert stored.meta["reward"] == learner.trees[0].meta["reward"] == 1.0
    assert not list(tmp_path.rglob("*.partial"))


async def test_the_bytes_of_a_tree_are_on_the_disk_before_its_name(tmp_path, monkeypatch):
    seen = []

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        seen.append((path.name, len(codec.decode(path.read_bytes()).nodes), sorted(tmp_path.rglob("*.tree"))))

    monkeypatch.setattr(os, "fsync", fsync)
    actor = builder(tmp_path, Learner())
    actor.add(packed(record(0)))
    await actor.finish("s", 1, meta())
    [(name, nodes, under_its_name)] = seen
    assert (name, under_its_name) == ("e1.partial", [])
    assert nodes > 1


async def test_filters_and_kinds_add_up_to_what_was_sampled(tmp_path):
    actor = builder(tmp_path, Learner())
    actor.add(packed(record(0), record(1, "sc0"), record(2, "sc0"), record(3, None, kind="side")))
    report = await actor.finish("s", 4, meta())
    removed = sum(v for k, v in report.items() if k.startswith("filter/removed"))
    kinds = sum(v for k, v in report.items() if k.startswith("kind/"))
    assert report["filter/kept"] + removed == kinds == report["tokens/sampled"] == 8
    assert report["filter/kept"] == 4


async def test_missing_records_are_told_and_accepted_again(tmp_path):
    learner = Learner()
    first = builder(tmp_path, learner)
    first.add(packed(record(0)))
    assert await first.finish("s", 2, meta()) is None
    restarted = builder(tmp_path, learner)
    assert await restarted.finish("s", 2, meta()) is None
    restarted.add(packed(record(0), record(1, "sc0")))
    restarted.add(packed(record(0), record(1, "sc0")))
    assert (await restarted.finish("s", 2, meta()))["tokens/sampled"] == 4
    assert len(learner.trees) == 1


async def test_a_dead_learner_finds_the_tree_on_disk(tmp_path):
    actor = builder(tmp_path, Learner(dead=True))
    actor.add(packed(record(0)))
    assert (await actor.finish("s", 1, meta()))["leaves"] == 1
    assert (tmp_path / "trees" / "step_000004" / "e1.tree").is_file()


async def test_evaluations_are_neither_sent_nor_stored(tmp_path):
    learner = Learner()
    actor = builder(tmp_path, learner)
    actor.add(packed(record(0)))
    assert await actor.finish("s", 1, meta(split="heldout/greedy"))
    assert not learner.trees
    assert not (tmp_path / "trees").exists()


async def test_evaluations_are_stored_where_that_is_asked_for_and_never_sent(tmp_path):
    learner = Learner()
    for sink in (learner, None):
        actor = builder(tmp_path, sink, keep="all")
        actor.add(packed(record(0)))
        assert await actor.finish("s", 1, meta(split="heldout/greedy"))
    assert not learner.trees
    assert (tmp_path / "trees" / "step_000004" / "e1.tree").is_file()


async def test_the_oldest_and_the_newest_version_that_sampled_are_told(tmp_path):
    actor = builder(tmp_path, Learner())
    actor.add(packed(record(0, version=3), record(1, "sc0", version=5)))
    report = await actor.finish("s", 2, meta())
    assert (report["version"], report["version_last"]) == (3, 5)


async def test_an_episode_with_too_many_leaves_is_dropped_with_its_reason(tmp_path):
    actor = builder(tmp_path, Learner(), max_leaves=1, train_kinds=["main", "side"])
    actor.add(packed(record(0), record(1, None, kind="side")))
    report = await actor.finish("s", 2, meta())
    assert "over-branching" in report["dropped"]
    assert report["tokens_trained"] == 0


async def test_old_trees_go_when_told_so(tmp_path):
    actor = builder(tmp_path, Learner(), keep_steps=2)
    for step in range(5):
        actor.add(packed(record(0, session=f"s{step}")))
        await actor.finish(f"s{step}", 1, meta(step=step))
    assert sorted(p.name for p in (tmp_path / "trees").iterdir()) == ["step_000003", "step_000004"]


async def test_a_call_without_log_probabilities_is_left_out_and_counted_with_what_extends_it(tmp_path):
    learner = Learner()
    actor = builder(tmp_path, learner)
    bare = replace(record(1, "sc0"), logprobs=np.zeros(0, np.float32))
    actor.add(packed(record(0), bare, record(2, "sc1")))
    report = await actor.finish("s", 3, meta())
    assert (report["calls/recorded"], report["calls/refused"]) == (1, 2)
    assert report["tokens_trained"] == 2
    assert all(np.count_nonzero(node.logprobs) == len(node) for node in learner.trees[0].calls())


async def test_an_episode_cut_before_its_first_call_has_an_empty_tree(tmp_path):
    report = await builder(tmp_path, Learner()).finish("s", 0, meta())
    assert report["tokens/sampled"] == report["tokens_trained"] == report["leaves"] == 0
    assert report["version"] is None


@pytest.mark.parametrize("n", [0, 1])
async def test_discarded_sessions_are_forgotten(tmp_path, n):
    actor = builder(tmp_path, Learner())
    actor.add(packed(*[record(i) for i in range(n)]))
    actor.discard("s")
    assert await actor.finish("s", 1, meta()) is None


async def test_memory_is_bounded_and_what_was_forgotten_can_be_told_again(tmp_path):
    actor = builder(tmp_path, Learner(), builder_mb=1)
    large = np.arange(50_000, dtype=np.int32)
    for episode in range(12):
        actor.add(packed(replace(record(0, session=f"e{episode}"), prompt_ids=large)))
        actor.add(packed(record(0, session="kept")))
    assert sum(actor._held.values()) <= 1 << 20
    assert await actor.finish("kept", 1, meta()) is not None
    assert await actor.finish("e11", 1, meta()) is not None
    assert await actor.finish("e0", 1, meta()) is None
    actor.add(packed(replace(record(0, session="e0"), prompt_ids=large)))
    assert (await actor.finish("e0", 1, meta()))["tokens_trained"] == 2


async def test_trees_that_nobody_trains_again_are_put_together_by_group(tmp_path):
    actor = builder(tmp_path, Learner())
    for step in range(3):
        for member in range(4):
            name = f"s{step}g{member % 2}m{member}"
            actor.add(packed(record(0, session=name)))
            await actor.finish(name, 1, meta(step=step) | {"episode": name, "group": f"s{step}g{member % 2}"})
    before = {path: path.read_bytes() for path in (tmp_path / "trees").rglob("*.tree")}
    await actor.gather(2)
    await builder(tmp_path, Learner()).gather(2)
    found = {str(path.relative_to(tmp_path / "trees")) for path in (tmp_path / "trees").rglob("*")}
    groups = {f"step_00000{step}/s{step}g{g}.tree" for step in range(2) for g in range(2)}
    singles = {f"step_000002/s2g{member % 2}m{member}.tree" for member in range(4)}
    assert found == groups | singles | {f"step_00000{step}" for step in range(3)}
    with (tmp_path / "trees" / "step_000001" / "s1g1.tree").open("rb") as file:
        trees = list(codec.read(file))
    assert [tree.meta["episode"] for tree in trees] == ["s1g1m1", "s1g1m3"]
    single = before[tmp_path / "trees" / "step_000001" / "s1g1m3.tree"]
    assert codec.encode(trees[1]) == single


async def test_gathering_goes_on_where_it_was_broken_off(tmp_path):
    actor = builder(tmp_path, Learner())
    for member in range(2):
        actor.add(packed(record(0, session=f"m{member}")))
        await actor.finish(f"m{member}", 1, meta(step=0) | {"episode": f"m{member}", "group": "g"})
    folder = tmp_path / "trees" / "step_000000"
    kept = (folder / "m1.tree").read_bytes()
    await actor.gather(1)
    whole = (folder / "g.tree").read_bytes()
    (folder / "m1.tree").write_bytes(kept)
    (folder / "torn.tree").write_bytes(kept[:20])
    await builder(tmp_path, Learner()).gather(1)
    assert (folder / "g.tree").read_bytes() == whole
    assert sorted(path.name for path in folder.iterdir()) == ["g.tree", "torn.tree"]


async def episodes(actor, folder, *names, group="g", step=0, **fields):
    for name in names:
        actor.add(packed(record(0, session=name, **fields)))
        await actor.finish(name, 1, meta(step=step) | {"episode": name, "group": group})
    return folder / "trees" / f"step_{step:06d}"


def held(path):
    with path.open("rb") as file:
        return {tree.meta["episode"]: tree for tree in codec.read(file)}


async def test_gathering_is_no_reason_to_end_a_run(tmp_path):
    actor = builder(tmp_path, Learner())
    folder = await episodes(actor, tmp_path, "a", "b")
    (folder / "z.tree").mkdir()
    (folder / "gone.tree").symlink_to("nowhere")
    (tmp_path / "trees" / "step_tmp").mkdir()
    (folder / "alone.tree").write_bytes(codec.encode(codec.decode((folder / "a.tree").read_bytes())))
    await actor.gather(1)
    assert set(held(folder / "g.tree")) == {"a", "b"}
    # A step that could not be gathered is tried again.
    folder = await episodes(actor, tmp_path, "c", "d", step=1)
    (folder / "g.partial").mkdir()
    await actor.gather(2)
    assert (folder / "c.tree").exists()
    (folder / "g.partial").rmdir()
    await actor.gather(2)
    assert set(held(folder / "g.tree")) == {"c", "d"}


async def test_gathering_loses_no_tree(tmp_path):
    actor = builder(tmp_path, Learner())
    folder = await episodes(actor, tmp_path, "p", "q", group="x")
    await episodes(actor, tmp_path, "x", "y", group="g2")
    await actor.gather(1)
    kept = {name for path in folder.glob("*.tree") for name in held(path)}
    assert kept == {"p", "q", "x", "y"}


async def test_an_episode_that_ran_again_is_newer_than_what_was_gathered(tmp_path):
    folder = await episodes(builder(tmp_path, Learner()), tmp_path, "a1", "a2", group="z")
    await builder(tmp_path, Learner()).gather(1)
    await episodes(builder(tmp_path, Learner()), tmp_path, "a1", group="z", version=9)
    await builder(tmp_path, Learner()).gather(1)
    trees = held(folder / "z.tree")
    assert {name: tree.calls()[0].versions[0].version for name, tree in trees.items()} == {"a1": 9, "a2": 3}


async def test_a_damaged_group_is_not_written_over(tmp_path):
    folder = await episodes(builder(tmp_path, Learner()), tmp_path, "a1", "a2")
    await builder(tmp_path, Learner()).gather(1)
    damaged = (folder / "g.tree").read_bytes()[:-5]
    (folder / "g.tree").write_bytes(damaged)
    await episodes(builder(tmp_path, Learner()), tmp_path, "a3")
    await builder(tmp_path, Learner()).gather(1)
    assert (folder / "g.tree").read_bytes() == damaged
    assert (folder / "a3.tree").exists()


async def test_a_record_told_twice_is_held_once(tmp_path):
    actor = builder(tmp_path, Learner(), builder_mb=1)
    large = packed(replace(record(0, session="big"), prompt_ids=np.arange(50_000, dtype=np.int32)))
    actor.add(packed(record(0, session="other")))
    for _ in range(20):
        actor.add(large)
    assert await actor.finish("other", 1, meta()) is not None


async def test_sessions_that_are_told_again_do_not_push_each_other_out(tmp_path):
    actor = builder(tmp_path, Learner(), builder_mb=1)
    ids = np.arange(200_000, dtype=np.int32)
    for name in ("a", "b"):
        assert await actor.finish(name, 1, meta()) is None
    for name in ("a", "b"):
        actor.add(packed(replace(record(0, session=name), prompt_ids=ids)))
    for name in ("a", "b"):
        assert await actor.finish(name, 1, meta()) is not None
