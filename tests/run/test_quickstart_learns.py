"""The claim of the quickstart, shortened: through every real part, greedy success on held-out tasks rises."""

import pytest
from live import statuses_add_up
from needs import cold_policy

STEPS = 10


@pytest.mark.learning
@pytest.mark.timeout(1500)
def test_greedy_success_on_held_out_tasks_rises(launch):
    cold_policy()
    run = launch(f"steps={STEPS}", "eval.every=0", "eval.tasks=24", "learner.warmup_steps=3")
    assert run.wait(1400) == 0, run.tail()
    rows, episodes = run.rows("metrics.jsonl"), run.rows("episodes.jsonl")
    statuses_add_up(rows, episodes)
    assert sum(row["episodes/failed"] for row in rows[1:]) == 0
    before, after = rows[0], rows[-1]
    assert before["eval/heldout/reward_greedy"] <= 0.25
    assert after["eval/heldout/reward_greedy"] >= before["eval/heldout/reward_greedy"] + 0.35
    assert after["eval/heldout/reward_sampled"] >= before["eval/heldout/reward_sampled"] + 0.2
    assert after["train/kl_mu_old"] < 0.1
    assert "done in" in run.tail()
