"""Where the replicas of an engine learn of new weights, and where it is known which replica has them.

Invariant: ``announce`` returns when every replica that is alive has the version or a newer one; a replica that
starts later begins with what lies published, which is at least as new. No replica goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_CHECK_S = 0.5
_ALONE_S = 600.0


@dataclass(slots=True)
class _Replica:
    actor: Any
    version: int
    error: str = ""
    failed: int = -1
    """The version that ``error`` is about."""


class WeightsBoard:
    """A Ray actor, one for the replicas of one engine. All methods run in one event loop."""

    def __init__(self) -> None:
        self._newest: tuple[int, str] | None = None
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()

    def ping(self) -> bool:
        return True

    async def announce(self, version: int, path: Path) -> None:
        """Have every replica take the weights in ``path``; returns when all that are alive have.

        Raises ``ValueError`` with a replica's word where one could not; it goes on with its old weights. Raises
        ``TimeoutError`` where no replica is alive for so long that none will come.
        """
        async with self._changed:
            self._newest = (version, str(path))
            for replica in self._replicas.values():
                replica.failed = -1
            self._changed.notify_all()
        alone = time.monotonic()
        while not self._taken(version):
            alone = time.monotonic() if self._replicas else alone
            if time.monotonic() - alone > _ALONE_S:
                raise TimeoutError(f"no engine has asked for weights within {_ALONE_S:g} s; look at the engines' logs")
            async with self._changed:
                # A replica that dies tells nobody.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _CHECK_S)
            await self._bury()

    async def next(
        self, name: str, actor: Any, version: int, error: str = "", failed: int = -1
    ) -> tuple[int, str] | None:
        """What a replica asks again and again: tells its version, and gets the next one as soon as there is one.

        ``actor``: its own handle. ``error``: why version ``failed`` could not be taken. None: nothing new so far.
        """
        async with self._changed:
            self._replicas[name] = _Replica(actor, version, error, failed)
            self._changed.notify_all()
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._has_news(name)), _POLL_S)
            except TimeoutError:
                return None
            return self._newest

    async def versions(self) -> dict[str, int]:
        """The version of every replica that is alive, by its name."""
        await self._bury()
        return {name: replica.version for name, replica in self._replicas.items()}

    def _has_news(self, name: str) -> bool:
        """Whether there is a newer version that the replica has not refused since it was last announced."""
        replica = self._replicas.get(name)
        if replica is None or self._newest is None:
            return False
        return self._newest[0] > replica.version and self._newest[0] != replica.failed

    def _taken(self, version: int) -> bool:
        for name, replica in self._replicas.items():
            if replica.failed == version:
                raise ValueError(f"engine {name} did not take version {version}: {replica.error}")
        return bool(self._replicas) and all(replica.version >= version for replica in self._replicas.values())

    async def _bury(self) -> None:
        """Forget replicas that are dead."""
        for name, replica in list(self._replicas.items()):
            try:
                await replica.actor.__ray_ready__.remote()
            except RayActorError:
                if self._replicas.get(name) is replica:
                    del self._replicas[name]


async def follow(board: Any, name: str, engine: Any, version: int) -> None:
    """Keep ``engine`` at the version on the board, for ever. Runs in the replica's actor; ``board``: the handle."""
    actor = ray.get_runtime_context().current_actor
    error, failed = "", -1
    while True:
        try:
            news = await board.next.remote(name, actor, version, error, failed)
        except Exception as gone:
            # It is started again, and has to know no more than what it is told from then on.
            logger.warning("the board does not answer: %s", type(gone).__name__)
            await asyncio.sleep(1)
            continue
        if news is None:
            continue
        wanted, path = news
        try:
            await engine.load_weights(wanted, Path(path))
            version, error, failed = wanted, "", -1
        except Exception as refused:
            logger.exception("version %d was not taken", wanted)
            error, failed = f"{type(refused).__name__}: {refused}", wanted
