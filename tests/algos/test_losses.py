import math

import pytest
import torch

from algos.losses import mismatch_statistics, policy_loss, ratio_statistics


def vectors(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    theta, old, mu = (-3 * torch.rand(3, n, dtype=torch.float64, generator=generator)).unbind()
    advantages = torch.randn(n, dtype=torch.float64, generator=generator)
    mask = torch.rand(n, generator=generator) < 0.6
    return theta.requires_grad_(), old, mu, advantages, mask


def gradient(loss, theta):
    (result,) = torch.autograd.grad(loss, theta)
    return result


def one(x):
    return torch.tensor([x], dtype=torch.float64)


def single(ratio, advantage, tis=1.0, **settings):
    """Loss and gradient of one token with the given ratio theta/old and importance weight old/mu."""
    old = one(-1.0)
    theta = (old + math.log(ratio)).requires_grad_()
    loss = policy_loss(theta, old, old - math.log(tis), one(advantage), torch.tensor([True]), **settings)
    return loss.item(), gradient(loss, theta).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.27, 1.0, -1.27, -1.27),
        (1.5, 1.0, -1.28, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (0.81, -1.0, 0.81, 0.81),
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio, advantage, loss, grad):
    assert single(ratio, advantage) == pytest.approx((loss, grad))


@pytest.mark.parametrize(("tis", "weight"), [(0.3, 0.3), (1.0, 1.0), (1.9, 1.9), (5.0, 2.0)])
def test_the_importance_weight_is_truncated_above_only_and_has_no_gradient(tis, weight):
    assert single(1.1, 1.0, tis) == pytest.approx((-1.1 * weight, -1.1 * weight))
    assert single(1.1, 1.0, tis, tis_cap=None) == pytest.approx((-1.1, -1.1))


def test_old_and_mu_get_no_gradient():
    theta, old, mu, advantages, mask = vectors(20)
    old.requires_grad_()
    mu.requires_grad_()
    policy_loss(theta, old, mu, advantages, mask).backward()
    assert theta.grad.abs().sum() > 0
    assert old.grad is None
    assert mu.grad is None


def test_token_mean_over_micro_batches():
    """L3: 100 tokens with loss 2.0 and 900 with 0.5 are 0.65, not the mean of means 1.25."""
    total = torch.zeros(())
    for tokens, loss in ((100, 2.0), (900, 0.5)):
        zeros = torch.zeros(tokens)
        every = torch.ones(tokens, dtype=torch.bool)
        total = total + policy_loss(zeros, zeros, zeros, torch.full((tokens,), -loss), every, normaliser=1000)
    assert total.item() == pytest.approx(0.65, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_any_split_and_order_gives_the_same_loss_and_gradient(seed):
    """L2."""
    theta, old, mu, advantages, mask = vectors(50, seed)
    whole = policy_loss(theta, old, mu, advantages, mask)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(50, generator=generator)
    parts = order.split([1, 0, 17, 20, 12])
    pieces = sum(policy_loss(theta[p], old[p], mu[p], advantages[p], mask[p], normaliser=mask.sum()) for p in parts)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(pieces, theta), gradient(whole, theta), rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["theta", "old", "mu", "advantages"])
@pytest.mark.parametrize("value", [200.0, -200.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_stands_at_a_masked_position_does_not_matter(where, value, dtype):
    """L4: loss and gradient equal those without the position."""
    theta, old, mu, advantages, mask = vectors(10)
    mask[4] = False
    tensors = {"theta": theta.detach(), "old": old, "mu": mu, "advantages": advantages}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    keep = torch.arange(10) != 4
    without = {name: tensor[keep] for name, tensor in tensors.items()}
    without["theta"].requires_grad_()
    expected = policy_loss(**without, mask=mask[keep])
    tensors[where] = tensors[where].clone()
    tensors[where][4] = value
    tensors["theta"] = tensors["theta"].clone().requires_grad_()
    loss = policy_loss(**tensors, mask=mask)
    torch.testing.assert_close(loss, expected)
    grad = gradient(loss, tensors["theta"])
    torch.testing.assert_close(grad[keep], gradient(expected, without["theta"]))
    assert grad[4] == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_trained_position_that_is_far_off_gives_a_finite_gradient(log_ratio, advantage):
    theta = torch.tensor([log_ratio], requires_grad=True)
    zero = torch.zeros(1)
    loss = policy_loss(theta, zero, zero, torch.tensor([advantage]), torch.tensor([True]))
    loss.backward()
    assert torch.isfinite(loss)
    assert theta.grad.item() == 0.0


def test_nothing_trained_is_zero():
    theta, old, mu, advantages, mask = vectors(5)
    assert policy_loss(theta, old, mu, advantages, torch.zeros_like(mask)).item() == 0.0


@pytest.mark.parametrize("fault", ["shape", "mask"])
def test_wrong_arguments_are_named(fault):
    theta, old, mu, advantages, mask = vectors(5)
    if fault == "shape":
        old = old[:, None]
    else:
        mask = mask.float()
    with pytest.raises(ValueError, match=r"expected one shape \[T\] and a bool mask"):
        policy_loss(theta, old, mu, advantages, mask)


def test_ratio_statistics_count_what_the_clip_removed():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    statistics = ratio_statistics(ratio.log(), torch.zeros(4, dtype=torch.float64), advantages)
    assert statistics["clip_high"] == 0.25
    assert statistics["clip_low"] == 0.25
    assert statistics["ratio_mean"] == pytest.approx(1.0)
    assert statistics["ratio_max"] == pytest.approx(1.5)
    k3 = (ratio - 1 - ratio.log()).mean().item()
    assert statistics["kl_old_theta"] == pytest.approx(k3)


def test_mismatch_statistics():
    ratio = torch.tensor([1.0, 3.0, 0.5, 1.0], dtype=torch.float64)
    statistics = mismatch_statistics(ratio.log(), torch.zeros(4, dtype=torch.float64), tis_cap=2.0)
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
    assert mismatch_statistics(old[draws], mu[draws])["kl_mu_old"] == pytest.approx(truth, rel=0.03)


def test_statistics_of_nothing_are_empty():
    empty = torch.empty(0)
    assert mismatch_statistics(empty, empty) == {}
    assert ratio_statistics(empty, empty, empty) == {}
