"""A harness adapter: how one agent program is started, pointed at the proxy, and how its end is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from envs.mcp.spec import ServerFault
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the harness finds its model API, as seen from inside: no path, e.g. ``http://127.0.0.1:8080``."""

    base_url: str
    key: str
    model: str = "policy"
    context: int = 131_072
    """The policy's longest sequence in tokens, for harnesses that compact their history before it is full."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """An MCP server as a harness inside starts it: a program that speaks over its standard input and output."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to what the harness itself gives its servers."""


class Harness(Protocol):
    """One adapter. Stateless: one instance serves all episodes."""

    name: str
    takes_mcp: bool
    """Whether the harness can be given MCP servers; where it cannot, ``command`` is given none."""

    def command(
        self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits, servers: tuple[ToolServer, ...] = ()
    ) -> Command:
        """Write what the harness needs into the sandbox's home and say what to run."""
        ...

    def ended(self, finished: Finished) -> tuple[bool, str]:
        """Whether the harness came to its own end, and why in words (``final answer``, ``max turns``)."""
        ...


def check_tools(harness: Harness, tasks: Iterable[Task]) -> None:
    """Raises ValueError when a task names MCP servers that the harness cannot be given."""
    if harness.takes_mcp:
        return
    for task in tasks:
        if task.mcp:
            names = ", ".join(server.name for server in task.mcp)
            raise ValueError(
                f"task {task.id!r} in {task.folder} needs MCP servers ({names}), which the harness {harness.name} does "
                "not speak to; choose another with harness.name, or leave the task out"
            )


def check_variables(tasks: Iterable[Task]) -> None:
    """Raises ValueError when a task's MCP server needs an environment variable that is not set here."""
    for task in tasks:
        for server in task.mcp:
            try:
                server.environment()
            except ServerFault as fault:
                raise ValueError(f"task {task.id!r} in {task.folder}: {fault}") from None
