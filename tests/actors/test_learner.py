import itertools
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines import weights
from actors.learner import Learner
from actors.trained_model import TrainedModel
from configs.learner import LearnerConfig
from trees import codec
from trees.build import TreeBuilder
from trees.record import CallRecord, VersionSpan
from trees.tree import NO_IDS, Node, Tree

VOCABULARY = 48
GOOD = 12
"""The synthetic task rewards tokens below this one."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@torch.no_grad()
def sample(model, rows, temperature, generator, length=6):
    """For each row of ids, all of one length, ``length`` sampled ids and their log-probabilities."""
    ids, logprobs = torch.tensor(rows), []
    for _ in range(length):
        distribution = torch.log_softmax(model(input_ids=ids).logits[:, -1].float() / temperature, -1)
        token = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(-1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, -length:].tolist(), torch.cat(logprobs, 1).tolist()


def packed(episode, group, reward, calls, *, step=0, status="completed", version=0, temperature=1.0):
    """A tree of calls (parent index or None, new prompt ids, sampled ids, log-probabilities)."""
    builder = TreeBuilder(episode)
    for n, (parent, prompt, sampled, logprobs) in enumerate(calls):
        builder.add(
            CallRecord(
                session=episode,
                call=f"c{n}",
                parent=None if parent is None else f"c{parent}",
                ordinal=n,
                prompt_ids=np.array(prompt, np.int32),
                sampled_ids=np.array(sampled, np.int32),
                logprobs=np.array(logprobs, np.float32),
                versions=(VersionSpan(version, 0, len(sampled)),),
                temperature=temperature,
                finish="stop",
            )
        )
    meta = {
        "episode": episode,
        "group": group,
        "step": step,
        "status": status,
        "reward": reward,
        "split": "train",
    }
    return codec.encode(builder.tree(meta))


def rollouts(weights_path, step, *, temperature=1.0, version=None, reward=None, size=6):
    """Two groups of episodes with two calls each; the reward is the share of good tokens unless given."""
    model = Qwen3ForCausalLM.from_pretrained(weights_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(step)
    tail = [4, 5]
    prompts = [[1 + g, 2, 3] for g in range(2) for _ in range(size)]
    first, mu_first = sample(model, prompts, temperature, generator)
    second, mu_second = sample(
        model, [p + f + tail for p, f in zip(prompts, first, strict=True)], temperature, generator
    )
    batch, groups = {}, {}
    for n, prompt in enumerate(prompts):
        name, group = f"s{step}e{n:02d}", f"g{n // size}"
        earned = sum(token < GOOD for token in first[n] + second[n]) / 12 if reward is None else reward
        calls = [(None, prompt, first[n], mu_first[n]), (0, tail, second[n], mu_second[n])]
        sampled_by = step if version is None else version
        batch[name] = packed(name, group, earned, calls, step=step, version=sampled_by, temperature=temperature)
        groups[name] = group
    return batch, groups


def make(model_path, run_dir, total_steps=20, seed=0, keep=3, **settings):
    return Learner(model_path, run_dir, LearnerConfig(**settings), total_steps=total_steps, seed=seed, keep=keep)


def give(learner, batch):
    for data in batch.values():
        learner.add(data)


def saved(learner, run_dir, step):
    """The folder of a checkpoint that is made now."""
    assert learner.save(step) == step
    return run_dir / "checkpoints" / f"step_{step:06d}"


def published(run_dir):
    version, path = weights.latest(run_dir / "weights")
    return version, weights.read(path)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def probability_of_good(path):
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)[:GOOD].sum())


def test_what_is_rewarded_becomes_likelier(model_path, tmp_path):
    learner = make(model_path, tmp_path, learning_rate=6e-3, warmup_steps=1)
    source, chances = model_path, [probability_of_good(model_path)]
    for step in range(8):
        batch, groups = rollouts(source, step)
        give(learner, batch)
        metrics = learner.train(step, groups)
        assert metrics["train/optimiser_steps"] == 2
        source = saved(learner, tmp_path, step + 1)
        chances.append(probability_of_good(source))
    assert chances[0] < 0.4
    assert chances[-1] > 0.7
    assert learner.policy_version == 8
    assert published(tmp_path)[0] == 8


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_on_policy_every_ratio_and_importance_weight_is_one(model_path, tmp_path, temperature):
    """L5, and that sampling and scoring are one and the same distribution."""
    batch, groups = rollouts(model_path, 0, temperature=temperature)
    learner = make(model_path, tmp_path, minibatches=1, max_tokens_per_microbatch=70)
    give(learner, batch)
    metrics = learner.train(0, groups)
    assert metrics["train/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/tis_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/mu_old_max"] < 1e-5
    assert metrics["train/tis_capped"] == metrics["train/clip_high"] == metrics["train/clip_low"] == 0
    assert metrics["train/staleness_max"] == 0
    assert metrics["train/tokens"] == metrics["train/tokens_main"] == 12 * 12
    assert 0 < metrics["train/entropy"] <= math.log(VOCABULARY)


def test_later_minibatches_move_away_from_old(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    learner = make(model_path, tmp_path, minibatches=2, learning_rate=1e-2, warmup_steps=0)
    give(learner, batch)
    metrics = learner.train(0, groups)
    assert metrics["train/ratio_max"] > 1.05
    assert metrics["train/kl_old_theta"] > 0


def test_staleness_is_the_distance_of_versions(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    for step in range(2):
        batch, groups = rollouts(model_path, step, version=0)
        give(learner, batch)
        metrics = learner.train(step, groups)
        assert metrics["train/staleness_mean"] == metrics["train/staleness_max"] == step


def test_forks_neither_shift_the_baseline_nor_count_tokens_twice(model_path, tmp_path):
    """L1 in the whole learner: the first episode forks into four leaves under one shared call."""
    chunk = ([9, 8, 9], [-1.0, -2.0, -3.0])
    forked = [(None, [1, 2], *chunk)] + [(0, [3, leaf], *chunk) for leaf in range(4)]
    plain = [(None, [1, 2], *chunk)]
    learner = make(model_path, tmp_path)
    learner.add(packed("e0", "g", 1.0, forked))
    for n in (1, 2, 3):
        learner.add(packed(f"e{n}", "g", 0.0, plain))
    metrics = learner.train(0, {f"e{n}": "g" for n in range(4)})
    assert metrics["train/tokens"] == 15 + 3 * 3
    assert metrics["train/paths"] == 4 + 3
    assert metrics["train/advantage_max"] == pytest.approx(0.75 / math.sqrt(3 / 16))


def test_a_step_without_spread_publishes_the_same_weights_as_the_next_version(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    learner.publish()
    before = published(tmp_path)
    batch, groups = rollouts(model_path, 0, reward=1.0)
    give(learner, batch)
    metrics = learner.train(0, groups)
    after = published(tmp_path)
    assert (before[0], after[0]) == (0, 1)
    assert same(before[1], after[1])
    assert metrics["train/optimiser_steps"] == 0
    assert metrics["train/optimiser_steps_without_advantage"] == 2
    assert metrics["train/groups_without_spread"] == metrics["train/groups"] == 2
    assert metrics["train/groups_without_spread_share"] == 1.0


def test_a_step_without_episodes_publishes_too(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    metrics = learner.train(0, {})
    assert learner.policy_version == published(tmp_path)[0] == 1
    assert metrics["train/episodes"] == metrics["train/tokens"] == metrics["train/optimiser_steps"] == 0


def with_one_token(batch, logprob, reward):
    """The batch with an episode of one trained token in place of its first."""
    prompt = Node(1, 0, np.array([1, 2], np.int32))
    said = Node(
        2,
        1,
        np.array([9], np.int32),
        sampled=True,
        logprobs=np.array([logprob], np.float32),
        versions=(VersionSpan(0, 0, 1),),
        trained=True,
    )
    meta = {"episode": "s0e00", "status": "completed", "reward": reward, "step": 0}
    return batch | {"s0e00": codec.encode(Tree((Node(0, -1, NO_IDS), prompt, said), meta))}


def test_a_token_without_a_log_probability_is_refused(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    learner = make(model_path, tmp_path)
    give(learner, with_one_token(batch, math.nan, 1.0))
    with pytest.raises(ValueError, match="without a log-probability"):
        learner.train(0, groups)


def test_a_loss_that_is_not_finite_leaves_the_weights(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    batch = with_one_token(batch, -1.0, 1e300)
    learner = make(model_path, tmp_path, minibatches=1, advantage="dr_grpo")
    give(learner, batch)
    learner.publish()
    before = published(tmp_path)[1]
    metrics = learner.train(0, groups)
    assert metrics["train/optimiser_steps_not_finite"] == 1
    assert metrics["train/optimiser_steps"] == 0
    assert same(before, published(tmp_path)[1])
    assert learner.policy_version == 1


@pytest.mark.parametrize("train_truncated", [True, False])
def test_truncated_episodes_leave_batch_and_baseline_if_the_setting_says_so(model_path, tmp_path, train_truncated):
    call = [(None, [1, 2], [9, 8], [-1.0, -2.0])]
    learner = make(model_path, tmp_path, train_truncated=train_truncated)
    for n, (reward, status) in enumerate([(1.0, "completed"), (1.0, "completed"), (0.0, "truncated")]):
        learner.add(packed(f"e{n}", "g", reward, call, status=status))
    metrics = learner.train(0, {f"e{n}": "g" for n in range(3)})
    assert metrics["train/episodes_truncated_left_out"] == (0 if train_truncated else 1)
    assert metrics["train/tokens"] == (6 if train_truncated else 4)
    assert metrics["train/groups_without_spread"] == (0 if train_truncated else 1)


def test_order_of_arrival_and_repeats_do_not_change_the_weights(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    one, two = (make(model_path, tmp_path / name) for name in "ab")
    for name in [*reversed(batch), *batch]:
        two.add(batch[name])
    backwards = dict(reversed(groups.items()))
    give(one, batch)
    one.train(0, groups)
    two.train(0, backwards)
    assert same(published(tmp_path / "a")[1], published(tmp_path / "b")[1])


def test_the_seed_decides_the_minibatches(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    for seed in (0, 1):
        learner = make(model_path, tmp_path / str(seed), seed=seed, warmup_steps=0)
        give(learner, batch)
        learner.train(0, groups)
    assert not same(published(tmp_path / "0")[1], published(tmp_path / "1")[1])


def test_the_size_of_micro_batches_hardly_changes_the_weights(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    results = []
    for budget in (20, 10_000):
        learner = make(model_path, tmp_path / str(budget), max_tokens_per_microbatch=budget, warmup_steps=0)
        give(learner, batch)
        metrics = learner.train(0, groups)
        results.append((metrics["train/loss"], metrics["train/grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)


def test_restart_from_a_checkpoint_and_replay_from_disk_is_bit_identical(model_path, tmp_path):
    learner = make(model_path, tmp_path, total_steps=4)
    history = []
    for step in range(4):
        batch, groups = rollouts(model_path, step)
        folder = tmp_path / "trees" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name, data in batch.items():
            (folder / f"{name}.tree").write_bytes(data)
        give(learner, batch)
        learner.train(step, groups)
        history.append((groups, published(tmp_path)[1]))
        if step == 1:
            learner.save(2)
    (tmp_path / "checkpoints" / ".step_000004.partial").mkdir()
    again = make(model_path, tmp_path, total_steps=4)
    assert again.load() == again.policy_version == 2
    assert published(tmp_path)[0] == 2
    assert same(published(tmp_path)[1], history[1][1])
    for step in (2, 3):
        again.train(step, history[step][0])
        assert published(tmp_path)[0] == step + 1
        assert same(published(tmp_path)[1], history[step][1])


def test_naming_the_trained_step_again_trains_nothing_twice(model_path, tmp_path):
    batch, groups = rollouts(model_path, 0)
    learner = make(model_path, tmp_path)
    give(learner, batch)
    metrics = learner.train(0, groups)
    before = published(tmp_path)[1]
    assert learner.train(0, groups) == metrics
    assert learner.policy_version == 1
    assert same(before, published(tmp_path)[1])


def test_a_step_that_does_not_follow_is_refused(model_path, tmp_path):
    with pytest.raises(ValueError, match="got step 3 with policy version 0"):
        make(model_path, tmp_path).train(3, {})


def test_an_unknown_episode_is_named_with_the_place_where_it_should_be(model_path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"episode nobody: .*step_000000/nobody\.tree"):
        make(model_path, tmp_path).train(0, {"nobody": "g"})


def test_an_ungraded_episode_is_refused(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    learner.add(packed("e", "g", None, [(None, [1], [2], [-1.0])], status="failed"))
    with pytest.raises(ValueError, match="episode e: got reward None and status 'failed'"):
        learner.train(0, {"e": "g"})


def test_an_episode_without_trained_tokens_still_counts_in_the_baseline(model_path, tmp_path):
    call = [(None, [1, 2], [9, 8], [-1.0, -2.0])]
    learner = make(model_path, tmp_path)
    learner.add(packed("e0", "g", 1.0, call))
    learner.add(packed("e1", "g", 0.0, [(None, [1, 2], [], [])]))
    metrics = learner.train(0, {"e0": "g", "e1": "g"})
    assert metrics["train/advantage_max"] == 1.0
    assert metrics["train/tokens"] == 2
    assert metrics["train/optimiser_steps"] == 1


def test_only_the_present_state_can_be_saved(model_path, tmp_path):
    with pytest.raises(ValueError, match="got step 1, expected 0"):
        make(model_path, tmp_path).save(1)


def test_a_checkpoint_is_a_model_folder_of_its_own(model_path, tmp_path):
    path = saved(make(model_path, tmp_path), tmp_path, 0)
    assert (path / "tokenizer.json").read_text() == (model_path / "tokenizer.json").read_text()
    assert (path / "chat_template.jinja").exists()
    other = saved(make(path, tmp_path / "other"), tmp_path / "other", 0)
    assert same(weights.read(model_path), weights.read(other))
    assert (other / "tokenizer.json").exists()


def test_loading_without_a_checkpoint_starts_at_zero_unless_a_step_was_named(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    batch, groups = rollouts(model_path, 0)
    give(learner, batch)
    learner.train(0, groups)
    assert published(tmp_path)[0] == 1
    assert learner.load() == learner.policy_version == 0
    version, tensors = published(tmp_path)
    assert version == 0
    assert same(tensors, weights.read(model_path))
    with pytest.raises(FileNotFoundError, match="got step 5"):
        learner.load(5)


def test_a_step_that_was_broken_off_can_only_be_left_by_loading(model_path, tmp_path):
    class Breaks(Learner):
        def _optimise(self, step, episodes):
            super()._optimise(step, episodes)
            raise MemoryError

    batch, groups = rollouts(model_path, 0)
    learner = Breaks(model_path, tmp_path, LearnerConfig(), total_steps=2)
    give(learner, batch)
    with pytest.raises(MemoryError):
        learner.train(0, groups)
    with pytest.raises(RuntimeError, match="training of step 0 was broken off"):
        learner.train(0, groups)
    learner.load()
    with pytest.raises(MemoryError):
        learner.train(0, groups)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_learning_rate_rises_and_then_falls_to_its_share(model_path, decay):
    model = TrainedModel(model_path, LearnerConfig(learning_rate=1.0, decay=decay), total_steps=60)
    rates = [model.learning_rate(step) for step in range(60)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert rates[6] == pytest.approx(1)
    assert all(a >= b for a, b in itertools.pairwise(rates[6:]))
    assert rates[-1] == pytest.approx(0.3)
    assert model.learning_rate(1000) == pytest.approx(0.3)
