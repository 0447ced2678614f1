"""Grading: the task's own script, on a copy that the agent cannot reach any more.

Invariant: the verdict depends on the frozen workspace and on the task's ``reward/`` folder alone. It is
computed in a fresh sandbox without a network or a relay, after every process of the agent is gone;
``reward/`` replaces whatever the agent left under that name, and modules of the agent cannot stand in for
Python's own in a grader's ``python3 -c``.
"""

from __future__ import annotations

import math
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from envs.sandbox.base import Command, Finished, Limits, Sandbox, SandboxError
from envs.sandbox.create import Backend, create
from envs.sandbox.files import copy_tree, remove_tree
from envs.tasks.task import Task

LIMITS = Limits(wall_s=60.0, cpu_s=60.0, output_bytes=1 << 16)
_LOG_CHARACTERS = 2000
_SHIM = """#!/bin/bash
# PYTHONSAFEPATH keeps the agent's workspace, where a json.py would be imported, out of sys.path. Only a
# script file, which lies in reward/, gets its own folder back.
case "${1--}" in
-*) ;;
*) unset PYTHONSAFEPATH ;;
esac
exec %s "$@"
"""


class GradingError(SandboxError):
    """The grader could not run at all: infrastructure, never a score."""


@dataclass(frozen=True, slots=True)
class Grade:
    """``score`` is in [0, 1]; ``log`` says how it came about, for people."""

    score: float
    log: str


def read_score(finished: Finished) -> Grade:
    """The number on the last line of the grader's output; 0, with the reason, where there is none."""
    stdout = finished.stdout.decode(errors="replace").strip()
    tail = "\n".join(filter(None, (stdout, finished.stderr.decode(errors="replace").strip())))[-_LOG_CHARACTERS:]
    if finished.code is None:
        return Grade(0.0, f"the grader did not end within its {finished.seconds:.0f} s\n{tail}")
    if finished.code != 0:
        return Grade(0.0, f"the grader ended with exit code {finished.code}\n{tail}")
    last = stdout.splitlines()[-1].strip() if stdout else ""
    try:
        score = float(last)
    except ValueError:
        return Grade(0.0, f"the last line of the grader's output is no number: {last[:200]!r}\n{tail}")
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return Grade(0.0, f"the grader's number is {last[:200]}, expected one in [0, 1]\n{tail}")
    return Grade(score, tail)


def _place_reward(task: Task, sandbox: Sandbox, owner: int | None) -> None:
    reward = sandbox.workspace / "reward"
    remove_tree(reward)
    _keep_inner_links(sandbox.workspace, task.mount_dir)
    copy_tree(task.reward_dir, reward, owner)
    if sandbox.inside_workspace == task.mount_dir:
        return
    # A backend without a view of its own: graders that name the workspace by its path are pointed to the
    # copy.
    old, new = task.mount_dir.encode(), os.fsencode(sandbox.inside_workspace)
    for path in reward.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if old in content:
                path.write_bytes(content.replace(old, new))


def _keep_inner_links(workspace: Path, mount_dir: str) -> None:
    """Remove every link that does not lead to a file of the agent's own.

    Called while ``reward/`` is away: a link into it would show the grader its own expected files.
    """
    links = [Path(folder) / name for folder, folders, files in os.walk(workspace) for name in (*folders, *files)]
    links = [path for path in links if path.is_symlink()]
    for link in links:
        target = os.fspath(link.readlink())
        if target == mount_dir or target.startswith(mount_dir + "/"):
            inner = workspace / target[len(mount_dir) :].lstrip("/")
            link.unlink()
            link.symlink_to(os.path.relpath(inner, link.parent))
        elif target.startswith("/"):
            link.unlink()
    root = workspace.resolve()
    for link in links:
        if link.is_symlink() and not (link.exists() and link.resolve().is_relative_to(root)):
            link.unlink()


def _environment(sandbox: Sandbox) -> dict[str, str]:
    """The grader's environment: ``python3`` and ``python`` are shims in front of the sandbox's own."""
    env = sandbox.environment()
    python = sandbox.python
    shim = _SHIM % python
    for name in ("python", "python3"):
        inside = sandbox.put_home(f".grading/{name}", shim)
        (sandbox.home / ".grading" / name).chmod(0o755)
    env["PATH"] = f"{inside.rpartition('/')[0]}:{env['PATH']}"
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["PYTHONSAFEPATH"] = "1"
    return env


async def grade(task: Task, frozen: Path, backend: Backend, root: Path, limits: Limits = LIMITS) -> Grade:
    """Run ``bash reward/reward.sh`` in a copy of ``frozen`` and read the score from its last line.

    Whatever the agent's output makes the grader do (crash, hang, print no number) is a score of 0. Raises
    GradingError when there is no ``reward.sh``, SandboxError when the sandbox fails.
    """
    script = task.reward_dir / "reward.sh"
    if not script.is_file():
        raise GradingError(f"task {task.id}: no grader at {script}")
    sandbox = await create(backend, f"grade-{uuid.uuid4().hex[:16]}", frozen, task.mount_dir, root)
    try:
        _place_reward(task, sandbox, getattr(sandbox, "uid", None))
        command = Command(("/bin/bash", "reward/reward.sh"), _environment(sandbox), limits=limits)
        finished = await sandbox.run(command)
    finally:
        await sandbox.destroy()
    return read_score(finished)
