"""What becomes of every sampled token when real harnesses run against the proxy, harness by scenario.

    python benchmarks/fidelity.py [--smoke] [--harness NAME ...] [--scenario NAME ...]

An engine that plays a script samples what each scenario wants; the harness is the real program in a real
sandbox. Behind the bar: on the same sessions, a tree of *messages* that renders the history anew for every call
and takes a turn out of training when the harness hands it back rewritten.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "harness"))

from dialects import DIALECTS
from measured import Figures, measure
from scenarios import SCENARIOS, Scenario
from script_engine import TURN
from stage import Performance, make_tokenizer, perform, quiet

from actors.rendering import Rendering
from envs.harnesses.external.releases import missing, releases
from envs.protocols.canonical import Message, Request

_START = "<|im_start|>"
_AROUND = Message("user", ".")
Measured = tuple[Performance, Figures, tuple[int, int]]

HEAD = (
    f"{'harness':15}{'scenario':12}{'calls':>6}{'chains':>7}{'sampled':>8}{'trained':>8}{'thrown':>7}{'re-enc':>7}"
    f"{'false':>6}{'kind':>5}{'drift':>6} | {'trained':>8}{'tokens':>7} | end"
)


@dataclass
class MessageTree:
    """A tree whose nodes are messages, told apart by their rendered text.

    A reply is a node of its own; a replay that renders to other text is another node, which nobody sampled. What
    goes on below that one leaves the reply behind as a dead leaf.
    """

    rendering: Rendering
    tokens: int = 0
    _children: list[list[int]] = field(default_factory=lambda: [[]])
    _parents: list[int] = field(default_factory=lambda: [0])
    _numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    _replies: dict[int, str] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict)

    def add(self, call: str, request: Request, sampled: tuple[int, ...]) -> None:
        node = self._below(0, self._opening(request))
        for message in request.messages[1:]:
            node = self._below(node, self._text(message))
        reply = self.rendering.tokenizer.decode(list(sampled), skip_special_tokens=False)
        self._replies[self._below(node, f"{TURN}\n{reply}")] = call

    def trained(self) -> set[str]:
        """Calls whose reply something goes on from, or that stand alone at the end of their line."""
        return {
            call
            for node, call in self._replies.items()
            if self._children[node] or self._children[self._parents[node]] == [node]
        }

    def _below(self, parent: int, text: str) -> int:
        if (parent, text) not in self._numbers:
            node = self._numbers[parent, text] = len(self._parents)
            self._parents.append(parent)
            self._children.append([])
            self._children[parent].append(node)
            self.tokens += len(self.rendering.tokenizer.encode(text, add_special_tokens=False))
        return self._numbers[parent, text]

    def _opening(self, request: Request) -> str:
        """The first message, which stands together with the tools."""
        key = repr((request.messages[0], request.tools))
        if key not in self._texts:
            ids = self.rendering.first((request.messages[0], _AROUND), request.tools)
            self._texts[key] = self._pieces(ids)[0]
        return self._texts[key]

    def _text(self, message: Message) -> str:
        """A message as the chat template writes it in the middle of a conversation."""
        key = repr(message)
        if key not in self._texts:
            self._texts[key] = self._pieces(self.rendering.first((_AROUND, message, _AROUND)))[1]
        return self._texts[key]

    def _pieces(self, ids: list[int]) -> list[str]:
        pieces = self.rendering.tokenizer.decode(ids, skip_special_tokens=False).split(_START)[1:]
        return [_START + piece.removesuffix("\n") for piece in pieces]


def by_messages(played: Performance, rendering: Rendering) -> tuple[int, int]:
    """Main-line tokens that a message tree would train, and all tokens that it would compute."""
    tree = MessageTree(rendering)
    for asked in played.asked:
        tree.add(asked.call, played.requests[asked.call], asked.sampled)
    kinds = {record.call: record.kind for record in played.records}
    kept = tree.trained()
    main = [a for a in played.asked if a.part == "main" and kinds[a.call] != "after-compaction"]
    return sum(len(asked.sampled) for asked in main if asked.call in kept), tree.tokens


def row(played: Performance, figures: Figures, messages: tuple[int, int]) -> str:
    f, share = figures, messages[0] / max(1, figures.sampled_main)
    ratio = messages[1] / max(1, f.tree_tokens)
    end = f"{played.outcome.status}: {played.outcome.reason}"[:60]
    forks = ", ".join(f"{reason} {count}" for reason, count in f.forks.items())
    return (
        f"{played.harness:15}{played.scenario.name:12}{f.calls:6}{f.chains:7}{f.sampled_main:8}{f.trained_main:8}"
        f"{f.discarded:7}{f.reencoded:7}{f.false_forks:6}{f.misplaced:5}{f.drift:6} | "
        f"{min(1.0, share):8.0%}{ratio:7.2f} | {end}{f' [{forks}]' if forks else ''}"
    )


async def run(pairs: list[tuple[str, Scenario]], keep: Path | None) -> list[Measured]:
    done = []
    folder = Path(tempfile.mkdtemp(prefix="reins-"))
    try:
        rendering = Rendering(make_tokenizer(folder / "tokenizer"))
        print(HEAD)
        for number, (name, scenario) in enumerate(pairs):
            played = await perform(name, scenario, rendering, folder / str(number))
            if not played.records:
                print(f"{name:15}{scenario.name:12} no call: {played.outcome.reason[:400]}", flush=True)
                continue
            figures, messages = measure(played, rendering), by_messages(played, rendering)
            print(row(played, figures, messages), flush=True)
            done.append((played, figures, messages))
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name}-{scenario.name}.txt").write_text(account(played, figures))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def kinds(done: list[Measured]) -> str:
    """Calls by kind, expected of what was asked and found in the records, by harness and scenario."""
    lines = [f"{'harness':15}{'scenario':12} {'expected':52}{'found':52}wrong"]
    for played, figures, _ in done:
        told = [", ".join(f"{name} {n}" for name, n in sorted(c.items())) for c in (figures.expected, figures.kinds)]
        lines.append(f"{played.harness:15}{played.scenario.name:12} {told[0]:52}{told[1]:52}{figures.misplaced:5}")
    return "\n".join(lines)


def account(played: Performance, figures: Figures) -> str:
    """One session for people: how it ended, and every call with the ids' text."""
    lines = [str(figures), str(played.outcome), str(played.seen)]
    for tool in next(iter(played.requests.values())).tools:
        lines.append(json.dumps(tool["function"].get("parameters", {}))[:600] + f" <- {tool['function']['name']}")
    parts = {asked.call: asked for asked in played.asked}
    for record in played.records:
        asked = parts[record.call]
        about = f"{asked.part} {record.kind} ({record.why}) parent {record.parent} fork {record.fork!r} {record.extra}"
        lines += [f"== {record.ordinal} {record.call} {len(asked.prompt)} tokens {about} drift {record.drift}"]
        lines += [
            f"{message.role}: {message.text[:2000]} {message.tool_calls}"
            for message in played.requests[record.call].messages
        ]
        lines += [f"--> {asked.text}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one installed harness in one scenario")
    parser.add_argument("--harness", nargs="+", choices=sorted(DIALECTS), default=list(DIALECTS), metavar="NAME")
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write an account of every session here")
    arguments = parser.parse_args()
    known = releases()
    there = [n for n in arguments.harness if not any(missing(known[part]) for part in (*known[n].needs, n))]
    if absent := [name for name in arguments.harness if name not in there]:
        print(f"not installed: {', '.join(absent)} (python -m envs.harnesses install {' '.join(absent)})")
    if not there:
        sys.exit("no harness is installed: got none, expected at least one")
    pairs = [
        (name, scenario)
        for name in there
        for scenario in (SCENARIOS[chosen] for chosen in arguments.scenario)
        if scenario.suits(DIALECTS[name])
    ]
    quiet()
    done = asyncio.run(run(pairs[:1] if arguments.smoke else pairs, arguments.keep))
    total = {
        name: sum(getattr(figures, name) for _, figures, _ in done)
        for name in ("calls", "chains", "sampled_main", "trained_main", "reencoded", "false_forks", "misplaced")
    }
    shares = sorted(messages[0] / max(1, figures.sampled_main) for _, figures, messages in done)
    print(f"\n{kinds(done)}\n")
    if shares:
        print(f"a message tree would train {shares[0]:.0%} to {min(1.0, shares[-1]):.0%} of a session's main line")
    print(json.dumps({"benchmark": "fidelity", "sessions": len(done), **total}))


if __name__ == "__main__":
    main()
