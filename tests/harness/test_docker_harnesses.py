"""Real harnesses in containers: the same six calls as under bubblewrap, with nothing lost."""

from __future__ import annotations

import pytest
from dialects import DIALECTS
from measured import measure
from needs import require, require_docker
from scenarios import SCENARIOS
from stage import make_tokenizer, perform, quiet

from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases

pytestmark = [pytest.mark.docker, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    quiet()
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("name", list(DIALECTS))
async def test_six_calls(name, rendering, short_folder):
    require_docker()
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    played = await perform(name, SCENARIOS["six_calls"], rendering, short_folder / "s", backend="docker")
    assert (played.outcome.status, played.outcome.grade) == ("completed", 1.0), (
        played.outcome.reason,
        played.outcome.log,
    )
    figures = measure(played, rendering)
    assert figures.trained_main == figures.sampled_main > 0, figures
    assert (figures.reencoded, figures.false_forks, figures.misplaced) == (0, 0, 0), (figures, played.records)
    assert figures.chains == 1, figures
