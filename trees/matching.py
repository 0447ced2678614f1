"""Which held call an incoming conversation extends.

Invariant: the turns of the matched call's conversation, its own reply included, are a prefix of the
incoming turns, in meaning or within a measured drift that no turn exceeds; so the tokens held for that
call stay, and only the turns after the prefix need rendering.

An own reply is recognised by identity (a tool-call id that we minted), then by meaning (its key), then by
place (it stands where the reply stood, between unchanged neighbours, and differs little). All other turns
must be equal in meaning: what a tool or a user said is not ours to keep when the harness changed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trees import forks
from trees.turns import PrefixKey, Turn, canonical_key, distance, prefix_key

__all__ = ["Match", "PrefixKey", "SessionIndex", "Turn", "canonical_key", "prefix_key"]


@dataclass(frozen=True, slots=True)
class Match:
    """What an incoming conversation extends."""

    parent: str | None
    """None: nothing held, the whole conversation is to be rendered."""
    n_matched_turns: int
    """Leading turns that the parent's tokens stand for, its own reply included; 0 without a parent."""
    reason: str
    """One of ``trees.forks``; empty when the newest call of the line is extended, or the session starts."""
    drift: int
    """Characters by which the matched replies differ from those given."""
    detail: str = ""
    """For people: where the first fork out of a held line lies."""


@dataclass(eq=False, slots=True)
class _Place:
    """A point in the tree of turns: after a turn that was fed in, or after a reply of ours."""

    parent: _Place | None
    depth: int
    call: str = ""
    """The call whose reply this is; empty after a turn that was fed in."""
    reply: Turn | None = None
    agent: str = ""
    """Which agent of the harness asked, where it says so."""
    ordinal: int = -1
    fed: dict[str, _Place] = field(default_factory=dict)
    replies: list[_Place] = field(default_factory=list)
    drifts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Measured distance of each replayed variant of the reply, by its keys."""


@dataclass(frozen=True, slots=True)
class _Lead:
    place: _Place
    reply: _Place
    """The last reply on the way to ``place``, or the root."""
    drift: int = 0

    def to(self, place: _Place, drift: int = 0) -> _Lead:
        return _Lead(place, place if place.call else self.reply, self.drift + drift)


class SessionIndex:
    """The conversations of one session. Adding and matching take time linear in the turns given.

    ``max_drift``: characters by which one replayed reply may differ and still be the one that we gave.
    ``max_place_ratio``: of the longer text, for a reply recognised by its place alone.
    """

    def __init__(self, max_drift: int = 512, max_place_ratio: float = 0.5) -> None:
        self.max_drift = max_drift
        self.max_place_ratio = max_place_ratio
        self._roots: dict[PrefixKey, _Place] = {}
        self._calls: dict[str, _Place] = {}
        self._minted: dict[str, str] = {}
        self._meanings: dict[str, str] = {}

    def match(self, turns: Sequence[Turn], prefix: PrefixKey, agent: str = "") -> Match:
        """The deepest held call that ``turns`` extend; of equals the least altered, then the newest.

        ``agent``: which agent of the harness asks, where it says so; another agent's question is no retry.
        """
        root = self._roots.get(prefix)
        if root is None:
            return Match(None, 0, self._why_new_root(turns, prefix), 0)
        best, asked, detail = self._follow(root, turns)
        held = best.reply
        if not any(self._below(held)):
            return Match(held.call, held.depth, "", best.drift)
        reason = self._why_fork(held, asked, turns, agent)
        return Match(held.call or None, held.depth, reason, best.drift, detail)

    def add(
        self,
        call: str,
        parent: str | None,
        turns: Sequence[Turn],
        reply: Turn | None,
        prefix: PrefixKey,
        agent: str = "",
    ) -> None:
        """Hold a call: its whole incoming ``turns``, the parent that they were matched to, and our reply.

        ``reply`` None: the call is under way, or was aborted; ``answer`` fills it in. Raises ValueError for a
        call that is already held, a parent that is not, or fewer turns than the parent holds.
        """
        start = self._start(call, parent, prefix)
        if len(turns) < start.depth:
            raise ValueError(
                f"call {call}: got {len(turns)} turns, expected at least the {start.depth} of parent {parent}"
            )
        self.hold(call, parent, [turn.key for turn in turns[start.depth :]], reply, prefix, agent)

    def hold(
        self,
        call: str,
        parent: str | None,
        fed: Sequence[str],
        reply: Turn | None,
        prefix: PrefixKey,
        agent: str = "",
    ) -> None:
        """As ``add``, from the keys of the turns that come after the parent's. Raises ValueError likewise."""
        place = self._start(call, parent, prefix)
        for key in fed:
            place = place.fed.setdefault(key, _Place(place, place.depth + 1))
        held = _Place(place, place.depth + 1, call, agent=agent, ordinal=len(self._calls))
        place.replies.append(held)
        self._calls[call] = held
        self._minted[call] = call
        if reply is not None:
            self.answer(call, reply)

    def reply(self, call: str) -> Turn | None:
        """The reply of a call; None where it has none or is not held."""
        return self._calls[call].reply if call in self._calls else None

    def depth(self, call: str | None) -> int:
        """Turns of a held call's conversation, its own reply included; 0 for none."""
        return 0 if call is None else self._calls[call].depth

    def _start(self, call: str, parent: str | None, prefix: PrefixKey) -> _Place:
        if call in self._calls:
            raise ValueError(f"call {call} is already held: expected a new id")
        if parent is not None and parent not in self._calls:
            raise ValueError(f"call {call}: parent {parent} is not held: expected one of this session's calls")
        return self._calls[parent] if parent is not None else self._roots.setdefault(prefix, _Place(None, 0))

    def answer(self, call: str, reply: Turn) -> None:
        """Give a held call its reply. ValueError when one of its tool-call ids names another call."""
        for minted in reply.call_ids:
            owner = self._minted.setdefault(minted, call)
            if owner != call:
                raise ValueError(f"tool-call id {minted} of call {call} already names call {owner}")
        self._calls[call].reply = reply
        if reply.body.strip():
            self._meanings[reply.key] = self._meanings[reply.bare_key] = call

    def recognised(self, turn: Turn) -> str | None:
        """The call whose reply a turn is, wherever it stands: by identity (within the drift), by meaning."""
        if turn.role != "assistant":
            return None
        named = [self._calls[self._minted[minted]] for minted in turn.call_ids if minted in self._minted]
        for place in named:
            if place.reply is not None and self._drift(place, turn) <= self.max_drift:
                return place.call
        return self._meanings.get(turn.key)

    def _follow(self, root: _Place, turns: Sequence[Turn]) -> tuple[_Lead, list[_Place], str]:
        """The lead to the deepest reply, the places reached with all turns used, and where the walk ended."""
        leads = [_Lead(root, root)]
        best = leads[0]
        for index, turn in enumerate(turns):
            after = turns[index + 1] if index + 1 < len(turns) else None
            steps = [step for lead in leads for step in self._steps(lead, turn, after)]
            if not steps:
                return best, [], self._describe(leads, index, turn)
            leads = steps
            best = max([best, *leads], key=_preference)
        return best, [lead.place for lead in leads], ""

    def _steps(self, lead: _Lead, turn: Turn, after: Turn | None) -> Iterator[_Lead]:
        """Where one more turn leads from a place."""
        fed = lead.place.fed.get(turn.key)
        if fed is not None:
            yield lead.to(fed)
        if turn.role != "assistant":
            return
        replies = [(place, place.reply) for place in lead.place.replies if place.reply is not None]
        named = {self._minted[minted] for minted in turn.call_ids if minted in self._minted}
        found = [place for place, _ in replies if place.call in named]
        if not found:
            found = [place for place, reply in replies if _same(reply, turn)]
        if not found and not named:
            found = [place for place, _ in replies if self._in_place(place, turn, after)]
        for place in found:
            drift = self._drift(place, turn)
            if drift <= self.max_drift:
                yield lead.to(place, drift)

    def _in_place(self, place: _Place, turn: Turn, after: Turn | None) -> bool:
        assert place.reply is not None
        if place.fed and after is not None and after.key not in place.fed:
            return False
        longer = max(len(place.reply.body), len(turn.body))
        return self._drift(place, turn) <= min(self.max_drift, self.max_place_ratio * longer)

    def _drift(self, place: _Place, turn: Turn) -> int:
        """Characters between a reply of ours and its replay. Reasoning left out whole is no difference.

        At least so many, where the lengths alone differ by more than may be.
        """
        reply = place.reply
        assert reply is not None
        if _same(reply, turn):
            return 0
        if (least := abs(len(reply.body) - len(turn.body))) > self.max_drift:
            return least
        variant = (turn.key, turn.bare_key)
        if variant not in place.drifts:
            thought = distance(reply.reasoning, turn.reasoning) if turn.reasoning else 0
            place.drifts[variant] = distance(reply.body, turn.body) + thought
        return place.drifts[variant]

    def _below(self, place: _Place) -> Iterator[_Place]:
        """The calls that were asked next after a place."""
        open_places = [place]
        while open_places:
            here = open_places.pop()
            yield from here.replies
            open_places.extend(here.fed.values())

    def _why_fork(self, place: _Place, asked: list[_Place], turns: Sequence[Turn], agent: str) -> str:
        before = [reply for here in asked for reply in here.replies]
        if before:
            return forks.RETRY if any(reply.agent == agent for reply in before) else forks.OTHER_AGENT
        left = list(self._below(place))
        if any(self._replayed(call, turns[place.depth :]) for call in left):
            return forks.HISTORY_EDITED
        if place.call or any(self._is_prefix(call, turns) for call in left):
            return forks.REPLY_DROPPED
        return forks.NEW_CONVERSATION

    def _replayed(self, place: _Place, turns: Sequence[Turn]) -> bool:
        """Whether a reply of ours stands somewhere in these turns."""
        reply = place.reply
        return reply is not None and any(
            any(self._minted.get(minted) == place.call for minted in turn.call_ids) or _same(reply, turn)
            for turn in turns
            if turn.role == "assistant"
        )

    def _is_prefix(self, place: _Place, turns: Sequence[Turn]) -> bool:
        """Whether the turns start with those that a call directly under a root was asked with."""
        here = self._root_of(place)
        for turn in turns[: place.depth - 1]:
            if turn.key not in here.fed:
                return False
            here = here.fed[turn.key]
        return here is place.parent

    def _root_of(self, place: _Place) -> _Place:
        while place.parent is not None:
            place = place.parent
        return place

    def _why_new_root(self, turns: Sequence[Turn], prefix: PrefixKey) -> str:
        """Of a conversation under a prefix that the session has not seen: what changed, and since when."""
        if not self._roots:
            return ""
        related = [known for known, root in self._roots.items() if any(turn.key in root.fed for turn in turns[:1])]
        if not related:
            return forks.NEW_CONVERSATION
        nearest = max(related, key=lambda known: (known.system == prefix.system) + (known.tools == prefix.tools))
        if nearest.system == prefix.system:
            return forks.TOOLS_CHANGED
        return forks.SYSTEM_CHANGED if nearest.tools == prefix.tools else forks.SYSTEM_AND_TOOLS_CHANGED

    def _describe(self, leads: list[_Lead], index: int, turn: Turn) -> str:
        """Where the incoming turns leave everything held; empty where nothing was expected there."""
        held = [place for lead in leads for place in (*lead.place.replies, *lead.place.fed.values())]
        if not held:
            return ""
        replies = [place for place in held if place.reply is not None]
        if turn.role == "assistant" and replies:
            drift = min(self._drift(place, turn) for place in replies)
            return f"turn {index} (assistant) differs by {drift} characters; at most {self.max_drift} are taken"
        return f"turn {index} ({turn.role}) is not the one held"


def _same(reply: Turn, turn: Turn) -> bool:
    return turn.key == reply.key or (not turn.reasoning and turn.key == reply.bare_key)


def _preference(lead: _Lead) -> tuple[int, int, int, int]:
    return (lead.reply.depth, lead.place.depth, -lead.drift, lead.reply.ordinal)
