"""Grading: the task's own script, on a copy that the agent cannot reach any more.

Invariant: the verdict depends on the frozen workspace and on the task's ``reward/`` folder alone. It is
computed in a fresh sandbox without a network or a relay, after every process of the agent is gone;
``reward/`` replaces whatever the agent left under that name, and modules of the agent cannot stand in for
Python's own in a grader's ``python3 -c``. Only a number in [0, 1] is a verdict: a grader that gives none has
failed, which is no score at all. An agent that makes it fail escapes a low score that way, and earns none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Command, Finished, Limits, Sandbox, SandboxError
from envs.sandbox.create import Backend, create
from envs.sandbox.files import copy_tree, remove_tree
from envs.sandbox.watch import Bounds, watched
from envs.tasks import openclaw_events
from envs.tasks.task import Task

LIMITS = Limits(wall_s=60.0, cpu_s=60.0, output_bytes=1 << 16)
BOUNDS = Bounds(output_mb=64, disk_mb=2048)
_LOG_CHARACTERS = 2000
_TOLD = {
    "final_message": ("final_message.txt", "REINS_FINAL_MESSAGE"),
    "transcript": ("transcript.jsonl", "REINS_TRANSCRIPT"),
    "payload": ("payload.json", openclaw_events.VARIABLE),
}
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


class GraderFailureError(SandboxError):
    """The grader ran and gave no score; the message says why, with the tail of its output. Never a score."""


@dataclass(frozen=True, slots=True)
class Grade:
    """``score`` is in [0, 1]; ``log`` says how it came about, for people."""

    score: float
    log: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a grader is given besides the workspace, where its task asks for it (``Task.grader_gets``)."""

    final_message: str = ""
    transcript: str = ""
    """JSON lines, one for each message."""


_NOTHING_TOLD = Told()


def read_score(finished: Finished, reached: str = "") -> Grade:
    """The number on the last line of the grader's output.

    ``reached``: the bound of ``Bounds`` at which it was ended. Raises GraderFailureError where there is no number
    in [0, 1], or where the grader did not end well.
    """
    stdout = finished.stdout.decode(errors="replace").strip()
    tail = "\n".join(filter(None, (stdout, finished.stderr.decode(errors="replace").strip())))[-_LOG_CHARACTERS:]
    last = stdout.splitlines()[-1].strip() if stdout else ""
    try:
        score = float(last)
    except ValueError:
        score = math.nan
    if reached:
        fault = f"the grader reached its bound {reached}"
    elif finished.code is None:
        fault = f"the grader did not end within its {finished.seconds:.0f} s"
    elif finished.code != 0:
        fault = f"the grader ended with exit code {finished.code}"
    elif not last:
        fault = "the grader printed nothing, expected a number in [0, 1] on the last line of its output"
    elif not 0.0 <= score <= 1.0:
        fault = f"the last line of the grader's output is {last[:200]!r}, expected a number in [0, 1]"
    else:
        return Grade(score, tail)
    raise GraderFailureError(fault if tail in ("", last) else f"{fault}; its output:\n{tail}")


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
    links = list(_links(workspace))
    for link in links:
        target = os.fspath(link.readlink())
        if target == mount_dir or target.startswith(mount_dir + "/"):
            inner = workspace / target[len(mount_dir) :].lstrip("/")
            link.unlink()
            # A way back that is longer than a link can be leads nowhere.
            with contextlib.suppress(OSError):
                link.symlink_to(os.path.relpath(inner, link.parent))
        elif target.startswith("/"):
            link.unlink()
    root = workspace.resolve()
    for link in links:
        if link.is_symlink() and not _leads_into(root, link):
            link.unlink()


def _links(folder: Path) -> Iterator[Path]:
    """Every link below ``folder``; not by recursion, since the agent chose the depth."""
    pending = [os.fspath(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _leads_into(root: Path, link: Path) -> bool:
    # By the kernel, which follows 40 links and no more: an agent can make each of its links a chain of all of them.
    try:
        found = os.open(link, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it leads nowhere: in a circle, through a file, to a name too long
        return False
    try:
        return Path(f"/proc/self/fd/{found}").readlink().is_relative_to(root)
    finally:
        os.close(found)


def _environment(sandbox: Sandbox, task: Task, told: Told) -> dict[str, str]:
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
    for what in task.grader_gets:
        file, variable = _TOLD[what]
        text = _payload(task, told) if what == "payload" else getattr(told, what)
        text = text.encode("utf-8", "replace").decode()
        env[variable] = sandbox.put_home(f".grading/{file}", text)
        (sandbox.home / ".grading" / file).chmod(0o444)
    return env


def _payload(task: Task, told: Told) -> str:
    said = list(openclaw_events.events(told.transcript))
    asked = {"task_id": task.id, "user_query": task.instruction, "metadata": task.metadata}
    return json.dumps(asked | {"final_message": told.final_message, "transcript": said})


async def run_grader(
    task: Task,
    workspace: Path | None,
    backend: Backend,
    root: Path,
    limits: Limits = LIMITS,
    told: Told = _NOTHING_TOLD,
    start: tuple[str, ...] = ("/bin/bash", "reward/reward.sh"),
) -> tuple[Finished, str]:
    """Run the grader once in a fresh copy of ``workspace`` (None: an empty one); how it ended, and at which bound.

    ``start``: what starts it, in the workspace. Raises GradingError when there is no ``reward.sh``, WorkspaceTooLarge
    past the bounds of ``files.Bounds``, SandboxError when the sandbox fails.
    """
    grader = task.reward_dir / "reward.sh"
    if not grader.is_file():
        raise GradingError(f"task {task.id}: no grader at {grader}")
    sandbox = await create(backend, f"grade-{uuid.uuid4().hex[:16]}", workspace, task.mount_dir, root)
    try:
        await uninterrupted(asyncio.to_thread(_place_reward, task, sandbox, getattr(sandbox, "uid", None)))
        command = Command(start, _environment(sandbox, task, told), limits=limits)
        return await watched(sandbox, command, BOUNDS)
    finally:
        await sandbox.destroy()


async def progress(task: Task, transcript: str, backend: Backend, root: Path, limits: Limits = LIMITS) -> float:
    """How far an episode has come, in [0, 1], by ``bash reward/step.sh`` on the last line of its output.

    It sees ``$REINS_TRANSCRIPT``, what was said so far, and the input files as they were: the workspace itself cannot
    be copied while the agent's processes write to it. Raises as ``run_grader``, and GraderFailureError.
    """
    told = replace(task, grader_gets=("transcript",))
    start = ("/bin/bash", "reward/step.sh")
    ended = await run_grader(told, task.input_files, backend, root, limits, Told(transcript=transcript), start)
    return read_score(*ended).score


async def grade(
    task: Task, frozen: Path, backend: Backend, root: Path, limits: Limits = LIMITS, told: Told = _NOTHING_TOLD
) -> Grade:
    """Run ``bash reward/reward.sh`` in a copy of ``frozen`` and read the score from its last line.

    A grader that gives no score runs once more on the same files; GraderFailureError is raised when it fails again,
    and says whether it also fails on the untouched input files. Otherwise raises as ``run_grader``.
    """

    async def once(workspace: Path) -> Grade:
        return read_score(*await run_grader(task, workspace, backend, root, limits, told))

    try:
        return await once(frozen)
    except GraderFailureError:
        pass
    try:
        return await once(frozen)
    except GraderFailureError as error:
        try:
            untouched = await once(task.input_files)
        except GraderFailureError:
            cause = "it fails on the untouched input files too: the grader is broken"
        else:
            cause = f"on the untouched input files it gives {untouched.score:g}: what the agent left makes it fail"
        raise GraderFailureError(f"grader failure, twice on the same workspace; {cause}: {error}") from error
