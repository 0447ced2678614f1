"""How far apart engine and trainer are: differences of the log-probabilities that they give the same sampled tokens.

    python benchmarks/parity.py [--smoke] [--policy DIR]

Conversations of three turns at temperatures 1.0 and 0.7, all at once, so that prefixes are reused and others are in
the batch. SGLang samples them; the embedded engine is then made to draw the same tokens, and the trainer scores them
as the learner does before a step. Where there is no SGLang, and with ``--smoke``, the embedded engine samples.

Two models of one shape: a random one, with weights so wide that its distributions are peaked, on random ids; and the
tiny policy on the prompts of its tasks, where one lies in the cache of ``python -m algos.coldstart`` or is named.
The engines are in float32 or bfloat16; a run's trainer is float32 in either case, and one in bfloat16 stands beside it
for comparison. The last line is JSON.

It ends with an error when sources that are all in float32 are 1e-3 apart, or the embedded engine draws other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "actors"))

from scoring import Conversation, Plan, converse, trainer_logprobs

from actors.engines import batch, sampling
from actors.engines.locate import interpreter
from actors.engines.sglang import SGLangEngine
from actors.engines.sglang_server import Launch
from actors.engines.transformers import TransformersEngine
from actors.rendering import Rendering
from algos.coldstart import CACHE
from algos.imitation import transcribe
from algos.tiny import build_model
from configs.schema import SGLangConfig
from envs.tasks.desk import expert, generate

DTYPES = ("float32", "bfloat16")
BOUND = 1e-3
"""Nats by which sources in float32 may differ."""
TEMPERATURES = (1.0, 0.7)
VOCABULARY = 603
WIDER = 8
"""Factor of random weights that takes the distributions far from uniform."""
MAX_LEN = 1024


@dataclass(frozen=True)
class Subject:
    """A model in ``folder`` and the conversations to have with it."""

    name: str
    folder: Path
    plans: list[Plan]


def random_subject(folder: Path, vocabulary: int, conversations: int) -> Subject:
    model = build_model(vocabulary, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(WIDER)
    model.save_pretrained(folder)
    random = np.random.default_rng(0)

    def ids(size: int) -> list[int]:
        return random.integers(0, vocabulary, size).tolist()

    shared = ids(40)
    plans = []
    for i in range(conversations):
        head = [*shared * (i // 2 % 2), *ids(4 + 12 * i)]
        plans.append(Plan([head, ids(8 + i), ids(30)], [8 + 2 * i, 40, 16], TEMPERATURES[i % 2], seed=i))
    return Subject("random", folder, plans)


def trained_subject(folder: Path, conversations: int) -> Subject:
    """What the harness would say before each turn is taken from transcripts of the scripted expert."""
    rendering = Rendering(folder)
    end = rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    plans = []
    for i, task in enumerate(generate("heldout", conversations, seed=0)):
        transcript = transcribe(rendering, task, expert(task, Random(i)))
        edges = np.flatnonzero(np.diff(transcript.own)) + 1
        tails = [part.tolist() for part in np.split(transcript.ids, edges)[::2]][:3]
        plans.append(Plan(tails, [64] * len(tails), TEMPERATURES[i % 2], stop_ids=(end,), seed=i))
    return Subject("policy", folder, plans)


@contextlib.contextmanager
def redrawn(conversations: Sequence[Conversation]) -> Iterator[None]:
    """Have the embedded engine draw the tokens of ``conversations`` again when it is asked for their plans.

    The draws of a request with a seed are known beforehand, so that each stands for one token. It is replaced by one
    that falls into that token's share of the distribution; drawing itself and the log-probability are the engine's.
    """
    tokens: dict[float, int] = {}
    for conversation in conversations:
        for nth, turn in enumerate(conversation.turns):
            random = np.random.default_rng(conversation.plan.turn_seed(nth))
            tokens |= {random.random(): token for token in turn.ids}

    def draw(
        logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([tokens[number] for number in uniform.tolist()])[:, None]
        probs = torch.log_softmax(logits.float() / temperature[:, None], -1).exp()
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        middle = (cumulative.gather(1, ids) - probs.gather(1, ids) / 2) / cumulative[:, -1:]
        return sampling.draw(logits, temperature, top_p, middle[:, 0])

    batch.draw = draw
    try:
        yield
    finally:
        batch.draw = sampling.draw


async def by_sglang(python: Path, subjects: Sequence[Subject], dtype: str, log: Path) -> list[list[Conversation]]:
    """One start for all subjects, whose weights follow each other."""
    launch = Launch(python, subjects[0].folder, log, dtype=dtype, max_len=MAX_LEN, args=("--max-total-tokens", "32768"))
    engine = SGLangEngine(launch)
    try:
        await engine.ready()
        found = []
        for version, subject in enumerate(subjects):
            await engine.load_weights(version, subject.folder)
            found.append(await converse(engine, subject.plans))
    finally:
        await engine.close()
    return found


async def by_transformers(subject: Subject, dtype: str) -> list[Conversation]:
    engine = TransformersEngine(subject.folder, slots=len(subject.plans), max_len=MAX_LEN, dtype=dtype)
    try:
        return await converse(engine, subject.plans)
    finally:
        await engine.close()


async def replayed(subject: Subject, dtype: str, conversations: list[Conversation]) -> list[Conversation]:
    """The same tokens from the embedded engine. Raises RuntimeError where they are not the same."""
    with redrawn(conversations):
        again = await by_transformers(subject, dtype)
    for old, new in zip(conversations, again, strict=True):
        if [turn.ids for turn in old.turns] != [turn.ids for turn in new.turns]:
            raise RuntimeError(f"{subject.name}, {dtype}: the embedded engine drew other tokens than SGLang")
    return again


def by_trainer(folder: Path, dtype: str, conversations: Sequence[Conversation]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    return trainer_logprobs(model, conversations)


def scored(
    subject: Subject, dtype: str, sampled: list[Conversation] | None
) -> tuple[list[Conversation], dict[str, list[torch.Tensor]]]:
    """The conversations, and by source the log-probabilities of their tokens; ``sampled`` is what SGLang gave."""
    sources: dict[str, list[torch.Tensor]] = {}
    if sampled is None:
        sampled = asyncio.run(by_transformers(subject, dtype))
        sources["transformers"] = [each.mu() for each in sampled]
    else:
        sources["sglang"] = [each.mu() for each in sampled]
        sources["transformers"] = [each.mu() for each in asyncio.run(replayed(subject, dtype, sampled))]
    sources["trainer"] = by_trainer(subject.folder, "float32", sampled)
    if dtype != "float32":
        sources["bf16 trainer"] = by_trainer(subject.folder, dtype, sampled)
    return sampled, sources


Figures = dict[str, dict[str, float]]
"""By pair of sources the mean and the largest difference, in nats, at each temperature."""


def differences(sampled: Sequence[Conversation], sources: dict[str, list[torch.Tensor]]) -> Figures:
    found: Figures = {}
    for one, other in itertools.combinations(sources, 2):
        figures = found[f"{one} - {other}"] = {}
        for temperature in TEMPERATURES:
            pairs = zip(sampled, sources[one], sources[other], strict=True)
            apart = torch.cat([(a - b).abs() for each, a, b in pairs if each.plan.temperature == temperature])
            figures |= {f"mean_{temperature}": apart.mean().item(), f"max_{temperature}": apart.max().item()}
    return found


def cached_policy() -> Path | None:
    """The newest in the cache."""
    found = [path.parent for path in CACHE.expanduser().glob("[!.]*/model.safetensors")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few conversations and no SGLang")
    parser.add_argument("--policy", type=Path, metavar="DIR", help="a tiny policy; default: the newest in the cache")
    args = parser.parse_args()
    conversations = 6 if args.smoke else 32
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    console = Console()
    python = None
    if args.smoke:
        console.print("without SGLang, whose start takes longer than a smoke run may")
    else:
        try:
            python = interpreter(SGLangConfig())
        except FileNotFoundError as error:
            console.print(f"without SGLang: {error}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = args.policy or cached_policy()
        vocabulary = VOCABULARY
        subjects = []
        if policy is None:
            console.print("without a trained policy: python -m algos.coldstart makes one")
        else:
            subjects.append(trained_subject(policy, 2 * conversations))
            vocabulary = json.loads((policy / "config.json").read_text())["vocab_size"]
        subjects.insert(0, random_subject(folder / "random", vocabulary, conversations))
        report(console, measure(subjects, python, folder), args.smoke)


@dataclass(frozen=True)
class Measured:
    subject: str
    dtype: str
    """Of the engines."""
    tokens: int
    figures: Figures


def measure(subjects: Sequence[Subject], python: Path | None, folder: Path) -> list[Measured]:
    found = []
    for dtype in DTYPES:
        given: Sequence[list[Conversation] | None] = [None] * len(subjects)
        if python is not None:
            given = asyncio.run(by_sglang(python, subjects, dtype, folder / f"sglang-{dtype}.log"))
        for subject, sampled in zip(subjects, given, strict=True):
            conversations, sources = scored(subject, dtype, sampled)
            tokens = sum(map(len, sources["trainer"]))
            found.append(Measured(subject.name, dtype, tokens, differences(conversations, sources)))
    return found


def report(console: Console, found: Sequence[Measured], smoke: bool) -> None:
    result: dict[str, Any] = {"benchmark": "parity", "smoke": smoke, "sglang": False}
    for one in found:
        table = Table(title=f"{one.subject}, engines in {one.dtype}: difference over {one.tokens} tokens (nats)")
        table.add_column("between")
        for temperature in TEMPERATURES:
            table.add_column(f"mean T={temperature:g}", justify="right")
            table.add_column(f"max T={temperature:g}", justify="right")
        for pair, figures in one.figures.items():
            table.add_row(pair, *(f"{number:.1e}" for number in figures.values()))
            result["sglang"] |= pair.startswith("sglang")
            key = "_".join((one.subject, one.dtype, pair.replace(" - ", "_"))).replace(" ", "_")
            result[key] = {name: float(f"{number:.3g}") for name, number in figures.items()}
        console.print(table)
    print(json.dumps(result))
    wrong = [one.subject for one in found if one.dtype == "float32" and _largest(one.figures) >= BOUND]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: got differences of {BOUND} or more in float32, expected less")


def _largest(figures: Figures) -> float:
    return max(number for figure in figures.values() for name, number in figure.items() if name.startswith("max"))


if __name__ == "__main__":
    main()
