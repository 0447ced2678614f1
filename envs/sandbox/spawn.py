"""Start a program with collected output and a limit on its wall time; ending its process tree is the caller's.

Invariant: after ``collect`` no descriptor of the child is open here, and nobody can write to its pipes any more.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence

from envs.sandbox.aio import PipeReader, readable
from envs.sandbox.base import Command, Finished, Meter


class Child:
    """One program started by us, its pidfd and its two output pipes."""

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        bound: int,
        pass_fds: Sequence[int] = (),
        cwd: str = "/",
        stdin: int | None = None,
    ) -> None:
        """``stdin``: a descriptor for its standard input, which stays open here; None: there is nothing to read."""
        self.started = time.monotonic()
        out, out_writer = os.pipe()
        err, err_writer = os.pipe()
        try:
            # Started from the thread of the event loop: "die with parent" means the death of this thread.
            self.process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out_writer,
                stderr=err_writer,
                pass_fds=pass_fds,
                cwd=cwd,
            )
        except OSError:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_writer)
            os.close(err_writer)
        self.pidfd = os.pidfd_open(self.process.pid)
        self._out = PipeReader(out, bound // 2)
        self._err = PipeReader(err, bound - bound // 2)

    def measure(self, meter: Meter | None) -> None:
        """Keep ``meter`` up to date from here on."""
        self._out.kept.meter = self._err.kept.meter = meter

    async def gone(self) -> int:
        """Wait for the program itself; its exit code, or minus the signal that ended it."""
        if self.process.returncode is None:
            await readable(self.pidfd)
        return self.process.wait()

    async def collect(self, code: int | None) -> Finished:
        """The result, once every writer of the pipes is gone."""
        await self._out.end()
        await self._err.end()
        os.close(self.pidfd)
        stdout, cut_out = self._out.kept.value()
        stderr, cut_err = self._err.kept.value()
        return Finished(code, stdout, stderr, time.monotonic() - self.started, cut_out or cut_err)


async def within(child: Child, command: Command) -> int | None:
    """The program's exit code, or None when the wall limit came first."""
    child.measure(command.meter)
    left = command.limits.wall_s - (time.monotonic() - child.started)
    try:
        return await asyncio.wait_for(child.gone(), max(0.0, left))
    except TimeoutError:
        return None
