"""How a policy works inside a harness, told from the trees of its episodes, without a judge.

Each indicator is a rate: so many times out of so many chances. Rates of several episodes are pooled by adding both
numbers, so that a long episode counts for what it did. Invariant: what had no chance to happen has no rate.

Words come from whoever has the tokenizer (``Words``); what a tool's answer says of success is a guess from its text
(``failed``), good for comparing a policy with itself and no more.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trees.filters import dead_leaves
from trees.tree import Node, Tree
from trees.turns import canonical_arguments

MAIN = ("main", "after-compaction")

_FAILED = re.compile(
    r"\[exit code [1-9]|\[timed out|\bexit(?:ed with)?(?: code| status)?:? ?[1-9]\d*\b|Traceback \(most recent call"
    r"|<tool_use_error>|command not found|No such file or directory|Permission denied|^\s*\w*(?:Error|Exception)\b"
    r"|^error\b|\bis_error\W+true",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; two that mean the same are equal."""

    name: str
    arguments: str
    """Canonical JSON, or the text where it is none."""
    result: str | None = None
    """What the tool answered; None where nothing came back."""

    @property
    def same_as(self) -> tuple[str, str]:
        return self.name, self.arguments


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the policy on its main line, and what came of it."""

    text: str
    calls: tuple[Call, ...]
    clean: bool
    """False where the answer was cut, or a call in it could not be read."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``count`` out of ``of`` chances."""

    count: int
    of: int

    @property
    def value(self) -> float | None:
        return self.count / self.of if self.of else None

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.count + other.count, self.of + other.of)


class Words(Protocol):
    """The text behind token ids."""

    def said(self, ids: Sequence[int]) -> tuple[str, Sequence[tuple[str, Any]]]:
        """Of an answer: its text, and its tool calls as (name, arguments)."""
        ...

    def heard(self, ids: Sequence[int]) -> Sequence[str]:
        """Of what was fed in after an answer: the results of tools, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a workflow. ``pattern`` is searched in ``name arguments`` of calls; None: an answer without calls."""

    name: str
    pattern: str | None


WORKFLOW = (
    Stage(
        "look",
        r"\b(?:cat|ls|head|tail|grep|rg|find|wc|awk|sed -n|less|stat|Read|Glob|Grep|view|read_\w+|list_\w+)\b",
    ),
    Stage(
        "act",
        r"(?:>|\b(?:mv|cp|rm|mkdir|touch|tee|sed -i|patch|git|pip|make|Write|Edit|write_\w+|edit_\w+|apply_patch|"
        r"str_replace\w*|create\w*|insert)\b)",
    ),
    Stage("answer", None),
)
"""What file work consists of in nearly any harness: look at something, then change something, then say so."""

MEANINGS = {
    "malformed": "answers that were cut or held a call that could not be read, of all answers",
    "failing": "calls whose result says that they failed, of all calls with a result",
    "repeated_failing": "failed calls made again word for word before anything had succeeded, of failed calls",
    "recovered": "runs of failed calls after which a call succeeded, of all such runs",
    "reread": "successful calls made before in the same words and with the same result, of successful calls",
    "skipped_steps": "steps of the workflow (look, then act, then answer) that were skipped, of its steps",
}
"""Every indicator in words. Lower is better in all but ``recovered``."""


def failed(result: str) -> bool:
    """Whether a tool's answer reads like that of a call that failed. A guess: tools say it in words of their own."""
    return bool(_FAILED.search(result))


def steps(tree: Tree, words: Words) -> list[Step]:
    """The answers on the main line in order, without those that were given again and aborted ones.

    The results of an answer's calls are what the next answer was fed, in the order in which it stands there.
    """
    unmarked = tuple(replace(node, trained=node.sampled, reason="") for node in tree.nodes)
    living, _ = dead_leaves(Tree(unmarked, tree.meta))
    line = [node for node in living.calls() if node.kind in MAIN and node.trained]
    after: dict[int, Node] = {}
    for node in line:
        after.setdefault(tree.call_parents[node.id], node)
    found = []
    for node in line:
        text, calls = words.said(node.ids.tolist())
        following = after.get(node.id)
        heard = [] if following is None else words.heard(_between(tree, node, following))
        pairs = itertools.zip_longest(calls, heard[: len(calls)])
        made = tuple(Call(name, canonical_arguments(arguments), result) for (name, arguments), result in pairs)
        found.append(Step(text, made, node.clean))
    return found


def steps_of_transcript(lines: Iterable[Mapping[str, Any]]) -> list[Step]:
    """The same from the lines of a transcript (``actors.transcript``), which tells what an endpoint said too."""
    found: list[Step] = []
    for line in lines:
        if line.get("kind") not in MAIN:
            continue
        if line.get("role") == "assistant":
            calls = [(call.get("id"), call["name"], call["arguments"]) for call in line.get("tool_calls", ())]
            asked = [name for name, _, _ in calls]
            made = tuple(Call(name, canonical_arguments(arguments)) for _, name, arguments in calls)
            found.append(Step(line.get("text", ""), made, not any(isinstance(given, str) for *_, given in calls)))
        elif line.get("role") == "tool" and found and line.get("tool_call_id") in asked:
            place = asked.index(line["tool_call_id"])
            calls_now = list(found[-1].calls)
            calls_now[place] = replace(calls_now[place], result=line.get("text", ""))
            found[-1] = replace(found[-1], calls=tuple(calls_now))
    return found


def indicators(
    episode: Sequence[Step],
    workflow: Sequence[Stage] = WORKFLOW,
    has_failed: Callable[[str], bool] = failed,
) -> dict[str, Rate]:
    """Every rate of ``MEANINGS`` for one episode, and ``skipped: NAME`` for each stage of the workflow."""
    calls = [call for step in episode for call in step.calls if call.result is not None]
    bad = [has_failed(call.result or "") for call in calls]
    skipped = skipped_stages(episode, workflow) if episode else []
    found = {
        "malformed": Rate(sum(not step.clean for step in episode), len(episode)),
        "failing": Rate(sum(bad), len(calls)),
        "repeated_failing": Rate(_repeated(calls, bad), sum(bad)),
        "recovered": _recovered(bad),
        "reread": Rate(_reread(calls, bad), len(bad) - sum(bad)),
        "skipped_steps": Rate(len(skipped), len(workflow) if episode else 0),
    }
    return found | {f"skipped: {stage.name}": Rate(int(stage in skipped), int(bool(episode))) for stage in workflow}


def pooled(episodes: Iterable[Mapping[str, Rate]]) -> dict[str, Rate]:
    """The rates of several episodes as one."""
    total: dict[str, Rate] = {}
    for episode in episodes:
        for name, rate in episode.items():
            total[name] = total.get(name, Rate(0, 0)) + rate
    return total


def skipped_stages(episode: Sequence[Step], workflow: Sequence[Stage]) -> list[Stage]:
    """The fewest stages without which the rest come in their order; of equal choices the earliest are skipped.

    Each is reached where the one ahead of it is, or later: one command may be of several stages.
    """
    acts: list[str | None] = []
    for step in episode:
        acts += [f"{call.name} {call.arguments}" for call in step.calls] or [None]
    reached = [[at for at, act in enumerate(acts) if _reaches(act, stage)] for stage in workflow]

    @functools.cache
    def kept(stage: int, place: int) -> tuple[int, ...]:
        """The most stages from ``stage`` on that come in their order from ``place`` on."""
        if stage == len(workflow):
            return ()
        without = kept(stage + 1, place)
        if (at := next((at for at in reached[stage] if at >= place), None)) is None:
            return without
        return max(without, (stage, *kept(stage + 1, at)), key=len)

    return [stage for number, stage in enumerate(workflow) if number not in kept(0, 0)]


def _reaches(act: str | None, stage: Stage) -> bool:
    if act is None or stage.pattern is None:
        return act is stage.pattern
    return re.search(stage.pattern, act) is not None


def _repeated(calls: Sequence[Call], bad: Sequence[bool]) -> int:
    """Failed calls after which the very same call came again, nothing having succeeded in between."""
    open_failures: set[tuple[str, str]] = set()
    count = 0
    for call, is_bad in zip(calls, bad, strict=True):
        count += call.same_as in open_failures
        if is_bad:
            open_failures.add(call.same_as)
        else:
            open_failures.clear()
    return count


def _recovered(bad: Sequence[bool]) -> Rate:
    runs = [is_bad for is_bad, _ in itertools.groupby(bad)]
    return Rate(sum(is_bad for is_bad in runs[:-1]), sum(runs))


def _reread(calls: Sequence[Call], bad: Sequence[bool]) -> int:
    seen: set[tuple[str, str, str]] = set()
    count = 0
    for call, is_bad in zip(calls, bad, strict=True):
        if is_bad or not (call.result or "").strip():
            continue
        key = (*call.same_as, call.result or "")
        count += key in seen
        seen.add(key)
    return count


def _between(tree: Tree, node: Node, following: Node) -> list[int]:
    """The ids that were fed in between an answer and the next."""
    path = tree.path(following.parent)
    start = next(index for index, part in enumerate(path) if part.id == node.id)
    return [token for part in path[start + 1 :] for token in part.ids.tolist()]
