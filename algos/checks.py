"""What would stop a run or an evaluation, found before anything starts."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from algos.recipe import ColdstartError
from algos.run_folder import RunError
from configs.schema import RunConfig

if TYPE_CHECKING:
    from envs.tasks.sets import TaskSets

_LONGEST_ROOT = 60


@dataclass(frozen=True, slots=True)
class Found:
    """What a run would use."""

    backend: str
    """The sandbox backend."""
    sets: TaskSets | None = None
    """The tasks of ``tasks.path``; None: those are built in, or absent."""
    absent: tuple[str, ...] = ()
    """What the settings name and this machine lacks."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """Which broken tasks are left out, and why."""
        return self.sets.skipped if self.sets is not None else ()


def check(config: RunConfig, dry: bool = False) -> Found:
    """Find what would stop the run, before anything starts.

    With ``dry`` what this machine lacks (the model, the tasks, SGLang) is in ``Found.absent``, as if for another one.

    Raises:
        RunError: the harness, the assignment, the sandbox backend, the model folder or the tasks cannot be used.
    """
    from actors.coordinator import assignment_of
    from actors.engines.locate import interpreter
    from algos.tracking import missing_key
    from envs.harnesses.base import check_tools, check_variables
    from envs.harnesses.registry import harness
    from envs.harnesses.sets import harnesses
    from envs.judge.judge import check_judge
    from envs.sandbox.create import chosen, unavailable
    from envs.tasks.sets import load_sets

    try:
        assignment_of(config)
    except ValueError as error:
        raise RunError(str(error)) from None
    adapters = []
    faults = []
    for number, one in enumerate(harnesses(config).values()):
        try:
            adapters.append(harness(one))
        except ValueError as error:
            faults.append(f"mix.{number}: {error}" if config.mix else str(error))
    if faults:
        raise RunError("\n".join(faults))
    absent: list[str] = []
    sets = None
    try:
        if config.tasks.path is not None and not config.tasks.path.exists():
            absent.append(f"tasks.path: {config.tasks.path}: no such file or folder")
        elif config.tasks.path is not None:
            with tempfile.TemporaryDirectory(prefix="reins-check-") as folder:
                sets = load_sets(config.tasks, config.eval, Path(folder), config.seed)
            tasks = [*sets.train, *sets.evaluation.get("heldout", ())]
            for adapter in adapters:
                check_tools(adapter, tasks)
            check_variables(tasks)
            check_judge(tasks, config.judge)
    except (ValueError, OSError) as error:
        raise RunError(str(error)) from None
    if config.engine.kind == "sglang" and config.engine.sglang.url is None:
        try:
            interpreter(config.engine.sglang)
        except FileNotFoundError as error:
            absent.append(str(error))
    if config.model.path is None and config.coldstart.outside:
        # Only here: the import takes seconds.
        from algos.overheard import check_outside

        try:
            check_outside(config.coldstart.outside)
        except ColdstartError as error:
            raise RunError(str(error)) from None
    if reason := missing_key(config.wandb):
        raise RunError(reason)
    _check_writable(config.dir)
    backend = config.sandbox.backend
    reason = unavailable(chosen(config.sandbox))
    if reason and backend != "auto":
        raise RunError(f"sandbox.backend: {reason}")
    if config.sandbox.root is not None and len(os.fsencode(config.sandbox.root.resolve())) > _LONGEST_ROOT:
        raise RunError(f"sandbox.root: got a path of over {_LONGEST_ROOT} bytes, expected a shorter one (for sockets)")
    model = config.model.path
    for name in ("config.json", "tokenizer_config.json") if model is not None else ():
        if not (Path(str(model)) / name).is_file():
            absent.append(f"model.path: {model} has no {name}; expected a Hugging Face model folder with a tokenizer")
            break
    if absent and not dry:
        raise RunError("\n".join(absent))
    backend = backend if backend != "auto" else "process" if reason else "bubblewrap"
    return Found(backend, sets, tuple(absent))


def without_gpu(config: RunConfig) -> list[str]:
    """Settings that ask for a GPU where this machine has none and no cluster of others is named."""
    devices = {"engine.device": config.engine.device, "learner.device": config.learner.device}
    asked = [f"{name}={device}" for name, device in devices.items() if device != "cpu"]
    if not asked or os.environ.get("RAY_ADDRESS"):
        return []
    import torch

    return [] if torch.cuda.is_available() else asked


def _check_writable(folder: Path) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RunError(f"dir: {folder} cannot be made, since {there} is not a folder that can be written to")
