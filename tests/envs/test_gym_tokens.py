"""The environment with a tokenizer: prompts in ids, answers in words or in ids with their log-probabilities."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from bpe import save_bpe
from gymnasium.utils.env_checker import check_env
from needs import require

import envs  # noqa: F401
from actors.rendering import Rendering
from envs.gym.actions import words
from envs.protocols.canonical import Message, ToolCall
from envs.sandbox.create import unavailable
from trees.build import UNTOLD

TEXTS = ["You work on files through tools. system user assistant", '{"name": "execute_bash", "arguments": {}}']


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bpe(tmp_path_factory.mktemp("tokenizer"), TEXTS * 3, 420)


@pytest.fixture
def env(tokenizer: Path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    with tempfile.TemporaryDirectory(prefix="reins-") as root:
        made = gymnasium.make("Harness-v0", tokenizer=str(tokenizer), sandbox={"root": root}, temperature=0.5)
        yield made.unwrapped
        made.close()
        assert list(Path(root).iterdir()) == []


def test_gymnasiums_own_checker_has_nothing_to_say(env, recwarn):
    check_env(env)
    assert [str(warning.message) for warning in recwarn] == []


def test_sampled_ids_are_kept_as_they_are_and_the_next_prompt_extends_them(env, tokenizer):
    rendering = Rendering(tokenizer)
    first, _ = env.reset(seed=1)
    call = ToolCall("", "execute_bash", {"command": "echo seen"})
    ids = rendering.spoken(Message("assistant", "I look.", tool_calls=(call,)))
    # As a policy may sample and an encoder never does: the same text in other ids.
    ids = rendering.tokenizer.encode("I", add_special_tokens=False) + ids[1:]
    logprobs = np.linspace(-3, -0.1, len(ids), dtype=np.float32)
    second, *_ = env.step({"token_ids": np.array(ids, np.int32), "logprobs": logprobs})
    held = [*first["prompt_ids"].tolist(), *ids]
    assert second["prompt_ids"].tolist()[: len(held)] == held
    assert second in env.observation_space
    assert second["messages"][-1]["text"].startswith("seen")
    assert second["messages"][-2]["tool_calls"][0]["name"] == "execute_bash"
    assert 0 < second["sampling"]["max_tokens"] < first["sampling"]["max_tokens"]
    *_, terminated, _, info = env.step(words("Done."))
    assert terminated
    mine, spoken = info["tree"].calls()
    assert mine.ids.tolist() == ids
    assert np.array_equal(mine.logprobs, logprobs)
    assert (mine.trained, mine.temperature) == (True, 0.5)
    assert (spoken.trained, spoken.reason) == (False, UNTOLD)
    assert info["tree"].prompt_ids(spoken.call).tolist() == second["prompt_ids"].tolist()


def test_ids_that_end_without_a_stop_were_cut_and_earn_nothing(env):
    env.reset(seed=1)
    observation, reward, terminated, _, info = env.step({"token_ids": [5, 6, 7], "logprobs": [-1.0, -1.0, -1.0]})
    assert (terminated, reward, info["record"]["clean_end"]) == (True, 0.0, False)
    assert info["tree"].calls()[0].finish == "length"
    assert observation["prompt_ids"].tolist() == []
