"""Tasks of the public benchmarks, solved by a scripted policy through a real harness: what is right scores 1.0.

REINS_CLAWGYM and REINS_PINCHBENCH name where the benchmarks are; without them there is nothing to run.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from dialects import Dialect
from needs import require
from scenarios import Lines, Scenario
from script_engine import Step, part_of
from solved_tasks import SOLVED
from stage import make_tokenizer, perform, quiet

from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable
from envs.tasks import formats
from envs.tasks.task import Task

pytestmark = [pytest.mark.harness, pytest.mark.timeout(240)]
WHERE = {
    "clawgym": ("REINS_CLAWGYM", "github.com/ClawGym/ClawGym-Agents, and give its RL/data/clawgym_eval"),
    "pinchbench": ("REINS_PINCHBENCH", "github.com/pinchbench/skill, and give it"),
}
CASES = [(benchmark, name) for benchmark, tasks in SOLVED.items() for name in tasks]


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    quiet()
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def place(benchmark: str) -> Path:
    variable, how = WHERE[benchmark]
    if not os.environ.get(variable):
        pytest.skip(f"clone {how} in {variable}")
    return Path(os.environ[variable])


def written(benchmark: str, name: str, folder: Path) -> Task:
    tasks = formats.load(place(benchmark), folder, benchmark, skip_bad=True).tasks
    return next(task for task in tasks if task.id == name)


def speaker(prompt: str) -> str:
    """Whose lines are asked for: these tasks have no mark of the main line, but only it has tools."""
    part = part_of(prompt)
    return "main" if part == "side" and "<tools>" in prompt else part


@pytest.mark.parametrize("harness", ["mini_swe_agent", "qwen_code"])
@pytest.mark.parametrize(("benchmark", "name"), CASES, ids=[name for _, name in CASES])
async def test_a_solved_task_scores_one(harness, benchmark, name, rendering, short_folder):
    place(benchmark)
    known = releases()
    for part in (*known[harness].needs, harness):
        require(not missing(known[part]), f"python -m envs.harnesses install {harness}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")

    def lines(d: Dialect) -> Lines:
        steps = [Step("", (d.shell(command),)) for command in SOLVED[benchmark][name]]
        return {"main": (*steps, d.end("Hello, I'm ready! All is done."))}

    make = partial(written, benchmark, name)
    scenario = Scenario(name, lines)
    played = await perform(harness, scenario, rendering, short_folder / "s", task=make, speaker=speaker)
    assert (played.outcome.status, played.outcome.grade) == ("completed", 1.0), (
        played.outcome.reason,
        played.outcome.log,
    )
