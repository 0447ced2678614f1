"""Waiting that survives cancellation, and file descriptors in the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from typing import TypeVar

from envs.sandbox.base import Meter

T = TypeVar("T")


async def uninterrupted(awaitable: Awaitable[T]) -> T:
    """Await to the end even when the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()


async def readable(fd: int) -> None:
    """Return when ``fd`` can be read; a pidfd can be read once its process is gone."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


class Kept:
    """At most ``bound`` bytes of an output: the head and the tail. ``meter`` counts them all."""

    def __init__(self, bound: int) -> None:
        self.meter: Meter | None = None
        self._head = bytearray()
        self._tail = bytearray()
        self._head_bound = bound // 2
        self._tail_bound = bound - bound // 2
        self._dropped = 0

    def add(self, chunk: bytes) -> None:
        if self.meter is not None:
            self.meter.output_bytes += len(chunk)
            self.meter.last = time.monotonic()
        room = self._head_bound - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        excess = len(self._tail) - self._tail_bound
        if excess > self._tail_bound:
            # Cut only now and then: cutting at every chunk would move the whole tail each time.
            del self._tail[:excess]
            self._dropped += excess

    def value(self) -> tuple[bytes, bool]:
        """What was kept, and whether something was left out."""
        excess = max(0, len(self._tail) - self._tail_bound)
        dropped = self._dropped + excess
        tail = bytes(self._tail[excess:])
        if not dropped:
            return bytes(self._head) + tail, False
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % dropped + tail, True


class PipeReader:
    """Reads a pipe to its end into ``kept``."""

    def __init__(self, fd: int, bound: int) -> None:
        self._fd = fd
        self.kept = Kept(bound)
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._take)

    def _take(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        if chunk:
            self.kept.add(chunk)
        else:
            self.close()

    def close(self) -> None:
        if not self._ended.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._ended.set_result(None)

    async def end(self) -> None:
        """Wait until every writer is gone."""
        await asyncio.wait([self._ended])
