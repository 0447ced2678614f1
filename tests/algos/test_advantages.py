import pytest
import torch
from reference import OracleEpisode, baselines

from algos.advantages import ESTIMATORS, dr_grpo, grpo, has_spread, rloo
from trees.tree import NO_IDS, Node, Tree


def test_an_episode_counts_once_however_many_leaves_it_has():
    """L1: rewards 1, 0, 0, 0; whatever forks the first has, the baseline is 0.25 and the std sqrt(3)/4."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(dr_grpo(rewards, groups), rewards - 0.25)
    torch.testing.assert_close(grpo(rewards, groups), (rewards - 0.25) / (3**0.5 / 4))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_equal_the_reference_on_interleaved_groups_of_unequal_size(estimator):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(23, dtype=torch.float64, generator=generator)
    groups = torch.randint(0, 4, (23,), generator=generator)
    nothing = Tree((Node(0, -1, NO_IDS),))
    episodes = [OracleEpisode(str(g), r, nothing) for g, r in zip(groups.tolist(), rewards.tolist(), strict=True)]
    expected = torch.tensor(baselines(episodes, estimator), dtype=torch.float64)
    torch.testing.assert_close(ESTIMATORS[estimator](rewards, groups), expected)


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.5, 7.0], dtype=torch.float64)
    groups = torch.tensor([3, 3, 3, 9])
    torch.testing.assert_close(
        rloo(rewards, groups), torch.tensor([1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0.0], dtype=torch.float64)
    )


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_groups_without_spread_give_exactly_zero(estimator, reward):
    rewards = torch.tensor([reward] * 7 + [1.0, 0.0])
    groups = torch.tensor([0] * 7 + [1, 1])
    assert estimator(rewards, groups)[:7].tolist() == [0.0] * 7
    assert (estimator(rewards, groups)[7:] != 0).all()
    assert has_spread(rewards, groups).tolist() == [False] * 7 + [True] * 2


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())
def test_rounding_in_a_grader_is_no_spread(estimator):
    rewards = torch.tensor([1 / 3, 1 / 3 + 1e-7, 1 / 3])
    assert estimator(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())
def test_order_and_other_groups_do_not_matter(estimator):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(12, dtype=torch.float64, generator=generator)
    groups = torch.arange(12) % 3
    order = torch.randperm(12, generator=generator)
    whole = estimator(rewards, groups)
    torch.testing.assert_close(estimator(rewards[order], groups[order]), whole[order])
    torch.testing.assert_close(estimator(rewards[groups == 1], groups[groups == 1]), whole[groups == 1])


def test_rewards_and_groups_must_match():
    with pytest.raises(ValueError, match="expected two vectors of one length"):
        grpo(torch.zeros(3), torch.zeros(4, dtype=torch.int64))
