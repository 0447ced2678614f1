"""Evaluations for real: killed in the middle, interrupted, and of somebody else's model."""

import json
import os
import signal

import pytest
from scripted_api import Script, bash, say, serving

from algos.runlog import read_jsonl

pytestmark = pytest.mark.harness

SMALL = (
    "rings=[{name: training, harnesses: [{name: agent_loop, max_turns: 3}]}]",
    "tasks={heldout: {limit: 12}}",
    "runs=2",
    "sandbox.concurrency=4",
    "proxy.max_tokens=12",
)
PARTS = ("ray::TreeBuilderActor", "ray::SandboxActor", "ray::ServeReplica:reins")


@pytest.mark.timeout(600)
def test_a_killed_evaluation_goes_on_and_evaluates_nothing_twice(launch, untrained):
    run = launch(f"model.path={untrained}", *SMALL, module="algos.eval")
    run.until(lambda: len(run.rows("episodes.jsonl")) >= 5, 240, "five episodes")
    assert run.find("ray::LearnerRank") == []
    parts = [pid for title in PARTS for pid in run.find(title)]
    run.process.kill()
    run.process.wait()
    run.until_gone(parts, 60)
    folder = run.run_folder()
    before = read_jsonl(folder / "episodes.jsonl")
    assert len(before) < 24
    with (folder / "episodes.jsonl").open("a") as file:
        file.write('{"id": "r01n')
    resumed = launch("--resume", str(folder), module="algos.eval")
    assert resumed.wait(400) == 0, resumed.tail()
    after = read_jsonl(folder / "episodes.jsonl")
    assert after[: len(before)] == before
    assert len({row["id"] for row in after}) == len(after) == 24
    table = json.loads((folder / "table.json").read_text())
    assert table["complete"] is True
    assert table["episodes"] == {"asked": 24, "graded": 24, "failed": 0, "not_ended": 0}
    assert len(list((folder / "transcripts").iterdir())) == 24
    assert len(list(folder.glob("trees/*/*.tree"))) == 24
    again = launch("--resume", str(folder), module="algos.eval")
    assert again.wait(120) == 0, again.tail()
    assert read_jsonl(folder / "episodes.jsonl") == after


@pytest.mark.timeout(300)
def test_ctrl_c_ends_an_evaluation_cleanly_with_the_table_so_far(launch, untrained):
    run = launch(f"model.path={untrained}", *SMALL, module="algos.eval")
    run.until(lambda: run.rows("episodes.jsonl"), 240, "an episode")
    started = run.find("")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 130
    assert "--resume" in run.tail()
    assert "Traceback" not in run.tail()
    assert "incomplete" in (run.run_folder() / "table.md").read_text()
    run.until_gone(started, 30)


class Writer(Script):
    """Puts the word into the file where it is asked to write, and a wrong word elsewhere."""

    def next(self):
        messages = self.bodies[-1]["messages"]
        if any(message["role"] == "tool" for message in messages):
            return say("Done.")
        asked = next(message["content"] for message in messages if message["role"] == "user")
        return bash(f"echo {'olive' if asked.startswith('Write') else 'amber'} > answer.txt")


@pytest.mark.timeout(400)
def test_an_endpoint_is_evaluated_without_a_model_and_its_behaviour_is_told(launch, capsys):
    script = Writer(None)
    with serving(script) as url:
        run = launch(
            "engine.kind=endpoint",
            f"engine.endpoint.url={url}/v1",
            "rings=[{name: words, harnesses: [{name: agent_loop}]}]",
            # Of six wordings one begins with Write.
            "tasks={words: {builtin: word, limit: 6}}",
            "runs=2",
            "sandbox.concurrency=1",
            module="algos.eval",
        )
        assert run.wait(360) == 0, run.tail()
    scores = json.loads((run.run_folder() / "table.json").read_text())["scores"][0]
    assert scores["pass_1"]["value"] == pytest.approx(1 / 6)
    assert scores["pass_all"]["value"] == pytest.approx(1 / 6)
    assert {body["temperature"] for body in script.bodies} == {1.0}

    from algos.analyse import main

    assert main([str(run.run_folder())]) == 0
    assert "skipped: look | 1.000 ± 0.000 of 12" in capsys.readouterr().out
