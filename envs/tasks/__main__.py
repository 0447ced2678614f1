"""Command line of the tasks: check task folders, their graders included."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from envs.sandbox.base import SandboxError
from envs.sandbox.create import BACKENDS, Backend
from envs.sandbox.grading import LIMITS
from envs.tasks.check import check_task
from envs.tasks.clawgym import TaskError, folders

_EXAMPLES = """examples:
  python -m envs.tasks check my_tasks              every task folder in it: loads, and its grader keeps its word?
  python -m envs.tasks check my_tasks/sort_a_list  one of them
"""


async def _check(places: list[Path], backend: Backend, root: Path) -> int:
    broken = checked = 0
    for folder in (folder for place in places for folder in folders(place)):
        findings = await check_task(folder, root, backend, LIMITS)
        wrong = [finding for finding in findings if finding.wrong]
        print(f"{'FAILS' if any(f.broken for f in wrong) else 'warns' if wrong else 'holds'}  {folder}")
        for finding in wrong:
            print(f"    {finding}", flush=True)
        checked += 1
        broken += any(finding.broken for finding in wrong)
    print(f"{checked} task folder{'s' if checked != 1 else ''} checked, {broken} broken")
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m envs.tasks",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="run graders for real; exit code 1 if a folder is broken")
    checking.add_argument("places", type=Path, nargs="+", metavar="DIR", help="a task folder, or a folder of them")
    checking.add_argument("--backend", choices=BACKENDS, default="auto", help="the sandbox")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
        try:
            return asyncio.run(_check(arguments.places, arguments.backend, Path(root)))
        except (SandboxError, TaskError) as error:
            print(error, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
