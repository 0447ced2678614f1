"""What came of a session's tokens: from its call records, the tree built of them, and the engine's own log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from script_engine import END, TURN
from stage import Performance

from actors.rendering import Rendering
from trees import filters
from trees.build import TreeBuilder
from trees.tree import Tree

MAX_LEAVES = 16


@dataclass
class Figures:
    """Tokens, unless the name says otherwise.

    ``sampled_main``: sampled for the main line by the engine's own account, answers that an injected fault or
    the harness threw away aside (``discarded``), and those after a compaction aside. ``reencoded``: in assistant
    turns of later prompts that are not, id by id, a sampled run; ``rewritten_after``: the same in prompts that
    compact a history or go on from a compacted one. ``misplaced``: calls whose kind is not that of the part that
    was asked.
    """

    calls: int = 0
    chains: int = 0
    sampled_main: int = 0
    trained_main: int = 0
    discarded: int = 0
    reencoded: int = 0
    rewritten_after: int = 0
    false_forks: int = 0
    misplaced: int = 0
    drift: int = 0
    tree_tokens: int = 0
    forks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    """Calls by the kind that their record has."""
    expected: Counter[str] = field(default_factory=Counter)
    """Calls by the kind that the part that was asked is of."""


def tree_of(played: Performance) -> Tree:
    builder = TreeBuilder(played.records[0].session)
    for record in played.records:
        builder.add(record)
    return builder.tree()


def measure(played: Performance, rendering: Rendering) -> Figures:
    """The figures of one session. Raises AssertionError where records and the engine's log contradict each other."""
    whole = tree_of(played)
    tree, _ = filters.apply(whole, MAX_LEAVES)
    parts = {asked.call: asked.part for asked in played.asked}
    for asked in played.asked:
        assert tuple(whole.prompt_ids(asked.call)) == asked.prompt, f"{asked.call}: record and engine differ"
    figures = Figures(calls=len(played.records), tree_tokens=whole.counts().tokens)
    for node in tree.calls():
        if parts[node.call] != "main" or node.kind == "after-compaction":
            continue
        if played.scenario.causes and node.reason.startswith("dead"):
            figures.discarded += len(node)
            continue
        figures.sampled_main += len(node)
        figures.trained_main += len(node) if node.trained else 0
    figures.chains = len(filters.live_leaves(tree))
    begun: set[str] = set()
    for record in played.records:
        part = parts[record.call]
        first = part not in begun
        begun.add(part)
        figures.drift += record.drift
        figures.kinds[record.kind] += 1
        right = _kinds(part, "compaction" in begun)
        figures.expected[right[0]] += 1
        figures.misplaced += record.kind not in right
        if record.fork:
            figures.forks[record.fork] += 1
            figures.false_forks += not first and record.fork not in played.scenario.causes
    compacted = _compacted(played)
    own: dict[str, set[tuple[int, ...]]] = {}
    sampled = {asked.sampled for asked in played.asked}
    texts = {rendering.tokenizer.decode(ids) for ids in sampled}
    for asked in played.asked:
        turns = list(assistant_turns(asked.prompt, rendering))
        if asked.part not in own:
            # What a harness itself puts into the policy's mouth stands there from the start.
            own[asked.part] = {turn for turn in turns if rendering.tokenizer.decode(turn) not in texts}
        words = own[asked.part]
        strange = sum(len(turn) for turn in turns if turn not in sampled and turn not in words)
        if asked.call in compacted or asked.part == "compaction":
            figures.rewritten_after += strange
        else:
            figures.reencoded += strange
    return figures


def assistant_turns(prompt: Sequence[int], rendering: Rendering) -> Iterator[tuple[int, ...]]:
    """The ids of each finished assistant turn of a prompt, without the words that open it."""
    tokenizer = rendering.tokenizer
    opening = tokenizer.encode(f"{TURN}\n", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    prompt = list(prompt)
    starts = [i for i, token in enumerate(prompt) if token == opening[0] and prompt[i : i + len(opening)] == opening]
    assert len(starts) == tokenizer.decode(prompt, skip_special_tokens=False).count(TURN)
    for start in starts:
        body = start + len(opening)
        if end in prompt[body:]:
            yield tuple(prompt[body : prompt.index(end, body) + 1])


def _compacted(played: Performance) -> set[str]:
    """Calls whose conversation begins with what a compaction left of an earlier one."""
    found: set[str] = set()
    for record in played.records:
        root = record.kind == "after-compaction" and record.parent not in found
        if root or record.parent in found:
            found.add(record.call)
    return found


def _kinds(part: str, after: bool) -> tuple[str, ...]:
    """The kinds that calls of a part may have; ``after`` the history was compacted."""
    if part == "main":
        return ("after-compaction",) if after else ("main",)
    return {"compaction": ("compaction",), "title": ("side",), "side": ("side",)}.get(part, ("subagent",))
