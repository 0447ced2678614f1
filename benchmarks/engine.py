"""Tokens per second and time to first token of the engines, against what Transformers offers, in one run.

    python benchmarks/engine.py [--smoke]

A random model of the quickstart's shape serves 1, 8 and 32 sessions of two turns that all begin at once: first with
``generate``, for the rate, then others of the same lengths with ``stream``, for the time to the first token. The same
first turns go through ``model.generate`` one after the other, and through Transformers' own continuous batching at
once (a manager that is warm and kept). Each figure is the best of several tries, which take turns, so that a busy
machine hurts all alike; a time to the first token is the median over the sessions of a try.

Prefix reuse off: no two prompts for the embedded engine begin alike, SGLang is started with ``--disable-radix-cache``.
``prefill`` is the share of the second turn's prompts that was computed. Without a second prefill it is the share that
is new: the last token sampled before, whose keys and values nobody has yet, and what was added since. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from actors.engines.base import Engine, Generate, Generated, joined
from actors.engines.locate import interpreter
from actors.engines.sglang import SGLangEngine
from actors.engines.sglang_server import Launch
from actors.engines.transformers import TransformersEngine
from algos.tiny import build_model
from configs.schema import SGLangConfig

VOCABULARY = 603
SESSIONS = (1, 8, 32)
MOST = SESSIONS[-1]
SHARED, TAIL = 25, 12
"""Tokens with which all prompts of a turn begin, and those that come to a conversation before its second turn."""
MAX_LEN = 512


@dataclass(frozen=True)
class Load:
    sampled: int
    """Tokens in each turn."""
    tries: int
    sequential: int
    """Sessions that ``model.generate`` serves; its rate does not depend on their number."""


def prompts(sessions: int, seed: int, alike: bool = True) -> list[list[int]]:
    """Ragged prompts of 35 to 70 tokens. Others for each seed; ``alike`` ones have their beginning in common."""
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCABULARY, SHARED).tolist()
    made = [shared + random.integers(0, VOCABULARY, 10 + 5 * (i % 8)).tolist() for i in range(sessions)]
    return made if alike else [[first, *prompt[1:]] for first, prompt in enumerate(made)]


def next_prompt(prompt: list[int], answer: Generated, alike: bool) -> list[int]:
    tail = np.random.default_rng(len(prompt)).integers(0, VOCABULARY, TAIL).tolist()
    # Changed in its first token it has no beginning in common with what went before.
    return [prompt[0] if alike else VOCABULARY - 1 - prompt[0], *prompt[1:], *answer.ids, *tail]


@dataclass(frozen=True)
class Turn:
    """One turn of all sessions. ``first_ms``: median time to the first token; 0 where it was not measured."""

    rate: float
    first_ms: float
    prefill: float
    """Share of the prompts' tokens that was computed."""


Ask = Callable[[Generate], Awaitable[tuple[Generated, float]]]
"""Gives the answer, and the seconds to its first token."""


async def converse(engine: Engine, ask: Ask, first: list[list[int]], sampled: int, alike: bool) -> list[Turn]:
    turns, current = [], first
    for _ in range(2):
        before, began = await engine.stats(), time.perf_counter()
        answers = await asyncio.gather(
            *(ask(Generate(prompt, sampled, session=str(i))) for i, prompt in enumerate(current))
        )
        seconds, after = time.perf_counter() - began, await engine.stats()
        if (tokens := sum(len(answer.ids) for answer, _ in answers)) != len(current) * sampled:
            raise RuntimeError(f"got {tokens} tokens of {len(current)} sessions, expected {sampled} of each")
        share = (after.prefill_tokens - before.prefill_tokens) / sum(map(len, current))
        turns.append(Turn(tokens / seconds, 1e3 * statistics.median(wait for _, wait in answers), share))
        current = [next_prompt(p, answer, alike) for p, (answer, _) in zip(current, answers, strict=True)]
    return turns


async def measure(engine: Engine, sessions: int, load: Load, seed: int, alike: bool = True) -> list[Turn]:
    """Both turns: rates by ``generate``, times to first token by ``stream``."""

    async def whole(request: Generate) -> tuple[Generated, float]:
        return await engine.generate(request), 0.0

    async def streamed(request: Generate) -> tuple[Generated, float]:
        began, pieces, wait = time.perf_counter(), [], 0.0
        async for piece in engine.stream(request):
            wait = wait or time.perf_counter() - began
            pieces.append(piece)
        return joined(pieces), wait

    rates = await converse(engine, whole, prompts(sessions, seed, alike), load.sampled, alike)
    waits = await converse(engine, streamed, prompts(sessions, seed + 1, alike), load.sampled, alike)
    return [dataclasses.replace(rate, first_ms=wait.first_ms) for rate, wait in zip(rates, waits, strict=True)]


async def warm(engine: Engine, sessions: int) -> None:
    """Leaves no prefix that a measured turn could use."""
    await asyncio.gather(*(engine.generate(Generate([VOCABULARY // 2 + i] * 40, 16)) for i in range(sessions)))


def best(tries: Sequence[list[Turn]]) -> list[Turn]:
    """Of each turn the highest rate, the shortest time to the first token and the largest prefill."""
    return [
        Turn(max(t.rate for t in turn), min(t.first_ms for t in turn), max(t.prefill for t in turn))
        for turn in zip(*tries, strict=True)
    ]


async def run_embedded(folder: Path, sessions: int, load: Load, seed: int, threads: int, alike: bool) -> list[Turn]:
    engine = TransformersEngine(folder, slots=sessions + 8, max_len=MAX_LEN, threads=threads)
    try:
        await warm(engine, sessions)
        return await measure(engine, sessions, load, seed, alike)
    finally:
        await engine.close()


async def run_sglang(python: Path, folder: Path, load: Load, reuse: bool) -> dict[int, list[Turn]]:
    """Both turns by the number of sessions, from one start."""
    args = ("--max-total-tokens", "32768", *(() if reuse else ("--disable-radix-cache",)))
    engine = SGLangEngine(Launch(python, folder, folder / "sglang.log", max_len=MAX_LEN, args=args))
    try:
        await engine.ready()
        await warm(engine, MOST)
        tries: dict[int, list[list[Turn]]] = {}
        for nth in range(load.tries):
            for sessions in SESSIONS:
                seed = 1000 * nth + 10 * sessions
                tries.setdefault(sessions, []).append(await measure(engine, sessions, load, seed))
        return {sessions: best(found) for sessions, found in tries.items()}
    finally:
        await engine.close()


async def decode_step_ms(folder: Path, rows: int = 64, steps: int = 40) -> float:
    """Milliseconds of one decode step of ``rows`` rows at a context of about 100 tokens."""
    engine = TransformersEngine(folder, slots=rows, max_len=MAX_LEN)
    random = np.random.default_rng(1)
    asked = random.integers(0, VOCABULARY, (rows, 60)).tolist()

    async def seconds(tokens: int) -> float:
        before = await engine.stats()
        await asyncio.gather(*(engine.generate(Generate(p, tokens)) for p in asked))
        return (await engine.stats()).busy_s - before.busy_s

    await seconds(60)
    least = min([await seconds(60) - await seconds(60 - steps) for _ in range(3)])
    await engine.close()
    return least / steps * 1e3


def run_sequential(folder: Path, load: Load) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=load.sampled, pad_token_id=0)
    asked = prompts(MOST, 0)[: load.sequential]

    def answer(prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, generation_config=config).shape[1] - len(prompt)

    answer(asked[0])
    began = time.perf_counter()
    tokens = sum(answer(prompt) for prompt in asked)
    return tokens / (time.perf_counter() - began)


def run_continuous(folder: Path, load: Load) -> float | None:
    """None when Transformers' continuous batching does not give every token on this machine."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=load.sampled, eos_token_id=-1, pad_token_id=0)
    asked = prompts(MOST, 0)
    model.generate_batch(asked[:2], generation_config=config, persistent_manager=True)
    began = time.perf_counter()
    answers = model.generate_batch(asked, generation_config=config, persistent_manager=True)
    seconds = time.perf_counter() - began
    model.destroy_cached_continuous_batching_manager()
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    return tokens / seconds if tokens == MOST * load.sampled else None


@dataclass(frozen=True)
class Row:
    """A line of the table; ``turns`` are both turns."""

    engine: str
    reuse: bool
    sessions: int
    turns: list[Turn]


@dataclass(frozen=True)
class Found:
    rows: list[Row]
    sequential: float
    continuous: float | None
    step_ms: float

    def of(self, engine: str) -> list[Turn]:
        """Both turns of the largest crowd, with prefix reuse."""
        return next(row.turns for row in self.rows if (row.engine, row.reuse, row.sessions) == (engine, True, MOST))


def embedded(threads: int) -> str:
    return "transformers" if threads == 1 else f"transformers x{threads}"


def run_all(folder: Path, load: Load, smoke: bool, python: Path | None) -> Found:
    settings = [(threads, reuse) for threads in ((1,) if smoke else (1, 2)) for reuse in (True, False)]
    tries: dict[tuple[int, bool, int], list[list[Turn]]] = {}
    sequentials = []
    for nth in range(load.tries):
        sequentials.append(run_sequential(folder, load))
        for threads, reuse in settings:
            for sessions in SESSIONS:
                turns = asyncio.run(run_embedded(folder, sessions, load, 1000 * nth, threads, reuse))
                tries.setdefault((threads, reuse, sessions), []).append(turns)
    rows = [Row(embedded(threads), reuse, n, best(found)) for (threads, reuse, n), found in tries.items()]
    step_ms, continuous = asyncio.run(decode_step_ms(folder)), run_continuous(folder, load)
    if python is not None:
        for reuse in (True, False):
            found = asyncio.run(run_sglang(python, folder, load, reuse))
            rows += [Row("sglang", reuse, sessions, turns) for sessions, turns in found.items()]
    return Found(rows, max(sequentials), continuous, step_ms)


def new_share(load: Load) -> float:
    """Of the second turn's prompts of the largest crowd."""
    whole = sum(len(prompt) + load.sampled + TAIL for prompt in prompts(MOST, 0))
    return (TAIL + 1) * MOST / whole


def show(console: Console, found: Found, load: Load) -> None:
    table = Table(title=f"two turns of {load.sampled} sampled tokens a session, all at once (x2: two threads)")
    table.add_column("\nengine")
    for column in ("\nreuse", "at\nonce", "tok/s\nturn 1", "first\nms", "tok/s\nturn 2", "first\nms", "pre-\nfill"):
        table.add_column(column, justify="right")
    for row in found.rows:
        first, second = row.turns
        cells = [f"{first.rate:,.0f}", f"{first.first_ms:.0f}", f"{second.rate:,.0f}", f"{second.first_ms:.0f}"]
        cells = ["on" if row.reuse else "off", str(row.sessions), *cells, f"{second.prefill:.1%}"]
        table.add_row(row.engine, *cells, end_section=row.sessions == MOST)
    console.print(table)
    rate = found.of(embedded(1))[0].rate
    against = Table(title=f"{MOST} sessions, first turn: {rate:,.0f} tokens/s")
    for column in ("", "tokens/s", "the engine is faster"):
        against.add_column(column, justify="right" if column else "left")
    others = {"model.generate, one by one": found.sequential, "Transformers continuous batching": found.continuous}
    for name, other in others.items():
        cells = ["does not run here", ""] if other is None else [f"{other:,.0f}", f"{rate / other:.1f}x"]
        against.add_row(name, *cells)
    console.print(against)
    console.print(f"decode step, 64 rows: {found.step_ms:.2f} ms")
    console.print(f"second turn: {new_share(load):.1%} of the prompts is new")


def figures(found: Found, load: Load) -> dict[str, Any]:
    first, second = found.of(embedded(1))
    sglang = found.of("sglang") if any(row.engine == "sglang" for row in found.rows) else None
    return {
        "transformers_tok_s_32": round(first.rate, 1),
        "transformers_speedup_32": round(first.rate / found.sequential, 2),
        "generate_tok_s": round(found.sequential, 1),
        "continuous_tok_s_32": found.continuous and round(found.continuous, 1),
        "speedup_over_continuous_32": found.continuous and round(first.rate / found.continuous, 2),
        "second_turn_prefill_share": round(second.prefill, 4),
        "second_turn_new_share": round(new_share(load), 4),
        "decode_step_ms_64": round(found.step_ms, 3),
        "sglang_tok_s_32": sglang and round(sglang[0].rate, 1),
        "sglang_second_turn_prefill_share": sglang and round(sglang[1].prefill, 4),
        "rows": [_flat(row) for row in found.rows],
    }


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {"engine": row.engine, "reuse": row.reuse, "sessions": row.sessions}
    for number, turn in enumerate(row.turns, 1):
        flat[f"tok_s_turn{number}"] = round(turn.rate, 1)
        flat[f"first_ms_turn{number}"] = round(turn.first_ms, 1)
        flat[f"prefill_turn{number}"] = round(turn.prefill, 4)
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="short answers, one try, no SGLang")
    smoke = parser.parse_args().smoke
    load = Load(16, 1, 3) if smoke else Load(64, 3, 8)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    python, note = None, None
    if smoke:
        note = "without SGLang, whose start takes longer than a smoke run may"
    else:
        try:
            python = interpreter(SGLangConfig())
        except FileNotFoundError as error:
            note = f"without SGLang: {error}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(VOCABULARY, seed=0).save_pretrained(folder)
        found = run_all(folder, load, smoke, python)
    console = Console()
    show(console, found, load)
    if note:
        console.print(note)
    print(json.dumps({"benchmark": "engine", "smoke": smoke, **figures(found, load), "note": note}))


if __name__ == "__main__":
    main()
