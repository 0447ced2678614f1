"""What a resumed run takes over: episodes that had ended, of steps that it trains (again).

Invariant: an episode is taken over only where the schedule asks for the same one, its tree is on disk, whole and of
this episode, and it is within the staleness bound. A step whose episodes are all taken over is trained on the same
trees from the same state, so it gives the version that it gave before; and no episode is in the log twice, since those
taken over are not run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from actors.coordinator import schedule_of
from actors.episodes import Finished
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.tasks.task import Task
from trees import codec

logger = logging.getLogger(__name__)

_DIGITS = 1e-6
"""To which a reward stands in a row (``algos.runlog``)."""


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
        if spec is not None and _same(row, spec) and _fresh(row, config) and _has_tree(row, _tree(run_dir, spec)):
            found[spec.id] = _finished(row, spec)
    return found


def _same(row: Mapping[str, Any], spec: EpisodeSpec) -> bool:
    asked = (spec.task.id, spec.harness, spec.seed, spec.group)
    return asked == (row["task"], row["harness"], row["seed"], row["group"])


def _fresh(row: Mapping[str, Any], config: RunConfig) -> bool:
    """A row without a report is of an episode whose tree was never finished."""
    if not row.get("report"):
        return False
    version = row["report"]["version"]
    return version is None or row["step"] - version <= config.async_.max_staleness


def _tree(run_dir: Path, spec: EpisodeSpec) -> Path:
    return run_dir / "trees" / f"step_{spec.step:06d}" / f"{spec.id}.tree"


def _has_tree(row: Mapping[str, Any], path: Path) -> bool:
    """Whether the file can be trained as the episode of ``row``: a power cut may have left any bytes under its name."""
    if not path.is_file():
        return False
    try:
        meta = codec.decode(path.read_bytes()).meta
    except (codec.CodecError, OSError) as error:
        logger.warning("%s is left out, and its episode runs again: %s", path, error)
        return False
    # A filter drops an episode after its tree was told how it ended.
    same_end = row["status"] == "dropped" or meta.get("status") == row["status"]
    return meta.get("episode") == row["id"] and same_end and _alike(meta.get("reward"), row["reward"])


def _alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        # In a row a figure that does not exist is null.
        return all(value is None or not math.isfinite(value) for value in (one, other))
    return math.isclose(one, other, rel_tol=0, abs_tol=_DIGITS)


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
