"""PPO in the whole learner, with a critic of its own and with a head on the policy's states."""

import math

import pytest
from test_learner import give, make, packed, probability_of_good, published, rollouts, same
from test_learner import model_path as model_path

CRITIC = {"own": {"learning_rate": 3e-3}, "shared": {"shared": True, "learning_rate": 3e-3}}
kinds = pytest.mark.parametrize("kind", CRITIC)


def ppo(model_path, run_dir, kind, critic=(), **settings):
    more = {"critic": CRITIC[kind] | dict(critic), "warmup_steps": 0, **settings}
    return make(model_path, run_dir, advantage="gae", **more)


@kinds
def test_what_is_rewarded_becomes_likelier_and_values_follow(model_path, tmp_path, kind):
    learner = ppo(model_path, tmp_path, kind, {"gae_lambda": 0.95}, learning_rate=6e-3)
    source = model_path
    for step in range(5):
        batch, groups = rollouts(source, step)
        give(learner, batch)
        metrics = learner.train(step, groups)
        learner.save(step + 1)
        source = tmp_path / "checkpoints" / f"step_{step + 1:06d}"
    assert probability_of_good(source) > 2 * probability_of_good(model_path)
    assert metrics["train/value_mean"] == pytest.approx(metrics["train/return_mean"], abs=0.15)


@kinds
def test_the_critic_comes_to_know_which_episodes_end_well(model_path, tmp_path, kind):
    learner = ppo(model_path, tmp_path, kind, {"warmup_steps": 99, "learning_rate": 1e-2, "value_clip": None})
    rows = []
    for step in range(12):
        for n in range(4):
            calls = [(None, [1 + n % 2, 2, 3], [20 + n, 30], [-3.0, -3.0])]
            learner.add(packed(f"s{step}e{n}", "g", float(n % 2), calls, step=step))
        rows.append(learner.train(step, {f"s{step}e{n}": "g" for n in range(4)}))
    assert rows[0]["train/value_mean"] == rows[0]["train/explained_variance"] == 0
    assert rows[-1]["train/explained_variance"] > 0.5


def test_a_critic_of_its_own_may_learn_more_often_than_the_policy(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    losses, policies = [], []
    for more in ({}, {"epochs": 4}, {"epochs": 2, "minibatches": 2}):
        folder = tmp_path / str(len(losses))
        learner = ppo(model_path, folder, "own", more)
        give(learner, batch)
        learner.train(0, groups)
        policies.append(published(folder)[1])
        give(learner, again := rollouts(model_path, 1)[0])
        losses.append(learner.train(1, dict.fromkeys(again, "g"))["train/value_loss"])
    assert max(losses[1:]) < losses[0]
    assert same(*policies[:2])
    assert same(*policies[1:])


@kinds
def test_a_restored_learner_goes_on_with_the_same_critic(model_path, tmp_path, kind):
    more = {"epochs": 2, "minibatches": 3} if kind == "own" else {}
    learner = ppo(model_path, tmp_path, kind, more)
    history = []
    for step in range(3):
        batch, groups = rollouts(model_path, step)
        folder = tmp_path / "trees" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, data in batch.items():
            (folder / f"{name}.tree").write_bytes(data)
        history.append((learner.train(step, groups), groups, published(tmp_path)[1]))
        if step == 1:
            learner.save(2)
    again = ppo(model_path, tmp_path, kind, more)
    assert again.load() == 2
    metrics = again.train(2, history[2][1])
    assert same(published(tmp_path)[1], history[2][2])
    watched = ["train/value_mean", "train/value_loss", "train/explained_variance", "train/critic_grad_norm"]
    assert [metrics[name] for name in watched] == [history[2][0][name] for name in watched]
    again.save(3)


@kinds
def test_in_the_warm_up_only_the_critic_learns(model_path, tmp_path, kind):
    learner = ppo(model_path, tmp_path, kind, {"warmup_steps": 2})
    learner.publish()
    weights = [published(tmp_path)[1]]
    rows = []
    for step in range(3):
        batch, groups = rollouts(model_path, step, version=0)
        give(learner, batch)
        rows.append(learner.train(step, groups))
        weights.append(published(tmp_path)[1])
    assert same(weights[0], weights[1])
    assert same(weights[1], weights[2])
    assert not same(weights[2], weights[3])
    assert [row["train/optimiser_steps"] for row in rows] == [0, 0, 2]
    assert rows[2]["train/value_mean"] != rows[1]["train/value_mean"] != 0


@kinds
def test_by_default_the_advantage_is_the_reward_less_the_value(model_path, tmp_path, kind):
    """Before any step every value is 0, so that every token, also one that branches share, has the reward."""
    chunk = ([9, 8, 9], [-1.0, -2.0, -3.0])
    learner = ppo(model_path, tmp_path, kind)
    learner.add(packed("e0", "g", 1.0, [(None, [1, 2], *chunk)] + [(0, [3, leaf], *chunk) for leaf in range(4)]))
    learner.add(packed("e1", "g", 0.0, [(None, [1, 2], *chunk)]))
    metrics = learner.train(0, {"e0": "g", "e1": "g"})
    assert metrics["train/tokens"] == 18
    assert metrics["train/advantage_mean"] == pytest.approx(15 / 18)
    assert metrics["train/advantage_max"] == 1
    assert metrics["train/advantage_std"] == pytest.approx(math.sqrt(15 / 18 * 3 / 18))
    assert metrics["train/return_mean"] == pytest.approx(15 / 18)


def test_a_step_without_episodes_or_tokens_is_one_too(model_path, tmp_path):
    learner = ppo(model_path, tmp_path, "own")
    learner.train(0, {})
    learner.add(packed("e", "g", 1.0, [(None, [1, 2], [], [])], step=1))
    assert learner.train(1, {"e": "g"})["train/tokens"] == 0


EVERY = {
    "gspo": {"loss": "gspo", "clip_low": 1e-3, "clip_high": 1e-3, "normalise": "episode"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "normalise": "constant", "normalise_constant": 12},
    "dual": {"dual_clip": 3.0, "epochs": 2},
    "mask": {"tis_mode": "mask", "tis_cap": 1.5, "tis_floor": 0.5, "kl_coef": 0.01},
    "entropy": {"entropy_coef": 0.1},
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_every_loss_trains_and_tells_what_one_watches(model_path, tmp_path, name, advantage):
    critic = {"critic": {}} if advantage == "gae" else {}
    settings = EVERY[name] | critic
    learner = make(model_path, tmp_path, advantage=advantage, warmup_steps=0, learning_rate=5e-3, **settings)
    batch, groups = rollouts(model_path, 0)
    learner.publish()
    before = published(tmp_path)[1]
    give(learner, batch)
    metrics = learner.train(0, groups)
    assert not same(before, published(tmp_path)[1])
    assert metrics["train/optimiser_steps"] == 2 * settings.get("epochs", 1)
    watched = "entropy clip_high clip_low clip_dual ratio_mean ratio_max ratio_min tis_mean tis_capped tis_masked "
    watched += "kl_mu_old kl_old_theta grad_norm advantage_mean advantage_std groups_without_spread_share tokens_main "
    watched += "episodes_rejected loss"
    if advantage == "gae":
        watched += " explained_variance value_loss value_mean return_mean critic_grad_norm"
    for one in watched.split():
        assert math.isfinite(metrics[f"train/{one}"]), one
    assert metrics["train/ratio_max"] > 1 > metrics["train/ratio_min"]


def test_an_episode_far_from_its_engine_is_left_out_and_counted(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    far = [(None, [1, 2, 3], [9, 8], [-30.0, -30.0])]
    batch["s0e00"] = packed("s0e00", "g0", 1.0, far)
    found = []
    for bounds in ({}, {"reject_mean": 2.0}, {"reject_max": 100.0}):
        learner = make(model_path, tmp_path / str(len(found)), **bounds)
        give(learner, batch)
        found.append(learner.train(0, groups))
    assert [metrics["train/episodes_rejected"] for metrics in found] == [0, 1, 1]
    assert found[1]["train/grad_norm"] == found[2]["train/grad_norm"] != found[0]["train/grad_norm"]
    assert len({metrics["train/advantage_std"] for metrics in found}) == 1
