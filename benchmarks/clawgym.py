"""Whether grading gives what a task's own ``reward.sh`` gives when it is run by hand: on every untouched workspace.

    python benchmarks/clawgym.py DIR [--limit N] [--out FILE]
    python benchmarks/clawgym.py --smoke    four tasks made up here: the machinery only

DIR is a folder of task folders in the ClawGym format, such as ``RL/data/clawgym_eval`` of the public repository
ClawGym/ClawGym-Agents. By hand means: ``input_files/`` and ``reward/`` lie where the task says that the workspace is,
and ``bash reward/reward.sh`` runs there with the machine's own programs, of which ``python`` is ``python3``; nothing
of ours is in between but one ``bwrap`` that puts a folder at that path. Graded means ``envs.sandbox.grading``, as in a
run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from envs.sandbox.create import unavailable
from envs.sandbox.grading import GraderFailureError, grade
from envs.tasks import clawgym
from envs.tasks.task import Task

WHERE = (
    "{path}: no such folder. The benchmark is in a public repository; to have it:\n"
    "  git clone --depth 1 https://github.com/ClawGym/ClawGym-Agents\n"
    "  python benchmarks/clawgym.py ClawGym-Agents/RL/data/clawgym_eval"
)
PATH = "/usr/local/bin:/usr/bin:/bin"
NAMES = "/tmp/names"
"""Where ``python`` is, for graders that call it so: not every machine has that name."""


@dataclass(frozen=True)
class Compared:
    """The scores of one task's untouched workspace; None: no score, or one outside [0, 1]."""

    task: str
    by_hand: float | None
    graded: float | None


def by_hand(task: Task, folder: Path) -> float | None:
    """What ``bash reward/reward.sh`` prints as its last line."""
    workspace = folder / "by_hand"
    if task.input_files.is_dir():
        shutil.copytree(task.input_files, workspace, symlinks=True)
    shutil.copytree(task.reward_dir, workspace / "reward", symlinks=True, dirs_exist_ok=True)
    names = folder / "names"
    names.mkdir(exist_ok=True)
    if not (names / "python").is_symlink():
        (names / "python").symlink_to(shutil.which("python3", path=PATH) or "python3")
    room = ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/root", "--unshare-net"]
    shown = ["--ro-bind", os.fspath(names), NAMES, "--bind", os.fspath(workspace), task.mount_dir]
    done = subprocess.run(
        ["bwrap", *room, *shown, "--chdir", task.mount_dir, "bash", "reward/reward.sh"],
        env={"PATH": f"{NAMES}:{PATH}", "HOME": "/root", "LANG": "C.UTF-8"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    shutil.rmtree(workspace)
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        score = float(lines[-1]) if done.returncode == 0 and lines else None
    except ValueError:
        return None
    return score if score is not None and 0 <= score <= 1 else None


def made_up(folder: Path) -> None:
    """Four tasks whose graders give 0, a half, 1 and none, in a workspace as the benchmark's."""
    inputs = {"a.txt": "one\n"}
    graders = ("echo 0", "[ -f a.txt ] && echo 0.5", "python -c 'print(1.0)'", "exit 3")
    for number, grader in enumerate(graders):
        reward = {"reward.sh": f"{grader}\n"}
        clawgym.write(folder / str(number), str(number), "Do it.", inputs, reward, {}, "/root/.openclaw/workspace")


def graded(task: Task, folder: Path) -> float | None:
    try:
        return asyncio.run(grade(task, task.input_files, "bubblewrap", folder)).score
    except GraderFailureError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", metavar="DIR", help="folder of task folders")
    parser.add_argument("--smoke", action="store_true", help="four tasks made up here in place of DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N tasks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object there")
    arguments = parser.parse_args()
    if (arguments.path is None) != arguments.smoke:
        parser.error("expected either DIR or --smoke")
    console = Console(stderr=True)
    if not arguments.smoke and not arguments.path.is_dir():
        console.print(WHERE.format(path=arguments.path), highlight=False, markup=False)
        return 2
    if fault := unavailable("bubblewrap"):
        console.print(fault, markup=False)
        return 2
    began = time.monotonic()
    compared = []
    with tempfile.TemporaryDirectory(prefix="reins-bench-") as made:
        folder = Path(made)
        if arguments.smoke:
            made_up(folder / "tasks")
        loaded = clawgym.scan(arguments.path or folder / "tasks")
        for fault in loaded.skipped:
            console.print(fault, markup=False)
        for task in track(loaded.tasks[: arguments.limit], "both ways", console=console):
            compared.append(Compared(task.id, by_hand(task, folder), graded(task, folder)))
    different = [one for one in compared if one.by_hand != one.graded]
    for one in different:
        console.print(f"{one.task}: by hand {one.by_hand}, graded {one.graded}", highlight=False)
    line = {
        "benchmark": "clawgym",
        "smoke": arguments.smoke,
        "folders": len(loaded.tasks) + len(loaded.skipped),
        "loaded": len(loaded.tasks),
        "compared": len(compared),
        "equal": len(compared) - len(different),
        "without_score": sum(one.by_hand is None for one in compared),
        "above_zero": sum(bool(one.by_hand) for one in compared),
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))
    return 1 if different or loaded.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
