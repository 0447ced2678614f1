"""The engine against the plain forward of the same model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, greedy, logprobs_of, make

from actors.engines import weights
from actors.engines.base import Generate, Generated
from actors.engines.transformers import TransformersEngine

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path):
    """Qwen3 under versions 0, 1 and 2, saved in ``folder/<version>``."""
    torch.set_num_threads(1)
    return {version: make("qwen3", folder / str(version), seed=version) for version in range(3)}


@pytest.fixture
async def engine(models, folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(folder / "0", slots=8, max_len=512)
    yield engine
    await engine.close()


def ids(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, size).tolist()


def check(models, prompt: list[int], got: Generated, temperature: float = 1.0) -> None:
    """Every log-probability is that of the version that its span names."""
    assert len(got.ids) == len(got.logprobs)
    assert [s.start for s in got.versions] == [0, *(s.end for s in got.versions[:-1])][: len(got.versions)]
    assert (got.versions[-1].end if got.versions else 0) == len(got.ids)
    for span in got.versions:
        expected = logprobs_of(models[span.version], prompt, got.ids, temperature)[span.start : span.end]
        given = torch.tensor(got.logprobs[span.start : span.end])
        assert torch.allclose(given, expected, atol=TOLERANCE, rtol=0), (given - expected).abs().max()


async def until(condition, engine: TransformersEngine) -> None:
    while not condition(await engine.stats()):
        pass


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_ragged_turns_with_reuse_equal_the_plain_forward(kind: str, tmp_path: Path):
    model = make(kind, tmp_path, seed=5)
    engine = TransformersEngine(tmp_path, slots=6, max_len=512, chunk=64)

    async def episode(i: int) -> None:
        prompt = ids(20, 0) + ids(5 + 17 * (i % 4), i)
        for turn in range(3):
            temperature = (1.0, 0.6, 1.7)[turn]
            got = await engine.generate(
                Generate(prompt, max_tokens=3 + (i * 5 + turn) % 11, temperature=temperature, top_p=0.95)
            )
            check({0: model}, prompt, got, temperature)
            assert got.finish == "length"
            prompt = prompt + got.ids + ids(1 + (i + turn) % 9, 100 * i + turn)

    await asyncio.gather(*(episode(i) for i in range(14)))
    stats = await engine.stats()
    assert stats.extra["requests"] == 42
    assert stats.cached_tokens > 0
    await engine.close()


async def test_greedy_equals_the_argmax_step_by_step(models, engine: TransformersEngine):
    prompts = [ids(4 + 3 * i, i) for i in range(5)]
    got = await asyncio.gather(
        *(engine.generate(Generate(p, max_tokens=12, temperature=0.0, top_p=0.5)) for p in prompts)
    )
    for prompt, one in zip(prompts, got, strict=True):
        assert one.ids == greedy(models[0], prompt, 12)
        check(models, prompt, one)


async def test_a_stop_id_ends_and_belongs_to_the_answer(models, engine: TransformersEngine):
    prompt = ids(9, 1)
    line = greedy(models[0], prompt, 8)
    stop = line[5]
    got = await engine.generate(Generate(prompt, max_tokens=8, temperature=0.0, stop_ids=(stop,)))
    assert got.ids == line[: line.index(stop) + 1]
    assert got.finish == "stop"
    check(models, prompt, got)


async def test_draws_of_a_seeded_request_do_not_depend_on_the_batch(engine: TransformersEngine):
    request = Generate(ids(10, 3), max_tokens=20, temperature=1.3, seed=11)
    alone = await engine.generate(request)
    crowd = [engine.generate(Generate(ids(6 + i, 50 + i), max_tokens=25)) for i in range(7)]
    among, *_ = await asyncio.gather(engine.generate(request), *crowd)
    other = await engine.generate(dataclasses.replace(request, seed=12))
    assert among.ids == alone.ids != other.ids
    assert await engine.generate(request) != alone, "the second run reuses the prefix"


async def test_the_next_turn_reuses_all_that_was_cached(engine: TransformersEngine):
    prompt = ids(30, 4)
    first = await engine.generate(Generate(prompt, max_tokens=7))
    again = prompt + first.ids + ids(5, 5)
    second = await engine.generate(Generate(again, max_tokens=1))
    assert (first.cached_tokens, second.cached_tokens) == (0, 36)
    assert (await engine.stats()).prefill_tokens == 30 + 6


async def test_a_group_prefills_its_prompt_once(models, engine: TransformersEngine):
    prompt = ids(40, 6)
    got = await asyncio.gather(*(engine.generate(Generate(prompt, max_tokens=4)) for _ in range(5)))
    assert sorted(g.cached_tokens for g in got) == [0, 39, 39, 39, 39]
    assert (await engine.stats()).prefill_tokens == 40 + 4
    for one in got:
        check(models, prompt, one)


async def test_a_fork_leaves_the_longer_prefix_in_place(engine: TransformersEngine):
    base, tail = ids(40, 7), ids(40, 8)
    await engine.generate(Generate(base + tail, max_tokens=1))
    fork = await engine.generate(Generate(base + ids(10, 9), max_tokens=1))
    again = await engine.generate(Generate(base + tail + [1], max_tokens=1))
    assert (fork.cached_tokens, again.cached_tokens) == (40, 80)


async def test_fewer_slots_than_requests(models, folder: Path):
    engine = TransformersEngine(folder / "0", slots=3, max_len=128)
    prompts = [ids(5 + i, 20 + i) for i in range(12)]
    got = await asyncio.gather(*(engine.generate(Generate(p, max_tokens=5)) for p in prompts))
    for prompt, one in zip(prompts, got, strict=True):
        check(models, prompt, one)
    assert (await engine.stats()).extra["evictions"] >= 9
    newest = await engine.generate(Generate(prompts[-1], max_tokens=1))
    oldest = await engine.generate(Generate(prompts[0], max_tokens=1))
    assert (newest.cached_tokens, oldest.cached_tokens) == (len(prompts[-1]) - 1, 0)
    await engine.close()


async def test_the_prefix_unused_for_longest_is_evicted(models, folder: Path):
    engine = TransformersEngine(folder / "0", slots=3, max_len=128)
    a, b, c, d = (ids(20, seed) for seed in range(4))

    async def cached(prompt: list[int]) -> int:
        return (await engine.generate(Generate(prompt, max_tokens=1))).cached_tokens

    assert [await cached(p) for p in (a, b, c, b, a, d)] == [0, 0, 0, 19, 19, 0]
    assert [await cached(p) for p in (b, a, d, c)] == [19, 19, 19, 0]
    await engine.close()


async def test_the_context_end_is_length(models, folder: Path):
    engine = TransformersEngine(folder / "0", slots=2, max_len=40)
    prompt = ids(33, 1)
    got = await engine.generate(Generate(prompt, max_tokens=100))
    assert (len(got.ids), got.finish) == (7, "length")
    check(models, prompt, got)
    assert len((await engine.generate(Generate(ids(39, 2), max_tokens=5))).ids) == 1
    await engine.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Generate(ids(512, 0), max_tokens=1), r"prompt of 512 tokens, expected 1 to 511"),
        (Generate([], max_tokens=1), r"prompt of 0 tokens"),
        (Generate([VOCABULARY], max_tokens=1), r"expected 0 to 299"),
        (Generate([-1], max_tokens=1), r"expected 0 to 299"),
        (Generate([1], max_tokens=0), r"max_tokens 0, expected at least 1"),
        (Generate([1], max_tokens=1, temperature=-1.0), r"expected a finite temperature"),
        (Generate([1], max_tokens=1, temperature=float("nan")), r"expected a finite temperature"),
        (Generate([1], max_tokens=1, top_p=0.0), r"0 < top_p <= 1"),
    ],
)
async def test_bad_requests_are_refused_at_once(engine: TransformersEngine, request_: Generate, message: str):
    with pytest.raises(ValueError, match=message):
        await engine.generate(request_)
    assert (await engine.stats()).extra.get("requests", 0) == 0


async def test_abort_returns_what_was_sampled(models, engine: TransformersEngine):
    prompt = ids(10, 1)
    task = asyncio.create_task(engine.generate(Generate(prompt, max_tokens=400, request="a")))
    other = asyncio.create_task(engine.generate(Generate(ids(8, 2), max_tokens=30)))
    await until(lambda s: s.decode_tokens > 5, engine)
    await engine.abort("a")
    got = await task
    assert got.finish == "abort"
    assert 0 < len(got.ids) < 400
    check(models, prompt, got)
    assert (await other).finish == "length"
    await engine.abort("never seen")


async def test_abort_of_a_waiting_request(folder: Path, models):
    engine = TransformersEngine(folder / "0", slots=1, max_len=512)
    first = asyncio.create_task(engine.generate(Generate(ids(4, 1), max_tokens=300, request="first")))
    second = asyncio.create_task(engine.generate(Generate(ids(4, 2), max_tokens=3, request="second")))
    await until(lambda s: s.running == 1 and s.waiting == 1, engine)
    await engine.abort("second")
    assert await second == Generated([], [], "abort", ())
    await engine.abort("first")
    assert (await first).finish == "abort"
    await engine.close()


async def test_cancelling_the_caller_frees_its_row(engine: TransformersEngine):
    task = asyncio.create_task(engine.generate(Generate(ids(10, 1), max_tokens=490)))
    await until(lambda s: s.running == 1, engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.decode_tokens < 490


async def test_weights_change_between_two_tokens(models, folder: Path, engine: TransformersEngine):
    prompts = [ids(10, 0) + ids(5 + 9 * i, i) for i in range(4)]
    tasks = [asyncio.create_task(engine.generate(Generate(p, max_tokens=300))) for p in prompts]
    for version in (1, 2, 1):
        before = (await engine.stats()).decode_tokens
        await until(lambda s, n=before + 40: s.decode_tokens > n, engine)
        await engine.load_weights(version, folder / str(version))
        assert (await engine.stats()).version == version
    for prompt, task in zip(prompts, tasks, strict=True):
        got = await task
        assert [span.version for span in got.versions] == [0, 1, 2, 1]
        check(models, prompt, got)
    extra = (await engine.stats()).extra
    assert (extra["weight_loads"], extra["weight_rollbacks"]) == (3, 1)
    assert extra["forgotten_tokens"] > 0
    assert extra["requests"] == 4


async def test_a_prefix_of_the_old_weights_is_not_used(models, folder: Path, engine: TransformersEngine):
    prompt = ids(30, 1)
    first = await engine.generate(Generate(prompt, max_tokens=5))
    await engine.load_weights(1, folder / "1")
    again = prompt + first.ids + ids(3, 2)
    second = await engine.generate(Generate(again, max_tokens=5))
    assert second.cached_tokens == 0
    assert [s.version for s in second.versions] == [1]
    check(models, again, second)


async def test_published_weights_load(models, tmp_path: Path, engine: TransformersEngine):
    path = weights.publish(models[2].state_dict(), tmp_path, 2)
    await engine.load_weights(2, path)
    prompt = ids(7, 1)
    check(models, prompt, await engine.generate(Generate(prompt, max_tokens=5)))


async def test_weights_that_do_not_fit_leave_the_old_ones(models, tmp_path: Path, engine: TransformersEngine):
    make("llama", tmp_path, seed=0)
    with pytest.raises(ValueError, match="The weights in use stay"):
        await engine.load_weights(9, tmp_path)
    with pytest.raises(FileNotFoundError):
        await engine.load_weights(9, tmp_path / "nothing")
    prompt = ids(7, 1)
    got = await engine.generate(Generate(prompt, max_tokens=5))
    assert [s.version for s in got.versions] == [0]
    check(models, prompt, got)


async def test_an_error_in_the_model_fails_the_running_and_the_loop_goes_on(models, folder: Path):
    engine = TransformersEngine(folder / "0", slots=2, max_len=512)
    trouble: list[Exception] = []

    def hook(module, args) -> None:
        if trouble:
            raise trouble.pop()

    engine.model.register_forward_pre_hook(hook)
    running = [asyncio.create_task(engine.generate(Generate(ids(5, i), max_tokens=300))) for i in range(2)]
    waiting = asyncio.create_task(engine.generate(Generate(ids(9, 9), max_tokens=6)))
    await until(lambda s: s.running == 2 and s.decode_tokens > 4, engine)
    trouble.append(MemoryError("no room"))
    for task in running:
        with pytest.raises(MemoryError, match="no room"):
            await task
    check(models, ids(9, 9), await waiting)
    assert (await engine.generate(Generate(ids(5, 0), max_tokens=2))).cached_tokens == 0
    await engine.close()


async def test_diverged_weights_are_an_error_and_can_be_replaced(models, folder: Path, tmp_path: Path):
    engine = TransformersEngine(folder / "0", slots=2, max_len=64)
    broken = models[0].state_dict() | {"model.norm.weight": torch.full((64,), torch.nan)}
    await engine.load_weights(1, weights.publish(broken, tmp_path, 1))
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="version 1"):
            await engine.generate(Generate([1, 2], max_tokens=2, temperature=temperature))
    await engine.load_weights(2, folder / "2")
    check(models, [1, 2], await engine.generate(Generate([1, 2], max_tokens=2)))
    await engine.close()


async def test_a_group_is_fed_once_after_a_weight_change(models, folder: Path, engine: TransformersEngine):
    prompt = ids(60, 1)
    tasks = [asyncio.create_task(engine.generate(Generate(prompt, max_tokens=200))) for _ in range(4)]
    await until(lambda s: s.decode_tokens > 40, engine)
    before = await engine.stats()
    await engine.load_weights(1, folder / "1")
    for task in tasks:
        got = await task
        assert [span.version for span in got.versions] == [0, 1]
        check(models, prompt, got)
    after = await engine.stats()
    assert after.cached_tokens - before.cached_tokens >= 3 * 60
    fed = after.prefill_tokens - before.prefill_tokens
    assert fed == after.extra["forgotten_tokens"] + 4 - (after.cached_tokens - before.cached_tokens)


@pytest.mark.parametrize("question", ["stats", "health", "pause"])
async def test_a_question_that_is_cancelled_disturbs_nobody(engine: TransformersEngine, question: str):
    running = [asyncio.create_task(engine.generate(Generate([1, 2, i], max_tokens=60))) for i in range(4)]
    for _ in range(20):
        asked = asyncio.create_task(getattr(engine, question)())
        await asyncio.sleep(0)
        asked.cancel()
        late = asyncio.create_task(engine.generate(Generate([9], max_tokens=2)))
        await asyncio.sleep(0)
    await engine.resume()
    assert {len(got.ids) for got in await asyncio.wait_for(asyncio.gather(*running), 30)} == {60}
    assert len((await asyncio.wait_for(late, 30)).ids) == 2


async def test_close_fails_what_is_open_and_refuses_what_comes(folder: Path, models):
    engine = TransformersEngine(folder / "0", slots=1, max_len=512)
    tasks = [asyncio.create_task(engine.generate(Generate(ids(4, i), max_tokens=400))) for i in range(2)]
    await until(lambda s: s.running == 1 and s.waiting == 1, engine)
    await engine.close()
    for task in tasks:
        with pytest.raises(RuntimeError, match="close"):
            await task
    with pytest.raises(RuntimeError, match="closed engine"):
        await engine.generate(Generate([1], max_tokens=1))
    await engine.close()


async def test_bfloat16_runs(folder: Path, models):
    engine = TransformersEngine(folder / "0", slots=2, max_len=64, dtype="bfloat16")
    got = await asyncio.gather(*(engine.generate(Generate(ids(4 + 9 * i, i), max_tokens=5)) for i in range(3)))
    assert all(len(g.ids) == 5 and np.isfinite(g.logprobs).all() for g in got)
    await engine.close()


def test_a_sliding_window_is_refused(tmp_path: Path):
    make("mistral-window", tmp_path, seed=0)
    with pytest.raises(ValueError, match="expected attention over the whole context"):
        TransformersEngine(tmp_path, max_len=64)


def test_more_length_than_the_model_has_is_refused(folder: Path, models):
    with pytest.raises(ValueError, match="expected at most the 1024 positions"):
        TransformersEngine(folder / "0", max_len=1025)
