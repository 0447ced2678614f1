"""One process of an MCP server outside, started at once and ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping

from envs.mcp.spec import McpServer
from envs.mcp.tap import LONGEST
from envs.sandbox import reaper
from envs.sandbox.aio import PipeReader, uninterrupted
from envs.sandbox.base import Limits
from envs.sandbox.namespace import rlimits

_LIMITS = Limits(cpu_s=900.0, memory_mb=4096, file_mb=256)
_STDERR_BYTES = 4000
_READY_S = 30.0
_PING = "reins-ready"


class Program:
    """A server that is being started. Its standard error is kept, head and tail."""

    def __init__(self, server: McpServer, env: Mapping[str, str]) -> None:
        self._server = server
        errors, self._errors_writer = os.pipe()
        self._said = PipeReader(errors, _STDERR_BYTES)
        self._pidfd: int | None = None
        self._starting = asyncio.ensure_future(self._start(env))

    async def _start(self, env: Mapping[str, str]) -> asyncio.subprocess.Process:
        # RLIMIT_NPROC would count all processes of this user, ours included.
        limits = [limit for limit in rlimits(_LIMITS) if limit[0] != resource.RLIMIT_NPROC]
        under = (sys.executable, "-I", "-S", os.fspath(reaper.__file__), str(os.getpid()), json.dumps(limits))
        try:
            process = await asyncio.create_subprocess_exec(
                *under,
                *self._server.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors_writer,
                env=env,
                cwd=self._server.cwd,
                limit=LONGEST,
            )
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(process.pid)
            return process
        finally:
            os.close(self._errors_writer)

    async def pipes(self) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
        """Its standard input and output. Raises OSError when it could not be started."""
        process = await uninterrupted(self._starting)
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    async def ready(self) -> None:
        """Wait until it answers, which it may do only after reading a corpus, or has ended, or half a minute is over.

        Called before anybody else talks to it; a ping is what may be asked before all else. Raises OSError when it
        could not be started.
        """
        stdin, stdout = await self.pipes()
        stdin.write(json.dumps({"jsonrpc": "2.0", "id": _PING, "method": "ping"}).encode() + b"\n")
        # An answer that comes too late, or is too long, is the tap's to leave out.
        with contextlib.suppress(TimeoutError, ValueError):
            async with asyncio.timeout(_READY_S):
                while line := await stdout.readline():
                    if _PING.encode() in line:
                        return

    async def code(self) -> int:
        """Wait for its end, once its output is read to the end."""
        return await self._starting.result().wait()

    def said(self) -> str:
        return self._said.kept.value()[0].decode(errors="replace")

    async def end(self) -> None:
        """Return when it and all that descends from it are gone. Nobody may be reading its output meanwhile."""
        await uninterrupted(self._end())

    async def _end(self) -> None:
        await asyncio.wait([self._starting])
        if self._starting.exception() is None:
            process = self._starting.result()
            if self._pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    # The reaper ends all the others first. Not `terminate`, which may take the exit code away.
                    signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
                os.close(self._pidfd)
                self._pidfd = None
            # asyncio knows of an end only when the pipes are read to theirs.
            assert process.stdout is not None
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()
        self._said.close()
