"""Requests that outlive updates of the weights and deaths of what samples them, with an engine that a test steers."""

import asyncio
import itertools
from pathlib import Path

import pytest

from actors.engines.base import EngineDownError, Generate, Generated, Piece, joined
from actors.engines.steady import SteadyEngine
from trees.record import VersionSpan

PATH = Path("somewhere")


class Steered:
    """Samples the number of tokens before it, one per ``tick``; its version is what was loaded last."""

    def __init__(self):
        self.version = 0
        self.requests = []
        self.loading = []
        self.dead = False
        self.back = asyncio.Event()
        self.refuse = False
        self._tick = asyncio.Condition()
        self._ticks = 0
        self._aborted = set()

    async def tick(self, n=1):
        for _ in range(n):
            async with self._tick:
                self._ticks += 1
                self._tick.notify_all()
            for _ in range(12):
                await asyncio.sleep(0)

    async def stream(self, request):
        if self.dead:
            raise EngineDownError("dead")
        self.requests.append(request)
        ids = list(request.ids)
        for n in range(request.max_tokens):
            seen = self._ticks
            async with self._tick:
                await self._tick.wait_for(lambda seen=seen: self._ticks > seen or self.dead)
            if self.dead:
                raise EngineDownError("died")
            if request.request in self._aborted:
                yield Piece([], [], (), "abort")
                return
            token = len(ids)
            ids.append(token)
            end = "stop" if token in request.stop_ids else "length" if n + 1 == request.max_tokens else None
            yield Piece([token], [-float(token)], (VersionSpan(self.version, 0, 1),), end)
            if end == "stop":
                return

    async def generate(self, request) -> Generated:
        pieces = []
        try:
            async for piece in self.stream(request):
                pieces.append(piece)
        except EngineDownError as error:
            raise EngineDownError(str(error), pieces) from error
        return joined(pieces)

    async def abort(self, request):
        self._aborted.add(request)
        async with self._tick:
            self._ticks += 1
            self._tick.notify_all()

    async def load_weights(self, version, path):
        self.loading.append([r.request for r in self.requests])
        if self.refuse:
            raise ValueError("torn")
        self.version = version

    async def ready(self):
        if self.dead:
            await self.back.wait()

    async def die(self):
        self.dead = True
        await self.tick()

    async def revive(self, version):
        self.dead, self.version = False, version
        self.back.set()
        await asyncio.sleep(0.01)


@pytest.fixture
def inner():
    return Steered()


def ask(steady, tokens=6, request="r", **more):
    return asyncio.create_task(steady.generate(Generate([0, 1, 2], tokens, request=request, **more)))


def whole(got, *spans):
    assert got.ids == list(range(3, 3 + len(got.ids)))
    assert got.logprobs == [-float(token) for token in got.ids]
    assert got.versions == tuple(VersionSpan(*span) for span in spans)


async def finish(inner, task):
    while not task.done():
        await inner.tick()
    return task.result()


async def test_between_tokens_nothing_waits(inner):
    steady = SteadyEngine(inner)
    task = ask(steady)
    await inner.tick(3)
    await steady.load_weights(1, PATH)
    got = await finish(inner, task)
    whole(got, (0, 0, 2), (1, 2, 6))
    assert len(inner.requests) == 1


async def test_drain_lets_what_runs_end_and_holds_back_the_rest(inner):
    steady = SteadyEngine(inner, "drain")
    task = ask(steady)
    await inner.tick(3)
    update = asyncio.create_task(steady.load_weights(1, PATH))
    await inner.tick()
    late = ask(steady, request="late")
    await inner.tick(1)
    assert not update.done()
    whole(await finish(inner, task), (0, 0, 6))
    await update
    whole(await finish(inner, late), (1, 0, 6))


async def test_abort_and_resume_goes_on_from_the_ids_it_has(inner):
    steady = SteadyEngine(inner, "abort_and_resume")
    task = ask(steady, seed=5)
    await inner.tick(3)
    await steady.load_weights(1, PATH)
    got = await finish(inner, task)
    whole(got, (0, 0, 2), (1, 2, 6))
    first, second = inner.requests
    assert (list(second.ids), second.max_tokens) == ([0, 1, 2, 3, 4], 4)
    # The same draws again would not be independent of those before them.
    assert first.seed == 5 != second.seed
    assert second.request != first.request


@pytest.mark.parametrize("mode", ["between_tokens", "drain", "abort_and_resume"])
async def test_a_failed_update_leaves_everything_running(inner, mode):
    steady = SteadyEngine(inner, mode)
    task = ask(steady, 3)
    await inner.tick(2)
    inner.refuse = True
    update = asyncio.create_task(steady.load_weights(1, PATH))
    got = await finish(inner, task)
    with pytest.raises(ValueError, match="torn"):
        await update
    whole(got, (0, 0, 3))
    whole(await finish(inner, ask(steady, 2, "next")), (0, 0, 2))


@pytest.mark.parametrize("mode", ["between_tokens", "abort_and_resume"])
async def test_an_abort_is_an_abort_in_every_mode(inner, mode):
    steady = SteadyEngine(inner, mode)
    task = ask(steady)
    await inner.tick(3)
    await steady.abort("r")
    got = await finish(inner, task)
    assert got.finish == "abort"
    whole(got, (0, 0, 2))


async def test_an_abort_reaches_a_request_that_waits_for_an_update(inner):
    steady = SteadyEngine(inner, "drain")
    task = ask(steady)
    await inner.tick(3)
    update = asyncio.create_task(steady.load_weights(1, PATH))
    await asyncio.sleep(0)
    late = ask(steady, request="late")
    await asyncio.sleep(0)
    await steady.abort("late")
    got = await late
    assert (got.ids, got.finish) == ([], "abort")
    await finish(inner, task)
    await update


async def test_what_was_sampled_outlives_the_engine(inner):
    steady = SteadyEngine(inner)
    task = ask(steady)
    await inner.tick(3)
    await inner.die()
    await asyncio.sleep(0.01)
    assert not task.done()
    await inner.revive(version=4)
    whole(await finish(inner, task), (0, 0, 2), (4, 2, 6))


async def test_an_abort_ends_the_wait_for_a_dead_engine(inner):
    steady = SteadyEngine(inner)
    task = ask(steady)
    await inner.tick(3)
    await inner.die()
    await steady.abort("r")
    got = await asyncio.wait_for(task, 1)
    assert (got.finish, got.ids) == ("abort", [3, 4])


@pytest.mark.parametrize(("stop_ids", "tokens", "finish_"), [((4,), 6, "stop"), ((), 2, "length")])
async def test_an_engine_that_died_right_before_it_told_the_end(inner, stop_ids, tokens, finish_):
    """The last token is there and the end is not: nothing more may be sampled."""

    async def dies_at_the_end(request):
        async for piece in Steered.stream(inner, request):
            yield Piece(piece.ids, piece.logprobs, piece.versions)
            if piece.finish:
                inner.back.set()
                raise EngineDownError("died")

    inner.stream = dies_at_the_end
    steady = SteadyEngine(inner)
    got = await finish(inner, ask(steady, tokens, stop_ids=stop_ids))
    assert (got.ids, got.finish) == ([3, 4], finish_)
    assert len(inner.requests) == 1


async def test_an_update_begins_again_when_the_engine_dies_meanwhile(inner):
    steady = SteadyEngine(inner)
    downs = 2

    async def load(version, path):
        nonlocal downs
        if downs:
            downs -= 1
            raise EngineDownError("died")
        inner.version = version

    inner.load_weights = load
    await steady.load_weights(3, PATH)
    assert inner.version == 3


async def test_an_update_runs_to_its_end_when_nobody_waits_for_it(inner):
    steady = SteadyEngine(inner, "drain")
    task = ask(steady)
    await inner.tick(2)
    update = asyncio.create_task(steady.load_weights(1, PATH))
    await asyncio.sleep(0)
    update.cancel()
    await finish(inner, task)
    await asyncio.sleep(0.01)
    assert inner.version == 1
    whole(await finish(inner, ask(steady, 2, "next")), (1, 0, 2))


async def test_a_paused_engine_takes_weights_also_in_drain(inner):
    inner.pause = inner.resume = lambda: asyncio.sleep(0)
    steady = SteadyEngine(inner, "drain")
    task = ask(steady)
    await inner.tick(2)
    await steady.pause()
    await asyncio.wait_for(steady.load_weights(1, PATH), 1)
    await steady.resume()
    whole(await finish(inner, task), (0, 0, 1), (1, 1, 6))


async def test_an_engine_that_never_gives_a_token_is_an_error_and_no_hot_loop(inner, monkeypatch):
    monkeypatch.setattr("actors.engines.steady._PAUSE_S", 0.001)
    asked = 0

    async def down(request):
        nonlocal asked
        asked += 1
        raise EngineDownError("nobody there")
        yield

    inner.stream = down
    with pytest.raises(EngineDownError, match="nobody there"):
        await SteadyEngine(inner).generate(Generate([1], 4))
    assert asked == 5


async def test_a_cancelled_caller_frees_an_update_that_waits_for_it(inner):
    steady = SteadyEngine(inner, "drain")
    task = ask(steady)
    await inner.tick(2)
    update = asyncio.create_task(steady.load_weights(1, PATH))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(update, 1)
    assert inner.version == 1


async def test_many_requests_and_updates_lose_and_repeat_nothing(inner):
    steady = SteadyEngine(inner, "abort_and_resume")
    tasks = [ask(steady, 5 + i % 7, f"r{i}") for i in range(40)]
    for version in range(1, 9):
        await inner.tick()
        await steady.load_weights(version, PATH)
    for i, task in enumerate(tasks):
        got = await finish(inner, task)
        assert got.ids == list(range(3, 8 + i % 7))
        assert got.versions[0].start == 0
        assert got.versions[-1].end == len(got.ids)
        for before, after in itertools.pairwise(got.versions):
            assert (before.end, before.version < after.version) == (after.start, True)
