import math

import pytest
import torch

from algos.losses import (
    Objective,
    episode_means,
    importance_weights,
    normalisers,
    policy_loss,
    rejected,
    sequence_log_ratios,
)


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
    loss = policy_loss(theta, old, old - math.log(tis), one(advantage), torch.tensor([True]), Objective(**settings))
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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [(5.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (0.5, -1.0, 0.8, 0.0), (5.0, 1.0, -1.28, 0.0)],
)
def test_the_dual_clip_bounds_what_a_bad_token_costs(ratio, advantage, loss, grad):
    assert single(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, grad))


@pytest.mark.parametrize(("tis", "weight"), [(0.3, 0.0), (0.5001, 0.5001), (1.0, 1.0), (1.99, 1.99), (2.01, 0.0)])
def test_masked_importance_weights_drop_tokens_on_both_sides(tis, weight):
    assert single(1.1, 1.0, tis, tis_mode="mask") == pytest.approx((-1.1 * weight, -1.1 * weight))


def test_the_floor_of_the_mask_is_a_setting():
    assert single(1.0, 1.0, 0.3, tis_mode="mask", tis_floor=0.25)[1] == pytest.approx(-0.3)
    assert single(1.0, 1.0, 0.3, tis_mode="mask", tis_cap=None)[1] == pytest.approx(-1)


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (5.0, 1.28)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_gradient(ratio, weight, advantage):
    loss, grad = single(ratio, advantage, loss="cispo")
    assert grad == pytest.approx(-weight * advantage)
    assert loss == pytest.approx(-weight * advantage * (-1.0 + math.log(ratio)))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("shift", [-0.3, 0.0, 0.1, 0.3])
def test_gspo_has_the_gradient_of_the_ratio_of_whole_sequences(advantage, shift):
    """Equation 5 of the paper, episode by episode, where all tokens of an episode have one advantage."""
    theta, old, *_ = vectors(9, 4)
    theta = (old + shift + 0.01 * (theta - old)).detach().requires_grad_()
    episode = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2])
    every = torch.ones(9, dtype=torch.bool)
    expected = torch.zeros((), dtype=torch.float64)
    for e in range(3):
        ratio = (theta - old)[episode == e].mean().exp()
        expected = expected - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) / 3
    found = policy_loss(
        theta,
        old,
        old,
        torch.full((9,), advantage, dtype=torch.float64),
        every,
        Objective("gspo"),
        sequence=sequence_log_ratios(theta, old, episode),
        normaliser=normalisers(episode, "episode"),
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, theta), gradient(expected, theta))


def test_the_divergence_from_old_is_paid_for():
    theta = one(-0.5).requires_grad_()
    loss = policy_loss(theta, one(-1.0), one(-1.0), one(0.0), torch.tensor([True]), Objective(kl_coef=0.1))
    assert loss.item() == pytest.approx(0.1 * (math.exp(0.5) - 1 - 0.5))
    assert gradient(loss, theta).item() == pytest.approx(0.1 * (math.exp(0.5) - 1))


def test_entropy_is_rewarded():
    entropy = one(1.5).requires_grad_()
    none = one(0.0)
    loss = policy_loss(none, none, none, none, torch.tensor([True]), Objective(entropy_coef=0.01), entropy=entropy)
    assert loss.item() == pytest.approx(-0.015)
    assert gradient(loss, entropy).item() == pytest.approx(-0.01)


@pytest.mark.parametrize(
    ("objective", "what"), [(Objective("gspo"), "sequence"), (Objective(entropy_coef=1), "entropy")]
)
def test_what_an_objective_needs_is_asked_for(objective, what):
    theta, old, mu, advantages, mask = vectors(3)
    with pytest.raises(ValueError, match=f"{what}: got none"):
        policy_loss(theta, old, mu, advantages, mask, objective)


@pytest.mark.parametrize("kind", ["token", "gspo", "cispo"])
@pytest.mark.parametrize("where", ["theta", "old", "mu", "advantages", "sequence", "entropy", "normaliser"])
@pytest.mark.parametrize("value", [200.0, math.inf, math.nan])
def test_masked_positions_reach_no_loss(kind, where, value):
    """L4, for every loss with every term."""
    theta, old, mu, advantages, mask = vectors(10)
    mask[4], keep = False, torch.arange(10) != 4
    objective = Objective(kind, dual_clip=None if kind == "cispo" else 3.0, kl_coef=0.1, entropy_coef=0.1)
    tensors = {"theta": theta.detach(), "old": old, "mu": mu, "advantages": advantages}
    tensors |= {"sequence": (theta.detach() - old) / 2, "entropy": -old, "normaliser": 1 + mu.abs()}
    found = []
    for mine in (keep, slice(None)):
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        given[where][4] = value
        given = {name: tensor[mine] for name, tensor in given.items()}
        given["theta"].requires_grad_()
        loss = policy_loss(**given, mask=mask[mine], objective=objective)
        found.append((loss, gradient(loss, given["theta"])))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1][keep], found[0][1])
    assert found[1][1][4] == 0


def test_normalisers():
    """Episodes of 1 and 3 tokens: per token, per episode, and by a constant, each a mean over episodes."""
    episode = torch.tensor([4, 7, 7, 7])
    assert normalisers(episode, "token").tolist() == [4.0] * 4
    assert normalisers(episode, "episode").tolist() == [2.0, 6.0, 6.0, 6.0]
    assert normalisers(episode, "constant", 100).tolist() == [200.0] * 4
    with pytest.raises(ValueError, match="constant: got none"):
        normalisers(episode, "constant")
    assert normalisers(episode[:0], "episode").tolist() == []


def test_episode_means_follow_the_episode_wherever_its_tokens_stand():
    means = episode_means(torch.tensor([1.0, 10.0, 3.0]), torch.tensor([5, 2, 5]))
    assert means.tolist() == [2.0, 10.0, 2.0]


def test_episodes_far_from_their_engine_are_rejected_whole():
    weight = torch.tensor([1.1, 1.1, 1.1, 9.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    episode = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    zero = torch.zeros(7, dtype=torch.float64)
    for bounds, expected in [
        ({"mean": 2.0}, [0, 1, 1]),
        ({"mean": 2.0, "largest": 5.0}, [0, 1, 1]),
        ({"largest": 9.5}, [0, 0, 1]),
        ({"mean": 1.05}, [1, 1, 1]),
        ({}, [0, 0, 0]),
    ]:
        bad = rejected(weight.log(), zero, episode, **bounds)
        assert bad.tolist() == [bool(expected[e]) for e in episode.tolist()]


def test_importance_weights_have_no_gradient():
    old = one(-1.0).requires_grad_()
    assert not importance_weights(old, one(-2.0), torch.tensor([True]), Objective()).requires_grad
