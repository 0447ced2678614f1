"""Every part of a run is killed for real; the run goes on, and the counts still add up."""

import os
import signal

import pytest
from live import statuses_add_up

from actors.checkpoints import find

pytestmark = pytest.mark.harness

SMALL = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "eval.every=0",
    "eval.tasks=8",
    "checkpoint.every=3",
    "proxy.max_tokens=12",
)
PARTS = ("ray::LearnerRank", "ray::TreeBuilderActor", "ray::SandboxActor", "ray::ServeReplica:reins")


@pytest.mark.timeout(600)
def test_a_run_survives_the_death_of_every_part(launch, untrained):
    run = launch(f"model.path={untrained}", "steps=14", *SMALL)
    run.reach(1, 240)
    run.kill_part("ray::TreeBuilderActor")
    run.reach(3, 120)
    run.kill_part("ray::ServeReplica:reins:EngineServer")
    run.reach(5, 180)
    run.kill_part("ray::LearnerRank")
    run.reach(7, 120)
    run.kill_part("ray::SandboxActor")
    run.reach(9, 120)
    os.kill(run.until(lambda: run.find("bwrap") or run.find("/usr/bin/bwrap"), 60, "a sandbox")[0], signal.SIGKILL)
    run.reach(11, 120)
    run.kill_part("ray::ServeReplica:reins:Proxy")
    assert run.wait(240) == 0, run.tail()
    rows, episodes = run.rows("metrics.jsonl"), run.rows("episodes.jsonl")
    assert [row["step"] for row in rows] == list(range(15))
    assert [row["policy_version"] for row in rows] == list(range(15))
    statuses_add_up(rows, episodes)
    assert all(row["episodes/failed"] == 0 for row in rows[1:]), "an episode was not run again"
    assert sum(row["episodes/retries"] for row in rows[1:]) > 0
    assert rows[-1]["deaths/learner"] >= 1
    trained = [e["id"] for e in episodes if e["split"] == "train"]
    assert len(trained) == len(set(trained)) == 14 * 16


@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_with_the_same_schedule_and_the_episodes_that_had_ended(launch, untrained):
    run = launch(f"model.path={untrained}", "steps=6", "checkpoint.every=2", *SMALL[:4], *SMALL[5:])
    run.reach(3, 240)
    started = run.find("")
    parts = [pid for title in PARTS for pid in run.find(title)]
    assert len(parts) >= len(PARTS)
    run.process.kill()
    run.process.wait()
    run.until_gone(parts, 60)
    before = {e["id"]: e for e in run.rows("episodes.jsonl") if e["split"] == "train"}
    again = launch("--resume", str(run.run_folder()))
    assert again.wait(240) == 0, again.tail()
    rows = again.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    after = [e for e in again.rows("episodes.jsonl") if e["split"] == "train"]
    statuses_add_up(rows, after)
    assert len(after) == len({e["id"] for e in after}) == 6 * 16
    kept = [e for e in after if e["id"] in before]
    assert sum(e["step"] >= 2 for e in kept) >= 16
    assert all(e == before[e["id"]] for e in kept)
    run.until_gone(started, 120)


@pytest.mark.timeout(600)
def test_when_one_rank_of_the_learner_dies_all_come_back_together(launch, untrained):
    run = launch(f"model.path={untrained}", "steps=6", "learner.ranks=2", "checkpoint.every=2", *SMALL[:4], *SMALL[5:])
    run.reach(3, 240)
    ranks = run.find("ray::LearnerRank")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(240) == 0, run.tail()
    rows, episodes = run.rows("metrics.jsonl"), run.rows("episodes.jsonl")
    assert [row["policy_version"] for row in rows] == list(range(7))
    statuses_add_up(rows, episodes)
    assert rows[-1]["deaths/learner"] >= 1
    run.until_gone(ranks, 30)
    assert find(run.run_folder() / "checkpoints")[0] == 6


@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_run_cleanly_and_says_how_to_go_on(launch, untrained):
    run = launch(f"model.path={untrained}", "steps=50", *SMALL)
    run.reach(1, 240)
    started = run.find("")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 130
    assert "--resume" in run.tail()
    assert "Traceback" not in run.tail()
    run.until_gone(started, 30)


@pytest.mark.timeout(300)
def test_a_broken_task_stops_before_anything_starts_and_can_be_skipped(launch, untrained, tmp_path):
    from envs.tasks import desk

    tasks = tmp_path / "tasks"
    desk.write(desk.generate("train", 5, seed=0), tasks)
    broken = sorted(tasks.iterdir())[2] / "data_entry.json"
    broken.write_text('{\n "task_id": "x",\n "user_query": 5\n}')
    run = launch(f"model.path={untrained}", f"tasks.path={tasks}", "steps=1", *SMALL)
    assert run.wait(60) == 2
    assert f"{broken}:3" in run.tail().replace("\n", "")
    assert "user_query" in run.tail()
    assert not list(tmp_path.glob("quickstart-*"))
    again = launch(f"model.path={untrained}", f"tasks.path={tasks}", "tasks.skip_bad=true", "--dry-run", *SMALL)
    assert again.wait(60) == 0, again.tail()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("setting", "word"), [("engine.device=cuda:99", "CUDA"), ("engine.gpus=99", "engines want 99 GPUs")]
)
def test_a_part_that_cannot_start_says_why_in_one_line(launch, untrained, setting, word):
    run = launch(f"model.path={untrained}", "steps=1", "engine.gpus=0", setting, *SMALL)
    assert run.wait(240) == 1
    assert "could not be started" in run.tail()
    assert word in run.tail()
    assert "Traceback" not in run.tail()
