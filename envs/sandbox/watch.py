"""Running a command under the bounds that the kernel does not hold: its output, its disk, and silence.

Invariant: on return nothing of the command is alive, whether it ended, reached a bound, or was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox.base import Command, Finished, Meter, Sandbox
from envs.sandbox.gc import processes_of

_PAUSE_S = 1.0
_BLOCK = 4096
_SHARE = 20
"""Measuring the disk takes at most one part in so many of the time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a command may use. None: no bound."""

    output_mb: int | None = None
    """MiB that its processes may print, both streams together, kept or not."""
    disk_mb: int | None = None
    """MiB of disk that the folders of the sandbox may take, looked at every second or so. A file with holes counts
    without them, a hard link once, each file and folder at least one block; so do files that were removed and that a
    process still holds, where we may look. What is in a folder that we may not read does not count.
    """
    idle_s: float | None = None
    """Seconds without output and without a model call."""


async def watched(
    sandbox: Sandbox,
    command: Command,
    bounds: Bounds,
    since_call: Callable[[], Awaitable[float]] | None = None,
) -> tuple[Finished, str]:
    """Run ``command``; how it ended, and the name of the bound that ended it (empty: none; else the code is None).

    ``since_call``: seconds since the last model call, 0 while one runs; asked only when the output is silent.
    Raises SandboxError as ``Sandbox.run``.
    """
    meter = Meter()
    running = asyncio.ensure_future(sandbox.run(replace(command, meter=meter)))
    watching = asyncio.ensure_future(_reached(sandbox, meter, bounds, since_call))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result(), ""
        reached = watching.result()
        await sandbox.kill()
        return replace(await running, code=None), reached
    finally:
        watching.cancel()
        running.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def _reached(
    sandbox: Sandbox, meter: Meter, bounds: Bounds, since_call: Callable[[], Awaitable[float]] | None
) -> str:
    """Return the name of a bound once it is reached."""
    look_again = 0.0
    while True:
        await asyncio.sleep(_PAUSE_S)
        if bounds.output_mb is not None and meter.output_bytes > bounds.output_mb << 20:
            return "output_mb"
        began = time.monotonic()
        if bounds.idle_s is not None and began - meter.last > bounds.idle_s:
            silent = bounds.idle_s + 1 if since_call is None else await since_call()
            if silent > bounds.idle_s:
                return "idle_s"
        if bounds.disk_mb is not None and began >= look_again:
            used = await used_bytes(sandbox.writable) + await asyncio.to_thread(removed_bytes, sandbox.workspace)
            if used > bounds.disk_mb << 20:
                return "disk_mb"
            now = time.monotonic()
            look_again = now + _SHARE * (now - began)


async def used_bytes(folders: Sequence[Path]) -> int:
    """Bytes of disk that ``folders`` take, with a block for each entry: empty files use up a disk's inodes. They may
    change meanwhile, and be deeper than any path is long.
    """
    named = ["--", *map(os.fspath, folders)]
    blocks = await _total("--block-size=1", *named)
    return blocks + _BLOCK * await _total("--inodes", *named)


async def _total(*arguments: str) -> int:
    """The last line of ``du``."""
    argv = ["du", "-s", "-c", *arguments]
    quiet = asyncio.subprocess.DEVNULL
    counting = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=quiet)
    try:
        output, _ = await counting.communicate()
    finally:
        if counting.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                counting.kill()
            await counting.wait()
    return int(output.split()[-2])


def removed_bytes(workspace: Path) -> int:
    """Bytes of the workspace's disk that files without a name take, which processes of the sandbox hold open or mapped.

    A file that is on its way from one process to another through a socket is not seen.
    """
    disk = workspace.stat().st_dev
    found = {}
    for pid in processes_of(workspace.parent):
        for folder in ("fd", "map_files"):
            # The process, or its file, may be gone by now.
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/{folder}") as held:
                for entry in held:
                    with contextlib.suppress(OSError):
                        info = entry.stat()
                        if info.st_dev == disk and not info.st_nlink and stat.S_ISREG(info.st_mode):
                            found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())
