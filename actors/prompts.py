"""From the conversations of one session to prompts: what is held stays, what is new is rendered.

Invariant: the prompt of a call that extends a held path is exactly ``held ids + ids of the new tail``; nothing that
was sampled is encoded again where it can be recognised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors import conversation
from actors.journal import Entry
from actors.renderer import Renderer, UnrenderableError
from actors.token_path import TokenPath
from configs.proxy import ProxyConfig
from envs.harnesses.kinds import agent_of
from envs.protocols.canonical import Message, Request
from envs.protocols.errors import WireError
from envs.protocols.volatile import without_volatile_head
from trees import forks
from trees.matching import Match, PrefixKey, SessionIndex, Turn
from trees.record import CallRecord

_TIPS = 16
"""Paths that are kept whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a request extends, and the ids of its prompt: ``held`` ids of the parent's path, then ``new``."""

    request: Request
    turns: list[Turn]
    prefix: PrefixKey
    parent: str | None
    held: TokenPath
    new: list[int]
    fork: str
    detail: str
    drift: int
    matched: float
    """When the conversation was read and matched; what came after is work on tokens."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A request as turns, and the held call that they extend."""

    request: Request
    spoken: tuple[Message, ...]
    turns: list[Turn]
    prefix: PrefixKey
    match: Match


class Prompts:
    """The conversations and the tokens of one session. ``records`` are its ended calls, which the session adds to."""

    def __init__(
        self,
        rendering: Renderer,
        config: ProxyConfig,
        records: Mapping[str, CallRecord],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rendering = rendering
        self._as_template = config.history == "rendered"
        self._records = records
        self._clock = clock
        self._index = SessionIndex(config.max_drift)
        self._kept: dict[str, tuple[Message, ...]] = {}
        self._paths: dict[str, TokenPath] = {}

    def plan(self, request: Request) -> Plan:
        """What a request extends and the ids of its prompt. Nothing is changed.

        Raises ``WireError``: 400 where nothing is said or the chat template refuses the conversation, 404 for a
        previous call that is not kept.
        """
        request = conversation.ordered(without_volatile_head(self._resolved(request)))
        if not request.messages:
            raise WireError(400, "messages: got nothing but a volatile line, expected a message", param="messages")
        read = self._matched(request)
        matched = self._clock()
        request, turns, prefix, match = read.request, read.turns, read.prefix, read.match
        parent, fork, detail = match.parent, match.reason, match.detail
        if self._as_template:
            return self._as_rendered(request, turns, prefix, match, matched)
        if parent is not None:
            held = self._path(parent)
            new = self._tail(parent, held, read.spoken[match.n_matched_turns :], request)
            if new is not None:
                return Plan(request, turns, prefix, parent, held, new, fork, detail, match.drift, matched)
            fork, detail = forks.HISTORY_EDITED, "the turns after the held ones cannot be rendered alone"
        return Plan(request, turns, prefix, None, TokenPath(), self._anew(request, turns), fork, detail, 0, matched)

    def _matched(self, request: Request) -> _Read:
        """The request and what it extends; without remnants of broken answers, where it then extends more."""
        found = self._match(request)
        lean = conversation.without_remnants(request)
        if len(lean.messages) < len(request.messages):
            return max(found, self._match(lean), key=lambda read: read.match.n_matched_turns)
        return found

    def _match(self, request: Request) -> _Read:
        prefix, spoken = conversation.split(request)
        turns = [conversation.turn_of(message) for message in spoken]
        return _Read(request, spoken, turns, prefix, self._index.match(turns, prefix, agent_of(request)))

    def _anew(self, request: Request, turns: Sequence[Turn]) -> list[int]:
        """The ids of a conversation that extends nothing held: answers of ours in it stay as they were sampled.

        A harness that compacts or rewrites its history keeps some of them.
        """
        own = {i: call for i, turn in enumerate(turns) if (call := self._index.recognised(turn)) is not None}
        if not own or 0 in own:
            return self.whole(request)
        head = len(request.messages) - len(turns)
        places = sorted(own)
        ids = self.whole(replace(request, messages=request.messages[: head + places[0]]))
        for place, following in zip(places, [*places[1:], len(turns)], strict=True):
            sampled = self._records[own[place]].sampled_ids.tolist()
            new = request.messages[head + place + 1 : head + following]
            tail = self._rendering.extend(ids, sampled, new, request.tools)
            if tail is None:
                return self.whole(request)
            ids = ids + sampled + tail
        return ids

    def _as_rendered(
        self, request: Request, turns: list[Turn], prefix: PrefixKey, match: Match, matched: float
    ) -> Plan:
        """The conversation as the chat template writes it; it extends what is held only where the ids agree."""
        ids = self.whole(request)
        parent = match.parent
        while parent is not None:
            held = self._path(parent)
            if ids[: len(held)] == held.ids.tolist():
                break
            parent = self._records[parent].parent
        held = TokenPath() if parent is None else held
        fork, detail = match.reason, match.detail
        if parent != match.parent:
            fork, detail = forks.RENDERED_DIFFERENTLY, f"the template's ids agree with {len(held)} of those held"
        drift = match.drift if parent == match.parent else 0
        return Plan(request, turns, prefix, parent, held, ids[len(held) :], fork, detail, drift, matched)

    def _resolved(self, request: Request) -> Request:
        """The request with the whole conversation, where it names a previous call."""
        if not request.previous:
            return request
        before = self._kept.get(request.previous)
        record = self._records.get(request.previous)
        if before is None or record is None:
            raise WireError(
                404,
                f"previous response {request.previous!r} not found: expected one that this session answered and kept",
                "previous_response_not_found",
                "previous_response_id",
            )
        instructions = conversation.instructions(request)
        return replace(request, messages=(*instructions, *before, *request.messages[len(instructions) :]))

    def begin(self, call: str, plan: Plan) -> None:
        """Hold a call that is under way."""
        self._index.add(call, plan.parent, plan.turns, None, plan.prefix, agent_of(plan.request))
        if plan.request.keep:
            # Instructions are not part of what was said: a request that goes on from here brings its own.
            self._kept[call] = plan.request.messages[len(conversation.instructions(plan.request)) :]

    def end(self, record: CallRecord, prompt: TokenPath) -> None:
        """Hold the tokens of a call that has ended. ``prompt``: the whole of it."""
        # The tips of the lines are at hand, so that a call costs what it adds; a fork puts its path together anew.
        if record.parent is not None:
            self._paths.pop(record.parent, None)
        self._paths[record.call] = prompt.then(record.sampled_ids)
        if len(self._paths) > _TIPS:
            del self._paths[next(iter(self._paths))]

    def answer(self, call: str, message: Message) -> None:
        """Give a held call the answer that the harness was given."""
        self._index.answer(call, conversation.turn_of(message))
        if call in self._kept:
            self._kept[call] += (message,)

    def reply(self, call: str) -> Turn | None:
        """The answer of a call; None without one."""
        return self._index.reply(call)

    def brought(self, plan: Plan) -> tuple[Message, ...]:
        """The messages of a call that those which it extends had not brought."""
        head = len(plan.request.messages) - len(plan.turns)
        return plan.request.messages[0 if plan.parent is None else head + self._index.depth(plan.parent) :]

    def entry(self, record: CallRecord, plan: Plan) -> Entry:
        """An ended call as it goes into the log."""
        fed = tuple(turn.key for turn in plan.turns[self._index.depth(plan.parent) :])
        reply, kept = self.reply(record.call), self._kept.get(record.call)
        return Entry(record, plan.prefix, fed, reply, kept, agent_of(plan.request))

    def restore(self, entry: Entry) -> None:
        """Hold an ended call from the log."""
        call = entry.record.call
        self._index.hold(call, entry.record.parent, entry.fed, entry.reply, entry.prefix, entry.agent)
        if entry.kept is not None:
            self._kept[call] = entry.kept

    def _path(self, call: str) -> TokenPath:
        """All ids held for a call: its prompt and what was sampled."""
        if call in self._paths:
            return self._paths[call]
        pieces: list[np.ndarray] = []
        here: str | None = call
        while here is not None:
            record = self._records[here]
            pieces += [record.sampled_ids, record.prompt_ids]
            here = record.parent
        return TokenPath(np.concatenate(pieces[::-1]))

    def _tail(self, parent: str, held: TokenPath, new: Sequence[Message], request: Request) -> list[int] | None:
        sampled = self._records[parent].sampled_ids
        prompt = held.ids[: len(held) - len(sampled)]
        return self._rendering.extend(prompt, sampled.tolist(), new, request.tools)

    def whole(self, request: Request) -> list[int]:
        """The ids of a conversation as the chat template writes it. Raises ``WireError`` 400 where it refuses it."""
        try:
            return self._rendering.first(request.messages, request.tools)
        except UnrenderableError as error:
            raise WireError(400, f"messages: {error}", "invalid_value", "messages") from error
