"""Train: ``python -m algos.run [CONFIG] [key.path=value ...]``."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from algos.checks import Found, check, without_gpu
from algos.entry import interruptible, listed, new_folder, parsed, say, typed
from algos.forecast import forecast
from algos.recipe import Recipe, SpaceRecipe, space_recipe
from algos.run_folder import (
    RunError,
    check_checkpoints,
    fault_of_a_part,
    is_complete,
    last_checkpoint,
    same_episodes,
    write_settings,
)
from configs.loader import ConfigError, describe, load
from configs.schema import ColdstartConfig, RunConfig

_EPILOG = """\
examples:
  python -m algos.run                                     the quickstart: minutes on two cores
  python -m algos.run --dry-run rollout.groups=4          check the settings and print the plan
  python -m algos.run configs/quickstart.yaml seed=1 steps=80
  python -m algos.run configs/quickstart.yaml tasks.path=DIR      see python -m envs.tasks --help
  python -m algos.run --resume runs/quickstart-20260101-120000    go on after an interruption

settings (key = default):
"""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 the run stopped on a fault, 2 wrong settings, 130 interrupted."""
    args = _arguments(argv)
    console = Console()
    try:
        config, folder = _settings(args)
        found = check(config, dry=args.dry_run)
        if args.resume:
            check_checkpoints(folder)
        if args.dry_run:
            for line in found.skipped:
                say(console, f"skipped {line}")
            say(console, plan(config, found, folder, args.resume))
            if found.absent:
                raise RunError("\n".join(found.absent))
            return 0
        if args.resume and is_complete(folder, config.steps):
            say(console, f"{folder} has all of its {config.steps} steps; for more: --resume {folder} steps=N")
            return 0
        if found.backend == "process":
            say(console, " the agent runs as an ordinary process (bubblewrap is not used)", "no isolation:")
        return _train(config, folder, bool(args.resume), console)
    except (ConfigError, RunError) as error:
        say(Console(stderr=True), f" {error}", "error:")
        return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m algos.run",
        description="Train a policy through an agent harness. Without arguments: the quickstart.",
        epilog=_EPILOG + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="YAML file of settings; none: configs/quickstart.yaml")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on in a run folder, from its last checkpoint")
    parser.add_argument("--skip-bad-tasks", action="store_true", help="leave broken tasks out (tasks.skip_bad=true)")
    args = parsed(parser, argv)
    if args.skip_bad_tasks:
        args.overrides.append("tasks.skip_bad=true")
    return args


def _settings(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    if args.resume:
        if args.config:
            raise ConfigError(f"got both --resume and {args.config}; a run goes on with its own config.yaml")
        saved = args.resume / "config.yaml"
        if not saved.is_file():
            raise ConfigError(f"--resume {args.resume}: no config.yaml there; expected a folder made by this command")
        return load(saved, args.overrides), args.resume
    config = load(Path(args.config) if args.config else None, args.overrides)
    return config, new_folder(config.dir, config.name)


def plan(config: RunConfig, found: Found, folder: Path, resume: Path | None = None) -> str:
    """What a run with these settings would do, in a few lines."""
    per_step = config.rollout.groups * config.rollout.group_size
    before = last_checkpoint(folder) if resume else 0
    evaluation = f"{config.eval.tasks} tasks of each set" + (" before and after" if config.steps else "")
    if config.eval.every and config.steps:
        beside = "" if config.eval.wait else ", beside the training"
        evaluation = f"every {config.eval.every} steps{beside}, {evaluation}"
    if config.tasks.path is not None and not config.tasks.heldout:
        evaluation = "none: tasks.heldout=0 keeps no task of tasks.path out of training"
    tasks = f"{config.tasks.train} built-in {config.tasks.builtin} tasks"
    if config.tasks.path is not None and found.sets is None:
        tasks = f"{config.tasks.path}: not here"
    if found.sets is not None:
        heldout = found.sets.evaluation.get("heldout", ())
        tasks = f"{config.tasks.path}: {len(found.sets.train)} to practise on, {len(heldout)} held out"
        tasks += f", {len(found.skipped)} broken left out" if found.skipped else ""
    engine = f"{config.engine.kind} x {config.engine.replicas}, new weights: {config.update.mode.replace('_', ' ')}"
    if config.engine.kind == "endpoint":
        engine = f"{config.engine.endpoint.model} at {config.engine.endpoint.url}, for evaluation only"
    keeps = f"every {config.checkpoint.every} steps; the newest {config.checkpoint.keep} stay"
    if config.checkpoint.keep_best:
        keeps += f", and the best {config.checkpoint.keep_best}"
        if not _scored(config):
            keeps += (
                " (none: no step before the last has both a checkpoint and an evaluation on held-out tasks that "
                "training waits for; see checkpoint.every, eval.every, eval.wait and checkpoint.keep_best)"
            )
    policy = config.model.path or f"the tiny policy of the cold start ({config.coldstart.kind}; kept in a cache)"
    return "\n".join(
        [
            f"policy      {policy}",
            f"tasks       {tasks}",
            f"harness     {_harnesses_told(config)}",
            f"engine      {engine}",
            f"sandbox     {found.backend}{' (no isolation)' if found.backend == 'process' else ''}, "
            f"{config.sandbox.actors} x {config.sandbox.concurrency} at a time",
            f"training    {config.steps} steps x {config.rollout.groups} groups x {config.rollout.group_size} "
            f"episodes = {config.steps * per_step} episodes, staleness at most {config.async_.max_staleness}",
            f"evaluation  {evaluation}",
            *([f"checkpoints {keeps}"] if config.steps else []),
            *forecast(config),
            f"writes to   {folder}" + (f", going on after step {before}" if resume else ""),
            *(f"careful     {setting}: no GPU is seen on this machine" for setting in without_gpu(config)),
        ]
    )


def _scored(config: RunConfig) -> bool:
    """Whether a checkpoint before the last has a score by which the best are told."""
    evaluated = config.tasks.path is None or config.tasks.heldout
    both = math.lcm(config.eval.every, config.checkpoint.every)
    return bool(evaluated) and config.eval.wait and 0 < both < config.steps


def _train(config: RunConfig, folder: Path, resume: bool, console: Console) -> int:
    from algos.display import LiveDisplay, before_after, failures
    from algos.runlog import read_jsonl

    began = time.monotonic()
    interrupted = False
    fault: BaseException | None = None
    say(console, f"run folder {folder}")
    with LiveDisplay(config.steps, f"Reins  {folder.name}", console) as display:
        try:
            alike = resume and same_episodes(folder, config)
            sets = _tasks(config, folder, display)
            if not resume:
                write_settings(config, folder, display)
            model = _policy(config, display)
            asyncio.run(interruptible(_run(config, folder, sets, model, resume, alike, display)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            interrupted = True
        except (RunError, ConfigError) as error:
            fault = error
    if fault is not None:
        say(Console(stderr=True), f" {fault}", "stopped:")
        if (folder / "config.yaml").exists():
            say(console, _next_steps(folder, resumable=True))
        return 1
    if interrupted:
        say(console, "interrupted\n" + _next_steps(folder, resumable=True))
        return 130
    table = before_after(read_jsonl(folder / "metrics.jsonl"))
    if table is not None:
        console.print(table)
    else:
        say(console, "no table of before and after: no tasks were evaluated (tasks.heldout, eval.tasks)")
    if told := failures(read_jsonl(folder / "episodes.jsonl")):
        say(console, told)
    say(console, f"done in {time.monotonic() - began:.0f} s\n" + _next_steps(folder, resumable=False))
    return 0


def _tasks(config: RunConfig, folder: Path, display: Any) -> Any:
    from envs.tasks.sets import load_sets

    try:
        sets = load_sets(config.tasks, config.eval, folder / "tasks", config.seed)
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise RunError(str(error)) from None
    for line in sets.skipped:
        display.say(f"skipped {line}")
    return sets


async def _run(
    config: RunConfig, folder: Path, sets: Any, model: Path, resume: bool, alike: bool, display: Any
) -> None:
    """``alike``: episodes that ended before the resume are still what the settings ask for."""
    from ray.exceptions import RayTaskError

    from actors.cluster import PartLostError
    from actors.coordinator import Coordinator
    from actors.episodes import NothingWorksError
    from actors.one_writer import hold
    from actors.resume import taken_over
    from actors.start import StartError, started
    from algos.runlog import RunLog, read_jsonl, rewind

    if resume:
        try:
            # Its checkpoints are settled only when the learner of the part before is gone.
            (await asyncio.to_thread(hold, folder)).close()
        except TimeoutError as error:
            raise RunError(str(error)) from None
    start = last_checkpoint(folder) if resume else 0
    finished: dict[str, Any] = {}
    lost = False
    if resume:
        if alike:
            finished = taken_over(read_jsonl(folder / "episodes.jsonl"), config, sets.train, folder, start)
        # Without a checkpoint the evaluation before the first step happens again.
        rewind(folder, start or -1, finished)
        lost = _lost_evaluation(config, start, read_jsonl(folder / "metrics.jsonl"))
        # Not before: until they are gone, episodes of the settings before would pass for episodes of these.
        write_settings(config, folder, display)
        display.say(f"going on after step {start}, with {len(finished)} episodes that had ended")
    display.note("starting Ray, the proxy and the engine")
    log = RunLog(folder, config, display)
    try:
        async with started(config, folder, model, start) as cluster:
            await Coordinator(config, cluster, log, sets.train, sets.evaluation, start, finished, lost).run()
    except (PartLostError, NothingWorksError, StartError) as error:
        raise RunError(str(error)) from None
    except RayTaskError as error:
        raise fault_of_a_part(folder, error) from None
    finally:
        log.close()


def _lost_evaluation(config: RunConfig, start: int, rows: list[dict[str, Any]]) -> bool:
    """Whether the newest evaluation that training did not wait for was under way when the run ended."""
    from algos.runlog import measured

    if config.eval.wait or not config.eval.every:
        return False
    due = start - start % config.eval.every
    return due > 0 and due > max(measured(rows), default=0)


def _policy(config: RunConfig, display: Any) -> Path:
    if config.model.path is not None:
        return config.model.path
    seed = config.seed if config.coldstart.seed is None else config.coldstart.seed
    cache = config.coldstart.cache.expanduser()
    if config.coldstart.kind == "primer":
        return _primer(config, cache, seed, display)
    from algos.coldstart import ColdstartError, coldstart
    from envs.sandbox.create import chosen

    display.note("the tiny policy of the cold start")
    told = False

    def tick(done: int, likely: int) -> None:
        nonlocal told
        if not told:
            display.say(
                f"cold start: making the tiny policy from a scripted expert; the next run takes it from {cache}"
            )
            told = True
        display.note(f"cold start: step {done} of about {likely}")

    try:
        return coldstart(
            cache, seed, display.note, _recipe(config.coldstart), tick=tick, backend=chosen(config.sandbox)
        )
    except ColdstartError as error:
        raise RunError(str(error)) from None


def _recipe(config: ColdstartConfig) -> Recipe:
    if config.kind != "space":
        return Recipe()
    outside = tuple(config.outside)
    return space_recipe(SpaceRecipe(config.level_chance, config.pairs, config.pair_chance, config.pair_seed, outside))


def _primer(config: RunConfig, cache: Path, seed: int, display: Any) -> Path:
    from algos.primer import primer

    display.note("the tiny policy on the Qwen3 vocabulary")
    try:
        return primer(cache, [one.name for one in config.harnesses.values()], seed, display.note)
    except (RuntimeError, ValueError) as error:
        raise RunError(str(error)) from None


def _harnesses_told(config: RunConfig) -> str:
    from envs.harnesses.sets import harnesses

    names, how = list(harnesses(config)), config.assignment
    told = listed(names)
    if how.kind == "all":
        return f"each task in each of {told}" if len(names) > 1 else told
    return f"each task in {how.k} of {len(names)}, in consecutive steps, by {how.kind}: {told}"


def _next_steps(folder: Path, resumable: bool) -> str:
    command = f"{typed('python')} -m algos.run"
    lines = [f"metrics {folder / 'metrics.jsonl'}, episodes {folder / 'episodes.jsonl'}, trees {folder / 'trees'}"]
    newest = last_checkpoint(folder)
    if (folder / "metrics.jsonl").is_file():
        lines.append(f"curves and examples on one page:  {typed('python')} -m algos.report {folder}")
    if (folder / "trees").is_dir():
        lines.append(f"look at its trees:  {typed('python')} -m trees.view {folder}")
    if (folder / "wandb").is_dir():
        lines.append(f"curves in W&B, with an account:  {typed('wandb')} sync {folder / 'wandb'}/*run-*")
    if resumable:
        lines.append(f"go on:  {command} --resume {folder}")
    elif newest:
        weights = folder / "checkpoints" / f"step_{newest:06d}"
        lines.append(f"train on from its weights:  {command} model.path={weights}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
