"""How an agent behaves, told from its tree alone: no judge and no task is asked.

Invariant: the figures follow from the tokens that were sampled and heard on one path of the tree, so the same tree
always has the same figures. Whether an answer of a tool is an error is read from its text (``is_error``): that is a
rule of thumb over the wordings of common shells and harnesses, the same before and after training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from trees.tree import Node, Tree

_ERROR = re.compile(
    r"exit(?:ed with)? (?:code|status):? *-?[1-9]"
    r"|^Traceback \(most recent call last\)"
    r"|^(?:\w+: )*(?:error|fatal)\b"
    r"|: command not found|: not found$|No such file or directory|Permission denied|Is a directory"
    r"|<tool_use_error>|\"is_error\": *true|\[timed out|unknown tool|invalid (?:arguments|json)",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply and what was heard after it; ``heard`` is empty after the last."""

    said: str
    heard: str
    clean: bool
    """False where the reply was cut or a tool call in it could not be parsed."""


@dataclass(frozen=True, slots=True)
class Indicators:
    """Counts over one episode, or the sums over several."""

    episodes: int = 0
    replies: int = 0
    malformed: int = 0
    """Replies that were cut or held a tool call that could not be parsed."""
    answered: int = 0
    """Replies that something was heard after: calls of tools, mostly."""
    failing: int = 0
    """Of these, answered by an error."""
    repeated: int = 0
    """Of the failing, the same reply as an earlier failing one of the episode."""
    recovered: int = 0
    """Of the failing, followed at once by an answer without an error."""
    given_up: int = 0
    """Episodes whose last answer was an error."""
    reread: int = 0
    """Of the answered without an error, a reply that had been given before and was answered alike."""

    def __add__(self, other: Indicators) -> Indicators:
        return Indicators(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Indicators)))

    def shares(self) -> dict[str, float]:
        """Each as a share of what it is one of; what there was none of has no share."""
        parts = {
            "malformed": (self.malformed, self.replies),
            "failing": (self.failing, self.answered),
            "repeated": (self.repeated, self.failing),
            "recovered": (self.recovered, self.failing),
            "reread": (self.reread, self.answered - self.failing),
            "given_up": (self.given_up, self.episodes),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole}


def main_path(tree: Tree) -> list[Node]:
    """From the root to the newest call of the main line, or of the tree where it has no main line; may be empty."""
    calls = tree.calls()
    main = [call for call in calls if call.kind in ("main", "after-compaction")] or calls
    return [node for node in tree.path(main[-1].id) if len(node)] if main else []


def turns(tree: Tree, text: Callable[[np.ndarray], str]) -> list[Turn]:
    """The replies of the main line; ``text`` decodes ids."""
    found: list[Turn] = []
    said: Node | None = None
    heard: list[np.ndarray] = []
    for node in main_path(tree):
        if node.sampled:
            if said is not None:
                found.append(_turn(said, heard, text))
            said, heard = node, []
        elif said is not None:
            heard.append(node.ids)
    return [*found, _turn(said, heard, text)] if said is not None else found


def is_error(heard: str) -> bool:
    """Whether what a tool answered reads like an error."""
    return _ERROR.search(heard) is not None


def indicators(said: Sequence[Turn]) -> Indicators:
    """The figures of one episode."""
    answered = [turn for turn in said if turn.heard]
    errors = [is_error(turn.heard) for turn in answered]
    failed: set[str] = set()
    seen: set[tuple[str, str]] = set()
    repeated = reread = 0
    for turn, error in zip(answered, errors, strict=True):
        if error:
            repeated += turn.said in failed
            failed.add(turn.said)
        else:
            reread += (turn.said, turn.heard) in seen
            seen.add((turn.said, turn.heard))
    return Indicators(
        episodes=1,
        replies=len(said),
        malformed=sum(not turn.clean for turn in said),
        answered=len(answered),
        failing=sum(errors),
        repeated=repeated,
        recovered=sum(error and not after for error, after in pairwise(errors)),
        given_up=bool(errors and errors[-1]),
        reread=reread,
    )


def total(several: Iterable[Indicators]) -> Indicators:
    """The sums."""
    return sum(several, Indicators())


def _turn(node: Node, heard: Sequence[np.ndarray], text: Callable[[np.ndarray], str]) -> Turn:
    return Turn(text(node.ids), text(np.concatenate(heard)) if heard else "", node.clean)
