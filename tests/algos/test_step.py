import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from tree_cases import moved, tiny_model

from algos.batching import PaddedBatch, TreeBatch, layout_for, micro_batches, padded_batches, sample_of
from algos.ranks import Ranks
from algos.step import LossSettings, accumulate, apply, with_old
from trees.linearise import Path

VOCABULARY = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocabulary=VOCABULARY, layers=2)


def path(ids, mask, temperature, rng):
    mask = np.array(mask, bool)
    return Path(
        ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.uniform(-5, -1, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        temperature=np.full(len(ids), temperature, np.float32),
        credit=mask.astype(np.float32),
        leaf=0,
        before=np.full(len(ids), -1, np.int32),
    )


def samples():
    """Six episodes; the second is forked into three leaves that share a trained prefix."""
    rng = np.random.default_rng(5)
    found = []
    for n in range(6):
        prefix = rng.integers(0, VOCABULARY, 6).tolist()
        for leaf in range(3 if n == 1 else 1):
            tail = rng.integers(0, VOCABULARY, int(rng.integers(2, 12))).tolist()
            shared = [False, False, False, *[leaf == 0] * 3]
            mask = shared + [bool(rng.random() < 0.7) for _ in tail]
            found.append(sample_of(path(prefix + tail, mask, 0.8, rng), 1.1 - n / 3))
    return found


class Told(Ranks):
    """Keeps what it tells the others."""

    def exchange(self, mine):
        messages.append(mine)
        return [mine]


messages = []


def test_what_ranks_tell_each_other_of_samples_is_no_longer_than_its_numbers(model):
    messages.clear()
    few = LossSettings(max_tokens=10_000)
    with_old(model, samples() * 1, few, Told())
    parts = [tensor for found in messages[0][0].values() for tensor in found.values()]
    alone = [torch.zeros(len(part), dtype=part.dtype) for part in parts]
    assert len(parts) == 2 * len(samples())
    assert len(pickle.dumps(parts)) == len(pickle.dumps(alone))


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_samples_without_advantage_count_as_tokens_only(model):
    now = moved(model, 0.02)
    known, *_ = with_old(model, samples(), LossSettings())
    idle = replace(known[0], advantages=torch.zeros_like(known[0].advantages))
    now.zero_grad()
    alone = accumulate(now, [known], LossSettings())
    expected = gradients(now)
    now.zero_grad()
    together = accumulate(now, [known, [idle]], LossSettings())
    share = alone.tokens / together.tokens
    assert together.tokens == alone.tokens + len(idle.targets)
    assert together.ran == alone.ran
    assert together.loss == pytest.approx(alone.loss * share)
    torch.testing.assert_close(gradients(now), expected * share)


def test_padded_batches_hold_every_sample_once_within_the_budget():
    every = samples()
    batches = padded_batches(every, 45)
    assert len(batches) > 1
    held = [id(sample) for batch in batches for sample in batch.samples]
    assert sorted(held) == sorted(id(sample) for sample in every)
    for batch in batches:
        assert batch.ids.numel() <= 45
        assert batch.ids[batch.mask].tolist() == batch.gather("targets").tolist()
    assert sum(int(batch.mask.sum()) for batch in batches) == sum(len(sample.targets) for sample in every)


def test_a_sample_longer_than_the_budget_stands_alone():
    assert [len(batch.samples) for batch in padded_batches(samples(), 1)] == [1] * 8


def group_of(prompt, n=4):
    """Samples that share a prompt of so many tokens."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, VOCABULARY, prompt).tolist()
    tails = [rng.integers(0, VOCABULARY, 5).tolist() for _ in range(n)]
    return [sample_of(path(shared + tail, [False] * prompt + [True] * 5, 0.8, rng), 1.0) for tail in tails]


def test_trees_are_taken_where_they_spare_a_fifth_of_the_tokens():
    long, short = micro_batches(group_of(2), 10_000), micro_batches(group_of(1), 10_000)
    assert [type(batch) for batch in (*long, *short)] == [TreeBatch, PaddedBatch]
    assert (long[0].computed, short[0].computed) == (2 + 4 * 5, 4 * 6)
    assert [type(batch) for batch in micro_batches(group_of(60), 10_000, "paths")] == [PaddedBatch]


def test_a_model_with_a_window_is_trained_on_paths(model):
    config = MistralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, sliding_window=4
    )
    windowed = MistralForCausalLM(config)
    assert (layout_for(windowed, "auto"), layout_for(model, "auto")) == ("paths", "auto")
    with pytest.raises(ValueError, match=r"learner.layout=paths"):
        layout_for(windowed, "tree")


def test_what_follows_the_last_trained_token_is_cut():
    rng = np.random.default_rng(0)
    sample = sample_of(path(range(8), [0, 0, 1, 1, 0, 0, 0, 0], 1.0, rng), 1.0)
    assert sample.ids.tolist() == [0, 1, 2, 3]
    assert sample.targets.tolist() == [2, 3]
    assert sample_of(path(range(8), [0] * 8, 1.0, rng), 1.0) is None


@pytest.mark.parametrize(("mask", "fault"), [([1, 1, 0], "first token"), ([0, 1, 1], "without a version")])
def test_paths_that_cannot_be_trained_are_refused(mask, fault):
    bad = path(range(3), mask, 1.0, np.random.default_rng(0))
    if fault == "without a version":
        bad.versions[2] = -1
    with pytest.raises(ValueError, match=fault):
        sample_of(bad, 1.0)


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_a_step_that_is_not_finite_leaves_weights_and_moments(loss, gradient):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones(3)
    assert apply([optimizer], [weight], 1.0, 1.0) == pytest.approx(3**0.5)
    before = copy.deepcopy((weight.data, optimizer.state_dict()["state"]))
    weight.grad = torch.full((3,), gradient)
    assert np.isnan(apply([optimizer], [weight], loss, 1.0))
    assert weight.grad is None
    torch.testing.assert_close((weight.data, optimizer.state_dict()["state"]), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_whose_positions_depend_on_what_is_beside_is_refused(kind):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    stretched = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            rope_parameters=scaling,
        )
    )
    for layout in ("auto", "tree", "paths"):
        with pytest.raises(ValueError, match=f"rope_type '{kind}'"):
            layout_for(stretched, layout)
