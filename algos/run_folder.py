"""A run's folder: the settings in it, and from where it can go on.

Invariant: ``config.yaml`` holds the settings that made the episodes in the folder's logs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from configs.loader import dump, load
from configs.schema import RunConfig


class RunError(RuntimeError):
    """The run cannot start or go on; the message says why and what to do."""


def same_episodes(folder: Path, config: RunConfig) -> bool:
    """Whether the settings that a run had make the same episodes as these."""
    others = {"name", "dir", "steps", "learner", "eval", "checkpoint", "wandb"}
    before = load(folder / "config.yaml", [])
    return before.model_dump(exclude=others) == config.model_dump(exclude=others)


def write_settings(config: RunConfig, folder: Path, display: Any) -> None:
    """Keep the settings with the run; those that an earlier part of it had are kept beside them."""
    path = folder / "config.yaml"
    new = dump(config)
    try:
        if path.is_file() and (old := path.read_text(encoding="utf-8")) != new:
            kept = folder / f"config.until_step_{last_checkpoint(folder):06d}.yaml"
            kept.write_text(old, encoding="utf-8")
            display.say(f"settings changed; those of the steps before are in {kept.name}")
        path.write_text(new, encoding="utf-8")
    except OSError as error:
        raise RunError(str(error)) from None


def is_complete(folder: Path, steps: int) -> bool:
    """Whether a run has all that it was to do: without steps, its evaluation."""
    from algos.runlog import read_jsonl

    logged = max((row["step"] for row in read_jsonl(folder / "metrics.jsonl")), default=-1)
    # The last row is written before the last checkpoint.
    return min(logged, last_checkpoint(folder)) >= steps


def check_checkpoints(folder: Path) -> None:
    """Raise RunError where there are checkpoints and none can be read: a resume would begin anew, unasked."""
    from actors.checkpoints import complete, find

    there = complete(folder / "checkpoints")
    if not there or find(folder / "checkpoints") is not None:
        return
    number, newest = there[-1]
    try:
        find(folder / "checkpoints", number)
        reason = "it cannot be read"
    except (ValueError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0]
    raise RunError(
        f"--resume {folder}: none of the {len(there)} checkpoints in {folder / 'checkpoints'} can be read; of the "
        f"newest: {reason}. Start a new run from the weights of one of them, if those are whole (model.path={newest}), "
        f"or remove {folder / 'checkpoints'} to begin this run at step 0"
    )


def last_checkpoint(folder: Path) -> int:
    """Training steps behind the newest checkpoint that can be read, 0 for none."""
    from actors.checkpoints import find

    found = find(folder / "checkpoints")
    return found[0] if found else 0


def fault_of_a_part(folder: Path, error: Any) -> RunError:
    """What was raised in another process, in one line; the whole of it is left in ``fault.txt``."""
    (folder / "fault.txt").write_text(Text.from_ansi(str(error)).plain + "\n", encoding="utf-8")
    words = str(error.cause).strip().splitlines()
    first = f"{type(error.cause).__name__}: {words[0] if words else 'without a message'}"
    return RunError(f"{first} (where it happened: {folder / 'fault.txt'})")
