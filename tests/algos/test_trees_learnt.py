"""The fast path, from trees to gradients, against the reference that goes path by path."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import OracleEpisode, baselines, policy_loss, tokens, tree_gae, value_loss, values
from tree_cases import (
    apart,
    batches,
    cut,
    gradients,
    moved,
    reordered,
    samples_of,
    tiny_critic,
    tiny_model,
    tree_of,
    with_idle_leaves,
)

from algos.advantages import ESTIMATORS
from algos.critic import value_head
from algos.episodes import flat, nested, with_gae
from algos.losses import Objective
from algos.step import LossSettings, accumulate, accumulate_values, with_old, with_values

OBJECTIVES = {
    "token": Objective(clip_low=0.05, clip_high=0.1),
    "dual": Objective(clip_low=0.05, clip_high=0.1, dual_clip=1.1, tis_cap=None),
    "gspo": Objective("gspo", clip_low=0.01, clip_high=0.02),
    "cispo": Objective("cispo", clip_low=0.05, clip_high=0.1),
    "mask": Objective(tis_mode="mask", tis_cap=1.5),
    "kl": Objective(clip_low=0.05, clip_high=0.1, kl_coef=0.2),
    "entropy": Objective(clip_low=0.05, clip_high=0.1, entropy_coef=0.05),
}
RULES = [("token", None), ("episode", None), ("constant", 50)]
relaxed = settings(deadline=None, max_examples=15)
ways = st.fixed_dictionaries(
    {
        "objective": st.sampled_from(list(OBJECTIVES)),
        "rule": st.sampled_from(RULES),
        "max_tokens": st.sampled_from([1, 25, 10_000]),
        "layout": st.sampled_from(["paths", "tree"]),
    }
)


@functools.cache
def models(dtype=torch.float64):
    """The policy before and after some steps, and the critic likewise."""
    old, critic = tiny_model(), tiny_critic()
    found = old, moved(old), critic, moved(critic)
    return [model.to(dtype) for model in found]


def loss_settings(way):
    rule, constant = way["rule"]
    objective = way["objective"]
    return LossSettings(
        objective if isinstance(objective, Objective) else OBJECTIVES[objective],
        normalise=rule,
        constant=constant,
        value_clip=0.05,
        max_tokens=way["max_tokens"],
        layout=way["layout"],
    )


def advantages_of(episodes, estimator="grpo"):
    groups = sorted({episode.group for episode in episodes})
    rewards = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
    return ESTIMATORS[estimator](rewards, torch.tensor([groups.index(episode.group) for episode in episodes])).tolist()


def group_step(episodes, way, dtype=torch.float64):
    """Loss and gradient of the policy, as the learner computes them."""
    old, now, *_ = models(dtype)
    samples = [samples_of(*pair) for pair in zip(episodes, advantages_of(episodes), strict=True)]
    chosen = loss_settings(way)
    filled, *_ = with_old(old, flat(samples), chosen)
    now.zero_grad()
    result = accumulate(now, nested(filled, samples), chosen)
    return result.loss, gradients(now), result


def close(found, expected, tolerance=1e-6):
    assert found[0] == pytest.approx(expected[0], abs=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance)


@relaxed
@given(batches(), ways)
def test_loss_and_gradient_equal_the_reference(episodes, way):
    old, now, *_ = models()
    loss, gradient, _ = group_step(episodes, way)
    now.zero_grad()
    advantages = [
        dict.fromkeys(tokens(episode.tree), advantage)
        for episode, advantage in zip(episodes, baselines(episodes, "grpo"), strict=True)
    ]
    expected = policy_loss(now, old, episodes, advantages, OBJECTIVES[way["objective"]], *way["rule"])
    if expected.requires_grad:
        expected.backward()
    close((loss, gradient), (expected.item(), gradients(now)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("rule", RULES, ids=[rule for rule, _ in RULES])
def test_float32_equals_the_reference_to_one_in_ten_thousand(objective, rule):
    episodes = some_episodes()
    way = {"objective": objective, "rule": rule, "max_tokens": 30, "layout": "tree"}
    exact, rough = group_step(episodes, way), group_step(episodes, way, torch.float32)
    assert rough[1].dtype == torch.float32
    assert rough[0] == pytest.approx(exact[0], rel=1e-4, abs=1e-6)
    scale = exact[1].abs().max().item()
    torch.testing.assert_close(rough[1].double(), exact[1], rtol=1e-4, atol=1e-4 * scale)


def some_episodes():
    """Two groups; one episode with six branches, one deep, one with a single token."""
    main = "main"
    shapes = [
        [(99, 2, 3, main), *((i, 1, 1 + i % 3, main) for i in range(6))],
        [(0, 1, i % 3, main) for i in range(12)],
        [(0, 1, 1, main)],
        [(0, 1, 2, main), (0, 0, 2, main), (1, 2, 3, main), (0, 1, 2, "side")],
    ]
    return [OracleEpisode("aabb"[i], float(i % 2), tree_of(shape, i)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_bound_of_these_objectives_is_set_off(objective):
    """So that equality says something: with its bounds wide open an objective has another gradient."""
    way = {"objective": objective, "rule": RULES[0], "max_tokens": 10_000, "layout": "tree"}
    tight = OBJECTIVES[objective]
    gradient = group_step(some_episodes(), way)[1]
    for name, wide in (("clip_low", 0.99), ("clip_high", 99.0), ("dual_clip", None), ("tis_cap", None)):
        if getattr(tight, name) != wide and (objective != "mask" or name == "tis_cap"):
            opened = group_step(some_episodes(), way | {"objective": replace(tight, **{name: wide})})[1]
            assert (opened - gradient).abs().max() > 1e-4, name


@relaxed
@given(batches(3), ways, st.sampled_from([(1.0, 1.0), (0.95, 0.7)]))
def test_critic_and_policy_of_ppo_equal_the_reference(episodes, way, rates):
    """Values, advantages, value loss and its gradient, and the policy's under these advantages."""
    old, now, old_critic, critic = models()
    chosen = loss_settings(way)
    samples = [samples_of(episode) for episode in episodes]
    rewards = [episode.reward for episode in episodes]
    filled, *_ = with_old(old, flat(samples), chosen)
    filled = with_values(old_critic, filled, chosen)
    trained = with_gae(nested(filled, samples), rewards, *rates)
    critic.zero_grad()
    found = accumulate_values(critic, trained, chosen).value_loss, gradients(critic)

    with torch.no_grad():
        before = [{t: float(v) for t, v in values(old_critic, episode.tree).items()} for episode in episodes]
    advantages = [tree_gae(e.tree, e.reward, known, *rates) for e, known in zip(episodes, before, strict=True)]
    returns = [{t: a + known[t] for t, a in mine.items()} for mine, known in zip(advantages, before, strict=True)]
    critic.zero_grad()
    expected = value_loss(critic, old_critic, episodes, returns, 0.05, *way["rule"])
    if expected.requires_grad:
        expected.backward()
    close(found, (expected.item(), gradients(critic)))

    now.zero_grad()
    found = accumulate(now, trained, chosen).loss, gradients(now)
    now.zero_grad()
    expected = policy_loss(now, old, episodes, advantages, OBJECTIVES[way["objective"]], *way["rule"])
    if expected.requires_grad:
        expected.backward()
    close(found, (expected.item(), gradients(now)))


class OnThePolicy:
    """A value head on a policy's hidden states, as the reference takes a critic."""

    def __init__(self, policy, head):
        self.policy, self.head = policy, head

    def __call__(self, input_ids):
        return SimpleNamespace(logits=self.head(self.policy.model(input_ids=input_ids).last_hidden_state))


@functools.cache
def heads():
    before = value_head(tiny_model().config.hidden_size).double()
    torch.manual_seed(1)
    torch.nn.init.normal_(before.weight, 0, 0.3)
    return before, moved(before, 0.1)


@relaxed
@given(batches(3), ways, st.sampled_from([0.37, 2.0]))
def test_a_critic_on_the_policys_states_equals_the_reference(episodes, way, coefficient):
    """Both losses in one pass, the gradient of their sum, and that of the head when it learns alone."""
    old, now, *_ = models()
    old_head, head = heads()
    chosen = replace(loss_settings(way), value_coef=coefficient)
    samples = [samples_of(episode) for episode in episodes]
    filled, *_ = with_old(old, flat(samples), chosen, head=old_head)
    trained = with_gae(nested(filled, samples), [episode.reward for episode in episodes], 0.95, 0.7)
    now.zero_grad()
    head.zero_grad()
    done = accumulate(now, trained, chosen, head=head)
    found = torch.cat([gradients(now), gradients(head)])
    head.zero_grad()
    accumulate_values(now, trained, chosen, head=head)
    alone = gradients(head)

    with torch.no_grad():
        before = [{t: float(v) for t, v in values(OnThePolicy(old, old_head), e.tree).items()} for e in episodes]
    advantages = [tree_gae(e.tree, e.reward, known, 0.95, 0.7) for e, known in zip(episodes, before, strict=True)]
    returns = [{t: a + known[t] for t, a in mine.items()} for mine, known in zip(advantages, before, strict=True)]
    now.zero_grad()
    head.zero_grad()
    loss = policy_loss(now, old, episodes, advantages, OBJECTIVES[way["objective"]], *way["rule"])
    of_values = value_loss(OnThePolicy(now, head), OnThePolicy(old, old_head), episodes, returns, 0.05, *way["rule"])
    both = loss + coefficient * of_values
    if both.requires_grad:
        both.backward()
    close((done.loss, found), (loss.item(), torch.cat([gradients(now), gradients(head)])))
    close((done.value_loss, alone), (of_values.item(), gradients(head)))


@relaxed
@given(batches(3), ways, st.integers(0, 1000), st.sampled_from(["cut", "apart", "reordered", "idle", "order"]))
def test_rearranging_changes_nothing(episodes, way, seed, how):
    """L2: runs cut in two, branches that part earlier, other orders of calls and episodes, leaves that add nothing."""
    rng = np.random.default_rng(seed)
    change = {
        "cut": lambda tree: cut(tree, rng),
        "apart": apart,
        "reordered": lambda tree: reordered(tree, rng),
        "idle": with_idle_leaves,
        "order": lambda tree: tree,
    }[how]
    others = [OracleEpisode(episode.group, episode.reward, change(episode.tree)) for episode in episodes]
    if how == "order":
        others = others[::-1]
    loss, gradient, _ = group_step(episodes, way)
    other, its_gradient, _ = group_step(others, way)
    close((other, its_gradient), (loss, gradient))


@relaxed
@given(batches(3), ways, ways)
def test_repacking_changes_nothing(episodes, way, other):
    """L2: micro-batches of any size, packed or padded."""
    other = other | {"objective": way["objective"], "rule": way["rule"]}
    close(group_step(episodes, other)[:2], group_step(episodes, way)[:2])
