"""How one actor calls another: what an actor is given instead of a raw handle.

Light to import: whoever receives one of these loads neither torch nor tokenizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.engines.base import EngineStats
from actors.session_contract import SessionSpec, Summary
from actors.session_key import ROUTE_LENGTH, route
from trees import codec
from trees.record import CallRecord

T = TypeVar("T")
_QUESTIONS = 8


class LearnerByName:
    """Where a tree builder sends trees. A handle among an actor's arguments would not survive its restart."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def add(self, data: bytes) -> None:
        await ray.get_actor(self._name).add.remote(data)


class Builders:
    """The tree builders of a run: every session has one of them."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    def of(self, session: str) -> Any:
        """The handle of the builder of a session."""
        return self._actors[int(route(session), 16) % len(self._actors)]

    async def __call__(self, records: Sequence[CallRecord]) -> None:
        """Take call records of one session, as the proxy's sink."""
        if records:
            await self.of(records[0].session).add.remote(codec.encode_records(records))


class HandleEngine:
    """The replicas of an engine, for who steers the run: new weights by the board, counters by a Serve handle."""

    def __init__(self, handle: Any, board: Any, replicas: int = 1) -> None:
        self._handle = handle
        self._board = board
        self._replicas = replicas

    async def load_weights(self, version: int, path: Path) -> None:
        """Raises as ``WeightsBoard.announce``."""
        await self._board.announce.remote(version, path)

    async def stats(self) -> dict[str, float]:
        """The counters of all replicas, added up, but for the version; of those that a few questions reach."""

        def ask(asked: str) -> Awaitable[tuple[str, EngineStats]]:
            return self._handle.options(session_id=asked).stats.remote()

        counters = await _everywhere(ask, self._replicas)
        rows = [one.extra | {each.name: getattr(one, each.name) for each in fields(one)} for one in counters]
        total = _added({name: row[name] for name in row.keys() - {"version", "extra"}} for row in rows)
        return {"version": min(one.version for one in counters), **total}


class HandleProxy:
    """The proxy behind a Serve handle: every call goes to the replica of its session."""

    def __init__(self, handle: Any, replicas: int = 1) -> None:
        self._handle = handle
        self._replicas = replicas

    def _at(self, head: str) -> Any:
        return self._handle.options(session_id=head)

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        return await self._at(route(spec.id)).open_session.remote(spec)

    async def close_session(self, key: str) -> Summary:
        return await self._at(key[:ROUTE_LENGTH]).close_session.remote(key)

    async def since_call(self, key: str) -> float:
        return await self._at(key[:ROUTE_LENGTH]).since_call.remote(key)

    async def resend(self, session: str) -> int:
        return await self._at(route(session)).resend.remote(session)

    async def discard(self, session: str) -> None:
        await self._at(route(session)).discard.remote(session)

    async def stats(self) -> dict[str, float]:
        """The counters of all replicas, added up; of those that a few questions reach."""
        return _added(await _everywhere(lambda asked: self._at(route(asked)).stats.remote(), self._replicas))


async def _everywhere(ask: Callable[[str], Awaitable[tuple[str, T]]], replicas: int) -> list[T]:
    """The answers of all replicas, each with its name, of which Serve's ring decides whom a question reaches."""
    found: dict[str, T] = {}
    for asked in range(_QUESTIONS * replicas):
        replica, answer = await ask(f"stats {asked}")
        found[replica] = answer
        if len(found) == replicas:
            break
    return list(found.values())


def _added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return dict(total)
