"""Real harnesses as Gymnasium environments."""

from __future__ import annotations

import gymnasium
import pytest
from dialects import DIALECTS
from gymnasium.utils.env_checker import check_env
from needs import require_harness

import envs  # noqa: F401
from envs.gym.actions import words
from envs.tasks import clawgym

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["claude_code", "codex", "gemini_cli"])
def test_gymnasiums_own_checker_has_nothing_to_say(name, short_folder, recwarn):
    require_harness(name)
    env = gymnasium.make("Harness-v0", harness=name, sandbox={"root": short_folder})
    check_env(env.unwrapped)
    assert [str(warning.message) for warning in recwarn] == []
    env.close()
    assert list(short_folder.iterdir()) == []


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_an_agent_of_one_s_own_does_a_task_in_it(name, short_folder):
    require_harness(name)
    dialect = DIALECTS[name]
    grader = {"reward.sh": "grep -q BETA answer.txt && echo 1 || echo 0\n"}
    instruction = "Write BETA to answer.txt, and say that it is done."
    task = clawgym.write(short_folder / "task", "t", instruction, {"notes.txt": "n"}, grader, {}, "/root/workspace")
    env = gymnasium.make("Harness-v0", harness=name, task=task, sandbox={"root": short_folder / "rooms"})
    observation, info = env.reset()
    over, written, reward = False, False, 0.0
    while not over:
        assert observation in env.observation_space
        if info["kind"] != "main":
            action = words("A title.")
        elif not written:
            action, written = words("I write.", [dialect.shell("printf BETA > answer.txt")]), True
        else:
            action = words("It is done.", dialect.final)
        observation, reward, terminated, truncated, info = env.step(action)
        over = terminated or truncated
    env.close()
    assert (reward, terminated, info["record"]["status"]) == (1.0, True, "completed"), info["record"]
    assert list((short_folder / "rooms").iterdir()) == []
