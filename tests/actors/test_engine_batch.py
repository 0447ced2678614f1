"""Random schedules of the batch, checked after every step and, at the end, against the plain forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, logprobs_of, make
from transformers import AutoModelForCausalLM

from actors.engines.base import Generate, Generated
from actors.engines.batch import Batch, Running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path):
    torch.set_num_threads(1)
    return [make("qwen3", folder / str(version), seed=version) for version in range(2)]


def invariants(batch: Batch) -> None:
    slots, used = batch.slots, batch.slots.used
    pending = slots.known[:used] - slots.length[:used]
    assert 0 <= batch.decoding <= batch.running <= used <= batch.capacity
    assert (pending[: batch.decoding] == 1).all()
    assert (pending[batch.decoding : batch.running] >= 1).all()
    assert (pending[batch.running :] == 0).all()
    for row, entry in enumerate(batch.rows):
        assert (entry is not None) == (row < batch.running)
        if entry is not None:
            assert entry.row == row
            held = slots.tokens[row, : slots.known[row]].tolist()
            assert held == [*entry.prompt.tolist(), *entry.ids]
            assert batch.temperature[row] == np.float32(entry.request.temperature)


operation = st.one_of(
    st.tuples(st.just("new"), st.integers(0, 3), st.integers(1, 40), st.integers(1, 12)),
    st.tuples(st.just("extend"), st.integers(0, 99), st.integers(1, 20), st.integers(1, 12)),
    st.tuples(st.just("fork"), st.integers(0, 99), st.integers(1, 60), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 99), st.just(0), st.just(0)),
    st.tuples(st.just("load"), st.integers(0, 1), st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 8), st.just(0), st.just(0)),
)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(st.lists(operation, min_size=5, max_size=40), st.integers(1, 5), st.sampled_from([8, 24, 2048]))
def test_any_schedule_samples_from_the_model(models, folder: Path, operations, slots: int, chunk: int):
    model = AutoModelForCausalLM.from_pretrained(folder / "0").eval().requires_grad_(False)
    weights = [m.state_dict() for m in models]
    stem = np.random.default_rng(0).integers(0, VOCABULARY, 200)
    done: list[tuple[Generate, Generated]] = []
    number = 0

    with torch.inference_mode():
        batch = Batch(model, version=0, slots=slots, max_len=96, chunk=chunk)

        def submit(prompt: list[int], max_tokens: int) -> None:
            nonlocal number
            number += 1
            prompt = prompt[:95]
            request = Generate(prompt, max_tokens, temperature=0.5 + number % 3, request=str(number))

            def deliver(got: Generated | Exception) -> None:
                assert isinstance(got, Generated)
                done.append((request, got))

            batch.add(Running(request, deliver, np.asarray(prompt, np.int32), np.random.default_rng(number)))

        for kind, a, b, c in operations:
            fresh = np.random.default_rng(number).integers(0, VOCABULARY, b).tolist()
            old, answer = done[a % len(done)] if done else (Generate([1], 1), Generated([], [], "stop", ()))
            if kind == "new":
                submit(stem[: a * 20].tolist() + fresh, c)
            elif kind == "extend":
                submit(old.ids + answer.ids + fresh, c)
            elif kind == "fork":
                submit(old.ids[:b] + fresh[:5], c)
            elif kind == "abort":
                batch.abort(lambda e, name=str(a % (number + 1)): e.request.request == name)
            elif kind == "load":
                batch.swap_weights(a, weights[a])
            else:
                for _ in range(a):
                    batch.step()
                    invariants(batch)
            invariants(batch)
        while batch.busy:
            batch.step()
            invariants(batch)

    assert len(done) == number
    for request, got in done:
        assert got.finish == "abort" or len(got.ids) == min(request.max_tokens, 96 - len(request.ids))
        for span in got.versions:
            expected = logprobs_of(models[span.version], request.ids, got.ids, request.temperature)
            given_ = torch.tensor(got.logprobs)
            part = slice(span.start, span.end)
            assert torch.allclose(given_[part], expected[part], atol=1e-4, rtol=0)


def test_memory_follows_use(models):
    with torch.inference_mode():
        batch = Batch(models[0], version=0, slots=512, max_len=1024, chunk=512)
        assert batch.slots.data.nbytes == 0
        prompt = np.arange(20, dtype=np.int32)
        batch.add(Running(Generate(prompt.tolist(), 2), lambda got: None, prompt, None))
        while batch.busy:
            batch.step()
    assert batch.slots.data.shape[2] == 8
    assert batch.slots.data.shape[4] == 64


def test_a_long_prompt_does_not_hold_up_the_rows_that_decode(models):
    """While a prompt of many chunks is prefilled, the other row gets a token in every step."""
    with torch.inference_mode():
        batch = Batch(models[0], version=0, slots=2, max_len=1024, chunk=16)
        short, long = np.arange(4, dtype=np.int32), np.arange(250, dtype=np.int32)
        quick = Running(Generate(short.tolist(), 100), lambda got: None, short, None)
        slow = Running(Generate(long.tolist(), 100), lambda got: None, long, None)
        batch.add(quick)
        batch.step()
        batch.add(slow)
        before = len(quick.ids)
        for _ in range(10):
            batch.step()
    assert len(quick.ids) == before + 10
    assert not slow.ids


def test_one_prefill_call_feeds_no_more_than_a_chunk(models):
    with torch.inference_mode():
        batch = Batch(models[0], version=0, slots=8, max_len=1024, chunk=64)
        for row in range(6):
            prompt = np.full(20, row, np.int32)
            batch.add(Running(Generate(prompt.tolist(), 100), lambda got: None, prompt, None))
        for calls in (1, 2):
            batch.step()
            assert batch.stats().prefill_tokens == 60 * calls
