"""Real harnesses with a real policy: the tiny one of the quickstart, which has never seen them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dialects import DIALECTS
from needs import cold_policy, require
from scenarios import SCENARIOS
from stage import perform

from actors.engines.transformers import TransformersEngine
from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600), pytest.mark.xdist_group("policy")]
CONTEXT = 32_768


@pytest.fixture(scope="module")
def policy() -> Path:
    return cold_policy()


@pytest.mark.parametrize("name", list(DIALECTS))
async def test_a_policy_that_cannot_work_ends_cleanly(name, policy, short_folder):
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    engine = TransformersEngine(policy, slots=2, max_len=CONTEXT)
    try:
        # The policy's own context, which the prompts of most harnesses exceed: they are told so in their protocol.
        scenario = replace(SCENARIOS["six_calls"], context=CONTEXT)
        played = await perform(name, scenario, Rendering(policy), short_folder / "s", wall_s=90, policy=engine)
    finally:
        await engine.close()
    assert played.outcome.status in ("completed", "truncated"), (played.outcome.reason, played.outcome.log)
    assert played.summary.failed == ""
    calls = [record for record in played.records if record.finish != "abort"]
    assert calls or played.summary.limit == "context"
    for record in calls:
        assert len(record.sampled_ids) == len(record.logprobs) > 0
        assert record.versions[-1].end == len(record.sampled_ids)
        assert record.prompt_ids.size > 0
