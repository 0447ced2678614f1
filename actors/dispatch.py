"""Between sessions, engine and tree builder: runs calls to their end and hands their records over.

Invariants: a call runs to its end whoever listens, so what was sampled is always recorded; engine trouble
is retried here and reaches a harness only when the budget for it is used up; ``close`` returns when
every record of the session was taken by the sink or is counted as undelivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from actors.engines.base import Generated, Sampler
from actors.journal import Entry, Journal
from actors.renderer import Renderer
from actors.session import Prepared, Session
from actors.session_contract import SessionSpec, Summary
from configs.proxy import ProxyConfig
from envs.protocols.canonical import Reply, Request
from envs.protocols.errors import WireError
from trees.record import CallRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sink = Callable[[Sequence[CallRecord]], Awaitable[None]]

_RETRY_FIRST_S = 0.1
_RETRY_MOST_S = 5.0
_ABORT_AGAIN_S = 0.5
_SINK_RETRIES_S = (0.1, 0.5)


class EngineGoneError(RuntimeError):
    """The engine gave no answer within the budget."""


@dataclass(eq=False, slots=True)
class Running:
    """A call on its way. ``task`` gives the reply, or raises the ``WireError`` to answer with."""

    prepared: Prepared
    queue_s: float
    task: asyncio.Task[Reply] = field(init=False)
    aborting: asyncio.Event = field(default_factory=asyncio.Event)
    request: str = ""
    generation: asyncio.Future[Generated] | None = None


@dataclass(eq=False, slots=True)
class Hosted:
    """A session with what goes on in it. ``lock`` orders the work on the session."""

    session: Session
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set[Running] = field(default_factory=set)
    pending: list[CallRecord] = field(default_factory=list)
    undelivered: list[CallRecord] = field(default_factory=list)
    logged: int = 0
    """Bytes of the session's log as this replica knows it; another may have gone on with it."""
    unlogged: list[Entry] = field(default_factory=list)
    """Ended calls that the log has not taken."""
    closed: bool = False
    """Whether another replica has closed it."""
    marked: tuple[str, str, bool] = ("", "", False)
    """What the log says of the session's end: limit, failure, closed."""
    flusher: asyncio.Task[None] | None = None
    closing: asyncio.Task[Summary] | None = None


class Dispatcher:
    """All sessions of one replica. Lives in one event loop."""

    def __init__(
        self,
        config: ProxyConfig,
        rendering: Renderer,
        engine: Sampler,
        sink: Sink,
        context: int,
        journal: Journal | None = None,
    ) -> None:
        """``context``: the engine's longest sequence in tokens, prompt and answer together. ``journal``: where
        sessions are kept for another replica; None keeps none.
        """
        self.config = config
        self._rendering = rendering
        self._engine = engine
        self._in_words = getattr(engine, "takes_words", False)
        self._sink = sink
        self._context = context
        self._journal = journal
        self._by_key: dict[str, Hosted] = {}
        self._by_id: dict[str, Hosted] = {}
        self._counts: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()

    async def open(self, spec: SessionSpec) -> str:
        """Open a session and return its key. A session of the same id is closed and forgotten first."""
        await self.discard(spec.id)
        # Another opening of the same id may have come first while the old one closed.
        while spec.id in self._by_id:
            await self.discard(spec.id)
        session = Session(spec, self._rendering, self.config, self._context)
        hosted = Hosted(session)
        if self._journal is not None:
            hosted.logged = self._journal.open(spec, session.key, time.time())
        self._by_key[session.key] = self._by_id[spec.id] = hosted
        self._counts["sessions"] += 1
        return session.key

    def find(self, key: str) -> Hosted:
        """The open session of a key, also one that another replica began. Raises ``WireError`` 401."""
        hosted = self._held(key)
        if hosted is None:
            raise WireError(401, "unknown key: expected the key of an open session", "invalid_api_key")
        if hosted.closing is not None or hosted.closed:
            raise WireError(401, "the session of this key is closed", "session_closed")
        return hosted

    async def start(self, hosted: Hosted, request: Request, threaded: bool = False) -> Running:
        """Take a call in and set it going. ``threaded`` keeps the loop free while a large one is rendered.

        Raises ``WireError`` where the request cannot be served.
        """
        work = self._start(hosted, request, threaded)
        # Shielded: a handler that is cancelled now must not leave a prepared call without an end.
        return await (asyncio.shield(asyncio.create_task(work)) if threaded else work)

    async def count(self, hosted: Hosted, request: Request, threaded: bool = False) -> int:
        """Tokens of the prompt that a request would have. Raises ``WireError`` where it cannot be served."""
        async with hosted.lock:
            counted = hosted.session.count
            return await asyncio.to_thread(counted, request) if threaded else counted(request)

    def under_way(self, session: str, request: str) -> tuple[Session, Prepared] | None:
        """The call that the engine was given as ``request``, with its session; None where it is not under way."""
        hosted = self._by_id.get(session)
        if hosted is None:
            return None
        found = [call.prepared for call in hosted.running if call.request == request]
        return (hosted.session, found[0]) if found else None

    def abort(self, running: Running) -> None:
        """End a call that nobody waits for; what was sampled is kept."""
        self._spawn(self._abort(running))

    async def close(self, key: str) -> Summary:
        """End what is running, hand over all records, and say what came of the session.

        Safe to call twice. Raises ``KeyError`` for a key that was never given out or is discarded.
        """
        hosted = self._held(key)
        if hosted is None:
            raise KeyError("unknown session key: expected one that open gave out, not discarded since")
        if hosted.closing is None:
            hosted.closing = _detached(self._close(hosted))
        # Shielded: a caller that gives up must not undo the closing for the next one.
        return await asyncio.shield(hosted.closing)

    def since_call(self, key: str) -> float:
        """Seconds since the last call of a session ended; 0 while one runs. Raises ``KeyError`` as ``close``."""
        hosted = self._held(key)
        if hosted is None:
            raise KeyError("unknown session key: expected one that open gave out, not discarded since")
        return hosted.session.since_call()

    async def resend(self, session: str) -> int:
        """Offer all records of a session to the sink again; returns how many.

        Raises ``KeyError`` for an unknown session, and what the sink raises.
        """
        hosted = self._by_id.get(session)
        records = hosted.session.records if hosted is not None else self._logged(session)
        if hosted is None and not records:
            raise KeyError(f"unknown session: got {session!r}, expected one that is not yet discarded")
        if records:
            await self._sink(records)
        if hosted is not None:
            hosted.undelivered.clear()
        return len(records)

    async def discard(self, session: str) -> None:
        """Close a session if it is open, and forget it; an unknown one is forgotten already."""
        hosted = self._by_id.get(session)
        if hosted is None:
            if self._journal is not None:
                self._journal.forget(session)
            return
        await self.close(hosted.session.key)
        if self._journal is not None:
            self._journal.remove(hosted.session.key)
        self._by_key.pop(hosted.session.key, None)
        if self._by_id.get(session) is hosted:
            del self._by_id[session]

    def stats(self) -> dict[str, float]:
        """Counters since start, and what is there now."""
        hosted = self._by_id.values()
        now = {
            "sessions_open": sum(h.closing is None and not h.closed for h in hosted),
            "sessions_held": len(self._by_id),
            "calls_running": sum(len(h.running) for h in hosted),
            "undelivered": sum(len(h.undelivered) for h in hosted),
        }
        return {**self._counts, **now}

    def _held(self, key: str) -> Hosted | None:
        """The session of a key; from its log, where this replica never had it or another has gone on with it."""
        hosted = self._by_key.get(key)
        if hosted is None:
            return self._restored(key)
        if self._journal is None or hosted.running or hosted.closing or self._journal.size(key) <= hosted.logged:
            return hosted
        return self._restored(key)

    def _restored(self, key: str) -> Hosted | None:
        logged = self._journal.read(key) if self._journal is not None else None
        if logged is None or self._journal is None:
            return None
        spec = logged.spec
        session = Session(spec, self._rendering, self.config, self._context, key=key)
        session.restore(logged, max(0.0, time.time() - logged.opened))
        hosted = Hosted(session, logged=self._journal.size(key), closed=logged.closed)
        hosted.marked = (logged.limit, logged.failed, logged.closed)
        self._by_key[key] = self._by_id[spec.id] = hosted
        self._counts["sessions_restored"] += 1
        return hosted

    def _logged(self, session: str) -> list[CallRecord]:
        return self._journal.records(session) if self._journal is not None else []

    async def _start(self, hosted: Hosted, request: Request, threaded: bool) -> Running:
        came = time.monotonic()
        async with hosted.lock:
            if hosted.closing is not None:
                raise WireError(401, "the session of this key is closed", "session_closed")
            queue_s = time.monotonic() - came
            prepare = hosted.session.prepare
            try:
                prepared = await asyncio.to_thread(prepare, request) if threaded else prepare(request)
            finally:
                self._mark(hosted)
            return self._set_going(hosted, prepared, queue_s)

    def _set_going(self, hosted: Hosted, prepared: Prepared, queue_s: float) -> Running:
        running = Running(prepared, queue_s)
        running.task = _detached(self._run(hosted, prepared, running))
        hosted.running.add(running)

        def ended(task: asyncio.Task[Reply]) -> None:
            hosted.running.discard(running)
            # The listener may be gone; an error that nobody fetches would be logged as lost.
            if not task.cancelled():
                task.exception()

        running.task.add_done_callback(ended)
        self._counts["calls"] += 1
        return running

    async def _run(self, hosted: Hosted, prepared: Prepared, running: Running) -> Reply:
        """One call from prompt to reply; leaves exactly one record whatever happens."""
        session = hosted.session
        try:
            generated = await self._generate(prepared, running)
        except EngineGoneError as error:
            async with hosted.lock:
                session.failed = session.failed or f"engine: {error}"
                self._deliver(hosted, prepared, session.abandon(prepared))
            self._counts["engine_failures"] += 1
            raise WireError(503, "the engine is not available", "engine_unavailable") from error
        async with hosted.lock:
            if generated is None:
                reply, record = None, session.abandon(prepared)
            else:
                reply, record = session.complete(prepared, generated, running.queue_s)
            self._deliver(hosted, prepared, record)
        self._count(record)
        if reply is None or record.finish == "abort":
            raise WireError(401, "the call was ended before it was complete", "session_closed")
        return reply

    async def _generate(self, prepared: Prepared, running: Running) -> Generated | None:
        """Ask the engine until it answers. None: aborted with nothing sampled. Raises ``EngineGoneError``."""
        deadline = time.monotonic() + self.config.engine_wait_s
        delay = _RETRY_FIRST_S
        for attempt in itertools.count():
            running.request = f"{prepared.call}r{attempt}"
            # Conversations are large: an engine of ids, which may be in another process, gets none.
            said = prepared.plan.request if self._in_words else None
            generate = replace(prepared.generate, request=running.request, conversation=said)
            running.generation = asyncio.ensure_future(self._engine.generate(generate))
            trouble = ""
            try:
                generated = await running.generation
                if generated.finish != "abort" or running.aborting.is_set():
                    return generated
                trouble = "the engine ended the generation by itself"
            except asyncio.CancelledError:
                if not running.aborting.is_set():
                    raise
            except (ValueError, TypeError) as error:
                raise EngineGoneError(f"{type(error).__name__}: {error}") from error
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}".splitlines()[0]
            if running.aborting.is_set():
                return None
            logger.warning("engine trouble in call %s, attempt %d: %s", prepared.call, attempt, trouble)
            self._counts["engine_retries"] += 1
            if time.monotonic() + delay > deadline:
                raise EngineGoneError(f"no answer within {self.config.engine_wait_s:g} s; last: {trouble}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.aborting.wait(), delay)
                return None
            delay = min(2 * delay, _RETRY_MOST_S)
        raise AssertionError("unreachable")

    async def _abort(self, running: Running) -> None:
        """End a call: ask the engine, again if the generation had not reached it yet; then cut it off."""
        running.aborting.set()
        deadline = time.monotonic() + self.config.abort_wait_s
        while not running.task.done() and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._engine.abort(running.request), left)
            except Exception as error:
                logger.warning("the engine took no abort: %s", type(error).__name__)
            await asyncio.wait({running.task}, timeout=min(left, _ABORT_AGAIN_S))
        if not running.task.done() and running.generation is not None:
            running.generation.cancel()
            await asyncio.wait({running.task})

    async def _close(self, hosted: Hosted) -> Summary:
        async with hosted.lock:
            running = list(hosted.running)
        self._mark(hosted)
        await asyncio.gather(*(self._abort(call) for call in running))
        if hosted.flusher is not None:
            await hosted.flusher
        if hosted.undelivered:
            await self._hand_over(hosted, hosted.undelivered)
        alike = await asyncio.to_thread(hosted.session.rendered_alike)
        if alike is not None:
            self._counts["histories_alike" if alike else "histories_unlike"] += 1
        return replace(hosted.session.summary(), undelivered=len(hosted.undelivered))

    def _deliver(self, hosted: Hosted, prepared: Prepared, record: CallRecord) -> None:
        """Log a record, then hand it over in the background; records that come meanwhile go together."""
        self._log(hosted, hosted.session.entry(prepared))
        self._mark(hosted)
        hosted.pending.append(record)
        if hosted.flusher is None or hosted.flusher.done():
            hosted.flusher = self._spawn(self._flush(hosted))

    def _log(self, hosted: Hosted, entry: Entry) -> None:
        """Write an ended call, after those that could not be written: a full disk is no business of the harness's."""
        if self._journal is None:
            return
        hosted.unlogged.append(entry)
        try:
            while hosted.unlogged:
                hosted.logged = self._journal.append(hosted.session.key, hosted.unlogged[0])
                del hosted.unlogged[0]
        except OSError as error:
            logger.error("the log of session %s takes no calls: %s", hosted.session.spec.id, error)
            self._counts["log_failures"] += 1

    def _mark(self, hosted: Hosted) -> None:
        """Keep in the log what ends the session, where that has changed: another replica must judge it alike."""
        session = hosted.session
        mark = (session.limit, session.failed, hosted.closed or hosted.closing is not None)
        if self._journal is None or mark == hosted.marked:
            return
        with contextlib.suppress(OSError):
            hosted.logged = self._journal.mark(session.key, *mark)
            hosted.marked = mark

    async def _flush(self, hosted: Hosted) -> None:
        while hosted.pending:
            batch, hosted.pending = hosted.pending, []
            await self._hand_over(hosted, batch)

    async def _hand_over(self, hosted: Hosted, batch: list[CallRecord]) -> None:
        """Offer a batch to the sink a few times; what it does not take is kept as undelivered."""
        hosted.undelivered = [record for record in hosted.undelivered if record not in batch]
        for wait_s in (*_SINK_RETRIES_S, None):
            try:
                await self._sink(batch)
                return
            except Exception as error:
                logger.warning("the sink took no records: %s: %s", type(error).__name__, error)
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        hosted.undelivered += batch

    def _count(self, record: CallRecord) -> None:
        self._counts["tokens_prompt"] += len(record.prompt_ids)
        self._counts["tokens_sampled"] += len(record.sampled_ids)
        self._counts["tokens_cached"] += record.cached_tokens
        self._counts["drift"] += record.drift
        self._counts["calls_aborted"] += record.finish == "abort"
        self._counts["calls_unclean"] += not record.clean
        if record.fork:
            self._counts[f"forks/{record.fork}"] += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = _detached(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _detached(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task in an empty context.

    Serve knows by a context variable which request a call to the engine belongs to, and cancels the one with
    the other; then what was sampled when a client leaves would be lost.
    """
    return asyncio.create_task(work, context=contextvars.Context())
