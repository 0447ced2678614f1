"""An agent that can only move files."""

import re

import gymnasium

import envs  # noqa: F401 - registers Harness-v0
from envs.gym.actions import words

env = gymnasium.make("Harness-v0")
observation, info = env.reset(seed=1)
over = False
while not over:
    newest = observation["messages"][-1]
    command = re.sub(r"Move (\S+) to (\S+)\.", r"mv \1 \2", newest["text"])
    action = words("", [("execute_bash", {"command": command})]) if newest["role"] == "user" else words("Done.")
    observation, reward, terminated, truncated, info = env.step(action)
    over = terminated or truncated
print(reward, info["record"]["reason"])
env.close()
