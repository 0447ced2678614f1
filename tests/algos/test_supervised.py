"""Which tokens of a tree are trained, the loss of a step, and which trajectories a step takes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import call, grow, relaxed, sessions

from algos.supervised import accumulate, batches, learning_rate, measure, samples_of
from algos.tiny import build_model


@pytest.fixture(scope="module")
def model():
    return build_model(60, seed=3).double().eval()


@relaxed
@given(sessions(), st.booleans())
def test_every_token_of_a_tree_is_trained_once_or_not_at_all(records, everything):
    tree = grow(*records)
    trained = [node for node in tree.nodes if node.trained and len(node)]
    if not everything and any(len(tree.ids(node.parent)) == 0 for node in trained):
        # A call without a prompt: nothing predicts its first token.
        with pytest.raises(ValueError, match="first token"):
            samples_of(tree)
        return
    samples = samples_of(tree, everything)
    count = sum(len(sample.targets) for sample in samples)
    if not everything:
        assert count == sum(map(len, trained))
        return
    above = {node.id for leaf in trained for node in tree.path(leaf.id)}
    firsts = {next(node.id for node in tree.path(i) if len(node)) for i in above if len(tree.ids(i))}
    reached = sum(len(tree.nodes[i]) for i in above)
    assert reached - len(firsts) <= count <= tree.counts().tokens - len(firsts)
    for sample in samples:
        assert not sample.mask[0]
        assert torch.equal(sample.targets, sample.ids[sample.mask])


def forked():
    """Two calls after one prompt and one more after the first; ten trained tokens."""
    return grow(
        call(0, None, [5, 6, 7, 8], [9, 10, 11]),
        call(1, None, [5, 6, 7, 8], [9, 12, 13, 14]),
        call(2, 0, [20, 21], [22, 23, 24]),
    )


@pytest.mark.parametrize("layout", ["paths", "tree"])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 13, 10_000])
def test_loss_and_gradient_equal_a_reference_call_by_call(model, layout, everything, max_tokens):
    trees = [forked(), grow(call(0, None, [5, 6, 7, 8], [30, 31])), grow(call(0, None, [40, 41, 42], [43]))]
    model.zero_grad()
    total, tokens, seen = torch.zeros((), dtype=torch.float64), 0, set()
    for number, tree in enumerate(trees):
        for leaf in tree.calls():
            ids, at = tree.ids(leaf.id), 0
            logprobs = torch.log_softmax(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0], -1)
            for node in tree.path(leaf.id):
                for place in range(at, at + len(node)):
                    if place and (node.sampled or everything) and (number, node.id, place) not in seen:
                        seen.add((number, node.id, place))
                        total, tokens = total - logprobs[place - 1, ids[place]], tokens + 1
                at += len(node)
    (total / tokens).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    samples = [sample for tree in trees for sample in samples_of(tree, everything)]
    sums = accumulate(model, samples, max_tokens, layout)
    assert sums.tokens == tokens
    assert sums.loss == pytest.approx((total / tokens).item(), abs=1e-6)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-6)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert measure(model, samples[::-1], max_tokens, layout).loss == pytest.approx(sums.loss, abs=1e-6)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_a_step_is_a_mean_over_all_of_its_tokens(model):
    """L3: the mean of long and short trajectories is over tokens, not over trajectories or micro-batches."""
    long, short = grow(call(0, None, [5], list(range(6, 36)))), grow(call(0, None, [40], [41]))
    parts = [measure(model, samples_of(tree), 1) for tree in (long, short)]
    both = measure(model, samples_of(long) + samples_of(short), 1)
    assert both.loss == pytest.approx((30 * parts[0].loss + parts[1].loss) / 31)
    assert math.isnan(measure(model, [], 1).loss)


@relaxed
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 200), st.integers(0, 5))
def test_every_epoch_has_every_trajectory_once_in_steps_of_about_the_size(tokens, epochs, size, seed):
    plan = batches(tokens, epochs, size, seed)
    assert plan == batches(tokens, epochs, size, seed)
    for epoch in plan:
        assert sorted(place for step in epoch for place in step) == list(range(len(tokens)))
        assert all(sum(tokens[place] for place in step) <= size + max(tokens) for step in epoch)
        assert len(epoch) <= math.ceil(sum(tokens) / size)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_learning_rate_rises_and_falls(decay):
    rates = [learning_rate(i, 40, peak=2.0, warmup=0.1, decay=decay, final_factor=0.25) for i in range(40)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.5)
    assert learning_rate(0, 1, peak=2.0, warmup=0.1) == 2.0
