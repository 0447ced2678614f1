"""``Harness-v0`` with ``remote=True``: the sandbox is in an actor on a Ray cluster, all else is the same."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import ray
from needs import require

import envs  # noqa: F401
from envs.gym.actions import words
from envs.sandbox.create import unavailable


@pytest.fixture
def env():
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    with tempfile.TemporaryDirectory(prefix="reins-") as root:
        made = gymnasium.make("Harness-v0", remote=True, sandbox={"root": root}).unwrapped
        yield made
        made.close()
        assert list(Path(root).iterdir()) == []
    assert not ray.is_initialized()


def test_the_same_environment_lives_in_an_actor(env):
    seen, info = env.reset(seed=1)
    with gymnasium.make("Harness-v0") as here:
        same, told = here.unwrapped.reset(seed=1)
    assert (seen["messages"], info) == (same["messages"], told)
    look = words("I look.", [("execute_bash", {"command": "echo seen"})])
    assert env.step(look)[0]["messages"][-1]["text"].startswith("seen")
    *_, terminated, _, info = env.step("Done.")
    assert (terminated, info["record"]["status"], len(info["tree"].calls())) == (True, "completed", 2)


def test_an_actor_that_dies_fails_its_episode_and_the_next_is_in_another(env):
    env.reset(seed=1)
    ray.kill(env._stage._actor)
    _, reward, terminated, truncated, info = env.step("Done.")
    assert np.isnan(reward)
    assert (terminated, truncated, info["record"]["status"]) == (False, True, "failed")
    assert info["record"]["reason"].startswith("the sandbox actor died")
    env.reset(seed=1)
    assert env.step("Done.")[2]


def test_workers_do_without_uvloop(env):
    """Its children waited for ever now and then: see ``connect``."""

    class Looped:
        async def loop(self):
            return type(asyncio.get_running_loop()).__module__

    env.reset(seed=1)
    assert ray.get(ray.remote(Looped).options(num_cpus=0).remote().loop.remote()) == "asyncio.unix_events"
