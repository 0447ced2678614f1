"""PPO through every real part: the reward of practice rises, and the critic's values follow it."""

import pytest
from live import statuses_add_up
from needs import cold_policy

STEPS = 10


@pytest.mark.learning
@pytest.mark.timeout(1500)
def test_the_reward_rises_and_values_follow(launch):
    cold_policy()
    run = launch("configs/quickstart_ppo.yaml", f"steps={STEPS}", "eval.every=0", "eval.tasks=16")
    assert run.wait(1400) == 0, run.tail()
    rows = run.rows("metrics.jsonl")
    statuses_add_up(rows, run.rows("episodes.jsonl"))
    trained = rows[1:]
    assert trained[0]["train/value_mean"] == 0
    assert [row["train/optimiser_steps"] for row in trained[:2]] == [0, 0]

    def mean(name, part):
        return sum(row[f"train/{name}"] for row in part) / len(part)

    assert mean("reward", trained[-3:]) >= mean("reward", trained[:3]) + 0.2
    assert mean("value_loss", trained[-3:]) < mean("value_loss", trained[:3])
    assert abs(mean("value_mean", trained[-3:]) - mean("return_mean", trained[-3:])) < 0.25
    assert rows[-1]["eval/heldout/reward_sampled"] > rows[0]["eval/heldout/reward_sampled"]
