"""A sandbox: a throw-away room with a workspace, one process tree at a time, and nothing left afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class SandboxError(RuntimeError):
    """Infrastructure trouble: the sandbox could not do its part. Never graded as 0."""


class WorkspaceTooLarge(Exception):  # noqa: N818 - names the state, not the error
    """The agent left more than a copy is allowed to hold: its own fault, so the episode is graded 0."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process tree. Sizes in MiB, times in seconds; CPU time counts per process.

    Memory counts for all processes together where control groups can be made (``cgroups.holding``), else for each.
    """

    wall_s: float = 120.0
    cpu_s: float = 60.0
    memory_mb: int = 2048
    processes: int = 256
    cpus: float = 0.0
    """Cores that all processes together may use, where control groups can be made; 0: no bound."""
    file_mb: int = 256
    """The largest file; where the backend keeps ``/tmp`` in memory, also all of ``/tmp``."""
    open_files: int = 1024
    output_bytes: int = 1 << 20
    """How much output is kept, half for each stream, head and tail; the rest is thrown away."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path shown read-only (or writable) at ``inside``.

    The agent may be another user than ours: the path must be readable by everyone (a socket: writable).
    """

    host: Path
    inside: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process tree ended. ``code`` is None when the wall limit fired. Nothing of the tree is alive."""

    code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    truncated_output: bool = False


class NotStartedError(SandboxError):
    """The command does not seem to have been started. What it printed says so, and it could have printed that itself:
    who knows that it ran goes by ``finished``.
    """

    def __init__(self, finished: Finished) -> None:
        reason = finished.stderr.decode(errors="replace").strip()[-1000:]
        super().__init__(f"the sandbox could not start the command (exit code {finished.code}): {reason}")
        self.finished = finished


@dataclass(slots=True)
class Meter:
    """What a running command has printed so far; whoever starts the command keeps it up to date."""

    output_bytes: int = 0
    """Of both streams, also what is thrown away."""
    last: float = field(default_factory=time.monotonic)
    """When the newest byte came, by the monotonic clock; before the first one, when the meter was made."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run inside: ``argv`` is seen from inside, ``env`` is the whole environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    limits: Limits = field(default_factory=Limits)
    meter: Meter | None = None
    """Told of the output while it comes."""


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """The backend ``docker`` with settings. ``image``: empty for the one of our recipe. ``runtime``: empty for the
    engine's own, else one that it knows, such as ``runsc`` (gVisor) or ``kata``.
    """

    image: str = ""
    runtime: str = ""


class Sandbox(Protocol):
    """One room. Created with a workspace, used for a few commands in sequence, destroyed."""

    label: str
    workspace: Path
    """The workspace on the host."""
    home: Path
    """The private home on the host; ``/root``-like inside, at ``inside_home``."""
    python: str
    """A Python interpreter (3.9 or newer) as a process inside starts it."""
    relay_port: int
    """Where a relay listens on the loopback address inside; 0 lets the kernel choose."""

    @property
    def writable(self) -> tuple[Path, ...]:
        """The folders on the host that processes inside can write to, the workspace first."""
        ...

    @property
    def inside_workspace(self) -> str:
        """The workspace as a process inside sees it."""
        ...

    @property
    def inside_home(self) -> str: ...

    def inside(self, mount: Mount) -> str:
        """Where a mount is seen inside: ``mount.inside``, or its host path if the backend hides nothing."""
        ...

    def environment(self) -> dict[str, str]:
        """PATH, HOME and locale: what every command's environment starts from."""
        ...

    def put_home(self, name: str, text: str) -> str:
        """Write the file ``name`` under the home, for the agent's user; the result is its path inside."""
        ...

    async def run(self, command: Command) -> Finished:
        """Run to the end or to the wall limit; on return no process of the command is alive.

        Raises SandboxError when the command could not be started at all.
        """
        ...

    async def kill(self) -> None:
        """End whatever runs; on return nothing of this sandbox is alive. Safe to call at any time."""
        ...

    async def freeze(self) -> Path:
        """Copy the workspace (links as links, no special files) to a place the agent never saw.

        Raises WorkspaceTooLarge past the bounds of ``files.Bounds``, SandboxError while something still runs.
        """
        ...

    async def destroy(self) -> None:
        """Kill, then remove every directory of the sandbox. Safe to call twice."""
        ...
