"""Which harnesses can be overheard is said before anything starts."""

import pytest

from algos.checks import check
from algos.overheard import check_outside
from algos.recipe import ColdstartError
from algos.run_folder import RunError
from configs.schema import RunConfig


@pytest.mark.parametrize("name", ["mini_swe", "agent_loop", "codex"])
def test_a_harness_that_cannot_be_overheard_is_told(name):
    with pytest.raises(ColdstartError, match=rf"coldstart\.outside: got '{name}', expected some of .*mini_swe_agent"):
        check_outside([name])


def test_a_run_checks_it_first(tmp_path):
    config = RunConfig.model_validate({"dir": tmp_path, "coldstart": {"kind": "space", "outside": ["mini_swe"]}})
    with pytest.raises(RunError, match=r"coldstart\.outside: got 'mini_swe'"):
        check(config)


def test_one_that_is_not_installed_is_told_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("algos.overheard.missing", lambda release: "its program")
    with pytest.raises(
        ColdstartError, match=r"mini_swe_agent not installed: python -m envs\.harnesses install mini_swe_agent"
    ):
        check_outside(["mini_swe_agent"])
