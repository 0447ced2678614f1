"""Evaluate: ``python -m algos.eval [CONFIG] [key.path=value ...]``."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from algos.checks import check, without_gpu
from algos.entry import interruptible, listed, new_folder, parsed, say, typed
from algos.run_folder import RunError, fault_of_a_part
from configs.eval import EvaluationConfig, RingConfig, TaskSetConfig
from configs.loader import ConfigError, describe, load_as

if TYPE_CHECKING:
    from actors.evaluation import Attempt
    from envs.tasks.task import Task

CONFIG = Path(__file__).parents[1] / "configs" / "eval.yaml"
_EPILOG = """\
examples:
  python -m algos.eval model.path=runs/NAME                       the newest checkpoint of a run on configs/eval.yaml
  python -m algos.eval model.path=runs/NAME model.checkpoint=best runs=5 name=best
  python -m algos.eval my.yaml model.path=MODEL_DIR               rings, harnesses and task sets of one's own
  python -m algos.eval engine.kind=endpoint engine.endpoint.url=URL engine.endpoint.model=NAME
  python -m algos.eval --dry-run model.path=MODEL_DIR             check everything, print the plan
  python -m algos.eval --resume evals/NAME                        go on after an interruption; runs=5 adds runs
  python -m algos.eval --table evals/BEFORE evals/AFTER           side by side, with the paired differences

settings (key = default):
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 stopped on a fault or figures are incomplete, 2 wrong settings, 130 interrupted."""
    args = _arguments(argv)
    console = Console()
    try:
        if args.table:
            return _compare([Path(name) for name in args.table], console)
        config, folder = _settings(args)
        backend = _check(config)
        return _dry_run(config, folder, backend, console) if args.dry_run else _begin(config, folder, args, console)
    except (ConfigError, RunError) as error:
        say(Console(stderr=True), f" {error}", "error:")
        return 2
    except KeyboardInterrupt:
        say(console, "interrupted before anything began")
        return 130


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    told = "\n".join(
        [
            describe(EvaluationConfig, CONFIG),
            "\nof each task set, tasks.NAME.key:",
            describe(TaskSetConfig),
            "\nof each ring in the list rings:",
            describe(RingConfig),
        ]
    )
    parser = argparse.ArgumentParser(
        prog="python -m algos.eval",
        description="Evaluate a model in harnesses: Pass@1 with its standard error over independent runs.",
        epilog=_EPILOG + told,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="YAML file of settings; none: configs/eval.yaml")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument(
        "--resume", type=Path, metavar="EVAL", help="go on in a folder; what has ended is not run again"
    )
    parser.add_argument("--table", nargs="+", metavar="EVAL", help="print the table of evaluations, and end")
    return parsed(parser, argv)


def _settings(args: argparse.Namespace) -> tuple[EvaluationConfig, Path]:
    from algos.eval_folder import settings
    from envs.harnesses.sets import with_rings

    if args.resume:
        if args.config:
            raise ConfigError(f"got both --resume and {args.config}; an evaluation goes on with its own config.yaml")
        return settings(args.resume, args.overrides), args.resume
    config = load_as(EvaluationConfig, Path(args.config) if args.config else CONFIG, args.overrides)
    try:
        config = with_rings(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config, new_folder(config.dir, config.name)


def _check(config: EvaluationConfig) -> str:
    """The sandbox backend that would be used. Raises RunError and ConfigError before anything starts."""
    from envs.harnesses.registry import harness

    for number, ring in enumerate(config.rings):
        for place, one in enumerate(ring.harnesses):
            try:
                harness(one)
            except ValueError as error:
                raise ConfigError(f"rings.{number}.harnesses.{place}: {error}") from None
    if config.model.path is None and config.engine.kind != "endpoint":
        raise ConfigError("model.path: got nothing, expected model.path=runs/NAME, or a Hugging Face model folder")
    return check(config.parts()).backend


def _model(config: EvaluationConfig) -> Path | None:
    """The folder that is measured: a run's checkpoint, or what was named. Raises ConfigError."""
    path = config.model.path
    if path is None:
        return None
    from algos.export import ExportError, checkpoint

    if (path / "checkpoints").is_dir() or (path / "trainer.pt").is_file():
        which = config.model.checkpoint
        try:
            return checkpoint(path, which if isinstance(which, int) else None, which == "best")
        except (ExportError, OSError, ValueError) as error:
            raise ConfigError(f"model.path: {error}") from None
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise ConfigError(
                f"model.path: {path} has no {name}; expected a run folder with checkpoints, one of them, or a Hugging "
                "Face model folder with a tokenizer"
            )
    return path


def _sets(config: EvaluationConfig, folder: Path) -> tuple[dict[str, list[Task]], list[str]]:
    """The tasks of every set, and what was left out. Raises ConfigError."""
    from envs.harnesses.base import check_tools, check_variables
    from envs.harnesses.registry import harness
    from envs.judge.judge import check_judge
    from envs.tasks.sets import load_set

    found: dict[str, list[Task]] = {}
    skipped: list[str] = []
    for name in dict.fromkeys(name for ring in config.rings for name in config.sets(ring)):
        try:
            found[name], left_out = load_set(config.tasks[name], folder / "tasks" / name)
            check_variables(found[name])
            check_judge(found[name], config.judge)
        except (ValueError, OSError) as error:
            raise ConfigError(f"tasks.{name}: {error}") from None
        skipped += left_out
    for ring in config.rings:
        for one in ring.harnesses:
            for name in config.sets(ring):
                try:
                    check_tools(harness(one), found[name])
                except ValueError as error:
                    raise ConfigError(f"rings: {ring.name}: {one.known_as}: {error}") from None
    return found, skipped


def _dry_run(config: EvaluationConfig, folder: Path, backend: str, console: Console) -> int:
    import tempfile

    from actors.evaluation import attempts

    model = _model(config)
    with tempfile.TemporaryDirectory() as scratch:
        sets, skipped = _sets(config, Path(scratch))
        for line in skipped:
            say(console, f"skipped {line}")
        say(console, _plan(config, model, backend, folder, attempts(config, sets)))
    return 0


def _plan(config: EvaluationConfig, model: Path | None, backend: str, folder: Path, planned: list[Attempt]) -> str:
    """What these settings come to, in a few lines."""
    engine = f"{config.engine.kind} x {config.engine.replicas}"
    shown = str(model)
    if config.engine.kind == "endpoint":
        shown = f"{config.engine.endpoint.model} at {config.engine.endpoint.url}"
    lines = [
        f"model       {shown}",
        f"engine      {engine}, temperature {config.temperature:g}",
        f"sandbox     {backend}{' (no isolation)' if backend == 'process' else ''}, "
        f"{config.sandbox.actors} x {config.sandbox.concurrency} at a time",
    ]
    for ring in config.rings:
        count = sum(attempt.ring == ring.name and attempt.run == 0 for attempt in planned)
        names = listed([one.known_as for one in ring.harnesses])
        lines.append(f"ring        {ring.name}: {', '.join(config.sets(ring))} in {names}, {count} episodes a run")
    runs = f"{config.runs} independent runs" if config.runs > 1 else "one run"
    lines += [f"episodes    {len(planned)}: {runs}", f"writes to   {folder}"]
    if config.runs > 1 and not config.temperature:
        lines.append("careful     at temperature 0 the runs are alike: their agreement says nothing about the policy")
    lines += [f"careful     {setting}: no GPU is seen on this machine" for setting in without_gpu(config.parts())]
    return "\n".join(lines)


def _begin(config: EvaluationConfig, folder: Path, args: argparse.Namespace, console: Console) -> int:
    from actors.evaluation import attempts, left
    from algos.eval_folder import link_model, reopened, write_settings

    model = _model(config) if not args.resume or not (folder / "model").is_dir() else folder / "model"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _alone(folder)
        sets, skipped = _sets(config, folder)
        for line in skipped:
            say(console, f"skipped {line}")
        planned = attempts(config, sets)
        try:
            wanted = left(planned, reopened(folder))
        except ValueError as error:
            raise ConfigError(f"--resume {folder}: {error}") from None
        if model is None:
            model = _counting(folder)
        elif (model / "trainer.pt").is_file():
            from actors.checkpoints import model_files

            model = link_model(model_files(model), folder)
        write_settings(folder, config, planned)
    except OSError as error:
        raise RunError(f"{folder}: {error}") from None
    with lock:
        return _evaluate(config, folder, model, planned, wanted, console)


def _alone(folder: Path) -> Any:
    from actors.one_writer import hold

    try:
        return hold(folder, seconds=5)
    except TimeoutError:
        raise RunError(f"{folder}: another evaluation still writes there; stop it first, or name another") from None


def _counting(folder: Path) -> Path:
    """A small tokenizer that counts an endpoint's tokens, where no other is named."""
    from algos.tiny import build_tokenizer

    target = folder / "model"
    target.mkdir(exist_ok=True)
    build_tokenizer(target)
    return target


class _Log:
    """Writes each attempt down, then shows it."""

    def __init__(self, folder: Path, total: int, done: int, console: Console) -> None:
        from algos.eval_folder import EPISODES, TRANSCRIPTS

        self._episodes = (folder / EPISODES).open("a", encoding="utf-8")
        self._transcripts = folder / TRANSCRIPTS
        self._console = console
        self._total, self._done, self._passed, self._failed = total, done, 0.0, 0
        self._graded = 0
        self._told = time.monotonic()
        columns = (
            TextColumn("[bold]episode {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left  {task.description}"),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task("starting Ray, the proxy and the engine", total=total, completed=done)
        if not console.is_terminal:
            say(console, "starting Ray, the proxy and the engine")

    def attempt(self, row: dict[str, Any], transcript: str | None) -> None:
        from algos.runlog import line

        if transcript is not None:
            self._transcripts.mkdir(exist_ok=True)
            (self._transcripts / f"{row['id']}.jsonl").write_text(transcript, encoding="utf-8", errors="replace")
        self._episodes.write(line(row))
        self._episodes.flush()
        self._done += 1
        self._failed += row["status"] == "failed"
        if row["reward"] is not None:
            self._graded += 1
            self._passed += row["reward"]
        mean = f"mean reward {self._passed / self._graded:.3f}" if self._graded else "nothing graded yet"
        told = mean + (f", {self._failed} failed" if self._failed else "")
        self.bar.update(self._task, completed=self._done, description=told)
        if not self._console.is_terminal and (time.monotonic() - self._told > 5 or self._done == self._total):
            say(self._console, f"episode {self._done}/{self._total}  {told}")
            self._told = time.monotonic()

    def close(self) -> None:
        self._episodes.close()


def _evaluate(
    config: EvaluationConfig,
    folder: Path,
    model: Path,
    planned: list[Attempt],
    wanted: list[Attempt],
    console: Console,
) -> int:
    from algos.eval_folder import scores, write_tables
    from algos.score_tables import rich_table, table

    began = time.monotonic()
    say(console, f"evaluation {folder}: {len(planned)} episodes, {len(planned) - len(wanted)} have ended already")
    interrupted, fault = False, None
    if wanted:
        log = _Log(folder, len(planned), len(planned) - len(wanted), console)
        with log.bar:
            try:
                asyncio.run(interruptible(_run(config, folder, model, wanted, log)))
            except (KeyboardInterrupt, asyncio.CancelledError):
                interrupted = True
            except RunError as error:
                fault = error
            finally:
                log.close()
    found = scores(folder)
    write_tables(folder, found, config)
    console.print(rich_table(table([found])))
    if fault is not None:
        say(Console(stderr=True), f" {fault}", "stopped:")
    elif interrupted:
        say(console, "interrupted")
    elif not found.complete:
        say(console, f" {len(found.failed)} episodes failed; the figures lack them, see table.md", "incomplete:")
    if not interrupted:
        say(console, f"done in {time.monotonic() - began:.0f} s")
    say(console, _next_steps(folder, found.complete))
    return 130 if interrupted else int(fault is not None or not found.complete)


async def _run(config: EvaluationConfig, folder: Path, model: Path, wanted: list[Attempt], log: _Log) -> None:
    from ray.exceptions import RayTaskError

    from actors.cluster import PartLostError
    from actors.episodes import NothingWorksError
    from actors.evaluation import measure
    from actors.start import StartError, started

    try:
        async with started(config.parts(), folder, model) as cluster:
            await measure(config, wanted, cluster, log)
    except (PartLostError, NothingWorksError, StartError) as error:
        raise RunError(str(error)) from None
    except RayTaskError as error:
        raise fault_of_a_part(folder, error) from None


def _compare(folders: list[Path], console: Console) -> int:
    from algos.eval_folder import scores
    from algos.score_tables import markdown, table

    found = [scores(folder) for folder in folders]
    names = [one.name for one in found]
    for one, folder in zip(found, folders, strict=True):
        # Two evaluations of one name are told apart by their folders.
        one.name = one.name if names.count(one.name) == 1 else folder.resolve().name
    say(console, markdown(table(found)))
    return 0 if all(one.complete for one in found) else 1


def _next_steps(folder: Path, complete: bool) -> str:
    python = typed()
    lines = [f"tables {folder / 'table.md'}, .html and .json, episodes {folder / 'episodes.jsonl'}"]
    if (folder / "trees").is_dir():
        lines.append(f"look at its trees:  {python} -m trees.view {folder}")
    if not complete:
        lines.append(f"go on:  {python} -m algos.eval --resume {folder}")
    lines.append(f"beside another:  {python} -m algos.eval --table OTHER {folder}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
