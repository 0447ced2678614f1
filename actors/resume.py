"""What a resumed run takes over: episodes that had ended, of steps that it trains (again).

Invariant: an episode is taken over only where the schedule asks for the same one, its tree is on disk, and it is within
the staleness bound. A step whose episodes are all taken over is trained on the same trees from the same state, so it
gives the version that it gave before; and no episode is in the log twice, since those taken over are not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from actors.coordinator import Finished, schedule_of
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.tasks.task import Task


def taken_over(
    rows: Iterable[Mapping[str, Any]], config: RunConfig, tasks: list[Task], run_dir: Path, start: int
) -> dict[str, Finished]:
    """By their ids the episodes of ``rows`` (lines of ``episodes.jsonl``) that steps from ``start`` on need not run.

    Those that failed are run again.
    """
    schedule = schedule_of(config, tasks)
    wanted: dict[int, dict[str, EpisodeSpec]] = {}
    found = {}
    for row in rows:
        step = row["step"]
        if row["split"] != "train" or not start <= step < config.steps or row["status"] == "failed":
            continue
        if step not in wanted:
            wanted[step] = {spec.id: spec for spec in schedule.step(step)}
        spec = wanted[step].get(row["id"])
        if spec is not None and _same(row, spec) and _fresh(row, config) and _tree(run_dir, spec).is_file():
            found[spec.id] = _finished(row, spec)
    return found


def _same(row: Mapping[str, Any], spec: EpisodeSpec) -> bool:
    asked = (spec.task.id, spec.harness, spec.seed, spec.group)
    return asked == (row["task"], row["harness"], row["seed"], row["group"])


def _fresh(row: Mapping[str, Any], config: RunConfig) -> bool:
    version = row["report"]["version"]
    return version is None or row["step"] - version <= config.async_.max_staleness


def _tree(run_dir: Path, spec: EpisodeSpec) -> Path:
    return run_dir / "trees" / f"step_{spec.step:06d}" / f"{spec.id}.tree"


def _finished(row: Mapping[str, Any], spec: EpisodeSpec) -> Finished:
    outcome = EpisodeOutcome(
        id=spec.id,
        status=row["status"],
        reason=row["reason"],
        reward=row["reward"],
        grade=row["grade"],
        clean_end=row["clean_end"],
        calls=row["calls"],
        prompt_tokens=row["tokens_prompt"],
        sampled_tokens=row["tokens_sampled"],
        exit_code=row["exit_code"],
        seconds=row["seconds"],
        log=row["log"],
        flags=tuple(row["flags"]),
        mcp=tuple(row["mcp"]),
    )
    return Finished(spec, outcome, row["report"], tuple(row["failures"]))
