"""Grading: the verdict is the grader's, whatever the agent left behind. Case S2, second half."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import require

from envs.sandbox.base import Command, Finished, Limits
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.grading import Grade, GradingError, grade, read_score
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
        ("echo hello", "no number"),
        ("echo nan", "expected one in"),
        ("echo 1.5", "expected one in"),
        ("echo inf", "expected one in"),
        ("echo -0.1", "expected one in"),
        ("true", "no number"),
        ("echo 1.0; exit 3", "exit code 3"),
        ("echo 1.0; sleep 30", "did not end"),
        ("echo 1.0; kill -9 $$", "exit code 137"),
        ("echo 0.5; no-such-tool", "exit code 127"),
    ],
)
async def test_a_grader_that_fails_on_the_output_gives_0(backend, tmp_path, script, log):
    verdict = await graded(backend, tmp_path, make_task(tmp_path, script), Limits(wall_s=2.0))
    assert verdict.score == 0.0
    assert log in verdict.log


@pytest.mark.parametrize(
    ("stdout", "score"),
    [
        (b"noise\n0.25\n", 0.25),
        (b"1", 1.0),
        (b" 1e-1 \n\n\n", 0.1),
        (b"\xff\n1.0\n", 1.0),
        (b"1.0\nbye\n", 0.0),
        (b"", 0.0),
    ],
)
def test_the_score_is_the_last_line(stdout, score):
    assert read_score(Finished(0, stdout, b"", 0.1)).score == score


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
