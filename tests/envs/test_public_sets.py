"""The public benchmarks as their authors publish them: they load, and their graders run.

REINS_CLAWGYM and REINS_PINCHBENCH name where they are; they may not be passed on, so a machine without them skips.
Grading ClawGym as by hand: ``benchmarks/clawgym.py``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from needs import require

from envs.sandbox.create import unavailable
from envs.sandbox.grading import Told, grade
from envs.tasks import formats


def place(variable: str, how: str) -> Path:
    if not os.environ.get(variable):
        pytest.skip(f"clone {how}, and name it in {variable}")
    return Path(os.environ[variable])


def test_the_clawgym_benchmark_loads():
    found = formats.scan(place("REINS_CLAWGYM", "github.com/ClawGym/ClawGym-Agents, RL/data/clawgym_eval of it"))
    assert (len(found.drafts), found.faults) == (200, [])
    assert {draft.mount_dir for draft in found.drafts} == {"/root/.openclaw/workspace"}


@pytest.mark.timeout(300)
async def test_pinchbench_loads_and_its_automated_graders_run(tmp_path):
    where = place("REINS_PINCHBENCH", "github.com/pinchbench/skill")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    loaded = formats.load(where, tmp_path / "tasks")
    assert (len(loaded.tasks), loaded.skipped) == (23, ())
    kinds = Counter(task.metadata["grading_type"] for task in loaded.tasks)
    assert kinds == {"automated": 9, "llm_judge": 7, "hybrid": 7}
    said = json.dumps({"call": 0, "kind": "main", "role": "assistant", "text": "Hello"}) + "\n"
    scores = {}
    for task in loaded.tasks:
        if task.scripted:
            told = Told("Hello", said)
            graded = await grade(task, task.input_files, "bubblewrap", tmp_path / "rooms", told=told)
            scores[task.id] = graded.score
    assert len(scores) == 16
    assert scores.pop("task_00_sanity") == 1.0
    assert max(scores.values()) < 1.0
