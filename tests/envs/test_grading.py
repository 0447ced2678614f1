"""Grading: the verdict is the grader's, whatever the agent left behind. Case S2, second half."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import require

from envs.sandbox import grading
from envs.sandbox.base import Command, Finished, Limits
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.grading import Grade, GraderFailureError, GradingError, Told, grade, read_score, run_grader
from envs.sandbox.watch import Bounds
from envs.tasks import clawgym
from envs.tasks.task import Task

CHECK = '[ "$(cat answer 2>/dev/null)" = right ] && echo 1.0 || echo 0.0\n'
CHECK_PY = """
import json, sys
from pathlib import Path
workspace = Path(sys.argv[1])
answer = workspace / "answer"
print(json.dumps({"right": float(answer.exists() and answer.read_text().strip() == "right"), "there": 1.0}))
"""
CLAWGYM_SH = (
    "#!/usr/bin/env bash\nset -euo pipefail\n"
    "python3 /root/.openclaw/workspace/reward/check.py /root/.openclaw/workspace | python3 -c "
    "'import json, sys; data = json.loads(sys.stdin.read()); print(sum(data.values()) / len(data))'\n"
)


@pytest.fixture(params=["bubblewrap", "process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    return request.param


def make_task(folder: Path, script: str = CHECK, **more: str) -> Task:
    return clawgym.write(folder / "task", "t", "Write the answer.", {}, {"reward.sh": script, **more}, {})


async def graded(backend: Backend, tmp_path: Path, task: Task, limits: Limits | None = None) -> Grade:
    """Grade ``tmp_path/frozen`` and see that nothing of it stays."""
    frozen = tmp_path / "frozen"
    frozen.mkdir(exist_ok=True)
    verdict = await grade(task, frozen, backend, tmp_path / "rooms", limits or Limits(wall_s=20.0))
    assert list((tmp_path / "rooms").iterdir()) == []
    return verdict


def answer(tmp_path: Path, text: str) -> Path:
    frozen = tmp_path / "frozen"
    frozen.mkdir(exist_ok=True)
    (frozen / "answer").write_text(text)
    return frozen


@pytest.mark.parametrize(("text", "score"), [("right", 1.0), ("wrong", 0.0)])
async def test_a_bash_grader(backend, tmp_path, text, score):
    answer(tmp_path, text)
    assert (await graded(backend, tmp_path, make_task(tmp_path))).score == score


@pytest.mark.parametrize(("text", "score"), [("right", 1.0), ("wrong", 0.5)])
async def test_a_clawgym_grader_with_its_fixed_path(backend, tmp_path, text, score):
    answer(tmp_path, text)
    task = make_task(tmp_path, CLAWGYM_SH, **{"check.py": CHECK_PY})
    verdict = await graded(backend, tmp_path, task)
    assert verdict.score == score, verdict.log


@pytest.mark.parametrize(
    ("script", "log"),
    [
        ("echo hello", "'hello', expected a number"),
        ("echo nan", "'nan', expected a number in"),
        ("echo 1.5", "expected a number in"),
        ("echo inf", "expected a number in"),
        ("echo -0.1", "expected a number in"),
        ("true", "printed nothing, expected a number"),
        ("echo 1.0; exit 3", "exit code 3"),
        ("echo 1.0; sleep 30", "did not end"),
        ("echo 1.0; kill -9 $$", "exit code 137"),
        ("echo 0.5; no-such-tool", "no-such-tool"),
    ],
)
async def test_a_grader_that_gives_no_score_has_failed_and_that_is_no_0(backend, tmp_path, script, log):
    with pytest.raises(GraderFailureError, match="twice on the same workspace; it fails on the untouched") as caught:
        await graded(backend, tmp_path, make_task(tmp_path, script), Limits(wall_s=1.0 if "sleep" in script else 60.0))
    assert log in str(caught.value)
    assert list((tmp_path / "rooms").iterdir()) == []


async def test_what_the_agent_left_is_named_where_it_makes_the_grader_fail(backend, tmp_path):
    answer(tmp_path, "crash")
    script = '[ "$(cat answer 2>/dev/null)" = crash ] && { echo "cannot read answer" >&2; exit 5; }; echo 0.25'
    with pytest.raises(
        GraderFailureError, match=r"on the untouched input files it gives 0\.25: what the agent"
    ) as caught:
        await graded(backend, tmp_path, make_task(tmp_path, script))
    assert "exit code 5; its output:\ncannot read answer" in str(caught.value)


async def test_a_grader_that_fails_once_is_asked_again(tmp_path):
    once = tmp_path / "once"
    script = f"if [ ! -e {once} ]; then touch {once}; exit 9; fi; echo 0.5"
    assert (await graded("process", tmp_path, make_task(tmp_path, script))).score == 0.5


async def test_a_grader_that_floods_its_output_or_the_disk_has_failed(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "BOUNDS", Bounds(output_mb=1, disk_mb=8))
    for script, bound in (("yes", "output_mb"), ("head -c 20M /dev/zero > big; sleep 60; echo 1", "disk_mb")):
        with pytest.raises(GraderFailureError, match=f"reached its bound {bound}"):
            read_score(*await run_grader(make_task(tmp_path, script), None, backend, tmp_path / "rooms"))


async def test_a_grader_is_told_what_its_task_asks_for(backend, tmp_path):
    script = """
    grep -q 'I am done' "$REINS_FINAL_MESSAGE" && grep -q '"role"' "$REINS_TRANSCRIPT" || exit 1
    case $REINS_TRANSCRIPT in $PWD/*) exit 2 ;; esac
    [ "$(stat -c %a "$REINS_TRANSCRIPT")" = 444 ] && ls -A | grep -qx reward && echo 1
    """
    reward = {"reward.sh": script}
    gets = ("final_message", "transcript")
    task = clawgym.write(tmp_path / "task", "t", "Do it.", {}, reward, {}, grader_gets=gets)
    (tmp_path / "empty").mkdir()
    told = Told("I am done \ud800", '{"role": "user"}\n')
    assert (await grade(task, tmp_path / "empty", backend, tmp_path / "rooms", told=told)).score == 1.0
    silent = clawgym.write(tmp_path / "other", "u", "Do it.", {}, {"reward.sh": "env | grep -c REINS_; echo 0"}, {})
    verdict = await grade(silent, tmp_path / "empty", backend, tmp_path / "rooms", told=told)
    assert verdict.log.startswith("0\n")


@pytest.mark.parametrize(
    ("stdout", "score"),
    [
        (b"noise\n0.25\n", 0.25),
        (b"1", 1.0),
        (b" 1e-1 \n\n\n", 0.1),
        (b"\xff\n1.0\n", 1.0),
        (b"1.0\nbye\n", None),
        (b"", None),
        (b"nan", None),
    ],
)
def test_the_score_is_the_last_line(stdout, score):
    finished = Finished(0, stdout, b"", 0.1)
    if score is None:
        with pytest.raises(GraderFailureError, match="expected a number in"):
            read_score(finished)
    else:
        assert read_score(finished).score == score


async def test_a_missing_grader_is_an_infrastructure_error(backend, tmp_path):
    task = make_task(tmp_path)
    (task.reward_dir / "reward.sh").unlink()
    with pytest.raises(GradingError, match="no grader"):
        await graded(backend, tmp_path, task)


def fake_reward(frozen: Path) -> None:
    (frozen / "reward").mkdir()
    (frozen / "reward" / "reward.sh").write_text("echo 1.0\n")
    (frozen / "reward" / "check.py").write_text("print('{\"all\": 1.0}')\n")


def linked_reward(frozen: Path) -> None:
    elsewhere = frozen.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "reward.sh").write_text("echo 1.0\n")
    (frozen / "reward").symlink_to(elsewhere)


def reward_is_a_file(frozen: Path) -> None:
    (frozen / "reward").write_text("echo 1.0\n")


def shadowing_modules(frozen: Path) -> None:
    for name in ("json", "sys", "pathlib", "sitecustomize", "re"):
        (frozen / f"{name}.py").write_text("print(1.0)\nimport os\nos._exit(0)\n")


def fifo(frozen: Path) -> None:
    os.mkfifo(frozen / "pipe")


def links_out(frozen: Path) -> None:
    (frozen / "answer").unlink()
    (frozen.parent / "right").write_text("right")
    (frozen / "answer").symlink_to(frozen.parent / "right")


ATTACKS: list[Callable[[Path], None]] = [
    fake_reward,
    linked_reward,
    reward_is_a_file,
    shadowing_modules,
    fifo,
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("grader", ["bash", "python"])
async def test_the_verdict_does_not_change(backend, tmp_path, attack, grader):
    attack(answer(tmp_path, "wrong"))
    python = make_task(tmp_path, CLAWGYM_SH, **{"check.py": CHECK_PY}) if grader == "python" else None
    verdict = await graded(backend, tmp_path, python or make_task(tmp_path))
    assert verdict.score == (0.5 if python else 0.0), verdict.log
    task = python or make_task(tmp_path)
    assert sorted(path.name for path in task.reward_dir.iterdir()) == sorted(
        ["reward.sh", "check.py"] if python else ["reward.sh"]
    )


async def test_a_link_out_of_the_workspace_is_not_followed(tmp_path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    links_out(answer(tmp_path, "wrong"))
    assert (await graded("bubblewrap", tmp_path, make_task(tmp_path))).score == 0.0


async def test_the_agent_cannot_prepare_the_graders_room(backend, tmp_path):
    """A whole episode: background loop, home with start-up files, and a verdict written ahead."""
    task = make_task(tmp_path)
    sandbox = await create(backend, "agent", task.input_files, task.mount_dir, tmp_path / "rooms")
    script = """
    echo wrong > answer
    mkdir -p reward; echo 'echo 1.0' > reward/reward.sh; echo 1.0 > verdict
    echo 'echo 1.0; exit' > ~/.bashrc; cp ~/.bashrc ~/.profile
    setsid -f bash -c 'while :; do echo right > answer; sleep 0.01; done' > /dev/null 2>&1
    sleep 0.1; echo wrong > answer
    """
    await sandbox.run(Command(("/bin/bash", "-c", script), sandbox.environment(), limits=Limits(wall_s=10.0)))
    (sandbox.workspace / "answer").write_text("wrong")
    frozen = await sandbox.freeze()
    verdict = await grade(task, frozen, backend, tmp_path / "rooms", Limits(wall_s=10.0))
    await sandbox.destroy()
    assert verdict.score == 0.0
    assert list((tmp_path / "rooms").iterdir()) == []


async def test_the_grader_has_no_network_and_no_relay(tmp_path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    script = "test $(grep -c : /proc/net/dev) = 1 && test ! -e /run/model-api.sock && echo 1.0"
    assert (await graded("bubblewrap", tmp_path, make_task(tmp_path, script))).score == 1.0
