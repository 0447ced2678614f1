"""The cases L1 to L6 of what people met in trainers of agents, each through the whole learner or as near as it can be.

Their kinds are covered by the property tests of ``tests/algos``.
"""

import math

import numpy as np
import pytest
import torch
from test_learner import give, make, packed, rollouts
from test_learner import model_path as model_path

from algos.advantages import dr_grpo
from algos.losses import Objective, policy_loss
from trees import codec
from trees.build import UNTOLD
from trees.filters import apply

CHUNK = ([9, 8, 9], [-1.0, -2.0, -3.0])


def test_l1_an_episode_of_four_leaves_enters_the_baseline_once(model_path, tmp_path):
    forked = [(None, [1, 2], *CHUNK)] + [(0, [3, leaf], *CHUNK) for leaf in range(4)]
    learner = make(model_path, tmp_path, advantage="dr_grpo")
    learner.add(packed("e0", "g", 1.0, forked))
    for n in (1, 2, 3):
        learner.add(packed(f"e{n}", "g", 0.0, [(None, [1, 2], *CHUNK)]))
    metrics = learner.train(0, {f"e{n}": "g" for n in range(4)})
    assert metrics["train/advantage_max"] == 1 - 0.25
    assert metrics["train/advantage_mean"] == 0
    assert dr_grpo(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": "gspo", "normalise": "episode"}, {"loss": "cispo"}, {"advantage": "gae", "critic": {"coef": 1.0}}],
    ids=["token", "gspo", "cispo", "gae"],
)
def test_l2_forks_order_and_packing_change_nothing(model_path, tmp_path, settings):
    """Two branches of one call that are asked for in either order, packed or not, in one micro-batch or several."""
    first, left, right = CHUNK, ([4, 5], [-2.0, -3.0]), ([6], [-3.5])
    shapes = [
        [(None, [1, 2], *first), (0, [3, 7], *left), (0, [3, 11], *right)],
        [(None, [1, 2], *first), (0, [3, 11], *right), (0, [3, 7], *left)],
    ]
    found = []
    for shape in shapes:
        for layout, budget in (("tree", 1000), ("paths", 9)):
            more = {"minibatches": 1, "layout": layout, "max_tokens_per_microbatch": budget, **settings}
            learner = make(model_path, tmp_path / str(len(found)), **more)
            learner.add(packed("e0", "g", 1.0, shape))
            learner.add(packed("e1", "g", 0.0, [(None, [1, 2], *CHUNK)]))
            metrics = learner.train(0, {"e0": "g", "e1": "g"})
            found.append([metrics[f"train/{name}"] for name in ("loss", "grad_norm", "tokens", "entropy")])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_l3_micro_batches_of_unequal_size_make_one_token_mean():
    total = 0.0
    for tokens, loss in ((100, 2.0), (900, 0.5)):
        zeros, every = torch.zeros(tokens), torch.ones(tokens, dtype=torch.bool)
        total += policy_loss(zeros, zeros, zeros, torch.full((tokens,), -loss), every, normaliser=1000).item()
    assert total == pytest.approx(0.65)


def test_l4_a_masked_position_far_off_is_not_there():
    """A log-ratio of 200 at a masked position."""
    found = []
    for keep in ([0, 2], [0, 1, 2]):
        theta = torch.tensor([-1.0, 200.0, -2.0])[keep].requires_grad_()
        old, mask = torch.tensor([-1.1, 0.0, -1.9])[keep], torch.tensor([True, False, True])[keep]
        loss = policy_loss(theta, old, old, torch.ones(len(keep)), mask, Objective(kl_coef=0.1))
        loss.backward()
        found.append((loss.item(), theta.grad[mask].tolist()))
        assert torch.isfinite(theta.grad).all()
    assert found[0] == found[1]


def test_l5_tokens_are_scored_at_the_temperature_that_they_were_sampled_at(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0, temperature=0.6)
    learner = make(model_path, tmp_path, minibatches=1)
    give(learner, batch)
    metrics = learner.train(0, groups)
    for name in ("ratio_min", "ratio_mean", "ratio_max", "tis_mean"):
        assert metrics[f"train/{name}"] == pytest.approx(1, abs=1e-5)


def test_l6_a_call_without_log_probabilities_is_dropped_and_counted(model_path, tmp_path):
    calls = [(None, [1, 2], *CHUNK), (0, [3], [4, 5], [math.nan, math.nan]), (1, [6], *CHUNK)]
    tree = codec.decode(packed("e0", "g", 1.0, calls))
    learner = make(model_path, tmp_path)
    learner.add(codec.encode(tree))
    learner.add(packed("e1", "g", 0.0, [(None, [1, 2], *CHUNK)]))
    metrics = learner.train(0, {"e0": "g", "e1": "g"})
    assert metrics["train/tokens"] == 3 + 3 + 3
    removed = apply(tree, 4)[1].removed
    assert [(reason, count.nodes, count.tokens) for reason, count in removed.items()] == [(UNTOLD, 1, 2)]
    untold = next(node for node in tree.nodes if node.sampled and not node.trained)
    assert np.array_equal(untold.ids, [4, 5])
