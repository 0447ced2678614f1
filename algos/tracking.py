"""Weights & Biases: a run's figures as they come and, at its end, its tables, episodes and trees as artifacts.

Invariant: nothing here needs an account or a network unless ``wandb.mode`` is ``online``; offline, all of it waits in
the run folder for ``wandb sync``. Trees are not copied: an artifact names the files in the run folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from algos.display import evaluations
from configs.schema import RunConfig, WandbConfig

_KEPT = ("config.yaml", "metrics.jsonl", "episodes.jsonl")


def missing_key(config: WandbConfig) -> str:
    """Why W&B could not be written to, in words; empty where it can, as far as can be told without asking it."""
    if config.mode != "online":
        return ""
    import wandb

    if wandb.login(prompt=False, verify=False):
        return ""
    return (
        "wandb.mode: got online, expected an account's key for it: run wandb login, or set WANDB_API_KEY; offline, "
        "which is the default, needs none, and wandb sync uploads it later"
    )


class Tracker:
    """One W&B run."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._folder = folder
        self._artifacts = config.wandb.artifacts
        self._run = wandb.init(
            project=config.wandb.project,
            name=folder.name,
            dir=folder,
            mode=config.wandb.mode,
            config=config.model_dump(mode="json", by_alias=True),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, row: dict[str, Any]) -> None:
        """The figures of a step; a figure that does not exist is left out."""
        self._run.log({k: v for k, v in row.items() if isinstance(v, int | float)}, step=row["step"])

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """End the run, whose lines of ``metrics.jsonl`` are ``rows``."""
        if self._artifacts and rows:
            self._log_artifacts(rows)
        self._run.finish()

    def _log_artifacts(self, rows: list[dict[str, Any]]) -> None:
        columns, data = evaluations(rows)
        if data:
            self._run.log({"evaluations": self._wandb.Table(columns=columns, data=data)}, step=rows[-1]["step"])
        episodes = self._wandb.Artifact(f"run-{self._run.id}-episodes", "episodes")
        for name in _KEPT:
            if (self._folder / name).is_file():
                episodes.add_file(str(self._folder / name))
        self._run.log_artifact(episodes)
        if any((self._folder / "trees").glob("*/*.tree")):
            trees = self._wandb.Artifact(f"run-{self._run.id}-trees", "trees")
            # Immutable: they are uploaded from where they are, in place of a copy in W&B's cache.
            trees.add_dir(str(self._folder / "trees"), policy="immutable")
            self._run.log_artifact(trees)
