"""Make the tiny policy from nothing: ``python -m algos.coldstart [--seed N] [--out DIR]``.

Invariant: the result is a function of the seed, the recipe and the sources that the fingerprint covers,
and it is kept only when its measured success is where reinforcement learning can begin: samples do every
family's work now and then, greedy answers mostly show the bad habits.

How it is made: a scripted expert does desk tasks in the real format of the harness; in most episodes it
has the one bad habit of the task's family. The model imitates these transcripts, and is then measured by
rollouts with a real shell and the real graders.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from algos.recipe import REPORT, ColdstartError, ColdstartReport, Recipe
from envs.harnesses.external.releases import releases

if TYPE_CHECKING:
    from envs.sandbox.create import Backend

ROOT = Path(__file__).parents[1]
CACHE = Path("~/.cache/reins/coldstart")

SOURCES = (
    "actors/rendering.py",
    "algos/apprentice.py",
    "algos/habits.py",
    "algos/imitation.py",
    "algos/muon.py",
    "algos/overheard.py",
    "algos/recipe.py",
    "algos/rehearsal.py",
    "algos/tiny.py",
    "envs/harnesses/agent_loop/context.py",
    "envs/harnesses/agent_loop/loop.py",
    "envs/harnesses/agent_loop/observations.py",
    "envs/harnesses/agent_loop/parts.py",
    "envs/harnesses/agent_loop/prompts.py",
    "envs/harnesses/agent_loop/schemas.py",
    "envs/harnesses/agent_loop/tools.py",
    "envs/harnesses/agent_loop/workflow.py",
    "envs/space.py",
    "envs/tasks/desk",
)
"""What determines the result, besides seed, recipe and the versions of the packages."""

PACKAGES = ("renderers", "tokenizers", "torch", "transformers")


def coldstart(
    cache: Path,
    seed: int,
    progress: Callable[[str], None] | None = None,
    recipe: Recipe | None = None,
    tick: Callable[[int, int], None] | None = None,
    backend: Backend = "auto",
) -> Path:
    """The folder of the policy for ``seed``: found in ``cache``, or made and put there.

    ``progress`` gets a line of text now and then, ``tick`` the step and how many are likely. Call it from a
    thread without a running event loop. Raises ColdstartError; an interrupted call leaves nothing behind.
    """
    recipe = recipe or Recipe()
    folder = cache / f"{seed}-{fingerprint(seed, recipe)}"
    if (folder / REPORT).is_file():
        return folder
    # Only now: the import takes seconds, and a policy in the cache needs none of it.
    from algos.apprentice import make

    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        make(made, seed, recipe, progress or _silent, tick or _silent, backend)
        made.chmod(0o755)
        # Another process may have finished the same one meanwhile; the two are equal.
        if not (folder / REPORT).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def fingerprint(seed: int, recipe: Recipe) -> str:
    """12 hex digits over seed, recipe, sources and package versions."""
    digest = hashlib.sha256(json.dumps([seed, dataclasses.asdict(recipe)], sort_keys=True).encode())
    for name in recipe.space.outside if recipe.space is not None else ():
        release = releases().get(name)
        digest.update(json.dumps(release.packages if release else None).encode())
    for package in PACKAGES:
        digest.update(f"{package} {version(package)}\n".encode())
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _silent(*_: object) -> None:
    return None


_EPILOG = """\
examples:
  python -m algos.coldstart                        the policy of the quickstart, into the cache
  python -m algos.coldstart --seed 1 --out tiny    another one, into a folder of its own
  python -m algos.run model.path=tiny              train it

A policy that is in the cache already is not made again.
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 no policy of the asked quality came out, 2 wrong arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m algos.coldstart",
        description="Make the tiny policy from nothing: tokenizer, and model that imitates a faulty expert.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes the result (default 0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="copy the policy there; must not exist yet")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"default {CACHE}")
    parser.add_argument(
        "--sandbox", choices=("auto", "bubblewrap", "process"), default="auto", help="for the measurement"
    )
    args = parser.parse_intermixed_args(argv)
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out} exists already; expected a folder that does not")
    try:
        folder = _with_bar(args.cache.expanduser(), args.seed, args.sandbox)
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    except ColdstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.out is not None:
        shutil.copytree(folder, args.out)
        folder = args.out
    _show(folder)
    return 0


def _with_bar(cache: Path, seed: int, backend: Backend) -> Path:
    console = Console(stderr=True)
    columns = (
        TextColumn("cold start {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=Recipe().full_steps + Recipe().decay_steps)

        def note(text: str) -> None:
            bar.update(task, description=text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        return coldstart(
            cache,
            seed,
            note,
            tick=lambda step, likely: bar.update(task, completed=step, total=likely),
            backend=backend,
        )


def _show(folder: Path) -> None:
    report = ColdstartReport(**json.loads((folder / REPORT).read_text()))
    table = Table(title="success on held-out tasks before any reinforcement learning")
    for name in ("family", "greedy", "sampled"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in report.greedy:
        table.add_row(family, f"{report.greedy[family]:.2f}", f"{report.sampled[family]:.2f}")
    table.add_section()
    table.add_row("all", f"{report.greedy_mean:.2f}", f"{report.sampled_mean:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"{report.parameters / 1e6:.2f} million parameters, vocabulary {report.vocabulary}, "
        f"{report.steps} steps, {report.seconds:.0f} s\npolicy in {folder}",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
