"""Ways in which an agent's files could speak for the grader; none of them changes the verdict."""

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from needs import require

from envs.sandbox.base import Command, Limits, Mount, WorkspaceTooLarge
from envs.sandbox.create import available, create
from envs.sandbox.files import copy_tree, remove_tree
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


def deep_links(workspace: Path) -> None:
    """Links at the bottom of a tree that is deeper than Python's stack, in paths as long as a copy allows."""
    deep = f"{workspace}/{'d/' * 1400}"
    subprocess.run(["mkdir", "-p", deep], check=True)
    bottom = os.open(deep, os.O_RDONLY)
    os.symlink("/root/ws/" + "e/" * 1900 + "f", "up", dir_fd=bottom)
    os.symlink("/etc/passwd", "out", dir_fd=bottom)
    os.close(bottom)


def odd_links(workspace: Path) -> None:
    (workspace / "circle").symlink_to("circle")
    (workspace / "endless").symlink_to("x" * 4000)
    (workspace / "through_a_file").symlink_to("answer.txt/x")
    for number in range(1500):
        (workspace / f"chain{number}").symlink_to(f"chain{number + 1}")


def long_names(workspace: Path) -> None:
    for letter in "abc":
        (workspace / (letter * 255)).write_text("x")
    (workspace / b"\xff\nnew line".decode("utf-8", "surrogateescape")).write_text("x")


def special_files(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(workspace / "socket"))
    if os.geteuid() == 0:
        os.mknod(workspace / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 5))


def hard_links(workspace: Path) -> None:
    (workspace / "one").write_text("1")
    for number in range(100):
        os.link(workspace / "one", workspace / f"link{number}")


@pytest.mark.parametrize("attack", [deep_links, odd_links, long_names, special_files, hard_links])
async def test_no_shape_of_the_workspace_keeps_the_grader_from_its_verdict(tmp_path, attack):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "answer.txt").write_text("42\n")
    attack(workspace)
    script = "[ -e device ] || [ -e pipe ] || [ -e socket ] || cmp -s answer.txt reward/expected.txt && echo 0.75\n"
    assert await score(make(tmp_path, script, expected_txt="42\n"), workspace, tmp_path) == 0.75
    assert list((tmp_path / "rooms").iterdir()) == []
    remove_tree(workspace)


@pytest.mark.parametrize("where", ["frozen", "graded"])
async def test_where_a_copy_lies_does_not_decide_whether_it_is_too_large(tmp_path, where):
    """Else an agent could choose a depth at which freezing succeeds and grading does not."""
    source = tmp_path / "source"
    deep = source / "/".join("d" * 9 for _ in range(299))
    deep.mkdir(parents=True)
    copy_tree(source, tmp_path / ("x" * (1 if where == "frozen" else 200)))
    (deep / ("e" * 30)).mkdir()
    with pytest.raises(WorkspaceTooLarge, match="longer than"):
        copy_tree(source, tmp_path / ("y" * (1 if where == "frozen" else 200)))


@pytest.mark.parametrize(("number", "text"), [(10_001, "x"), (300, "./" * 2000)], ids=["many", "long"])
def test_links_that_take_long_to_follow_are_too_much(tmp_path, number, text):
    source = tmp_path / "source"
    source.mkdir()
    for one in range(number):
        (source / f"link{one}").symlink_to(text)
    with pytest.raises(WorkspaceTooLarge, match="links"):
        copy_tree(source, tmp_path / "copy")


async def test_a_link_to_the_agents_own_file_still_counts(tmp_path):
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "result.txt").write_text("42\n")
    (workspace / "answer.txt").symlink_to("/root/ws/result.txt")
    script = "cmp -s answer.txt reward/expected.txt && echo 1 || echo 0\n"
    assert await score(make(tmp_path, script, expected_txt="42\n"), workspace, tmp_path) == 1.0


async def test_an_agent_cannot_hard_link_what_is_not_its_own(tmp_path):
    require(available(), "apt-get install bubblewrap")
    shown = tmp_path / "shown"
    shown.write_text("of the host")
    shown.chmod(0o644)
    sandbox = await create("bubblewrap", "one", None, "/root/ws", tmp_path / "rooms")
    script = "ln /usr/bin/env a; ln /opt/shown b; ln /etc/passwd c; ln ~/own d; ls; exit 0"
    sandbox.put_home("own", "x")
    mounts = (Mount(shown, "/opt/shown"),)
    command = Command(("/bin/bash", "-c", script), sandbox.environment(), mounts, Limits(wall_s=20.0))
    finished = await sandbox.run(command)
    assert (finished.code, finished.stdout) == (0, b"")
    assert finished.stderr.count(b"failed to create hard link") == 4
    await sandbox.destroy()
