"""The engine's log-probability of a sampled token is the trainer's: the importance weight of a fresh token is 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scoring import Plan, converse, trainer_logprobs
from sglang_server import launch
from tiny_models import VOCABULARY, make

from actors.engines.sglang import SGLangEngine
from actors.engines.transformers import TransformersEngine

BOUND = 1e-3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model and its folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    return make("qwen3", folder, seed=3), folder


def plans() -> list[Plan]:
    """Prompts of 3 to 183 tokens, of which some begin alike, three turns each, at both temperatures in turn."""
    random = np.random.default_rng(0)

    def ids(size: int) -> list[int]:
        return random.integers(0, VOCABULARY, size).tolist()

    shared = ids(30)
    heads = [[*shared * (i % 2), *ids(3 + 10 * i)] for i in range(16)]
    return [
        Plan([head, ids(1 + i), ids(12)], [1 + 2 * i, 24, 5], (1.0, 0.7)[i // 2 % 2]) for i, head in enumerate(heads)
    ]


def worst(model, conversations) -> float:
    olds = trainer_logprobs(model, conversations, max_tokens=1024)
    found = [(each.mu() - old).abs() for each, old in zip(conversations, olds, strict=True)]
    assert sum(map(len, found)) == sum(sum(each.plan.lengths) for each in conversations)
    return torch.cat(found).max().item()


async def test_the_embedded_engine_gives_the_trainers_logprobs(served):
    model, folder = served
    engine = TransformersEngine(folder, slots=20, max_len=512, chunk=96)
    conversations = await converse(engine, plans())
    stats = await engine.stats()
    await engine.close()
    assert worst(model, conversations) < BOUND
    assert stats.cached_tokens > stats.prefill_tokens, "prefixes were reused"
    assert stats.decode_tokens > 4 * stats.decode_steps, "neighbours were in the batch"


@pytest.mark.sglang
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("sglang")
async def test_sglang_gives_the_trainers_logprobs(served, tmp_path):
    model, folder = served
    engine = SGLangEngine(launch(folder, tmp_path / "sglang.log"))
    try:
        await engine.ready()
        conversations = await converse(engine, plans())
        stats = await engine.stats()
    finally:
        await engine.close()
    assert worst(model, conversations) < BOUND
    assert stats.cached_tokens > stats.prefill_tokens, "prefixes were reused"
