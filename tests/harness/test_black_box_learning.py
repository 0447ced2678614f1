"""Reinforcement learning through three real harnesses in one batch, with prompts of tens of thousands of tokens."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from needs import require

from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))
from live import LiveRun, statuses_add_up

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900), pytest.mark.xdist_group("policy")]
CONFIG = Path(__file__).parents[2] / "configs" / "mix_harness.yaml"
HARNESSES = ("claude_code", "qwen_code", "agent_loop")


def test_three_harnesses_learn_in_one_batch(tmp_path):
    for name in ("claude_code", "node", "qwen_code"):
        require(not missing(releases()[name]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    run = LiveRun(tmp_path, str(CONFIG), "steps=1", "rollout.group_size=4", "eval.tasks=1")
    try:
        assert run.wait(850) == 0, run.tail()
    finally:
        run.stop()
    rows, episodes = run.rows("metrics.jsonl"), run.rows("episodes.jsonl")
    statuses_add_up(rows, episodes)
    trained = [episode for episode in episodes if episode["split"] == "train"]
    assert Counter(episode["harness"] for episode in trained) == dict.fromkeys(HARNESSES, 4)
    groups: dict[str, set[tuple[str, str]]] = {}
    for episode in trained:
        groups.setdefault(episode["group"], set()).add((episode["harness"], episode["task"]))
    assert len(groups) == 3
    assert all(len(found) == 1 for found in groups.values())
    for row in rows[1:]:
        assert row["episodes/failed"] == 0
        assert row["train/groups"] == 3
        assert row["kind/main"] > 0
        # What the episodes of a harness share is computed once.
        assert row["train/tokens_computed"] < row["train/tokens_of_paths"] / 2
        assert {f"harness/{name}/reward" for name in HARNESSES} <= row.keys()
    # The policy's shell calls were carried out, not only heard.
    assert max(episode["calls"] for episode in trained if episode["harness"] != "agent_loop") > 1
    assert max(episode["tokens_prompt"] for episode in trained if episode["harness"] == "claude_code") > 15_000
