"""What it saves to compute shared prefixes once: seconds and memory of forward and backward, paths against trees.

    python benchmarks/tree_attention.py                 writes results/tree_attention.json
    python benchmarks/tree_attention.py --divide 4      all lengths divided by four: a tenth of the time
    python benchmarks/tree_attention.py --smoke         divided by sixteen, to see that it works
    python benchmarks/tree_attention.py --crossover     only where the tree begins to pay, by tokens spared
    python benchmarks/tree_attention.py --device cuda   bfloat16, FlexAttention against SDPA, a longer group

Group: eight episodes that share a prompt. Session: one with three retries, two sub-agents, a compaction and what
follows it, all that was sampled trained. Both are computed by the learner's own micro-batches under the same bound of
tokens, once as whole paths in padded rows and once as trees, in turns; of each side the fastest round counts. On a CPU
with one thread, seconds are those of the processor, so that other work on the machine does not count.

The ideal ratio is that of floating-point operations: of the model's matrices by tokens, of attention by pairs of tokens
that see each other, of the head by tokens scored. Gradients are of the mean of all scored tokens' weighted
log-probabilities, in float32 on a CPU. Peak memory is what a fresh process grew by, over what it held before the
forward pass: for either side all in one pass, and the paths also under the bound of tokens that the tree needs.

The model has random weights and the form of Qwen3. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from algos import path_attention
from algos.batching import MicroBatch, Sample, padded_batches, sample_of, tree_batches
from trees.build import TreeBuilder
from trees.linearise import linearise
from trees.packing import pack
from trees.record import CallRecord, Kind, VersionSpan

RESULTS = Path(__file__).with_name("results") / "tree_attention.json"
SIDES = ("paths", "tree")
WITHOUT_BOUND = 10**9
SHAPES = {
    "cpu": Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "cuda": Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}


LENGTHS = {"cpu": (8192, 1024), "cuda": (20_000, 4000)}
"""Tokens of a group's prompt, and of each episode's own."""
SMOKE = 16
EPISODES = 8
CROSSOVER_TOKENS = (256, 1024, 2048)
CROSSOVER_SHARED = (0.01, 0.02, 0.04, 0.07, 0.12)
"""Shares of a tree's tokens that are of the prompt."""


class Session:
    """Calls with random tokens, put together by the tree builder."""

    def __init__(self, seed: int, vocabulary: int, divisor: int) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary, self._divisor = vocabulary, divisor
        self._builder, self._count = TreeBuilder("s"), 0

    def text(self, size: int) -> np.ndarray:
        """So many tokens, divided."""
        return self._random.integers(0, self._vocabulary, max(1, size // self._divisor)).astype(np.int32)

    def call(self, parent: str | None, prompt: np.ndarray, sampled: np.ndarray, kind: Kind = "main") -> str:
        name = f"c{self._count}"
        self._builder.add(
            CallRecord(
                session="s",
                call=name,
                parent=parent,
                ordinal=self._count,
                prompt_ids=prompt,
                sampled_ids=sampled,
                logprobs=np.full(len(sampled), -1.0, np.float32),
                versions=(VersionSpan(0, 0, len(sampled)),),
                temperature=1.0,
                finish="stop",
                kind=kind,
            )
        )
        self._count += 1
        return name

    def turns(self, parent: str | None, prompt: np.ndarray, count: int, kind: Kind = "main") -> list[str]:
        names = [self.call(parent, prompt, self.text(120), kind)]
        for _ in range(count - 1):
            names.append(self.call(names[-1], self.text(200), self.text(120), kind))
        return names

    def samples(self, device: str) -> list[Sample]:
        found = [sample_of(path, 1.0, device) for path in linearise(self._builder.tree())]
        return [sample for sample in found if sample is not None]


def group_of(device: str, vocabulary: int, divisor: int, lengths: tuple[int, int] | None = None) -> list[Sample]:
    session = Session(0, vocabulary, divisor)
    prompt, own = lengths or LENGTHS[device]
    shared = session.text(prompt)
    for _ in range(EPISODES):
        session.call(None, shared, session.text(own))
    return session.samples(device)


def session_of(device: str, vocabulary: int, divisor: int) -> list[Sample]:
    session = Session(1, vocabulary, divisor)
    system = session.text(2000)
    first = session.turns(None, np.concatenate([system, session.text(300)]), 4)
    session.call(first[1], session.text(200), session.text(120))
    agent = session.text(1500)
    for _ in range(2):
        session.turns(None, np.concatenate([agent, session.text(200)]), 5, "subagent")
    second = session.turns(first[-1], session.text(600), 8)
    for at in (2, 5):
        session.call(second[at], session.text(200), session.text(120))
    summary = session.text(400)
    session.call(second[-1], session.text(100), summary, "compaction")
    session.turns(None, np.concatenate([system, session.text(100), summary]), 6, "after-compaction")
    return session.samples(device)


WORKLOADS = {"group": group_of, "session": session_of}


def batches_of(side: str, samples: Sequence[Sample], max_tokens: int) -> Sequence[MicroBatch]:
    return tree_batches(samples, max_tokens) if side == "tree" else padded_batches(samples, max_tokens)


def forward_backward(model: PreTrainedModel, batches: Sequence[MicroBatch]) -> None:
    """Gradient of the mean of the scored tokens' log-probabilities, each weighted by its place in its sample."""
    scored = sum(len(sample.targets) for batch in batches for sample in batch.samples)
    for batch in batches:
        weight = torch.cat([torch.linspace(-1, 1, len(s.targets), device=s.ids.device) for s in batch.samples])
        (batch.logprobs_and_entropies(model).logprobs * weight).sum().div(scored).backward()


@dataclass(frozen=True)
class Work:
    """What a side has to compute, padding left out."""

    tokens: int
    pairs: int
    scored: int

    @classmethod
    def of(cls, side: str, samples: Sequence[Sample]) -> Work:
        scored = sum(len(sample.targets) for sample in samples)
        lengths = [len(sample.ids) for sample in samples]
        if side == "paths":
            return cls(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), scored)
        packs = pack([sample.ids.cpu().numpy() for sample in samples], WITHOUT_BOUND)
        return cls(sum(map(len, packs)), sum(path_attention.layout_of(each).pairs for each in packs), scored)

    def operations(self, shape: Qwen3Config) -> int:
        """Floating-point operations of a forward pass; a backward pass takes twice as many."""
        wide, narrow = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        layer = shape.hidden_size * (2 * wide + 2 * narrow + 3 * shape.intermediate_size)
        by_layer = 2 * self.tokens * layer + 4 * self.pairs * wide
        return shape.num_hidden_layers * by_layer + 2 * self.scored * shape.hidden_size * shape.vocab_size


@dataclass(frozen=True)
class Measured:
    """A workload on both sides; dictionaries are by side."""

    name: str
    work: dict[str, Work]
    seconds: dict[str, float]
    ideal: float
    difference: float
    """Largest absolute difference of a gradient's entry between the sides."""
    gradient: float
    """Largest absolute entry of the gradient."""
    grown: dict[str, int]
    """Bytes at the peak, also of ``paths, same bound``."""

    @property
    def ratio(self) -> float:
        return self.seconds["paths"] / self.seconds["tree"]


def model_of(shape: Qwen3Config, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(shape, dtype=dtype).to(device).eval()


def clock(device: str, threads: int) -> Callable[[], float]:
    if device == "cuda":
        return lambda: (torch.cuda.synchronize(), time.perf_counter())[1]
    return time.process_time if threads == 1 else time.perf_counter


def measure(name: str, args: argparse.Namespace, samples: Sequence[Sample], model: PreTrainedModel) -> Measured:
    now, work = clock(args.device, args.threads), {side: Work.of(side, samples) for side in SIDES}
    bound = work["tree"].tokens
    batches = {side: batches_of(side, samples, bound) for side in SIDES}
    seconds = dict.fromkeys(SIDES, float("inf"))
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(args.rounds):
        for side in SIDES:
            model.zero_grad()
            began = now()
            forward_backward(model, batches[side])
            seconds[side] = min(seconds[side], now() - began)
            gradients[side] = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    operations = {side: work[side].operations(model.config) for side in SIDES}
    asked = {"paths": ("paths", WITHOUT_BOUND), "tree": ("tree", WITHOUT_BOUND), "paths, same bound": ("paths", bound)}
    return Measured(
        name,
        work,
        seconds,
        operations["paths"] / operations["tree"],
        max((a - b).abs().max().item() for a, b in zip(*gradients.values(), strict=True)),
        max(part.abs().max().item() for part in gradients["paths"]),
        {row: peak(args, name, samples, model, *what) for row, what in asked.items()},
    )


def peak(
    args: argparse.Namespace, name: str, samples: Sequence[Sample], model: PreTrainedModel, side: str, bound: int
) -> int:
    """Bytes by which memory grew over forward and backward."""
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_backward(model, largest(side, samples, bound))
        model.zero_grad()
        return torch.cuda.max_memory_allocated() - before
    # A process of its own, since memory that this one held before would be taken again.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as alone:
        return alone.submit(peak_here, name, side, bound, args.threads, args.divide).result()


def largest(side: str, samples: Sequence[Sample], bound: int) -> list[MicroBatch]:
    """The one micro-batch that decides how much memory is held."""
    return [max(batches_of(side, samples, bound), key=lambda batch: batch.computed)]


def peak_here(name: str, side: str, bound: int, threads: int, divide: int) -> int:
    """Bytes by which this process grows, beyond its model."""
    torch.set_num_threads(threads)
    model = model_of(SHAPES["cpu"], "cpu")
    batches = largest(side, WORKLOADS[name]("cpu", SHAPES["cpu"].vocab_size, divide), bound)
    # Linux: the high-water mark begins anew at what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    forward_backward(model, batches)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure_crossover(args: argparse.Namespace, model: PreTrainedModel) -> list[tuple[int, float, float]]:
    """Of groups: tokens in the tree, how many times more their paths have, and seconds of paths over those of it."""
    now, found = clock(args.device, args.threads), []
    for tokens in CROSSOVER_TOKENS:
        for shared in CROSSOVER_SHARED:
            prompt = int(tokens * shared)
            lengths = (prompt, (tokens - prompt) // EPISODES)
            samples = group_of(args.device, model.config.vocab_size, 1, lengths)
            sides = {side: batches_of(side, samples, WITHOUT_BOUND) for side in SIDES}
            seconds = dict.fromkeys(SIDES, float("inf"))
            for _ in range(args.rounds):
                for side, batches in sides.items():
                    began = now()
                    forward_backward(model, batches)
                    seconds[side] = min(seconds[side], now() - began)
            model.zero_grad()
            spared = sum(b.computed for b in sides["paths"]) / sum(b.computed for b in sides["tree"])
            found.append((tokens, spared, seconds["paths"] / seconds["tree"]))
    return found


def show(console: Console, one: Measured) -> None:
    table = Table(title=f"{one.name}: forward and backward")
    for column in ("", "tokens", "pairs (M)", "seconds", "peak (MB)"):
        table.add_column(column, justify="right" if column else "left")
    for side in SIDES:
        work = one.work[side]
        cells = (f"{work.tokens:,}", f"{work.pairs / 1e6:,.1f}", f"{one.seconds[side]:.2f}")
        table.add_row(side, *cells, f"{one.grown[side] / 1e6:,.0f}")
    table.add_row("paths, same bound", "", "", "", f"{one.grown['paths, same bound'] / 1e6:,.0f}")
    console.print(table)
    console.print(
        f"ideal ratio {one.ideal:.2f}, measured {one.ratio:.2f} ({one.ratio / one.ideal:.0%}); gradients differ by at "
        f"most {one.difference:.1e}, the largest entry is {one.gradient:.1e}"
    )


def show_crossover(console: Console, found: Sequence[tuple[int, float, float]]) -> None:
    table = Table(title="seconds of paths over seconds of the tree")
    for column in ("tokens in the tree", "tokens of paths over tree", "seconds of paths over tree"):
        table.add_column(column, justify="right")
    for tokens, spared, ratio in found:
        table.add_row(f"{tokens:,}", f"{spared:.2f}", f"{ratio:.2f}")
    console.print(table)


def figures(one: Measured) -> dict[str, Any]:
    grown = one.grown
    return {
        "ideal_ratio": round(one.ideal, 3),
        "measured_ratio": round(one.ratio, 3),
        "share_of_ideal": round(one.ratio / one.ideal, 3),
        "max_grad_diff": float(f"{one.difference:.3g}"),
        "largest_gradient": float(f"{one.gradient:.3g}"),
        "peak_mem_ratio": round(grown["paths"] / grown["tree"], 2),
        "peak_mem_ratio_same_bound": round(grown["paths, same bound"] / grown["tree"], 2),
        "peak_mem_mb": {row: round(size / 1e6) for row, size in grown.items()},
        "seconds": {side: round(seconds, 2) for side, seconds in one.seconds.items()},
        "tokens": {side: work.tokens for side, work in one.work.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="short ones, to see that it works")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="divide all lengths; default: 1")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; with more than 1, wall seconds count")
    parser.add_argument("--rounds", type=int, default=2, help="of each side, in turns; default: 2")
    parser.add_argument("--crossover", action="store_true", help="only where the tree begins to pay")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FILE", help="default: results/tree_attention.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: got no GPU that this torch sees, expected one; leave it out to measure on the CPU")
    args.divide = SMOKE if args.smoke else args.divide
    shape = SHAPES[args.device]
    console, model = Console(), model_of(shape, args.device)
    console.print(
        f"Qwen3 with {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, MLP {shape.intermediate_size}, "
        f"{shape.num_attention_heads} heads of {shape.head_dim} on {shape.num_key_value_heads}, vocabulary "
        f"{shape.vocab_size:,}; {model.dtype} on {args.device}"
    )
    # What is done once, such as compiling a kernel, counts on neither side.
    small = group_of(args.device, shape.vocab_size, 4 * SMOKE)
    for side in SIDES:
        forward_backward(model, batches_of(side, small, WITHOUT_BOUND))
    if args.crossover:
        crossover = measure_crossover(args, model)
        show_crossover(console, crossover)
        rows = [[tokens, round(spared, 3), round(ratio, 3)] for tokens, spared, ratio in crossover]
        print(json.dumps({"benchmark": "tree_attention", "crossover": rows}))
        return
    found = []
    for name, make in WORKLOADS.items():
        found.append(measure(name, args, make(args.device, shape.vocab_size, args.divide), model))
        show(console, found[-1])
    group, session = map(figures, found)
    result = {
        "benchmark": "tree_attention",
        "smoke": args.smoke,
        "device": args.device,
        "divided_by": args.divide,
        **group,
        "session": session,
    }
    if not args.smoke:
        args.out.parent.mkdir(exist_ok=True)
        command = " ".join(["python", "benchmarks/tree_attention.py", *sys.argv[1:]])
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
        args.out.write_text(json.dumps({"command": command, "machine": machine} | result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
