"""Rooms that are ready before their task is known, so that an episode does not wait for a start.

What a start has to do without knowing the task is done ahead: directories, namespaces, mounts, control groups, and
an interpreter with the relay loaded, which waits for a command (``waiting.py``). What is left for the task is to
copy its files, to write the harness's configuration, and to send arguments, environment and limits. Mounts cannot
come later; so rooms are kept for what was asked for before: by kind (the harness), once two commands of a kind in a
row had the same shape.

Invariants: a room serves one sandbox and is never used again. A room that is not there, has ended, or has another
shape than the command costs a start as if there were no pool, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Command, Sandbox, SandboxError
from envs.sandbox.bubblewrap import Bubblewrap
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.namespace import Shape

_log = logging.getLogger(__name__)
_PAUSE_S = 0.01
_KINDS = 16
"""Kinds that are remembered, the latest used."""


@dataclass(slots=True)
class _Kind:
    """What the commands of one kind look like, and the rooms that wait for one."""

    shape: Shape | None = None
    steady: bool = False
    """Whether the newest command had the shape of the one before it."""
    rooms: deque[Bubblewrap] = field(default_factory=deque)


class Pool:
    """Keeps up to ``size`` rooms ready under ``root``; with 0, or a backend other than bubblewrap, none.

    To be used from one event loop, in whose thread the rooms are started, and closed at the end.
    """

    def __init__(self, backend: Backend, root: Path, size: int) -> None:
        self._backend = backend
        self._root = root
        able = backend == "bubblewrap" or (backend == "auto" and not unavailable())
        self._size = size if able else 0
        self._kinds: OrderedDict[tuple[str, str], _Kind] = OrderedDict()
        self._filling: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.hits = 0
        """Sandboxes that came from the pool."""

    async def create(self, kind: str, label: str, input_files: Path | None, mount_dir: str) -> Sandbox:
        """As ``envs.sandbox.create.create``, from a ready room where there is one."""
        room = self._take(kind, mount_dir)
        if room is None:
            return await create(self._backend, label, input_files, mount_dir, self._root)
        try:
            await uninterrupted(asyncio.to_thread(room.move_in, label, input_files))
        except BaseException:
            await room.destroy()
            raise
        self.hits += 1
        return room

    def expect(self, kind: str, sandbox: Sandbox, command: Command) -> None:
        """Keep rooms ready for more commands of a kind that look like this one, which is to run in ``sandbox``.

        A folder of the sandbox's own that the command mounts is made in each of those rooms, empty.
        """
        if not self._size or not isinstance(sandbox, Bubblewrap):
            return
        key = kind, sandbox.mount_dir
        known = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        shape = Shape.of(command, sandbox.base)
        known.steady = known.shape == shape
        if not known.steady:
            known.shape = shape
            self._dismiss(known)
        while len(self._kinds) > _KINDS:
            self._dismiss(self._kinds.popitem(last=False)[1])
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._fill())

    async def filled(self) -> None:
        """Return once no more rooms are being started."""
        if self._filling is not None:
            await asyncio.wait([self._filling])

    def _take(self, kind: str, mount_dir: str) -> Bubblewrap | None:
        known = self._kinds.get((kind, mount_dir))
        while known is not None and known.rooms:
            room = known.rooms.popleft()
            if room.waits:
                return room
            self._discard(room)
        return None

    def _wanting(self) -> tuple[tuple[str, str], _Kind] | None:
        """The kind that has fewest of the rooms that are its share."""
        steady = [(key, known) for key, known in self._kinds.items() if known.steady]
        if not steady:
            return None
        share = max(1, self._size // len(steady))
        for _, known in steady:
            while len(known.rooms) > share:
                self._discard(known.rooms.popleft())
        if sum(len(known.rooms) for _, known in steady) >= self._size:
            return None
        key, known = min(steady, key=lambda one: len(one[1].rooms))
        return (key, known) if len(known.rooms) < share else None

    async def _fill(self) -> None:
        """Start rooms, one by one."""
        while wanting := self._wanting():
            # What the episode that took a room does next comes first.
            await asyncio.sleep(_PAUSE_S)
            (_, mount_dir), known = wanting
            shape = known.shape
            assert shape is not None
            room = Bubblewrap(self._root, f"warm-{uuid.uuid4().hex[:16]}", mount_dir)
            try:
                await uninterrupted(asyncio.to_thread(room.build, None))
                await room.prepare(shape)
            except SandboxError as error:
                # A start that fails here fails for the episode as well, which then says so.
                _log.warning("a room of the pool could not be made ready: %s", error)
                await room.destroy()
                known.steady = False
                return
            except BaseException:
                await room.destroy()
                raise
            if known.steady and known.shape == shape:
                known.rooms.append(room)
            else:
                self._discard(room)

    def _dismiss(self, known: _Kind) -> None:
        while known.rooms:
            self._discard(known.rooms.popleft())

    def _discard(self, room: Bubblewrap) -> None:
        task = asyncio.create_task(room.destroy())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Remove all rooms that wait; on return nothing of them is left. The pool can go on to be used."""
        await uninterrupted(self._close())

    async def _close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        for known in self._kinds.values():
            self._dismiss(known)
        self._kinds.clear()
        await asyncio.gather(*self._closing)
