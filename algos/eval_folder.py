"""The folder of an evaluation: what was asked for, what came of it, and the tables.

    config.yaml       the settings, complete
    tasks/            the built-in tasks
    model/            links to the files of the checkpoint, where a run's is measured
    attempts.jsonl    a line for each attempt that is asked for
    episodes.jsonl    a line for each that has ended
    transcripts/      what was said in each
    trees/            their prefix trees
    table.md .json .html

Invariant: a line of ``episodes.jsonl`` is written whole before its attempt counts; an attempt has at most one line
once ``reopened`` has returned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from actors.evaluation import Attempt
from algos.runlog import line, read_jsonl
from algos.score_tables import markdown, page, table
from algos.scores import Scores
from configs.eval import EvaluationConfig
from configs.loader import ConfigError, dump, load_as

SETTINGS, ATTEMPTS, EPISODES, TRANSCRIPTS = "config.yaml", "attempts.jsonl", "episodes.jsonl", "transcripts"
_OF_AN_ATTEMPT = ("id", "ring", "tasks", "run", "task", "harness")
_OF_AN_EPISODE = ("id", "status", "reward")
_MAY_CHANGE: dict[str, Any] = {
    **dict.fromkeys(("runs", "name", "dir"), True),
    "sandbox": {"actors", "concurrency", "pool", "retries", "root"},
    "engine": {"replicas", "threads"},
}
"""Settings that change how an evaluation runs, or add to it, and not what an attempt is."""


def settings(folder: Path, overrides: list[str]) -> EvaluationConfig:
    """Those of an evaluation that goes on. Raises ConfigError where ``overrides`` make it another one."""
    saved = folder / SETTINGS
    for name in (SETTINGS, ATTEMPTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name} there; expected a folder made by this command")
    before, after = load_as(EvaluationConfig, saved), load_as(EvaluationConfig, saved, overrides)
    if before.model_dump(exclude=_MAY_CHANGE) != after.model_dump(exclude=_MAY_CHANGE):
        raise ConfigError(
            f"--resume {folder}: got {', '.join(overrides)}, which would make some of its episodes other than those "
            "that have ended; expected at most runs, engine.replicas, sandbox.actors, .concurrency, .pool, .retries; "
            "begin a new evaluation"
        )
    if after.runs < before.runs:
        raise ConfigError(f"--resume {folder}: got runs={after.runs}, expected at least its {before.runs}")
    return after


def write_settings(folder: Path, config: EvaluationConfig, planned: Iterable[Attempt]) -> None:
    """Keep what is asked for. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [attempt.identity | {"category": attempt.category} for attempt in planned]
    _replace(folder / ATTEMPTS, "".join(map(line, rows)))
    _replace(folder / SETTINGS, dump(config))


def reopened(folder: Path) -> list[dict[str, Any]]:
    """The lines of attempts that need not run again; those that failed, and a line cut short, are taken out.

    Raises RunError for a damaged line.
    """
    rows = {row["id"]: row for row in read_jsonl(folder / EPISODES, _OF_AN_EPISODE) if row["status"] != "failed"}
    _replace(folder / EPISODES, "".join(map(line, rows.values())))
    return list(rows.values())


def scores(folder: Path) -> Scores:
    """What an evaluation has come to so far.

    Raises ConfigError for a folder that is none, RunError for a damaged line.
    """
    if not (folder / ATTEMPTS).is_file():
        raise ConfigError(f"{folder}: no {ATTEMPTS} there; expected a folder made by python -m algos.eval")
    config = load_as(EvaluationConfig, folder / SETTINGS)
    asked, ended = read_jsonl(folder / ATTEMPTS, _OF_AN_ATTEMPT), read_jsonl(folder / EPISODES, _OF_AN_EPISODE)
    return Scores(config.name, asked, ended, config.runs, config.success)


def write_tables(folder: Path, found: Scores, config: EvaluationConfig) -> None:
    """``table.md``, ``table.html`` and ``table.json``, each replaced whole."""
    made = table([found])
    plain = found.plain() | {"settings": config.model_dump(mode="json", by_alias=True)}
    texts = {"md": markdown(made), "html": page(made), "json": json.dumps(plain, indent=1, allow_nan=False) + "\n"}
    for suffix, text in texts.items():
        _replace(folder / f"table.{suffix}", text)


def link_model(files: Iterable[Path], folder: Path) -> Path:
    """``folder/model`` with the files of a checkpoint, which its run may remove at any time."""
    target = folder / "model"
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = target / file.name
        link.unlink(missing_ok=True)
        try:
            os.link(file.resolve(), link)
        except OSError:
            # Another disk, or one without links to a file: what is gone there is gone here.
            link.symlink_to(file.resolve())
    return target


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
