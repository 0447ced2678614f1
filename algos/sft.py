"""Supervised fine-tuning on trajectories: ``python -m algos.sft [CONFIG] model.path=DIR data.path=PATH out=DIR``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from algos.entry import parsed, say, typed
from algos.run_folder import RunError
from configs.loader import ConfigError, describe, dump, load_as
from configs.sft import SftConfig

if TYPE_CHECKING:
    from algos.trajectories import Loaded, Trajectory

CONFIG = Path(__file__).parents[1] / "configs" / "sft.yaml"
_SAVED = "config.yaml"
_EPILOG = """\
examples:
  python -m algos.sft model.path=MODEL data.path=runs/NAME data.min_reward=1 out=tuned    what a run did well
  python -m algos.sft model.path=MODEL data.path=rows.jsonl out=tuned epochs=3            conversations
  python -m algos.sft --dry-run model.path=MODEL data.path=rows.jsonl out=tuned           check all, print the plan
  python -m algos.sft --resume tuned                                       go on after an interruption
  python -m algos.run model.path=tuned                                     then reinforcement learning

A JSON line is {"messages": [...], "tools": [...]} as Chat Completions has them: tool_calls, role tool with
tool_call_id, reasoning_content on assistant turns. "weight": 0 on an assistant turn leaves it untrained; "reward" on
the row is what data.min_reward looks at.

settings (key = default):
"""


@dataclass(frozen=True, slots=True)
class _Data:
    loaded: Loaded
    training: list[Trajectory]
    heldout: list[Trajectory]
    steps: int


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 stopped on a fault, 2 wrong settings or data, 130 interrupted."""
    args = _arguments(argv)
    console = Console()
    before = signal.signal(signal.SIGTERM, _interrupt)
    folder: Path | None = None
    try:
        config, out = _settings(args)
        data = _data(config)
        say(console, _plan(config, data, out))
        if args.dry_run:
            return 0
        folder = _begun(config, out)
        return _tune(config, folder, data, console)
    except KeyboardInterrupt:
        left = f"\ngo on:  {typed()} -m algos.sft --resume {folder}" if folder else "; nothing was begun"
        say(console, "interrupted" + left)
        return 130
    except (ConfigError, RunError) as error:
        say(Console(stderr=True), f" {error}", "error:")
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _begun(config: SftConfig, out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _SAVED).write_text(dump(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out: {error}; expected a folder that can be written to") from None
    return out


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m algos.sft",
        description="Train a causal language model to imitate trajectories: prefix trees or JSON lines of messages.",
        epilog=_EPILOG + describe(SftConfig, CONFIG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="YAML file of settings; none: configs/sft.yaml")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, start nothing")
    parser.add_argument("--resume", type=Path, metavar="OUT", help="go on in a folder, from its last checkpoint")
    parser.add_argument("--skip-bad", action="store_true", help="leave broken data out (data.skip_bad=true)")
    args = parsed(parser, argv)
    if args.skip_bad:
        args.overrides.append("data.skip_bad=true")
    return args


def _settings(args: argparse.Namespace) -> tuple[SftConfig, Path]:
    """The settings, and where the result goes. Raises ConfigError."""
    if args.resume:
        if args.config or args.overrides:
            raise ConfigError(
                "got settings besides --resume, expected none: a run goes on with those that it began with"
            )
        saved = args.resume / _SAVED
        if not saved.is_file():
            raise ConfigError(f"--resume {args.resume}: no {_SAVED} there; expected a folder made by this command")
        if (args.resume / "config.json").is_file():
            raise ConfigError(f"--resume {args.resume}: it is finished already: {_train_on(args.resume)}")
        return _checked(load_as(SftConfig, saved)), args.resume
    config = _checked(load_as(SftConfig, Path(args.config) if args.config else CONFIG, args.overrides))
    assert config.out is not None
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise ConfigError(f"out: {config.out} exists already; expected a new folder, or --resume {config.out}")
    return config, config.out


def _checked(config: SftConfig) -> SftConfig:
    examples = {"model.path": "MODEL_DIR", "data.path": "runs/NAME", "out": "tuned"}
    named = {"model.path": config.model.path, "data.path": config.data.path, "out": config.out}
    missing = [f"{key}: got nothing, expected {key}={examples[key]}" for key, value in named.items() if not value]
    if missing:
        raise ConfigError("\n".join(missing))
    assert config.model.path is not None
    for name in ("config.json", "tokenizer_config.json"):
        if not (config.model.path / name).is_file():
            raise ConfigError(
                f"model.path: {config.model.path} has no {name}; expected a Hugging Face model folder with a tokenizer"
            )
    import torch

    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"device: got {config.device}, expected cpu, cuda or cuda:N of this machine ({first})"
        ) from None
    return config


def _data(config: SftConfig) -> _Data:
    """Reads and renders all of it. Raises ConfigError and DataError."""
    from functools import cache

    from transformers import AutoConfig

    from actors.rendering import Rendering
    from algos.supervised import batches
    from algos.trajectories import load, split

    assert config.model.path is not None
    try:
        model = AutoConfig.from_pretrained(config.model.path, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from None
    positions = getattr(model, "max_position_embeddings", None) or sys.maxsize
    longest = min(positions, config.data.max_len or positions)

    @cache
    def rendering() -> Rendering:
        assert config.model.path is not None
        try:
            return Rendering(config.model.path, config.model.renderer)
        except ValueError as error:
            raise ConfigError(f"model.renderer: {error}") from None

    loaded = load(config.data, rendering, longest, model.vocab_size, config.device)
    training, heldout = split(loaded.trajectories, config.data.heldout, config.seed)
    steps = batches([each.tokens for each in training], config.epochs, config.batch_tokens, config.seed)
    return _Data(loaded, training, heldout, sum(map(len, steps)))


def _plan(config: SftConfig, data: _Data, out: Path) -> str:
    """What these settings and data come to, in a few lines."""

    def sizes(chosen: list[Trajectory]) -> str:
        tokens, trained = sum(each.tokens for each in chosen), sum(each.trained for each in chosen)
        prompts = len({each.prompt for each in chosen})
        return f"{len(chosen)} trajectories of {prompts} prompts, {tokens} tokens, {trained} of them trained"

    lines = [
        f"policy      {config.model.path}",
        f"data        {', '.join(map(str, config.data.path))}",
        f"training    {sizes(data.training)}",
        f"held out    {sizes(data.heldout).replace('trained', 'measured') if data.heldout else 'nothing'}",
        f"plan        {config.epochs} epochs, {data.steps} optimiser steps of about {config.batch_tokens} tokens",
        f"writes to   {out}",
    ]
    if data.loaded.repeated:
        lines.append(f"repeated    {data.loaded.repeated} trajectories are there already; each is trained")
    lines += [f"left out    {count} {reason}" for reason, count in data.loaded.left_out.items()]
    lines += [f"skipped     {fault}" for fault in data.loaded.told()]
    return "\n".join(lines)


def _tune(config: SftConfig, folder: Path, data: _Data, console: Console) -> int:
    from safetensors import SafetensorError

    from algos.finetune import CHECKPOINTS, METRICS, FineTuning
    from algos.runlog import read_jsonl

    began = time.monotonic()
    columns = (
        TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left  {task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model", total=data.steps)

        def seen(row: dict[str, Any]) -> None:
            told = _told(row, data.steps)
            bar.update(task, completed=row["step"], description=told)
            if not console.is_terminal:
                say(console, told)

        try:
            work = FineTuning(config, folder, data.training, data.heldout, seen)
        except ConfigError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            if not (folder / CHECKPOINTS).exists():
                # Nothing was trained: the same command with a better model may take the same place.
                for name in (_SAVED, METRICS):
                    (folder / name).unlink(missing_ok=True)
            raise ConfigError(f"model.path: {config.model.path}: {error}") from None
        bar.update(task, completed=work.done)
        work.run()
    rows = read_jsonl(folder / METRICS)
    console.print(_before_after(rows))
    if broken := sum(row.get("not_finite", 0) for row in rows):
        say(console, f" {broken} steps were not taken, since loss or gradient were not finite", "careful:")
    say(console, f"done in {time.monotonic() - began:.0f} s\nmetrics {folder / METRICS}\n{_train_on(folder)}")
    return 0


def _told(row: dict[str, Any], steps: int) -> str:
    parts = [f"step {row['step']}/{steps}"]
    parts += [
        f"{name} {row[key]:.4f}"
        for name, key in (("loss", "loss"), ("held out", "heldout/loss"))
        if row.get(key) is not None
    ]
    return "  ".join(parts)


def _before_after(rows: list[dict[str, Any]]) -> Table:
    """The loss of the first and of the last step, and of what is held out before and after."""
    table = Table(title="nats per token", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for name, key in (("trained, first and last step", "loss"), ("held out", "heldout/loss")):
        found = [row[key] for row in rows if row.get(key) is not None]
        if found:
            table.add_row(name, f"{found[0]:.4f}", f"{found[-1]:.4f}")
    return table


def _train_on(folder: Path) -> str:
    return f"train on with it:  {typed()} -m algos.run model.path={folder}"


if __name__ == "__main__":
    sys.exit(main())
