"""Transcripts in the words of an outside harness, against what the proxy holds of an episode in it."""

from __future__ import annotations

from random import Random

import gymnasium
import numpy as np
import pytest
from needs import require_harness

import envs  # noqa: F401
from actors.rendering import Rendering
from algos.imitation import Transcript, transcribe_outside
from algos.overheard import LAST, overhear
from algos.recipe import ColdstartError
from algos.tiny import build_tokenizer
from envs.tasks.desk import FAMILIES, expert, generate, write

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]


def own(transcript: Transcript) -> list[tuple[int, int]]:
    """Where the policy's turns begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], transcript.own, [False]]).astype(int)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def test_transcripts_are_what_the_proxy_holds_of_the_same_episode(tmp_path, short_folder):
    name = "mini_swe_agent"
    require_harness(name)
    heard = overhear(name)
    assert heard.last == LAST.get(name, "")
    plain, own_words = tmp_path / "plain", tmp_path / "words"
    for folder, more in ((plain, []), (own_words, heard.phrases())):
        folder.mkdir()
        build_tokenizer(folder, levels=True, more=more)
    rendering = Rendering(own_words)
    tasks = generate("train", len(FAMILIES), 5, FAMILIES)
    lengths = []
    for task, written in zip(tasks, write(tasks, tmp_path / "tasks"), strict=True):
        turns = expert(task, Random(0))
        transcript = transcribe_outside(rendering, task, turns, heard)
        lengths.append(len(transcript.ids))
        longer = transcribe_outside(Rendering(plain), task, turns, heard)
        assert len(longer.ids) > 2 * len(transcript.ids)
        env = gymnasium.make(
            "Harness-v0", harness=name, task=written, sandbox={"root": short_folder}, tokenizer=own_words
        )
        observation, _ = env.reset()
        over, reward = False, 0.0
        for begin, end in own(transcript):
            assert not over
            ids = rendering.tokenizer
            held = np.asarray(observation["prompt_ids"])
            assert ids.decode(held) == ids.decode(transcript.ids[:begin])
            assert held.tolist() == transcript.ids[:begin].tolist()
            said = transcript.ids[begin:end].astype(np.int32)
            action = {"token_ids": said, "logprobs": np.zeros(len(said), np.float32)}
            observation, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        env.close()
        assert (over, reward) == (True, 1.0), task.instruction
    assert max(lengths) < 1000


def test_a_harness_that_tells_the_files_of_the_task_is_refused():
    require_harness("qwen_code")
    with pytest.raises(ColdstartError, match="the first request of qwen_code tells the files"):
        overhear("qwen_code")
