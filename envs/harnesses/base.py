"""A harness adapter: how one agent program is started, pointed at the proxy, and how its end is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class Harness(Protocol):
    """One adapter. Stateless: one instance serves all episodes."""

    name: str

    def command(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits) -> Command:
        """Write what the harness needs into the sandbox's home and say what to run."""
        ...

    def ended(self, finished: Finished) -> tuple[bool, str]:
        """Whether the harness came to its own end, and why in words (``final answer``, ``max turns``)."""
        ...
