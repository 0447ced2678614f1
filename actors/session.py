"""One session: the model calls of one episode, as tokens that are held and as a conversation that is matched.

Invariants: the prompt of a call that extends a held path is exactly ``held ids + ids of the new tail``;
nothing that was sampled is ever encoded again. Every call that ``prepare`` accepted ends as exactly one
record, by ``complete`` or by ``abandon``, so the ordinals of a closed session's records are 0, 1, 2, ...
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from actors import stops
from actors.engines.base import Generate, Generated, Spoken
from actors.journal import Entry, Logged
from actors.prompts import Plan, Prompts
from actors.renderer import Renderer
from actors.seeds import stable_seed
from actors.session_contract import SessionSpec, Summary
from actors.session_key import new_key
from actors.token_path import TokenPath
from actors.transcript import Transcript
from configs.proxy import ProxyConfig
from envs.harnesses.kinds import classify
from envs.protocols.canonical import Message, Reply, Request, Usage
from envs.protocols.errors import WireError
from envs.protocols.fields import arguments_text
from envs.sandbox.flags import grader_paths
from trees.record import CallRecord, Kind
from trees.turns import PrefixKey

_FINAL_CHARACTERS = 1_000_000
_MOST_TOUCHED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A call under way. ``path`` is the whole prompt, ``plan.new`` the part of it that was not held."""

    call: str
    ordinal: int
    plan: Plan
    path: TokenPath
    generate: Generate
    kind: Kind
    why: str
    began: float
    rendered: float
    """Times of the session's clock: when the request was taken up, and when its prompt was complete."""


class Session:
    """Not safe for threads: one call of ``prepare``, ``complete`` or ``abandon`` at a time."""

    def __init__(
        self,
        spec: SessionSpec,
        rendering: Renderer,
        config: ProxyConfig,
        context: int,
        clock: Callable[[], float] = time.monotonic,
        key: str | None = None,
    ) -> None:
        """``context``: the engine's longest sequence in tokens, prompt and answer together. ``key``: None mints one."""
        self.spec = spec
        self.key = key or new_key(spec.id)
        self.limit = ""
        self.failed = ""
        self._rendering = rendering
        self._limits = spec.limits or config.limits
        self._context = context
        self._max_tokens = config.max_tokens
        self._clock = clock
        self._opened = clock()
        self._records: dict[str, CallRecord] = {}
        self._prompts = Prompts(rendering, config, self._records, clock)
        self._kinds: dict[str, Kind] = {}
        self._main: set[PrefixKey] = set()
        self._newest_main: Prepared | None = None
        self._running = 0
        self._prepared = 0
        self._tokens = 0
        self._heard = self._opened
        self._transcript: Transcript | None = Transcript()
        self._touched: dict[str, None] = {}

    @property
    def records(self) -> list[CallRecord]:
        """All records so far, in the order in which the calls arrived."""
        return sorted(self._records.values(), key=lambda record: record.ordinal)

    def prepare(self, request: Request) -> Prepared:
        """Make the prompt of a call.

        Raises ``WireError``: 429 ``limit_reached`` at a limit of the session, 400
        ``context_length_exceeded`` when no room is left for an answer, 400 when the chat template refuses
        the conversation, 404 for a previous call that is not kept, 503 after the session has failed.
        """
        if self.failed:
            raise WireError(503, f"the session has failed: {self.failed}", "session_failed")
        self._check_limits()
        began = self._clock()
        plan = self._prompts.plan(request)
        path = plan.held.then(plan.new)
        generate = Generate(
            ids=path.ids,
            max_tokens=self._room(len(plan.held), len(plan.new), request.sampling.max_tokens),
            temperature=self.spec.temperature,
            top_p=self.spec.top_p,
            stop_ids=self._rendering.stop_ids,
            session=self.spec.id,
            request="c" + secrets.token_hex(9),
            seed=None if self.spec.seed is None else stable_seed(self.spec.seed, str(self._prepared)),
        )
        rendered = self._clock()
        call = generate.request
        above = None if plan.parent is None else self._kinds[plan.parent]
        elsewhere = bool(self._main) and plan.prefix not in self._main
        kind, why = classify(plan.request, above, plan.fork, elsewhere)
        self._kinds[call] = kind
        if kind == "main":
            self._main.add(plan.prefix)
        self._prompts.begin(call, plan)
        prepared = Prepared(call, self._prepared, plan, path, generate, kind, why, began, rendered)
        self._prepared += 1
        self._running += 1
        self._newest_main = prepared if kind == "main" else self._newest_main
        return prepared

    def restore(self, logged: Logged, seconds: float) -> None:
        """Take the ended calls of a session that another replica held, and what had ended it.

        A call that was under way there leaves an empty record. ``seconds``: how long ago the session was opened.
        """
        self._opened = self._clock() - seconds
        self.limit, self.failed = logged.limit, logged.failed
        # The log holds tokens and keys; of what was said before there are no words here.
        self._transcript = None if logged.entries else self._transcript
        for entry in logged.entries:
            record = entry.record
            self._prompts.restore(entry)
            self._kinds[record.call] = record.kind
            if record.kind == "main":
                self._main.add(entry.prefix)
            self._records[record.call] = record
            self._tokens += len(record.prompt_ids) + len(record.sampled_ids)
        ordinals = {entry.record.ordinal for entry in logged.entries}
        self._prepared = max(ordinals, default=-1) + 1
        for ordinal in set(range(self._prepared)) - ordinals:
            lost = _lost(self.spec.id, ordinal)
            self._records[lost.call] = lost

    def heard(self, prepared: Prepared) -> str:
        """The transcript so far, with what a call under way has brought; nothing where none was asked for."""
        if not self.spec.transcript or self._transcript is None:
            return ""
        new = Transcript()
        new.add(prepared.ordinal, prepared.kind, self._prompts.brought(prepared.plan))
        return self._transcript.text() + new.text()

    def entry(self, prepared: Prepared) -> Entry:
        """An ended call as it goes into the log."""
        return self._prompts.entry(self._records[prepared.call], prepared.plan)

    def since_call(self) -> float:
        """Seconds since the last call ended, or since the opening; 0 while one runs."""
        return 0.0 if self._running else self._clock() - self._heard

    def count(self, request: Request) -> int:
        """Tokens of the prompt that this request would have. Nothing is changed, no limit applies."""
        plan = self._prompts.plan(request)
        return len(plan.held) + len(plan.new)

    def rendered_alike(self) -> bool | None:
        """Whether the chat template gives the newest prompt of the main line in the very ids that it had.

        That is what a deployment without this proxy would feed the policy. None without such a call; False also
        where the template refuses a history that was held piece by piece.
        """
        newest = self._newest_main
        if newest is None:
            return None
        try:
            whole = self._prompts.whole(newest.plan.request)
        except (WireError, RecursionError):
            return False
        return np.array_equal(whole, newest.generate.ids)

    def complete(self, prepared: Prepared, generated: Generated, queue_s: float = 0.0) -> tuple[Reply, CallRecord]:
        """Keep what was sampled and decode a copy of it for the harness. ``queue_s``: waited before ``prepare``."""
        request = prepared.plan.request
        began = self._clock()
        generated, message, readable, stop = self._decoded(prepared, generated)
        calls = tuple(replace(call, id=f"{prepared.call}t{i}") for i, call in enumerate(message.tool_calls))
        message = replace(message, tool_calls=calls, node=prepared.call)
        times = {"queue_s": queue_s, "engine_s": began - prepared.rendered}
        times["parse_s"] = self._clock() - began
        record = self._record(prepared, generated, readable and generated.finish == "stop", times)
        self._keep(prepared, record)
        if generated.finish != "abort":
            self._prompts.answer(prepared.call, message)
            self._note(prepared, message)
            # What a later call got past did not cut the session short.
            if self.limit in ("context", "concurrent"):
                self.limit = ""
        finish: Literal["stop", "length", "tool_calls"] = "tool_calls" if calls else "stop"
        usage = Usage(len(prepared.generate.ids), len(generated.ids), generated.cached_tokens)
        cut = generated.finish == "length"
        return Reply(prepared.call, request.model, message, "length" if cut else finish, usage, stop), record

    def _decoded(self, prepared: Prepared, generated: Generated) -> tuple[Generated, Message, bool, str]:
        """A completion up to the first stop sequence, its decoded copy, whether that is sure, and the sequence.

        What came as words stays as it came: it has ended at its stop sequence, and no renderer is in its way.
        """
        if isinstance(generated, Spoken):
            return generated, generated.message, generated.readable, ""
        request = prepared.plan.request
        generated, stop = stops.cut(generated, request.sampling.stop, self._rendering.decode)
        message, readable = self._rendering.parse(generated.ids, prepared.generate.ids, request.tools)
        return generated, stops.without(message, stop) if stop else message, readable, stop

    def _note(self, prepared: Prepared, message: Message) -> None:
        """Keep of an answered call what the summary tells."""
        for call in message.tool_calls:
            self._touched.update(dict.fromkeys(grader_paths(arguments_text(call))))
        if self.spec.transcript and self._transcript is not None:
            self._transcript.add(prepared.ordinal, prepared.kind, (*self._prompts.brought(prepared.plan), message))

    def abandon(self, prepared: Prepared) -> CallRecord:
        """The record of a call of which nothing was sampled."""
        record = self._record(prepared, Generated([], [], "abort", ()), False, {})
        self._keep(prepared, record)
        return record

    def summary(self) -> Summary:
        """What came of the session so far."""
        records = self._records.values()
        newest = max(records, key=lambda record: record.ordinal, default=None)
        answer = self._prompts.reply(newest.call) if newest is not None else None
        clean = newest is not None and newest.clean
        return Summary(
            session=self.spec.id,
            calls=len(records),
            prompt_tokens=sum(len(record.prompt_ids) for record in records),
            sampled_tokens=sum(len(record.sampled_ids) for record in records),
            last_finish=newest.finish if newest else None,
            last_clean=clean,
            final_answer=clean and answer is not None and bool(answer.body.strip()) and not answer.calls,
            limit=self.limit,
            failed=self.failed,
            drift=sum(record.drift for record in records),
            forks=dict(Counter(record.fork for record in records if record.fork)),
            seconds=self._clock() - self._opened,
            final_message=self._final_message(),
            transcript=None if self._transcript is None else self._transcript.text(),
            touched=tuple(self._touched)[:_MOST_TOUCHED],
        )

    def _final_message(self) -> str:
        main = (record for record in self._records.values() if record.kind == "main" and record.finish != "abort")
        newest = max(main, key=lambda record: record.ordinal, default=None)
        answer = self._prompts.reply(newest.call) if newest is not None else None
        return answer.body[:_FINAL_CHARACTERS] if answer is not None and not answer.calls else ""

    def _check_limits(self) -> None:
        limits = self._limits
        used = {
            "calls": (self._prepared, limits.calls),
            "tokens": (self._tokens, limits.tokens),
            "wall_s": (self._clock() - self._opened, limits.wall_s),
            "concurrent": (self._running, limits.concurrent),
        }
        for name, (got, most) in used.items():
            if got >= most:
                raise self._limit_error(name, f"{got:g} used of {most:g}")

    def _limit_error(self, name: str, detail: str) -> WireError:
        if self.limit in ("", "context", "concurrent"):
            self.limit = name
        # Only the number of calls at the same time gets better by waiting.
        wait_s = 1.0 if name == "concurrent" else None
        return WireError(429, f"limit of this session reached: {name}: {detail}", "limit_reached", name, wait_s)

    def _room(self, held: int, new: int, asked: int | None) -> int:
        """Tokens that the answer may have."""
        context = self._context - held - new
        if context < 1:
            self.limit = self.limit or "context"
            message = (
                f"This model's maximum context length is {self._context} tokens. However, your messages "
                f"resulted in {held + new} tokens. Please reduce the length of the messages."
            )
            data = {"tokens": held + new, "most": self._context - 1}
            raise WireError(400, message, "context_length_exceeded", "messages", data=data)
        left = self._limits.tokens - self._tokens - new
        if left < 1:
            raise self._limit_error("tokens", f"{self._tokens + new} used of {self._limits.tokens}")
        return min(bound for bound in (context, left, asked, self._max_tokens) if bound is not None)

    def _record(self, prepared: Prepared, generated: Generated, clean: bool, times: dict[str, float]) -> CallRecord:
        plan = prepared.plan
        asked = plan.request.sampling
        notes: dict[str, Any] = {
            **{name: round(seconds, 6) for name, seconds in times.items()},
            "match_s": round(plan.matched - prepared.began, 6),
            "render_s": round(prepared.rendered - plan.matched, 6),
            "protocol": plan.request.protocol or None,
            "harness_temperature": asked.temperature,
            "harness_top_p": asked.top_p,
            "fork_detail": plan.detail or None,
        }
        return CallRecord(
            session=self.spec.id,
            call=prepared.call,
            parent=plan.parent,
            ordinal=prepared.ordinal,
            prompt_ids=np.asarray(plan.new, np.int32),
            sampled_ids=np.asarray(generated.ids, np.int32),
            logprobs=np.asarray(generated.logprobs, np.float32),
            versions=generated.versions,
            temperature=prepared.generate.temperature,
            finish=generated.finish,
            kind=prepared.kind,
            why=prepared.why,
            fork=plan.fork,
            drift=plan.drift,
            clean=clean,
            seconds=self._clock() - prepared.began,
            cached_tokens=generated.cached_tokens,
            extra={name: value for name, value in notes.items() if value is not None},
        )

    def _keep(self, prepared: Prepared, record: CallRecord) -> None:
        self._records[prepared.call] = record
        self._prompts.end(record, prepared.path)
        self._running -= 1
        self._heard = self._clock()
        self._tokens += len(record.prompt_ids) + len(record.sampled_ids)


def _lost(session: str, ordinal: int) -> CallRecord:
    """The record of a call that was under way when its replica died."""
    return CallRecord(
        session=session,
        call=f"lost{ordinal}",
        parent=None,
        ordinal=ordinal,
        prompt_ids=np.zeros(0, np.int32),
        sampled_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=(),
        temperature=1.0,
        finish="abort",
        clean=False,
    )
