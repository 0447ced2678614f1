"""Several copies of the environment at the same time, each in a process of its own."""

from __future__ import annotations

import functools
from typing import Any

from gymnasium.vector import AsyncVectorEnv

from envs.gym.env import HarnessEnv


def asynchronous(num_envs: int, **settings: Any) -> AsyncVectorEnv:
    """What ``gymnasium.make_vec("Harness-v0", num_envs)`` makes.

    Conversations have no fixed size, so there is no memory to share: with ``vectorization_mode="async"`` pass
    ``vector_kwargs={"shared_memory": False}``.
    """
    return AsyncVectorEnv([functools.partial(HarnessEnv, **settings)] * num_envs, shared_memory=False)
