"""The process backend: no isolation at all, for machines without bubblewrap.

The agent runs as our own user, sees the whole machine and its network, and can read graders and kill us. What
is kept: a workspace and a home of its own, resource limits (``RLIMIT_NPROC`` does not bind root, and counts
all processes of another user), and no process left afterwards, by a reaper that adopts every orphan. A
command that kills the reaper, or one that leaves it on purpose, escapes that too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Command, Finished, Mount, NotStartedError, SandboxError
from envs.sandbox.namespace import rlimits
from envs.sandbox.room import Room
from envs.sandbox.spawn import Child, within

_log = logging.getLogger(__name__)
_REAPER = Path(__file__).with_name("reaper.py")
_warned = False


def warn_once() -> None:
    """Say once per process that nothing is isolated."""
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "Sandboxes use the backend `process`: NO ISOLATION. Agents run as user id %d with this machine's "
            "files and network in reach, graders included. For real sandboxes: `apt-get install bubblewrap`.",
            os.geteuid(),
        )


class Process(Room):
    """A workspace and a home, and plain processes in them. Made by ``envs.sandbox.create``."""

    relay_port = 0

    def __init__(self, root: Path, label: str, mount_dir: str) -> None:
        warn_once()
        super().__init__(root, label, mount_dir, None)
        self.python = sys.executable
        self._child: Child | None = None
        self._over = asyncio.Event()

    @property
    def inside_home(self) -> str:
        return os.fspath(self.home)

    @property
    def inside_workspace(self) -> str:
        return os.fspath(self.workspace)

    @property
    def busy(self) -> bool:
        return self._child is not None

    def inside(self, mount: Mount) -> str:
        return os.fspath(mount.host)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.inside_home,
            "TMPDIR": os.fspath(self.tmp),
            "LANG": "C.UTF-8",
        }

    async def run(self, command: Command) -> Finished:
        if self._child is not None:
            raise SandboxError(f"sandbox {self.label!r}: one command at a time; one is still running")
        reaper = [sys.executable, "-I", "-S", os.fspath(_REAPER), str(os.getpid())]
        argv = [*reaper, json.dumps(rlimits(command.limits)), *command.argv]
        self._over.clear()
        child = self._child = Child(argv, command.env, command.limits.output_bytes, cwd=self.inside_workspace)
        code: int | None = None
        try:
            code = await within(child, command)
        finally:
            finished = await uninterrupted(self._end(child, code))
        if code == 127 and finished.stderr.startswith(b"reaper: cannot execute"):
            raise NotStartedError(finished)
        return finished

    async def _end(self, child: Child, code: int | None) -> Finished:
        try:
            if child.process.returncode is None:
                # The reaper ends the whole tree before it goes.
                child.process.send_signal(signal.SIGTERM)
                await child.gone()
            return await child.collect(code)
        finally:
            self._child = None
            self._over.set()

    async def kill(self) -> None:
        if self._child is not None:
            self._child.process.send_signal(signal.SIGTERM)
            await self._over.wait()
