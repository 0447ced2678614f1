"""An engine whose requests outlive updates of the weights and restarts of what samples them.

Invariant: tokens that the engine gave are never sampled again; a request that was interrupted goes on from all the
ids that it has, and its spans say which version sampled which of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actors.engines.base import Engine, EngineDownError, EngineStats, Generate, Generated, Health, Piece, joined
from actors.seeds import stable_seed
from trees.record import Finish

logger = logging.getLogger(__name__)

UpdateMode = Literal["between_tokens", "drain", "abort_and_resume"]
"""What becomes of running requests: ``between_tokens`` they go on under the new weights, ``drain`` they end first
and nothing new starts meanwhile, ``abort_and_resume`` they are cut and asked again from the ids that they have."""

_AGAIN_S = 0.1
_PAUSE_S = 0.5
_DOWNS = 5
"""Times in a row that an engine may go down before it gave a token, or took weights; then the caller hears of it."""

Source = Callable[[Generate], AsyncGenerator[Piece, None]]


@dataclass(eq=False, slots=True)
class _Call:
    """A request under way. ``inner`` is the handle of the part of it that runs now."""

    request: Generate
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    inner: str = ""
    cut: bool = False
    """Whether an update has cut that part."""


class SteadyEngine:
    """The methods are those of ``Engine``; ``load_weights`` follows ``mode``."""

    def __init__(self, inner: Engine, mode: UpdateMode = "between_tokens") -> None:
        self._inner = inner
        self._mode = mode
        self._calls: set[_Call] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = asyncio.Event()
        self._updating = asyncio.Lock()
        self._counts: Counter[str] = Counter()

    async def generate(self, request: Generate) -> Generated:
        async with aclosing(self._drive(request, self._in_one)) as pieces:
            return joined([piece async for piece in pieces])

    def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        return self._drive(request, self._inner.stream)

    async def abort(self, request: str) -> None:
        """End the requests with this handle, also such as wait for an update or a restart."""
        for call in [call for call in self._calls if request and call.request.request == request]:
            call.aborted.set()
            if call.inner:
                await self._inner.abort(call.inner)

    async def load_weights(self, version: int, path: Path) -> None:
        """As the inner engine does; one update at a time. A failed one leaves the old weights serving.

        Runs to its end also when the caller is cancelled; begins again where the engine goes down meanwhile.
        """
        await asyncio.shield(asyncio.create_task(self._update(version, path)))

    async def _update(self, version: int, path: Path) -> None:
        async with self._updating:
            if self._mode != "between_tokens":
                self._open.clear()
            try:
                if self._mode == "abort_and_resume":
                    await self._interrupted()
                elif self._mode == "drain":
                    # What is paused would never end.
                    await _first(self._idle.wait(), self._paused.wait())
                await self._loaded(version, path)
            finally:
                self._open.set()

    async def _loaded(self, version: int, path: Path) -> None:
        for _ in range(_DOWNS):
            try:
                await self._inner.load_weights(version, path)
                return
            except EngineDownError as error:
                logger.warning("version %d is loaded again: %s", version, error)
                await self._inner.ready()
        raise EngineDownError(f"the engine went down {_DOWNS} times while it took version {version}")

    async def pause(self) -> None:
        self._paused.set()
        await self._inner.pause()

    async def resume(self) -> None:
        self._paused.clear()
        await self._inner.resume()

    async def ready(self) -> None:
        await self._inner.ready()

    @property
    def alive(self) -> bool:
        return self._inner.alive

    async def health(self) -> Health:
        return await self._inner.health()

    async def stats(self) -> EngineStats:
        """Those of the inner engine; ``extra`` also counts requests that were ``interrupted`` and ``continued``."""
        found = await self._inner.stats()
        return replace(found, extra={**found.extra, **self._counts})

    async def close(self) -> None:
        await self._inner.close()

    async def _in_one(self, request: Generate) -> AsyncGenerator[Piece, None]:
        try:
            got = await self._inner.generate(request)
        except EngineDownError as error:
            for piece in error.partial:
                yield piece
            raise
        yield Piece(got.ids, got.logprobs, got.versions, got.finish, got.cached_tokens)

    async def _drive(self, request: Generate, source: Source) -> AsyncGenerator[Piece, None]:
        """The pieces of a request from as many runs of the inner engine as it takes."""
        call = _Call(request)
        self._calls.add(call)
        held: list[int] = []
        runs = downs = 0
        try:
            while await self._admitted(call):
                call.inner, call.cut = f"{request.request}.{runs}" if runs else request.request, False
                runs += 1
                try:
                    async with aclosing(source(_rest(request, held, call.inner))) as pieces:
                        async for piece in pieces:
                            held += piece.ids
                            downs = 0 if piece.ids else downs
                            cut = call.cut and piece.finish == "abort" and not call.aborted.is_set()
                            yield replace(piece, finish=None) if cut else piece
                            if piece.finish and not cut:
                                return
                    self._counts["interrupted"] += 1
                except EngineDownError as error:
                    logger.warning("request %s waits for its engine: %s", request.request, error)
                    self._counts["engine_down"] += 1
                    downs += 1
                    if downs == _DOWNS:
                        raise
                    await _first(self._back(downs), call.aborted.wait())
                finally:
                    call.inner = ""
                    self._leave()
                if finish := _finished(request, held):
                    yield Piece([], [], (), finish)
                    return
            yield Piece([], [], (), "abort")
        finally:
            self._calls.discard(call)

    async def _back(self, downs: int) -> None:
        await asyncio.sleep(_PAUSE_S * (downs - 1) ** 2)
        await self._inner.ready()

    async def _admitted(self, call: _Call) -> bool:
        """Wait for an update to end; False when the request was aborted meanwhile."""
        while not self._open.is_set() and not call.aborted.is_set():
            await _first(self._open.wait(), call.aborted.wait())
        if call.aborted.is_set():
            return False
        self._running += 1
        self._idle.clear()
        return True

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def _interrupted(self) -> None:
        """Cut what runs; again, where a request had not reached the inner engine yet."""
        while not self._idle.is_set():
            for call in [call for call in self._calls if call.inner]:
                call.cut = True
                await self._inner.abort(call.inner)
            await _first(self._idle.wait(), asyncio.sleep(_AGAIN_S))


def _rest(request: Generate, held: list[int], handle: str) -> Generate:
    """What is left of a request of which ``held`` was sampled. Its draws are others than those of the beginning."""
    if not held:
        return replace(request, request=handle)
    ids = np.concatenate([np.asarray(request.ids, np.int32), np.asarray(held, np.int32)])
    seed = None if request.seed is None else stable_seed(request.seed, f"after {len(held)}")
    return replace(request, request=handle, ids=ids, max_tokens=request.max_tokens - len(held), seed=seed)


def _finished(request: Generate, held: list[int]) -> Finish | None:
    """How a request ended whose end was not told, because its engine went down right after."""
    if held and held[-1] in request.stop_ids:
        return "stop"
    return "length" if len(held) >= request.max_tokens else None


async def _first(*waits: Awaitable[Any]) -> None:
    """Return when the first has ended, and raise what it raised; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
