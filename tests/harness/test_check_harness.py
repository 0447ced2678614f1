"""Each real harness keeps what its adapter promises."""

from __future__ import annotations

import pytest
from dialects import DIALECTS
from needs import require

from configs.harness import HarnessConfig
from envs.harnesses.check import check_harness
from envs.harnesses.external.adapters import ADAPTERS
from envs.harnesses.external.releases import missing, releases
from envs.harnesses.registry import harness
from envs.sandbox.create import unavailable

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", sorted(ADAPTERS.keys() & DIALECTS.keys()))
async def test_its_adapter_keeps_its_word(name, short_folder):
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    findings = await check_harness(harness(HarnessConfig(name=name)), short_folder / "rooms")
    assert [str(finding) for finding in findings if finding.broken] == []
    assert [f.wrong for f in findings if f.promise == "writes only to hidden places of the home"] == [""]
