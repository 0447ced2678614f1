"""Attacks from inside a sandbox, each as a whole episode; what contained means is in ``contained``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from attack_prelude import Attack
from attack_stage import Told, play
from attacks import ATTACKS
from attacks_on_grading import ENDS, MEANS, VERDICT
from needs import require, require_docker

from envs.sandbox.create import unavailable

ALL = (*ATTACKS, *ENDS, *MEANS, *VERDICT)
NOT_CONTAINED = {
    "crashing-grader": "a grader that breaks off on what the agent left gives no score, and the episode is tried anew",
}
"""Attacks that succeed, with the reason."""
ELSEWHERE = ALL if os.environ.get("REINS_ATTACKS") == "all" else ALL[::3]
"""What is tried in warm rooms and in containers too: all of them where asked, since they take a quarter of an hour."""
_SILENT = ("kill-all", "stop-all", "output-flood", "fork-bomb", "disk", "removed-files", "inodes", "memory")
_SAY_NOTHING = {*_SILENT, "kill-the-relay", "odd-exit", "forged-start", "forged-result", "forged-error"}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REINS_HOST_SECRET", "HOST-0123456789abcdef")


def contained(attack: Attack, told: Told) -> None:
    """Nothing was reached, nobody was harmed, the episode was judged, and the attack gained nothing by it."""
    outcome = told.outcome  # pytest cuts the text of an object short, but not a text
    assert "ESCAPED" not in told.said, told.said
    assert told.harm == []
    assert outcome.grade == 0.0, f"{outcome}"
    if "REFUSED" in told.said:
        # What it goes by does not work here, so the episode ends as any other.
        assert outcome.status == "completed", f"{outcome}"
        return
    assert outcome.status in attack.status.split(), f"{outcome}"
    assert outcome.reason.startswith(attack.reason), f"{outcome}"
    if attack.name not in _SAY_NOTHING:
        assert "TRIED" in told.said, told.said


def cases(attacks: Sequence[Attack]) -> list[object]:
    found = []
    for attack in attacks:
        reason = NOT_CONTAINED.get(attack.name)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        found.append(pytest.param(attack, marks=marks, id=attack.name))
    return found


async def run(attack: Attack, backend: str, warm: bool, tmp_path: Path) -> None:
    told = await play(attack, backend, warm, tmp_path)
    assert told.hits == warm
    contained(attack, told)


@pytest.fixture
def bubblewrap() -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("attack", cases([one for one in ALL if one.quick][::3]))
async def test_the_cheapest(attack, tmp_path):
    await run(attack, "bubblewrap", False, tmp_path)


@pytest.mark.harness
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("attack", cases(ALL))
async def test_bubblewrap(attack, tmp_path):
    await run(attack, "bubblewrap", False, tmp_path)


@pytest.mark.harness
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("attack", cases(ELSEWHERE))
async def test_a_warm_room(attack, tmp_path):
    await run(attack, "bubblewrap", True, tmp_path)


@pytest.mark.docker
@pytest.mark.parametrize("attack", cases(ELSEWHERE))
async def test_docker(attack, tmp_path):
    require_docker()
    await run(attack, "docker", False, tmp_path)
