"""One start of bubblewrap: a command in its namespaces, or a place in them that waits for a command.

Invariants:
- ``end`` returns after the first process of the process namespace is gone, which the kernel lets happen only when
  all others are dead.
- No process of the agent starts before its limits hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox import seccomp
from envs.sandbox.aio import readable
from envs.sandbox.base import Command, Finished, Limits, Mount, NotStartedError, SandboxError
from envs.sandbox.cgroups import Group
from envs.sandbox.gc import end_processes
from envs.sandbox.proc import parent_of
from envs.sandbox.spawn import Child
from envs.sandbox.waiting import message

INSTALL = "Install it with `apt-get install bubblewrap`, or use the backend `process`."
_START_S = 30.0
_NOT_STARTED = (b"setpriv: failed to execute", b"unshare: failed to execute")


@functools.cache
def program() -> str:
    """Where bubblewrap lies on this machine."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(f"bubblewrap (bwrap) was not found on PATH. {INSTALL}")
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a command has to be known when its namespaces are made; the rest can come later."""

    mounts: tuple[Mount, ...]
    """Folders of the room itself by their paths in it, so that rooms can have the same shape."""
    file_mb: int
    cpus: float
    output_bytes: int

    @classmethod
    def of(cls, command: Command, base: Path) -> Shape:
        """The shape of a command in the room at ``base``."""
        mounts = tuple(
            replace(mount, host=mount.host.relative_to(base)) if mount.host.is_relative_to(base) else mount
            for mount in command.mounts
        )
        return cls(mounts, command.limits.file_mb, command.limits.cpus, command.limits.output_bytes)


def _held(name: str, content: bytes) -> int:
    """A descriptor from which ``content`` can be read."""
    fd = os.memfd_create(name)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Namespace:
    """Bubblewrap's own process, the first process of the namespace, and what they print."""

    def __init__(
        self,
        base: Path,
        group: Group,
        argv: Sequence[str],
        arguments: Sequence[str],
        env: dict[str, str],
        output_bytes: int,
        stdin: int | None = None,
    ) -> None:
        self._base = base
        self._group = group
        given = [*arguments, "--clearenv"]
        for name, value in env.items():
            given += ["--setenv", name, value]
        filtered = _held("bwrap-seccomp", seccomp.program())
        given += ["--seccomp", str(filtered)] if seccomp.program() else []
        options = _held("bwrap-arguments", b"\0".join(os.fsencode(argument) for argument in given) + b"\0")
        status, status_writer = os.pipe()
        block, self._release = os.pipe()
        self._status = status
        try:
            fds = [options, filtered, status_writer, block]
            # Passed by descriptor: the command line of the first process can be read inside.
            start = [program(), "--args", str(options), "--json-status-fd", str(status_writer)]
            start += ["--block-fd", str(block), "--", *argv]
            try:
                # The working directory tells garbage collection whose start this is.
                self.child = Child(group.entering(start), {}, output_bytes, fds, os.fspath(base), stdin)
            except OSError as error:
                os.close(self._release)
                os.close(status)
                raise SandboxError(f"bubblewrap did not start: {error}. {INSTALL}") from error
        finally:
            for fd in (options, filtered, status_writer, block):
                os.close(fd)
        os.set_blocking(status, False)
        self._text = b""
        self._init: int | None = None
        self.killed = False
        self.over = asyncio.Event()

    async def begin(self, limits: Limits | None) -> None:
        """Learn the namespace's first process, bound it, and let it go on. None: the command's limits come later."""
        try:
            while b"\n" not in self._text:
                await asyncio.wait_for(readable(self._status), _START_S)
                chunk = os.read(self._status, 4096)
                if not chunk:
                    return
                self._text += chunk
            # A start that failed is over by now, and its pid may be another's.
            with contextlib.suppress(ProcessLookupError):
                self._adopt(json.loads(self._text.split(b"\n")[0])["child-pid"], limits)
            if self.killed:
                self.kill()
        finally:
            if self._init is None:
                self.child.process.kill()
                end_processes(self._base)
            os.close(self._release)

    def _adopt(self, pid: int, limits: Limits | None) -> None:
        """Hold on to the namespace's first process and limit it. Raises ProcessLookupError if it is gone."""
        init = os.pidfd_open(pid)
        if parent_of(pid) != self.child.process.pid:
            os.close(init)
            raise ProcessLookupError(pid)
        self._init = init
        self._group.add(pid)
        for what, value in rlimits(limits) if limits else []:
            resource.prlimit(pid, what, value)

    def kill(self) -> None:
        self.killed = True
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    async def end(self, code: int | None) -> Finished:
        """Wait until the namespace is empty. Raises SandboxError when the command never ran."""
        await self.child.gone()
        if self._init is not None:
            await readable(self._init)
            os.close(self._init)
            self._init = None
        finished = await self.child.collect(code)
        while chunk := os.read(self._status, 4096):
            self._text += chunk
        os.close(self._status)
        untold = code is not None and b"exit-code" not in self._text and not self.killed
        if untold and (number := -self.child.process.returncode) > 0:
            if number == signal.SIGKILL and self._group.ran_out():
                # Who fills the memory may lose what is outside of its namespace too; that voids no episode.
                return replace(finished, code=128 + number)
            raise SandboxError(f"the sandbox was killed from outside (signal {number})")
        if untold or (code == 127 and finished.stderr.startswith(_NOT_STARTED)):
            raise NotStartedError(finished)
        return finished


class LostError(Exception):
    """The waiting place was gone before its command could begin."""


class Waiting(Namespace):
    """Namespaces of a shape in which ``waiting.py`` runs, for one command."""

    def __init__(
        self,
        base: Path,
        group: Group,
        argv: Sequence[str],
        arguments: Sequence[str],
        env: dict[str, str],
        shape: Shape,
    ) -> None:
        self.shape = shape
        self._door, theirs = socket.socketpair()
        self._door.setblocking(False)
        with theirs:
            try:
                super().__init__(base, group, argv, arguments, env, shape.output_bytes, theirs.fileno())
            except SandboxError:
                self._door.close()
                raise

    async def _answer(self) -> bytes:
        async with asyncio.timeout(_START_S):
            return await asyncio.get_running_loop().sock_recv(self._door, 1)

    async def ready(self) -> None:
        """Return once a command can be handed over. Raises SandboxError where that does not come about."""
        try:
            answer = await self._answer()
        except (OSError, TimeoutError) as error:
            raise SandboxError(f"a place that waits for a command did not become ready: {error!r}") from error
        if not answer:
            raise SandboxError("a place that waits for a command ended before it was ready")

    def alive(self) -> bool:
        return not self.killed and self.child.process.poll() is None

    async def hand_over(self, command: Command) -> None:
        """Have the command begin; its wall time counts from here. Raises LostError where the place is gone."""
        self.child.started = time.monotonic()
        sent = message(list(command.argv), rlimits(command.limits), command.env)
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.get_running_loop().sock_sendall(self._door, sent)
            answer = await self._answer()
        if not answer and not self.killed:
            raise LostError

    async def end(self, code: int | None) -> Finished:
        """As ``Namespace.end``."""
        try:
            finished = await super().end(code)
            # Every process is gone: what they wrote is there, and the command itself could not write here.
            reason = b"" if self.killed else self._door.recv(4096)
        finally:
            self._door.close()
        if reason and code is not None:
            raise SandboxError(f"the sandbox could not start the command: {reason.decode(errors='replace')}")
        return finished


def rlimits(limits: Limits) -> list[tuple[int, tuple[int, int]]]:
    """The kernel's resource limits for ``limits``, as arguments for setrlimit."""
    cpu = max(1, round(limits.cpu_s))
    return [
        (resource.RLIMIT_CORE, (0, 0)),
        # The soft limit sends SIGXCPU, the hard one SIGKILL.
        (resource.RLIMIT_CPU, (cpu, cpu + 5)),
        (resource.RLIMIT_DATA, (limits.memory_mb << 20, limits.memory_mb << 20)),
        (resource.RLIMIT_FSIZE, (limits.file_mb << 20, limits.file_mb << 20)),
        (resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files)),
        (resource.RLIMIT_NPROC, (limits.processes, limits.processes)),
    ]
