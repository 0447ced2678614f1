"""Real harnesses in scenarios: not one sampled token is lost, encoded anew, or forked without a cause.

Each harness has a third of the scenarios, and each scenario a third of the harnesses; REINS_SCENARIOS=all runs all.
"""

from __future__ import annotations

import os

import pytest
from dialects import DIALECTS
from measured import measure
from needs import require
from scenarios import SCENARIOS
from stage import make_tokenizer, perform, quiet

from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable

pytestmark = [pytest.mark.harness, pytest.mark.timeout(240)]
ALL = os.environ.get("REINS_SCENARIOS") == "all"
PAIRS = [
    pytest.param(harness, scenario, id=f"{harness}-{scenario.name}")
    for i, (harness, dialect) in enumerate(DIALECTS.items())
    for j, scenario in enumerate(SCENARIOS.values())
    if scenario.suits(dialect) and (ALL or scenario.name == "six_calls" or (i + j) % 3 == 0)
]


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    quiet()
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(("name", "scenario"), PAIRS)
async def test_nothing_is_lost(name, scenario, rendering, short_folder):
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    played = await perform(name, scenario, rendering, short_folder / "s")
    outcome = played.outcome
    if not scenario.may_fail:
        assert (outcome.status, outcome.grade) == ("completed", 1.0), (outcome.reason, outcome.log)
    figures = measure(played, rendering)
    assert figures.trained_main == figures.sampled_main > 0, figures
    assert (figures.reencoded, figures.false_forks, figures.misplaced) == (0, 0, 0), (figures, played.records)
    if not scenario.causes:
        assert figures.chains == 1, figures
