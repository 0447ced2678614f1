"""An episode: one task, in one harness, once. What is asked for and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from envs.tasks.task import Task

Status = Literal["completed", "truncated", "failed", "dropped"]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """What the coordinator asks a sandbox actor for."""

    id: str
    task: Task
    harness: str
    group: str
    """(task, harness) instance within a step: the episodes whose rewards are compared."""
    seed: int
    step: int
    split: str = "train"
    """``train``, or the name of an evaluation set."""
    temperature: float = 1.0
    attempt: int = 0
    transcript: bool = False
    """Whether what was said is handed back."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What a sandbox actor hands back.

    ``reward`` is None exactly when ``status`` is ``failed``: infrastructure trouble is never graded as 0.
    """

    id: str
    status: Status
    reason: str
    reward: float | None
    grade: float | None
    """The grader's number before the clean-end rule."""
    clean_end: bool
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    exit_code: int | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds by stage: ``create``, ``run``, ``grade``, ``destroy``."""
    log: str = ""
    """The tail of the harness's output, for people."""
    flags: tuple[str, ...] = ()
    """What a second look found suspicious, in words; see ``envs.sandbox.flags``."""
    mcp: tuple[dict[str, Any], ...] = ()
    """Calls on MCP servers outside (``envs.mcp.tap``): server, tool, arguments, result_bytes, is_error, seconds."""
    judge: dict[str, Any] | None = None
    """What a judge said (``envs.judge.judge.Verdict``); None: none was asked."""
    transcript: str | None = None
    """JSON lines of what was said (``actors.transcript``); None where it was not asked for, or was lost."""
