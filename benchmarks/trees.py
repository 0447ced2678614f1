"""What the prefix tree saves: time to build, bytes to keep and send, tokens to compute.

    python benchmarks/trees.py [--smoke]

A group of eight rollouts of one task, 200 turns each over a prompt of 20,000 tokens, with retries; some ask sub-agents,
clear old tool outputs or compact (``tests/trees/agent_sessions.py`` says what they are made of).

Building: a session's calls go into the tree one by one, as records that carry what is new. Against it, in the same
run, a builder that is given what a log has, the whole history of every call, and compares message lists and id lists.
It gets them as Python lists that are parsed already, and its time does not count the parsing.

Bytes: the trees of the group, filtered, as one group. Against them a logger that writes each call with its whole
prompt, as JSON lines with or without the messages, or as msgpack without; zstandard at the same level on both sides.

Tokens: what a learner computes that takes every call, every path or every tree by itself, over what is trained: by
default the main line, or all kinds.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

# Python looks beside a script first, so that every script of this folder finds this file for the package of its name.
__path__ = [str(Path(__file__).parents[1] / "trees")]

import msgpack
import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from trees import codec, filters
from trees.build import TreeBuilder
from trees.linearise import linearise
from trees.matching import SessionIndex, prefix_key
from trees.record import Kind
from trees.tree import Tree
from trees.turns import Turn

if TYPE_CHECKING:
    from agent_sessions import Call

MAX_LEAVES = 16
LEVELS = (1, 3, 6, 9, 12, 17)
BYTES_LEVELS = (3, codec.LEVEL)
"""Both sides of a comparison are at the same one: zstandard's default or the codec's."""
REFERENCES = {
    "jsonl_zstd": "JSON lines",
    "jsonl_zstd_without_messages": "JSON lines, no messages",
    "msgpack_zstd": "msgpack, call by call",
    "msgpack_zstd_one_stream": "msgpack, one stream",
}
TENTH, AROUND = 10, 4
"""The call that the last one is held against, and how many on each side of both enter the median."""


@dataclass
class _Line:
    messages: list[dict[str, Any]]
    ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class FullHistories:
    """The reference: every call with its whole history, put together where messages and ids both agree."""

    lines: list[_Line] = field(default_factory=list)

    def add(self, call: Logged) -> None:
        best = None
        for line in self.lines:
            if best is not None and len(line.ids) <= len(best.ids):
                continue
            same = call.messages[: len(line.messages)] == line.messages
            if same and call.prompt_ids[: len(line.ids)] == line.ids:
                best = line
        if best is None:
            best = _Line([], [])
            self.lines.append(best)
        new = len(call.prompt_ids) - len(best.ids)
        best.mask += [0] * new + [1] * len(call.sampled_ids)
        best.logprobs += [0.0] * new + call.logprobs
        best.ids = call.prompt_ids + call.sampled_ids
        best.messages = [*call.messages, call.reply]


@dataclass(frozen=True)
class Logged:
    """A call as a log gives it, with objects of its own: nothing in it is equal because it is the same."""

    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    reply: dict[str, Any]

    @classmethod
    def of(cls, call: Call) -> Logged:
        record = call.record
        messages, reply = json.loads(json.dumps([call.messages, call.reply]))
        return cls(messages, call.prompt_ids.tolist(), record.sampled_ids.tolist(), record.logprobs.tolist(), reply)


class Matched:
    """Ours with the proxy's matching before it: turns made of the messages, the parent found, then the tree."""

    def __init__(self, session: str) -> None:
        self.builder, self.index = TreeBuilder(session), SessionIndex()
        self.making = 0.0
        """Seconds that turning messages into comparable turns took."""

    def add(self, call: Call, messages: list[dict[str, Any]]) -> None:
        began = time.perf_counter()
        turns = [_turn(message) for message in messages[1:]]
        self.making += time.perf_counter() - began
        prefix = prefix_key(messages[0]["content"], [])
        match = self.index.match(turns, prefix)
        self.builder.add(replace(call.record, parent=match.parent))
        self.index.add(call.record.call, match.parent, turns, _turn(call.reply), prefix)


def _turn(message: dict[str, Any]) -> Turn:
    own = message["role"] == "assistant"
    return Turn.of(message["role"], message["content"], call_ids=(message["id"],) if own else ())


def timed(add: Callable[..., object], inputs: Iterable[tuple[Any, ...]]) -> list[float]:
    """Seconds of each call of ``add``; making the inputs does not count."""
    seconds = []
    gc.collect()
    gc.disable()
    for given in inputs:
        began = time.perf_counter()
        add(*given)
        seconds.append(time.perf_counter() - began)
    gc.enable()
    return seconds


@dataclass(frozen=True)
class Building:
    """Seconds per call of one session, of each the best of several tries in turns."""

    tokens: int
    ours: list[float]
    matched: list[float]
    making: float
    """Share of ``matched`` that is the making of turns."""
    reference: list[float]

    @staticmethod
    def last_over_tenth(seconds: Sequence[float]) -> float:
        around = seconds[TENTH - 1 - AROUND : TENTH + AROUND]
        return statistics.median(seconds[-2 * AROUND - 1 :]) / statistics.median(around)


def measure_building(calls: Sequence[Call], repeats: int) -> Building:
    found: dict[str, list[list[float]]] = {"ours": [], "matched": [], "reference": []}
    making = 1.0
    name = calls[0].record.session
    for _ in range(repeats):
        builder, matched, reference = TreeBuilder(name), Matched(name), FullHistories()
        found["ours"].append(timed(builder.add, ((call.record,) for call in calls)))
        parsed = ((call, json.loads(json.dumps(call.messages))) for call in calls)
        found["matched"].append(timed(matched.add, parsed))
        making = min(making, matched.making / sum(found["matched"][-1]))
        found["reference"].append(timed(reference.add, ((Logged.of(call),) for call in calls)))
    tree = builder.tree()
    if matched.builder.tree().counts() != tree.counts():
        raise RuntimeError("matching found other parents than those of the records")
    best = {name: [min(tries) for tries in zip(*runs, strict=True)] for name, runs in found.items()}
    return Building(tree.counts().tokens, best["ours"], best["matched"], making, best["reference"])


def grown(calls: Sequence[Call]) -> Tree:
    """The tree of a session. RuntimeError unless it holds every prompt as the model saw it."""
    builder = TreeBuilder(calls[0].record.session)
    for call in calls:
        builder.add(call.record)
    tree = builder.tree({"episode": builder.session, "task": "t", "status": "completed", "reward": 1.0})
    for call in calls:
        if not np.array_equal(tree.prompt_ids(call.record.call), call.prompt_ids):
            raise RuntimeError(f"call {call.record.call}: the tree holds another prompt than the one asked with")
    return tree


def logged(call: Call, values: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """What a logger without a tree writes of a call."""
    record = call.record
    arrays = {"prompt_ids": call.prompt_ids, "sampled_ids": record.sampled_ids, "logprobs": record.logprobs}
    return {
        **{name: getattr(record, name) for name in ("session", "call", "ordinal", "temperature", "finish", "kind")},
        "versions": [[span.version, span.start, span.end] for span in record.versions],
        **{name: values(array) for name, array in arrays.items()},
    }


def json_lines(calls: Iterable[Call], *, messages: bool) -> Iterator[bytes]:
    for call in calls:
        said = {"messages": [*call.messages, call.reply]} if messages else {}
        yield json.dumps(logged(call, np.ndarray.tolist) | said).encode() + b"\n"


def packed_calls(calls: Iterable[Call]) -> Iterator[bytes]:
    return (msgpack.packb(logged(call, np.ndarray.tobytes)) for call in calls)


class Sizes:
    """Bytes of parts as they are and, by level of zstandard, as one stream and each by itself."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        compressors = {level: zstandard.ZstdCompressor(level=level) for level in BYTES_LEVELS}
        streams = {level: zstandard.ZstdCompressor(level=level).compressobj() for level in BYTES_LEVELS}
        self.plain, self.stream, self.each = 0, Counter[int](), Counter[int]()
        for part in parts:
            self.plain += len(part)
            for level in BYTES_LEVELS:
                self.stream[level] += len(streams[level].compress(part))
                self.each[level] += len(compressors[level].compress(part))
        for level in BYTES_LEVELS:
            self.stream[level] += len(streams[level].flush())


def measure_bytes(group: Sequence[Sequence[Call]], trees: Sequence[Tree]) -> dict[str, dict[int, int]]:
    """By row and level of zstandard; level 0 is none."""
    calls = [call for session in group for call in session]
    said = Sizes(json_lines(calls, messages=True))
    silent = Sizes(json_lines(calls, messages=False))
    packed = Sizes(packed_calls(calls))
    blank = [
        Tree(tuple(replace(node, logprobs=np.zeros_like(node.logprobs)) for node in tree.nodes), tree.meta)
        for tree in trees
    ]
    ours: dict[str, Callable[[int], int]] = {
        "call records": lambda level: sum(len(codec.encode_records([call.record], level)) for call in calls),
        "trees alone": lambda level: sum(len(codec.encode(tree, level)) for tree in trees),
        "the group": lambda level: len(codec.encode_group(trees, level)),
        "the group, float16": lambda level: len(codec.encode_group(trees, level, float16=True)),
        "the group, no logprobs": lambda level: len(codec.encode_group(blank, level)),
    }
    return {
        "JSON lines": {0: said.plain, **said.stream},
        "JSON lines, no messages": {0: silent.plain, **silent.stream},
        "msgpack, one stream": {0: packed.plain, **packed.stream},
        "msgpack, call by call": {0: packed.plain, **packed.each},
        **{name: {level: size(level) for level in BYTES_LEVELS} for name, size in ours.items()},
    }


def measure_levels(trees: Sequence[Tree], repeats: int) -> dict[int, tuple[int, float, float]]:
    """By level of zstandard: bytes of the group, and seconds to write and to read it, the best of tries in turns."""
    found: dict[int, tuple[int, float, float]] = {}
    for _ in range(repeats):
        for level in LEVELS:
            began = time.perf_counter()
            data = codec.encode_group(trees, level)
            written = time.perf_counter()
            back = codec.decode_group(data)
            read = time.perf_counter() - written
            if codec.encode_group(back, level) != data:
                raise RuntimeError(f"level {level}: the group that was read is not the one that was written")
            _, writing, reading = found.get(level, (0, written - began, read))
            found[level] = (len(data), min(writing, written - began), min(reading, read))
    return found


def computed(group: Sequence[Sequence[Call]], trees: Sequence[Tree]) -> tuple[int, int, int]:
    """Tokens that a learner computes for what is trained: by calls, by paths, by trees."""
    by_call = by_path = by_tree = 0
    for calls, tree in zip(group, trees, strict=True):
        trained = {node.call for node in tree.nodes if node.trained}
        by_call += sum(len(c.prompt_ids) + len(c.record.sampled_ids) for c in calls if c.record.call in trained)
        paths = linearise(tree)
        by_path += sum(len(path.ids) for path in paths)
        shared = {node.id for path in paths for node in tree.path(path.leaf)}
        by_tree += sum(len(tree.nodes[node]) for node in shared)
    return by_call, by_path, by_tree


def show_building(console: Console, found: Building) -> None:
    table = Table(title=f"building a session of {len(found.ours)} calls and {found.tokens:,} tokens")
    for column in ("", "ms in all", "tokens/s", "µs, call 10", "µs, last", "last over tenth"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "tree": found.ours,
        "matching + tree": found.matched,
        "reference": found.reference,
    }
    for name, seconds in rows.items():
        ratio, last = found.last_over_tenth(seconds), statistics.median(seconds[-2 * AROUND - 1 :])
        cells = (1e3 * sum(seconds), found.tokens / sum(seconds), 1e6 * last / ratio, 1e6 * last)
        table.add_row(name, *(f"{cell:,.0f}" for cell in cells), f"{ratio:.2f}")
    console.print(table)
    console.print(f"matching: {found.making:.0%} of its row is making turns of all messages, whose hashes are compared")


def show_bytes(console: Console, found: dict[str, dict[int, int]], tokens: int, sampled: int) -> None:
    table = Table(title=f"kB of a group of {tokens:,} tokens in trees, {sampled:,} of them sampled")
    for column in ("", "plain", *(f"{what} {level}" for level in BYTES_LEVELS for what in ("zstd", "over group"))):
        table.add_column(column, justify="right" if column else "left")
    for name, size in found.items():
        cells = [f"{size[0] / 1e3:,.0f}" if 0 in size else ""]
        for level in BYTES_LEVELS:
            cells += [f"{size[level] / 1e3:,.0f}", f"{size[level] / found['the group'][level]:.2f}"]
        table.add_row(name, *cells)
    console.print(table)
    group, blank = (found[name][codec.LEVEL] for name in ("the group", "the group, no logprobs"))
    bits = 8 * (group - blank) / sampled
    console.print(f"exact log-probabilities are {1 - blank / group:.0%} of the group, {bits:.1f} bits each")


def show_levels(console: Console, found: dict[int, tuple[int, float, float]], trees: int, raw: int) -> None:
    table = Table(title=f"levels of zstandard, {raw / 1e6:.1f} MB of columns in {trees} trees")
    for column in ("level", "bytes", "write MB/s", "read MB/s", "write trees/s", "read trees/s"):
        table.add_column(column, justify="right")
    for level, (size, writing, reading) in found.items():
        rates = (raw / 1e6 / writing, raw / 1e6 / reading, trees / writing, trees / reading)
        table.add_row(str(level), f"{size:,}", *(f"{rate:,.0f}" for rate in rates))
    console.print(table)


def show_computed(console: Console, found: dict[str, tuple[int, int, int]]) -> None:
    table = Table(title="tokens that the learner computes")
    for column in ("trained", "per call", "per path", "per tree", "call over tree", "path over tree"):
        table.add_column(column, justify="right" if column != "trained" else "left")
    for name, (calls, paths, trees) in found.items():
        cells = (f"{calls:,}", f"{paths:,}", f"{trees:,}")
        table.add_row(name, *cells, f"{calls / trees:.2f}", f"{paths / trees:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sessions, to see that it works")
    args = parser.parse_args()
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "trees")]
    # Not at the top: whoever imports the package past this file does not need a tokenizer.
    from agent_sessions import Library, play_group

    vocabulary, characters, sessions, turns, prompt, repeats = (
        (4000, 1_500_000, 4, 24, 2000, 3) if args.smoke else (151_000, 40_000_000, 8, 200, 20_000, 5)
    )
    console = Console()
    group = play_group(Library(vocabulary, characters), sessions, turns, prompt)
    whole = [grown(calls) for calls in group]
    trees = [filters.apply(tree, MAX_LEAVES)[0] for tree in whole]
    tokens = {
        "the main line": computed(group, trees),
        "all kinds": computed(group, [filters.apply(tree, MAX_LEAVES, get_args(Kind))[0] for tree in whole]),
    }
    building = measure_building(group[0], repeats)
    show_building(console, building)
    levels = measure_levels(trees, repeats)
    raw = sum(head.unpacked for head in codec.heads(io.BytesIO(codec.encode_group(trees))))
    show_levels(console, levels, len(trees), raw)
    found = measure_bytes(group, trees)
    counts = [tree.counts() for tree in trees]
    show_bytes(console, found, sum(each.tokens for each in counts), sum(each.sampled for each in counts))
    show_computed(console, tokens)
    print(json.dumps(result(args.smoke, building, found, tokens)))


def result(
    smoke: bool, building: Building, found: dict[str, dict[int, int]], tokens: dict[str, tuple[int, int, int]]
) -> dict[str, Any]:
    reference, group, level = sum(building.reference), found["the group"], codec.LEVEL
    return {
        "benchmark": "trees",
        "smoke": smoke,
        "build_ratio": round(reference / sum(building.ours), 1),
        "build_ratio_with_matching": round(reference / sum(building.matched), 2),
        "build_tokens_per_s": round(building.tokens / sum(building.ours)),
        "last_over_tenth": round(building.last_over_tenth(building.ours), 2),
        "last_over_tenth_reference": round(building.last_over_tenth(building.reference), 2),
        "bytes": group[level],
        "bytes_vs_jsonl": round(found["JSON lines"][0] / group[level], 1),
        **{
            f"bytes_vs_{name}{'' if each == level else f'_level{each}'}": round(found[row][each] / group[each], 2)
            for name, row in REFERENCES.items()
            for each in BYTES_LEVELS[::-1]
        },
        "wire_vs_msgpack_zstd": round(found["msgpack, call by call"][level] / found["call records"][level], 2),
        **dict(zip(("tokens_per_call", "tokens_per_path", "tokens_per_tree"), tokens["the main line"], strict=True)),
        "tokens_all_kinds": list(tokens["all kinds"]),
    }


if __name__ == "__main__":
    main()
