"""Call records to a prefix tree.

Invariant: the tree depends on the set of records only, not on their order of arrival. Under the end
of each call (and under the root) the new prompt tokens of its continuations form a compressed prefix
tree; each sampled run hangs where its prompt ends and is never merged with another.

Adding a record costs time linear in the tokens that the record carries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trees.record import CallRecord, Finish, Kind, VersionSpan
from trees.tree import NO_IDS, ROOT, Node, Tree

UNTOLD = "no log-probabilities"
"""Why nothing is trained of an answer whose engine tells none."""


class RecordError(ValueError):
    """A call record that cannot be attached; it says what was got and what was expected."""


@dataclass(eq=False, slots=True)
class _Run:
    """A node while the tree still grows: observation children by first token, sampled runs apart."""

    ids: np.ndarray
    parent: _Run | None
    record: CallRecord | None = None
    observed: dict[int, _Run] = field(default_factory=dict)
    sampled: list[_Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequest:
    """One model call as an ordinary log has it: the whole prompt, and no word about its parent."""

    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    version: int = 0
    temperature: float = 1.0
    finish: Finish = "stop"
    kind: Kind = "main"


class TreeBuilder:
    """Builds the tree of one session, record by record."""

    def __init__(self, session: str) -> None:
        self.session = session
        self._root = _Run(NO_IDS, None)
        self._ends: dict[str, _Run] = {}
        self._ordinals: dict[int, str] = {}
        self._waiting: dict[str, list[CallRecord]] = {}
        self._known: set[str] = set()

    def add(self, record: CallRecord) -> bool:
        """Attach a record, or hold it until its parent comes. False when the call is already known.

        Raises RecordError when the record contradicts itself or what came before; nothing is changed then.
        """
        if record.call in self._known:
            return False
        record = _checked(record)
        self._fits(record)
        self._known.add(record.call)
        self._ordinals[record.ordinal] = record.call
        ready = [record]
        while ready:
            newest = ready.pop()
            if newest.parent is not None and newest.parent not in self._ends:
                self._waiting.setdefault(newest.parent, []).append(newest)
                continue
            self._attach(newest)
            ready.extend(self._waiting.pop(newest.call, ()))
        return True

    def missing(self, n_calls: int) -> list[int]:
        """Ordinals below ``n_calls`` of which no record has come."""
        return [ordinal for ordinal in range(n_calls) if ordinal not in self._ordinals]

    def waiting(self) -> list[str]:
        """Calls that came but whose parent did not; they are not in ``tree()``."""
        return sorted(record.call for held in self._waiting.values() for record in held)

    def tree(self, meta: dict[str, Any] | None = None) -> Tree:
        """The tree of what is attached so far; every sampled run with log-probabilities is marked trained. O(nodes)."""
        nodes = [Node(ROOT, -1, NO_IDS)]
        numbers: dict[int, int] = {id(self._root): ROOT}
        for ordinal in sorted(self._ordinals):
            end = self._ends.get(self._ordinals[ordinal])
            if end is None or end.record is None:
                continue
            fresh: list[_Run] = []
            run: _Run | None = end
            while run is not None and id(run) not in numbers:
                fresh.append(run)
                run = run.parent
            parent = ROOT if run is None else numbers[id(run)]
            for run in reversed(fresh):
                nodes.append(_node(len(nodes), parent, run, end.record))
                parent = numbers[id(run)] = len(nodes) - 1
        return Tree(tuple(nodes), {"session": self.session, **(meta or {})})

    def deepest(self, prompt_ids: np.ndarray) -> tuple[str | None, int]:
        """The call whose prompt and sampled ids are the longest prefix of ``prompt_ids``, and that length.

        Of calls that sampled the same ids the newest is taken. A call that sampled nothing is no one's
        parent: its continuation could not be told from its retry.
        """
        best: tuple[int, int, str | None] = (0, -1, None)
        open_runs: list[tuple[_Run, int]] = [(self._root, 0)]
        while open_runs:
            run, offset = open_runs.pop()
            if run.record is not None:
                best = max(best, (offset, run.record.ordinal, run.record.call), key=lambda found: found[:2])
            followers = [child for child in run.sampled if len(child.ids)]
            if offset < len(prompt_ids):
                observed = run.observed.get(int(prompt_ids[offset]))
                followers += [observed] if observed is not None else []
            for child in followers:
                end = offset + len(child.ids)
                if end <= len(prompt_ids) and np.array_equal(child.ids, prompt_ids[offset:end]):
                    open_runs.append((child, end))
        return best[2], best[0]

    def _fits(self, record: CallRecord) -> None:
        if record.session != self.session:
            raise RecordError(
                f"call {record.call}: got session {record.session!r}, expected {self.session!r}: "
                "use one TreeBuilder per session"
            )
        if record.ordinal in self._ordinals:
            raise RecordError(
                f"call {record.call}: ordinal {record.ordinal} is already that of call "
                f"{self._ordinals[record.ordinal]}; expected one ordinal per call"
            )
        if record.parent == record.call:
            raise RecordError(f"call {record.call} names itself as its parent; expected an earlier call or None")

    def _attach(self, record: CallRecord) -> None:
        start = self._root if record.parent is None else self._ends[record.parent]
        place = _walk(start, record.prompt_ids)
        run = _Run(record.sampled_ids, place, record)
        place.sampled.append(run)
        self._ends[record.call] = run


def from_requests(
    requests: Iterable[RecordedRequest], session: str = "recorded", meta: dict[str, Any] | None = None
) -> Tree:
    """A tree from whole prompts in order of arrival, by token prefix alone.

    The parent of a request is the earlier one whose prompt and sampled ids are the longest prefix of its
    prompt; ids that were re-tokenised on the way therefore fork. Linear in the tokens of all prompts.
    Raises RecordError as ``TreeBuilder.add`` does.
    """
    builder = TreeBuilder(session)
    for ordinal, request in enumerate(requests):
        prompt_ids = _ids(request.prompt_ids, f"request {ordinal}: prompt_ids")
        parent, held = builder.deepest(prompt_ids)
        sampled = len(request.sampled_ids)
        builder.add(
            CallRecord(
                session=session,
                call=f"r{ordinal}",
                parent=parent,
                ordinal=ordinal,
                prompt_ids=prompt_ids[held:],
                sampled_ids=request.sampled_ids,
                logprobs=request.logprobs,
                versions=(VersionSpan(request.version, 0, sampled),) if sampled else (),
                temperature=request.temperature,
                finish=request.finish,
                kind=request.kind,
            )
        )
    return builder.tree(meta)


def _walk(start: _Run, ids: np.ndarray) -> _Run:
    """The run below ``start`` that ends exactly where ``ids`` does, made or split off as needed."""
    place = start
    while len(ids):
        child = place.observed.get(int(ids[0]))
        if child is None:
            fresh = _Run(ids, place)
            place.observed[int(ids[0])] = fresh
            return fresh
        shared = common(child.ids, ids)
        if shared < len(child.ids):
            child = _split(child, shared)
        place, ids = child, ids[shared:]
    return place


def _split(run: _Run, at: int) -> _Run:
    """Cut an observation run in two and return the upper part; the lower keeps what hangs below it."""
    assert run.parent is not None
    upper = _Run(run.ids[:at], run.parent)
    run.parent.observed[int(run.ids[0])] = upper
    run.ids, run.parent = run.ids[at:], upper
    upper.observed[int(run.ids[0])] = run
    return upper


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids two runs begin alike with."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


def _node(number: int, parent: int, run: _Run, origin: CallRecord) -> Node:
    record = run.record
    if record is None:
        return Node(
            number,
            parent,
            run.ids,
            call=origin.call,
            ordinal=origin.ordinal,
            kind=origin.kind,
            why=origin.why,
        )
    told = not np.isnan(record.logprobs).any()
    return Node(
        id=number,
        parent=parent,
        ids=run.ids,
        sampled=True,
        logprobs=record.logprobs,
        versions=record.versions,
        temperature=record.temperature,
        call=record.call,
        ordinal=record.ordinal,
        kind=record.kind,
        why=record.why,
        fork=record.fork,
        drift=record.drift,
        finish=record.finish,
        clean=record.clean,
        trained=told,
        reason="" if told else UNTOLD,
    )


def _checked(record: CallRecord) -> CallRecord:
    """The record with arrays of our own, of the types that the tree promises."""
    name = f"call {record.call}"
    if not record.call:
        raise RecordError("a call record without a call id: expected a non-empty one")
    if record.ordinal < 0:
        raise RecordError(f"{name}: got ordinal {record.ordinal}, expected 0 or more")
    prompt_ids = _ids(record.prompt_ids, f"{name}: prompt_ids")
    sampled_ids = _ids(record.sampled_ids, f"{name}: sampled_ids")
    logprobs = np.array(record.logprobs, dtype=np.float32)
    logprobs.setflags(write=False)
    if logprobs.shape != sampled_ids.shape:
        raise RecordError(
            f"{name}: got log-probabilities of shape {logprobs.shape}, expected {sampled_ids.shape}, one per "
            "sampled id; drop the call and count it, or have the engine return them"
        )
    if not (np.isfinite(logprobs).all() or np.isnan(logprobs).all()):
        first = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise RecordError(
            f"{name}: got log-probability {logprobs[first]} at sampled token {first}, expected finite ones, "
            "or none that is a number where the engine tells none"
        )
    _check_versions(name, record.versions, len(sampled_ids))
    return replace(record, prompt_ids=prompt_ids, sampled_ids=sampled_ids, logprobs=logprobs)


def _check_versions(name: str, spans: tuple[VersionSpan, ...], length: int) -> None:
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start:
            break
        at = span.end
    else:
        if at == length:
            return
    got = ", ".join(f"[{span.start}, {span.end})" for span in spans) or "none"
    raise RecordError(
        f"{name}: got version spans {got}, expected spans in order that cover [0, {length}) without gaps: "
        "every sampled token has the version of the policy that sampled it"
    )


def _ids(ids: Any, name: str) -> np.ndarray:
    wide = np.array(ids, dtype=np.int64) if len(ids) else np.zeros(0, np.int64)
    if wide.ndim != 1:
        raise RecordError(f"{name}: got shape {wide.shape}, expected one dimension")
    if len(wide) and not 0 <= int(wide.min()) <= int(wide.max()) <= np.iinfo(np.int32).max:
        raise RecordError(f"{name}: got ids from {wide.min()} to {wide.max()}, expected 0 to 2**31 - 1")
    owned = wide.astype(np.int32)
    owned.setflags(write=False)
    return owned
