"""Command line of the tasks: check, count, show and draw tasks of every known format, and make built-in ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from envs.sandbox.base import SandboxError
from envs.sandbox.create import BACKENDS, Backend
from envs.sandbox.grading import LIMITS
from envs.tasks import clawgym, desk, formats
from envs.tasks.check import check_task
from envs.tasks.draft import Draft, Scan
from envs.tasks.faults import TaskError
from envs.tasks.shown import as_text, statistics_of, visible

_NEAR = 10
_MOST_DIGITS = 9
_EXAMPLES = """examples:
  python -m envs.tasks check my_tasks                   every task there: loads, and its grader keeps its word?
  python -m envs.tasks check my_tasks/sort_a_list       one task folder
  python -m envs.tasks stats ClawGym-Agents/RL/data/clawgym_eval
  python -m envs.tasks show pinchbench-skill task_09_files
  python -m envs.tasks sample my.jsonl 5 --out five     five of them, as task folders
  python -m envs.tasks generate --split heldout --level 2 --count 20 --out desk

formats:
""" + "".join(f"  {one.name:<16} {one.what}\n" for one in formats.FORMATS.values())


@contextmanager
def _working(words: str) -> Iterator[None]:
    """Say what is going on, where somebody looks on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(words):
        yield


def _scan(arguments: argparse.Namespace) -> Scan:
    with _working(f"reading {arguments.place}"):
        return formats.scan(arguments.place, arguments.format)


def _faults(found: Scan) -> int:
    """Print what is wrong, and give the exit code."""
    for fault in found.faults:
        print(visible(fault), file=sys.stderr)
    return 1 if found.faults else 0


async def _check(places: Sequence[Path], name: str | None, backend: Backend, root: Path) -> int:
    checked = broken = 0
    for place in places:
        for shown, folder, faults in _folders(place, name, root / "tasks"):
            lines = faults
            failed = bool(faults)
            if folder is not None:
                findings = [one for one in await check_task(folder, root, backend, LIMITS) if one.wrong]
                lines, failed = [str(one) for one in findings], any(one.broken for one in findings)
            print(visible(f"{'FAILS' if failed else 'warns' if lines else 'holds'}  {shown}"))
            for line in lines:
                print(visible(f"    {line}"), flush=True)
            checked += 1
            broken += failed
    print(f"{checked} task{'s' if checked != 1 else ''} checked, {broken} broken")
    if not broken:
        print(f"next: python -m algos.run tasks.path={shlex.quote(str(places[0]))}")
    return 1 if broken else 0


def _folders(place: Path, name: str | None, root: Path) -> Iterator[tuple[str, Path | None, list[str]]]:
    """Each task as it is called, its folder, or what is wrong with it."""
    found = formats.scan(place, name)
    for fault in found.faults:
        yield fault.partition(": ")[0], None, [fault]
    there = formats.format_of(place, name).name == "clawgym"
    for draft in found.drafts:
        if there:
            folder = Path(draft.source).parent
            yield str(folder), folder, []
            continue
        try:
            yield draft.source, clawgym.write_draft(draft, root / draft.folder_name).folder, []
        except TaskError as error:
            yield draft.source, None, error.faults


def _stats(arguments: argparse.Namespace) -> int:
    found = _scan(arguments)
    numbers = {"format": formats.format_of(arguments.place, arguments.format).name, **statistics_of(found.drafts)}
    numbers["broken"] = len(found.faults)
    if arguments.json:
        print(json.dumps(numbers))
        return _faults(found)
    for name, value in numbers.items():
        counts = value.items() if isinstance(value, dict) else ()
        shown = ", ".join(f"{key} {one:g}" if isinstance(one, float) else f"{key} {one}" for key, one in counts)
        print(f"{name.replace('_', ' '):<24} {shown or value}")
    if found.drafts:
        place, name = (shlex.quote(str(part)) for part in (arguments.place, found.drafts[0].id))
        print(f"next: python -m envs.tasks show {place} {name}")
    return _faults(found)


def _show(arguments: argparse.Namespace) -> int:
    found = _scan(arguments)
    for draft in found.drafts:
        if draft.id == arguments.task:
            print(visible(as_text(draft)))
            return 0
    near = [draft.id for draft in found.drafts if arguments.task in draft.id] or [d.id for d in found.drafts]
    told = ", ".join(near[:_NEAR]) or "none that can be read"
    more = f", and {len(found.drafts) - _NEAR} more" if len(found.drafts) > _NEAR else ""
    print(f"{arguments.place} has no task {arguments.task!r}; it has {told}{more}", file=sys.stderr)
    _faults(found)
    return 2


def _sample(arguments: argparse.Namespace) -> int:
    _check_new(arguments.out)
    found = _scan(arguments)
    count = min(arguments.count, len(found.drafts))
    chosen = sorted(random.Random(arguments.seed).sample(found.drafts, count), key=lambda draft: draft.id)
    for draft in chosen:
        print(visible(f"{draft.id}  ({draft.graded_by})  {draft.instruction.strip().splitlines()[0][:80]}"))
    if count < arguments.count:
        print(f"{arguments.place} has {count} sound tasks, and {arguments.count} were asked for", file=sys.stderr)
    if arguments.out is not None:
        _write(chosen, arguments.out)
    return _faults(found)


def _write(drafts: Sequence[Draft], folder: Path) -> None:
    for draft in drafts:
        clawgym.write_draft(draft, folder / draft.folder_name)
    print(f"next: python -m envs.tasks check {shlex.quote(str(folder))}")


def _check_new(folder: Path | None) -> None:
    """Raises ValueError for a folder that holds something, with which tasks would be mixed."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out: {folder} exists already; expected a new folder")


def _generate(arguments: argparse.Namespace) -> int:
    _check_new(arguments.out)
    made = desk.generate(arguments.split, arguments.count, arguments.seed, None, arguments.level)
    desk.write(made, arguments.out)
    print(f"{len(made)} tasks of the split {arguments.split}, level {arguments.level}, in {arguments.out}")
    print(f"next: python -m envs.tasks check {shlex.quote(str(arguments.out))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m envs.tasks",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="run graders for real; exit code 1 if a task is broken")
    checking.add_argument("places", type=Path, nargs="+", metavar="PATH", help="a task, or a folder or file of tasks")
    checking.add_argument("--backend", choices=BACKENDS, default="auto", help="the sandbox")
    counting = commands.add_parser("stats", help="how many tasks, of which kind, how large")
    counting.add_argument("--json", action="store_true", help="as one line of JSON")
    showing = commands.add_parser("show", help="one task: what is asked, what is given, how it is graded")
    drawing = commands.add_parser("sample", help="some tasks, chosen by a seed")
    for one in (counting, showing, drawing):
        one.add_argument("place", type=Path, metavar="PATH", help="a folder or a file of tasks")
    showing.add_argument("task", metavar="ID", help="the task's id")
    drawing.add_argument("count", type=_positive, nargs="?", default=5, metavar="N", help="how many")
    drawing.add_argument("--out", type=Path, metavar="DIR", help="also write them there, as task folders")
    for one in (checking, counting, showing, drawing):
        one.add_argument("--format", choices=list(formats.FORMATS), help="the format; recognised without it")
    making = commands.add_parser("generate", help="write built-in desk tasks")
    making.add_argument("--split", choices=["train", "heldout", "wording"], default="train", help="disjoint sets")
    making.add_argument("--level", type=int, choices=desk.LEVELS, default=1, help="difficulty")
    making.add_argument("--count", type=_positive, default=32, metavar="N", help="how many")
    making.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to")
    for one in (drawing, making):
        one.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same tasks")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    others: dict[str, Any] = {"stats": _stats, "show": _show, "sample": _sample, "generate": _generate}
    try:
        if arguments.command in others:
            return int(others[arguments.command](arguments))
        with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
            return asyncio.run(_check(arguments.places, arguments.format, arguments.backend, Path(root)))
    except (SandboxError, ValueError, OSError) as error:
        print(visible(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
