"""Ways in which an agent's files could speak for the grader; none of them changes the verdict."""

from pathlib import Path

import pytest
from needs import require

from envs.sandbox.create import available
from envs.sandbox.grading import grade
from envs.tasks import clawgym

EVIL = "import os\nprint(1.0, flush=True)\nos._exit(0)\n"


def make(tmp_path: Path, script: str, **reward: str):
    files = {"reward.sh": script.encode()} | {name.replace("_", "."): text.encode() for name, text in reward.items()}
    return clawgym.write(tmp_path / "task", "t", "do it", {}, files, {}, mount_dir="/root/ws")


async def score(task, workspace: Path, tmp_path: Path) -> float:
    require(available(), "apt-get install bubblewrap")
    return (await grade(task, workspace, "bubblewrap", tmp_path / "rooms")).score


@pytest.mark.parametrize(
    "python",
    ["python3 -c", "python3 -u -c", "python3 -B -c", "python3 -W ignore -c", "/usr/bin/python3 -c", "python -Bc"],
)
async def test_a_module_of_the_agent_does_not_stand_in_for_pythons_own(tmp_path, python):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "json.py").write_text(EVIL)
    assert await score(make(tmp_path, f"{python} 'import json; print(0)'\n"), workspace, tmp_path) == 0.0


async def test_a_grader_script_finds_the_modules_beside_it(tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    task = make(
        tmp_path,
        "python3 /root/ws/reward/check.py\n",
        check_py="import helper\nprint(helper.X)\n",
        helper_py="X = 0.5\n",
    )
    assert await score(task, workspace, tmp_path) == 0.5


@pytest.mark.parametrize(
    "target",
    [
        "reward/expected.txt",
        "/root/ws/reward/expected.txt",
        "loop/reward/expected.txt",
        "/proc/self/cwd/reward/expected.txt",
    ],
)
async def test_a_link_into_the_graders_folder_is_no_answer(tmp_path, target):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "loop").symlink_to(".")
    (workspace / "answer.txt").symlink_to(target)
    script = "cmp -s answer.txt reward/expected.txt && echo 1 || echo 0\n"
    task = make(tmp_path, script, expected_txt="42\n")
    assert await score(task, workspace, tmp_path) == 0.0


async def test_a_link_to_the_agents_own_file_still_counts(tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "result.txt").write_text("42\n")
    (workspace / "answer.txt").symlink_to("/root/ws/result.txt")
    script = "cmp -s answer.txt reward/expected.txt && echo 1 || echo 0\n"
    assert await score(make(tmp_path, script, expected_txt="42\n"), workspace, tmp_path) == 1.0
