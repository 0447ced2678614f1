"""The adapter of the transparent agent loop: its folder is mounted, its settings are in the environment."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from envs.harnesses.agent_loop.parts import BASE, assembled, known
from envs.harnesses.base import Endpoint, ToolServer
from envs.sandbox.base import Command, Finished, Limits, Mount, Sandbox
from envs.sandbox.bytecode import compiled
from envs.tasks.task import Task

_FOLDER = Path(__file__).with_name("agent_loop")
# Not `-m`: that would put the workspace, whose files are the agent's, in front of the standard library.
_START = "import sys; sys.path.insert(0, {!r}); from agent_loop.__main__ import main; sys.exit(main())"
_REASONS = {"final_answer": "final answer", "max_turns": "max turns", "error": "error"}


def levels_of(parts: Sequence[Path]) -> dict[str, int]:
    """How many levels each factor has, with those of files of the user's own. Raises ValueError."""
    with _told():
        return {letter: len(levels) for letter, levels in known([str(path) for path in parts]).items()}


@contextmanager
def _told() -> Iterator[None]:
    """Whatever a file of the user's own raises becomes a ValueError."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"harness.parts: {type(error).__name__}: {error}") from error


class AgentLoop:
    """A transparent loop of our own with a shell and a file editor.

    ``levels`` says what it is like (``agent_loop.parts``). ``wordings``: a task's name and this number choose among the
    wordings of each level, so that the episodes of a group read the same; None: always the first. ``parts`` are files
    with levels of one's own. Raises ValueError for levels that do not exist.
    """

    name = "agent_loop"
    takes_mcp = False

    def __init__(
        self,
        max_turns: int = 30,
        command_s: float = 30.0,
        observation_chars: int = 16_000,
        levels: str = BASE,
        wordings: int | None = None,
        parts: Sequence[Path] = (),
    ) -> None:
        self.max_turns = max_turns
        self.command_s = command_s
        self.observation_chars = observation_chars
        self.levels = levels
        self.wordings = wordings
        self.parts = tuple(path.resolve() for path in parts)
        with _told():
            assembled(levels, [str(path) for path in self.parts])

    def command(
        self,
        sandbox: Sandbox,
        task: Task,
        endpoint: Endpoint,
        limits: Limits,
        servers: tuple[ToolServer, ...] = (),  # noqa: ARG002 - it takes none
    ) -> Command:
        compiled(sandbox.python, *sorted(_FOLDER.glob("*.py")))
        folder = Mount(_FOLDER, "/opt/harness/agent_loop")
        own = [Mount(path, f"/opt/harness/parts/{i}.py") for i, path in enumerate(self.parts)]
        start = _START.format(sandbox.inside(folder).rpartition("/")[0])
        env = {
            **sandbox.environment(),
            "AGENT_LOOP_BASE_URL": endpoint.base_url,
            "AGENT_LOOP_KEY": endpoint.key,
            "AGENT_LOOP_MODEL": endpoint.model,
            "AGENT_LOOP_INSTRUCTION_FILE": sandbox.put_home(".agent_loop/instruction.txt", task.instruction),
            "AGENT_LOOP_MAX_TURNS": str(self.max_turns),
            "AGENT_LOOP_COMMAND_TIMEOUT_S": str(self.command_s),
            "AGENT_LOOP_OBSERVATION_CHARS": str(self.observation_chars),
            "AGENT_LOOP_READ_TIMEOUT_S": str(limits.wall_s),
            "AGENT_LOOP_LEVELS": self.levels,
            "AGENT_LOOP_PARTS": json.dumps([sandbox.inside(mount) for mount in own]),
            "AGENT_LOOP_WORDING": str(self._wording(task)),
            "AGENT_LOOP_NOTES": f"{sandbox.inside_home}/notes",
        }
        return Command((sandbox.python, "-I", "-S", "-c", start), env, (folder, *own), limits)

    def _wording(self, task: Task) -> int:
        return 0 if self.wordings is None else zlib.crc32(f"{self.wordings}/{task.id}".encode())

    def ended(self, finished: Finished) -> tuple[bool, str]:
        if finished.code is None:
            return False, "time limit"
        lines = finished.stdout.decode(errors="replace").strip().splitlines()
        try:
            result = json.loads(lines[-1]) if lines else {}
            reason = _REASONS[result["end"]]
        except (ValueError, TypeError, LookupError):
            return False, f"no result (exit code {finished.code})"
        if reason == "error":
            return False, f"error: {result.get('message', '')}"[:500]
        return finished.code == 0 and reason == "final answer", reason
