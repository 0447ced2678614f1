"""The real SGLang server on the CPU with a tiny Qwen3 model, as an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from sglang_server import launch
from tiny_models import greedy, logprobs_of, make

from actors.engines import weights
from actors.engines.base import EngineDownError, Generate, joined
from actors.engines.sglang import SGLangEngine
from actors.engines.steady import SteadyEngine
from trees.record import VersionSpan

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("sglang"),
]
PROMPT = list(range(20))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return folder, {version: make("qwen3", folder / str(version), seed=version) for version in range(3)}


@pytest.fixture(scope="module")
def published(models, tmp_path_factory):
    """Versions 1 and 2 as the learner publishes them."""
    folder = tmp_path_factory.mktemp("weights")
    return {v: weights.publish(models[1][v].state_dict(), folder, v) for v in (1, 2)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models, tmp_path_factory):
    own = SGLangEngine(launch(models[0] / "0", tmp_path_factory.mktemp("log") / "sglang.log"))
    await own.ready()
    yield own
    await own.close()


def exact(model, prompt, got, temperature=1.0, atol=1e-3):
    expected = logprobs_of(model, prompt, got.ids, temperature)
    torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=atol, rtol=0)


async def version_of(engine):
    return (await engine.generate(Generate(PROMPT, max_tokens=1))).versions[0].version


async def begun(engine, request, tokens):
    """A request under way that has got so many tokens; the task that collects the rest, and what has come so far."""
    pieces = []
    there = asyncio.Event()

    async def collect():
        async for piece in engine.stream(request):
            pieces.append(piece)
            if sum(len(p.ids) for p in pieces) >= tokens:
                there.set()
        return joined(pieces)

    task = asyncio.create_task(collect())
    await asyncio.wait_for(there.wait(), 60)
    return task, pieces


async def more(engine, tokens):
    """Return when the engine has got so many tokens more."""
    aim = (await engine.stats()).decode_tokens + tokens
    for _ in range(3000):
        if (await engine.stats()).decode_tokens >= aim:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"fewer than {tokens} tokens in 30 s")


async def test_generates_with_exact_logprobs(engine, models):
    model = models[1][await version_of(engine)]
    for temperature in (1.0, 0.7, 0.0):
        got = await engine.generate(Generate(PROMPT, max_tokens=16, temperature=temperature))
        assert (len(got.ids), got.finish) == (16, "length")
        exact(model, PROMPT, got, temperature)
    assert got.ids == greedy(model, PROMPT, 16)


async def test_stops_at_a_stop_id_and_keeps_it(engine, models):
    model = models[1][await version_of(engine)]
    ahead = greedy(model, PROMPT, 8)
    got = await engine.generate(Generate(PROMPT, max_tokens=16, temperature=0.0, stop_ids=(ahead[5],)))
    end = ahead.index(ahead[5]) + 1
    assert (got.ids, got.finish) == (ahead[:end], "stop")


async def test_a_stream_is_what_generate_gives(engine):
    request = Generate(PROMPT, max_tokens=40, temperature=0.0)
    pieces = [piece async for piece in engine.stream(request)]
    assert len(pieces) > 2
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert joined(pieces).ids == (await engine.generate(request)).ids


async def test_a_second_turn_finds_its_prefix(engine):
    first = await engine.generate(Generate(list(range(100, 150)), max_tokens=20))
    turn = [*range(100, 150), *first.ids, 7, 8, 9]
    second = await engine.generate(Generate(turn, max_tokens=4))
    assert second.cached_tokens >= 50 + len(first.ids) - 1


async def test_an_abort_gives_what_was_sampled_and_hits_nobody_else(engine, models):
    long = Generate(PROMPT, max_tokens=480, request="a1")
    one, _ = await begun(engine, long, 10)
    other, _ = await begun(engine, Generate(PROMPT, max_tokens=60, request="a11"), 1)
    await engine.abort("a1")
    cut = await one
    assert cut.finish == "abort"
    assert 10 <= len(cut.ids) < 480
    exact(models[1][await version_of(engine)], PROMPT, cut)
    assert (await other).finish == "length"


async def test_leaving_a_stream_ends_it_in_the_server(engine):
    async with aclosing(engine.stream(Generate(PROMPT, max_tokens=480))) as stream:
        await anext(stream)
    assert (await engine.stats()).running == 0


async def test_pause_and_resume(engine):
    task, pieces = await begun(engine, Generate(PROMPT, max_tokens=480), 10)
    await engine.pause()
    await asyncio.sleep(0.3)
    held = len(pieces)
    await asyncio.sleep(0.7)
    assert len(pieces) == held
    await engine.resume()
    assert len((await task).ids) == 480


@pytest.mark.parametrize("transport", ["disk", "tensor"])
async def test_weights_change_between_tokens(engine, models, published, transport):
    engine._transport = transport
    old = await version_of(engine)
    new = 2 if old == 1 else 1
    running = asyncio.create_task(engine.generate(Generate(PROMPT, max_tokens=450)))
    await more(engine, 16)
    await engine.load_weights(new, published[new])
    got = await running
    assert [span.version for span in got.versions] == [old, new]
    change = got.versions[0].end
    assert got.versions == (VersionSpan(old, 0, change), VersionSpan(new, change, 450))
    expected = [logprobs_of(models[1][v], PROMPT, got.ids) for v in (old, new)]
    whole = torch.cat([expected[0][:change], expected[1][change:]])
    torch.testing.assert_close(torch.tensor(got.logprobs), whole, atol=1e-3, rtol=0)
    assert await version_of(engine) == new


async def test_torn_and_foreign_weights_leave_the_old_ones_serving(engine, models, published, tmp_path):
    old = await version_of(engine)
    torn = tmp_path / "torn"
    torn.mkdir()
    data = (published[1] / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    other = make("llama", tmp_path / "llama", seed=1)
    with pytest.raises((ValueError, FileNotFoundError)):
        await engine.load_weights(8, tmp_path / "nothing")
    for bad in (torn, weights.publish(other.state_dict(), tmp_path / "foreign", 9)):
        with pytest.raises(ValueError, match=r"broken file|do not fit"):
            await engine.load_weights(9, bad)
        got = await engine.generate(Generate(PROMPT, max_tokens=8))
        assert [span.version for span in got.versions] == [old]
        exact(models[1][old], PROMPT, got)


@pytest.mark.parametrize("ids", [[], [300], [-1], [1] * 512])
async def test_what_would_end_the_server_is_refused(engine, ids):
    with pytest.raises(ValueError, match="expected"):
        await engine.generate(Generate(ids, max_tokens=4))
    assert (await engine.health()).pid


async def test_the_context_is_used_to_its_end(engine):
    got = await engine.generate(Generate([1] * 500, max_tokens=100))
    assert (len(got.ids), got.finish) == (12, "length")


@pytest.mark.parametrize("mode", ["drain", "abort_and_resume"])
async def test_other_ways_to_update(engine, published, mode):
    steady = SteadyEngine(engine, mode)
    old = await version_of(engine)
    new = 2 if old == 1 else 1
    running = [asyncio.create_task(steady.generate(Generate(PROMPT, 400, request=f"{mode}{i}"))) for i in range(3)]
    await more(engine, 24)
    await steady.load_weights(new, published[new])
    late = await steady.generate(Generate(PROMPT, 3))
    for got in await asyncio.gather(*running):
        assert (len(got.ids), got.finish) == (400, "length")
        assert [span.version for span in got.versions] == ([old] if mode == "drain" else [old, new])
    assert [span.version for span in late.versions] == [new]


@pytest.mark.parametrize("size", [505, 508, 511])
async def test_prompts_up_to_the_end_of_the_context(engine, size):
    got = await engine.generate(Generate([1] * size, max_tokens=100))
    assert (len(got.ids), got.finish) == (512 - size, "length")


async def test_an_update_that_nobody_waits_for_is_whole(engine, models, published):
    for transport in ("disk", "tensor"):
        engine._transport = transport
        old = await version_of(engine)
        new = 2 if old == 1 else 1
        update = asyncio.create_task(engine.load_weights(new, published[new]))
        await asyncio.sleep(0.02)
        update.cancel()
        await engine.load_weights(new, published[new])
        got = await engine.generate(Generate(PROMPT, max_tokens=8))
        assert [span.version for span in got.versions] == [new]
        exact(models[1][new], PROMPT, got)
    engine._transport = "disk"


async def test_a_foreign_server_is_looked_at_and_brought_to_the_weights(engine, models, published, tmp_path):
    known = launch(models[0] / "0", tmp_path / "log")
    other = SGLangEngine(known, url=engine._server.url, version=2, weights=published[2])
    got = await other.generate(Generate(PROMPT, max_tokens=6))
    assert [span.version for span in got.versions] == [2]
    exact(models[1][2], PROMPT, got)
    await other.close()
    nowhere = SGLangEngine(known, url="http://127.0.0.1:9")
    with pytest.raises(EngineDownError):
        await SteadyEngine(nowhere).generate(Generate(PROMPT, max_tokens=6))
    await nowhere.close()


async def test_altered_weights_are_refused_also_at_a_restart(engine, models, published):
    """And while it restarts, questions and aborts are answered at once."""
    await engine.load_weights(2, published[2])
    altered = weights.publish(models[1][1].state_dict(), published[2].parent, 3)
    file = altered / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    steady = SteadyEngine(engine)
    running = asyncio.create_task(steady.generate(Generate(PROMPT, max_tokens=480, request="gone")))
    await more(engine, 16)
    os.kill(psutil.Process((await engine.health()).pid).children()[0].pid, signal.SIGKILL)
    await asyncio.sleep(2)
    with pytest.raises(EngineDownError):
        await asyncio.wait_for(engine.health(), 2)
    await steady.abort("gone")
    cut = await asyncio.wait_for(running, 2)
    assert cut.finish == "abort"
    assert len(cut.ids) >= 8
    got = await asyncio.wait_for(steady.generate(Generate(PROMPT, max_tokens=6)), 300)
    assert [span.version for span in got.versions] == [2]
    exact(models[1][2], PROMPT, got)


async def test_a_killed_server_comes_back_and_the_request_goes_on(engine, models, published):
    """Last, since it takes the time of a start. The tokens that had come are kept, under the version that they had."""
    weights.publish(models[1][2].state_dict(), published[2].parent, 3)
    steady = SteadyEngine(engine)
    old = 1
    await engine.load_weights(old, published[old])
    running = asyncio.create_task(steady.generate(Generate(PROMPT, max_tokens=480, request="k")))
    await more(engine, 16)
    reaper = psutil.Process((await engine.health()).pid)
    processes = reaper.children(recursive=True)
    os.kill(reaper.children()[0].pid, signal.SIGKILL)
    got = await asyncio.wait_for(running, 400)
    assert (len(got.ids), got.finish) == (480, "length")
    # It was started with the model of version 0, and brought to the newest that was published.
    last = got.versions[-1].version
    assert got.versions[0].version == old
    for span in got.versions:
        model = models[1][min(span.version, 2)]
        expected = logprobs_of(model, PROMPT, got.ids)[span.start : span.end]
        torch.testing.assert_close(torch.tensor(got.logprobs[span.start : span.end]), expected, atol=1e-3, rtol=0)
    assert last == 3
    stats = await steady.stats()
    assert (stats.extra["server_restarts"] >= 1, stats.extra["engine_down"]) == (True, 1)
    assert not any(process.is_running() for process in processes)


async def test_a_closed_engine_answers_nobody(models, tmp_path):
    engine = SGLangEngine(launch(models[0] / "0", tmp_path / "log"))
    waiting = asyncio.create_task(engine.generate(Generate(PROMPT, max_tokens=4)))
    await asyncio.sleep(1)
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(waiting, 5)


async def test_a_log_that_cannot_be_written_is_told(models, tmp_path):
    engine = SGLangEngine(launch(models[0] / "0", tmp_path))
    with pytest.raises(RuntimeError, match=r"did not come up.*directory"):
        await asyncio.wait_for(engine.ready(), 10)
    await engine.close()


async def test_a_server_that_cannot_start_says_why(models, tmp_path: Path):
    wrong = launch(models[0] / "0", tmp_path / "log", dtype="int5")
    engine = SGLangEngine(wrong)
    with pytest.raises(RuntimeError, match=r"did not come up.*int5|invalid choice"):
        await engine.ready()
    assert not engine.alive
    await engine.close()
