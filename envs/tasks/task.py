"""A task: an instruction, the files it starts from, and a grader that the agent never sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from envs.mcp.spec import McpServer
from envs.tasks.rubric import Rubric


@dataclass(frozen=True, slots=True)
class Task:
    """A task folder in the ClawGym format: ``data_entry.json``, ``input_files/``, ``reward/reward.sh``."""

    id: str
    instruction: str
    folder: Path
    mount_dir: str
    """Where the workspace lies inside the sandbox, for the agent and for the grader."""
    metadata: dict[str, str | int | float | bool] = field(default_factory=dict)
    """For the built-in tasks: ``family``, ``level``, ``split``, ``wording``."""
    grader_gets: tuple[str, ...] = ()
    """What the grader is given besides the workspace: ``final_message``, ``transcript``, or both as ``payload``, in the
    form of ``envs.tasks.openclaw_events``.
    """
    mcp: tuple[McpServer, ...] = ()
    """The MCP servers that its harness is given."""
    rubric: Rubric | None = None
    """What a judge grades by; none: only the script grades."""
    sessions: tuple[str, ...] = ()
    """Instructions of further sessions: the harness starts anew for each, in the workspace as the last one left it."""

    @property
    def input_files(self) -> Path:
        return self.folder / "input_files"

    @property
    def reward_dir(self) -> Path:
        return self.folder / "reward"

    @property
    def wants_transcript(self) -> bool:
        return not {"transcript", "payload"}.isdisjoint(self.grader_gets)

    @property
    def scripted(self) -> bool:
        """Whether ``reward.sh`` has a part in the grade."""
        return self.rubric is None or self.rubric.share < 1

    @property
    def gives_steps(self) -> bool:
        """Whether ``reward/step.sh`` tells how far an episode has come, see ``envs.sandbox.grading.progress``."""
        return (self.reward_dir / "step.sh").is_file()
