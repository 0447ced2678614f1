import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import path_gae, tokens, tree_gae
from tree_cases import OracleEpisode, apart, batches, calls, cut, reordered, samples_of, tree_of, with_idle_leaves

from algos.batching import column, with_columns
from algos.episodes import flat, nested, with_gae
from algos.gae import gae, value_loss
from algos.statistics import value_statistics
from trees.linearise import linearise

REARRANGED = {"cut": cut, "apart": lambda tree, _: apart(tree), "reordered": reordered}
relaxed = settings(deadline=None, max_examples=60)


def value_of(ids):
    """A made-up value that depends on all that precedes a token."""
    return math.sin(sum((at + 1) * (1 + int(token)) for at, token in enumerate(ids)))


def valued(episodes):
    """Samples of the episodes with their values."""
    samples = [samples_of(episode) for episode in episodes]
    known = [
        value_of(sample.ids[:at].tolist()) for sample in flat(samples) for at in sample.mask.nonzero()[:, 0].tolist()
    ]
    return nested(with_columns(flat(samples), values=torch.tensor(known, dtype=torch.float64)), samples)


def by_token(tree, samples, name):
    """A column of an episode's samples, by the tokens of its tree."""
    names = []
    for path in linearise(tree):
        places = [(node.id, at) for node in tree.path(path.leaf) for at in range(len(node))]
        names += [place for place, mine in zip(places, path.loss_mask, strict=True) if mine]
    return dict(zip(names, column(samples, name).tolist(), strict=True)) if samples else {}


def chain(n):
    return torch.arange(n) - 1


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_a_chain_equals_the_recursion(values, gamma, lam):
    advantages, returns = gae(
        torch.full((len(values),), 0.7, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        chain(len(values)),
        gamma=gamma,
        lam=lam,
    )
    assert advantages.tolist() == pytest.approx(path_gae(0.7, values, gamma, lam), abs=1e-9)
    torch.testing.assert_close(returns, advantages + torch.tensor(values, dtype=torch.float64))


@relaxed
@given(batches(), st.sampled_from([(1.0, 1.0), (1.0, 0.9), (0.99, 0.5), (0.9, 0.0), (1.0, 0.0)]))
def test_trees_equal_the_reference_path_by_path(episodes, rates):
    """Also the rule for shared tokens: the mean of what they have on the paths of the leaves below them."""
    found = with_gae(valued(episodes), [episode.reward for episode in episodes], *rates)
    for episode, samples in zip(episodes, found, strict=True):
        tree = episode.tree
        known = by_token(tree, samples, "values")
        expected = tree_gae(tree, episode.reward, known, *rates)
        assert set(expected) == set(tokens(tree))
        assert by_token(tree, samples, "advantages") == pytest.approx(expected, abs=1e-6)
        returns = {token: advantage + known[token] for token, advantage in expected.items()}
        assert by_token(tree, samples, "returns") == pytest.approx(returns, abs=1e-6)


def test_by_default_every_leaf_agrees_on_reward_minus_value():
    tree = tree_of([(0, 1, 2, "main"), (0, 1, 3, "main"), (1, 1, 1, "main")], 0)
    (samples,) = with_gae(valued([OracleEpisode("a", 0.3, tree)]), [0.3], 1.0, 1.0)
    torch.testing.assert_close(column(samples, "advantages"), 0.3 - column(samples, "values"))
    assert column(samples, "returns").tolist() == pytest.approx([0.3] * 6)


def test_a_shared_token_has_the_mean_over_its_leaves():
    """Two leaves of values 1 and 3 below a token of value 0: with lambda 0 it is worth 2 and counts once."""
    advantages, _ = gae(torch.ones(3), torch.tensor([0.0, 1.0, 3.0]), torch.tensor([-1, 0, 0]), lam=0.0)
    assert advantages.tolist() == [2.0, 0.0, -2.0]


def test_a_branch_with_more_leaves_weighs_more():
    values = torch.tensor([0.0, 1.0, 4.0, 0.0, 0.0])
    advantages, _ = gae(torch.zeros(5), values, torch.tensor([-1, 0, 0, 1, 1]), lam=0.0)
    assert advantages[0].item() == pytest.approx((2 * 1 + 1 * 4) / 3)


@relaxed
@given(calls, st.integers(0, 99), st.sampled_from([*itertools.product(REARRANGED, [(1.0, 1.0), (0.95, 0.6)])]))
def test_rearranging_a_tree_does_not_change_the_advantages(shape, seed, case):
    name, rates = case
    tree = tree_of(shape, seed)
    others = [REARRANGED[name](tree, np.random.default_rng(seed)), with_idle_leaves(tree)]
    found = []
    for one in (tree, *others):
        (samples,) = with_gae(valued([OracleEpisode("a", 1.0, one)]), [1.0], *rates)
        found.append(sorted(column(samples, "advantages").tolist()) if samples else [])
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)


def test_advantages_keep_the_credit_of_a_branch():
    tree = tree_of([(0, 1, 2, "main"), (99, 1, 1, "side"), (99, 1, 1, "side")], 0)
    known = valued([OracleEpisode("a", 1.0, tree)])[0]
    scaled = with_columns(known, advantages=torch.tensor([1.0, 1.0, 0.5, 0.5]))
    (samples,) = with_gae([scaled], [1.0], 1.0, 1.0)
    expected = (1 - column(known, "values")) * torch.tensor([1.0, 1.0, 0.5, 0.5])
    torch.testing.assert_close(column(samples, "advantages"), expected, check_dtype=False)
    assert column(samples, "returns").tolist() == [1.0] * 4


def test_what_is_not_in_order_is_refused():
    with pytest.raises(ValueError, match="does not stand before"):
        gae(torch.zeros(2), torch.zeros(2), torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"expected one shape \[N\]"):
        gae(torch.zeros(2), torch.zeros(3), torch.tensor([-1, 0]))


@pytest.mark.parametrize(
    ("value", "clip", "loss", "gradient"),
    [
        (2.0, None, 0.5, 1.0),
        (2.0, 0.5, 0.5, 1.0),
        (1.6, 0.5, 0.18, 0.6),
        # Moved to the return and beyond the clip: the loss is that of the clipped value, without a gradient.
        (0.9, 0.5, 0.125, 0.0),
        (1.0, 0.5, 0.125, 0.0),
    ],
)
def test_the_value_loss_holds_values_near_the_old_ones(value, clip, loss, gradient):
    """The old value is 2 and the return 1."""
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([2.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    found = value_loss(values, old, returns, torch.tensor([True]), clip=clip)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", range(3))
def test_observed_positions_reach_neither_value_loss_nor_gradient(bad, where):
    tensors = [torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.1, 0.2]), torch.ones(3)]
    tensors[where] = torch.where(torch.tensor([False, True, False]), bad, tensors[where])
    values = tensors[0].requires_grad_()
    loss = value_loss(*tensors, torch.tensor([True, False, True]), clip=0.5)
    loss.backward()
    assert loss.item() == pytest.approx((0.9**2 + 0.7**2) / 4)
    assert values.grad.tolist() == pytest.approx([-0.45, 0, -0.35])


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert value_statistics(returns, returns)["explained_variance"] == 1
    assert value_statistics(torch.full((4,), 0.3), returns)["explained_variance"] == pytest.approx(0)
    assert value_statistics(1 - returns, returns)["explained_variance"] == pytest.approx(-3)
    assert value_statistics(returns / 2, returns)["explained_variance"] == pytest.approx(0.75)
    assert "explained_variance" not in value_statistics(returns, torch.ones(4))
    assert value_statistics(torch.empty(0), torch.empty(0)) == {}
