import math

import pytest
import torch

from algos.losses import Objective
from algos.statistics import mismatch_statistics, ratio_statistics


def test_ratio_statistics_count_what_the_clip_removed():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    statistics = ratio_statistics(ratio.log(), torch.zeros(4, dtype=torch.float64), advantages, Objective())
    assert statistics["clip_high"] == 0.25
    assert statistics["clip_low"] == 0.25
    assert statistics["ratio_mean"] == pytest.approx(1.0)
    assert statistics["ratio_max"] == pytest.approx(1.5)
    k3 = (ratio - 1 - ratio.log()).mean().item()
    assert statistics["kl_old_theta"] == pytest.approx(k3)


def test_mismatch_statistics():
    ratio = torch.tensor([1.0, 3.0, 0.5, 1.0], dtype=torch.float64)
    statistics = mismatch_statistics(ratio.log(), torch.zeros(4, dtype=torch.float64), Objective())
    assert statistics["tis_mean"] == pytest.approx((1 + 2 + 0.5 + 1) / 4)
    assert statistics["tis_capped"] == 0.25
    assert statistics["mu_old_max"] == pytest.approx(math.log(3))
    assert statistics["kl_mu_old"] > 0


def test_the_estimated_divergence_is_the_true_one_in_expectation():
    """k3 under samples of mu: E[r - 1 - log r] = KL(mu || old)."""
    generator = torch.Generator().manual_seed(0)
    mu = torch.log_softmax(torch.randn(5, dtype=torch.float64, generator=generator), 0)
    old = torch.log_softmax(torch.randn(5, dtype=torch.float64, generator=generator), 0)
    draws = torch.multinomial(mu.exp(), 200_000, replacement=True, generator=generator)
    truth = (mu.exp() * (mu - old)).sum().item()
    assert mismatch_statistics(old[draws], mu[draws], Objective())["kl_mu_old"] == pytest.approx(truth, rel=0.03)


def test_statistics_of_nothing_are_empty():
    empty = torch.empty(0)
    assert mismatch_statistics(empty, empty, Objective()) == {}
    assert ratio_statistics(empty, empty, empty, Objective()) == {}


def test_masked_tokens_are_counted_apart_from_capped_ones():
    ratio = torch.tensor([1.0, 3.0, 0.4, 1.0], dtype=torch.float64)
    statistics = mismatch_statistics(ratio.log(), torch.zeros(4, dtype=torch.float64), Objective(tis_mode="mask"))
    assert statistics["tis_masked"] == 0.5
    assert statistics["tis_capped"] == 0
    assert statistics["tis_mean"] == pytest.approx(0.5)


def test_the_dual_clip_is_counted():
    ratio = torch.tensor([4.0, 4.0, 2.0], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    statistics = ratio_statistics(
        ratio.log(), torch.zeros(3, dtype=torch.float64), advantages, Objective(dual_clip=3.0)
    )
    assert statistics["clip_dual"] == pytest.approx(1 / 3)


def test_the_ratio_of_sequences_is_counted_where_it_is_what_is_clipped():
    zero = torch.zeros(2, dtype=torch.float64)
    sequence = torch.tensor([1.5, 0.9], dtype=torch.float64).log()
    statistics = ratio_statistics(zero, zero, torch.ones(2), Objective("gspo"), sequence)
    assert (statistics["ratio_max"], statistics["ratio_min"]) == pytest.approx((1.5, 0.9))
    assert statistics["clip_high"] == 0.5
    assert statistics["kl_old_theta"] == 0
