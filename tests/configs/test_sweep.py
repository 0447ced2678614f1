"""configs/sweep.yaml, as far as it can be tried without an account."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils

from configs.loader import QUICKSTART, fields, load

SWEEP = QUICKSTART.with_name("sweep.yaml")


@pytest.fixture
def sweep() -> dict[str, Any]:
    return yaml.safe_load(SWEEP.read_text())


def ends(parameter: dict[str, Any]) -> list[Any]:
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def started(sweep: dict[str, Any], args: dict[str, Any]) -> list[str]:
    """The command line that an agent starts a run with, put together by W&B's own code."""
    command = {"args": {key: {"value": value} for key, value in args.items()}}
    parts = utils.create_sweep_command_args(command) | {"env": ["/usr/bin/env"], "interpreter": ["python"]}
    line = utils.create_sweep_command(sweep["command"])
    return [word for part in line for word in (parts[part[2:-1]] if part.startswith("${") else [part])]


def test_every_run_of_the_sweep_has_valid_settings_and_is_tracked_online(sweep: dict[str, Any]):
    names = list(sweep["parameters"])
    for values in itertools.product(*map(ends, sweep["parameters"].values())):
        args = dict(zip(names, values, strict=True))
        line = started(sweep, args)
        assert line[:4] == ["/usr/bin/env", "python", "-m", "algos.run"]
        config = load(SWEEP.parent.parent / line[4], line[5:])
        flat = config.model_dump(by_alias=True)
        for name, value in args.items():
            found: Any = flat
            for part in name.split("."):
                found = found[part]
            assert found == value
        assert config.wandb.mode == "online"


def test_its_metric_is_one_that_a_run_logs_and_its_keys_are_those_that_sweeps_have(sweep: dict[str, Any]):
    assert sweep["metric"] == {"name": "eval/heldout/reward_greedy", "goal": "maximize"}
    assert sweep["method"] in ("random", "grid", "bayes")
    known = {"name", "project", "program", "method", "run_cap", "metric", "parameters", "command"}
    assert set(sweep) <= known
    assert set(sweep["parameters"]) <= set(dict(fields()))
    assert (SWEEP.parent.parent / sweep["program"]).is_file()
