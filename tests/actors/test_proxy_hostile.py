"""Hostile input: whatever a client sends, nothing breaks, nobody else notices, and no key is told.

Every example is one HTTP request: a valid one of some protocol, bent in its structure, its bytes, its head or its
upload. Beside it lives a session with a call under way, which must never feel any of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from hostile_cases import CALL, CHAT, MOST_BODY, Case, cases
from hypothesis import HealthCheck, given, settings
from scripted import LOOK, ListSink, ScriptedEngine, full_ids, make_tokenizer

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.journal import Journal
from actors.rendering import Rendering
from actors.session_contract import SessionSpec
from configs.proxy import ProxyConfig, SessionLimits
from trees.build import TreeBuilder

EPISODE = 40
"""Examples that share one session."""
ITEMS = r"""
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late: ' + m.content) }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}
{%- for k, v in c.function.arguments | items %}{{ k + '=' + (v if v is string else v | tojson) }}{% endfor %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Written, as many are, for arguments that are objects and for a system message at the head alone."""


class TwoMinds(ScriptedEngine):
    """Answers the witness out of its own script, and when the gate is open."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, [])
        self.witness: list[str] = [CALL, CALL, "done<|im_end|>"]
        self.gate, self.waits = asyncio.Event(), asyncio.Event()
        self.asked: list[Any] = []
        self.gate.set()

    async def generate(self, request: Any) -> Any:
        if request.session != "witness":
            self.requests.clear()
            return await super().generate(request)
        self.asked.append(request)
        self.waits.set()
        await self.gate.wait()
        return self._generated(self.encode(self.witness.pop(0)), "stop")


class Place:
    """One proxy on one event loop, with a witness and, one after the other, the sessions that suffer."""

    def __init__(self, rendering: Rendering, folder: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.rendering = rendering
        self.engine = TwoMinds(rendering.tokenizer)
        self.sink = ListSink()
        self.journal = Journal(folder)
        config = ProxyConfig(
            max_body_mb=MOST_BODY / (1 << 20), body_wait_s=0.02, abort_wait_s=2, ping_s=0.01, engine_wait_s=0.2
        )
        self.dispatcher = Dispatcher(config, rendering, self.engine, self.sink, 1 << 15, self.journal)
        self.app = build_app(self.dispatcher)
        self.examples = 0
        self.key = self.closed = ""
        self.keys: list[str] = []
        self.statuses: dict[int, int] = {}

    async def raw(self, case: Case) -> tuple[int | None, bytes]:
        """The status and the body that an ASGI server would send."""
        sent: list[Any] = []
        chunks = [*case.chunks]

        async def receive() -> dict[str, Any]:
            if case.stalls and len(chunks) == 1:
                await asyncio.Event().wait()
            if chunks:
                body = self.filled(chunks.pop(0))
                return {"type": "http.request", "body": body, "more_body": bool(chunks) or case.leaves}
            if not case.leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        path = self.filled(case.path.encode()).decode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": case.method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": self.filled(case.query),
            "root_path": "",
            "headers": [(name, self.filled(value)) for name, value in case.headers],
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        if not sent:
            return None, b""
        assert [message["type"] for message in sent[1:]] == ["http.response.body"] * (len(sent) - 1)
        assert not sent[-1].get("more_body")
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    def filled(self, data: bytes) -> bytes:
        for name, key in ((b"@key@", self.key), (b"@witness@", self.witness), (b"@closed@", self.closed)):
            data = data.replace(name, key.encode())
        return data

    def told(self, data: bytes) -> bool:
        """Whether a key, or so much of one that the rest can be guessed, is in something."""
        return any(key[8:40].encode() in data or key[-32:].encode() in data for key in self.keys)

    async def begin(self) -> None:
        """The witness: an ended call, one under way, and what must not change."""
        self.witness = await self.dispatcher.open(SessionSpec("witness"))
        self.keys.append(self.witness)
        reply = await self.ask([*CHAT["messages"][:1], {"role": "user", "content": "go"}])
        self.call = reply["tool_calls"][0]
        self.history = [
            *CHAT["messages"][:1],
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [self.call]},
            {"role": "tool", "tool_call_id": self.call["id"], "content": "out"},
        ]
        self.engine.gate.clear()
        self.engine.waits = asyncio.Event()
        self.hanging = asyncio.create_task(self.ask(self.history))
        await self.engine.waits.wait()
        self.hosted = self.dispatcher.find(self.witness)
        self.before = (list(self.hosted.session.records), self.hosted.logged)

    async def ask(self, messages: list[Any]) -> dict[str, Any]:
        """The witness's own calls."""
        body = json.dumps({"messages": messages, "tools": [LOOK]}).encode()
        headers = [(b"authorization", b"Bearer @witness@")]
        case = Case("openai-chat", True, "POST", "/v1/chat/completions", b"", headers, [body], False, False, None)
        status, answer = await self.raw(case)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["message"]

    async def one(self, case: Case) -> None:
        if self.examples % EPISODE == 0:
            await self.change_sessions()
        self.examples += 1
        if case.leaves and case.chunks:
            self.engine.script = [ScriptedEngine.HANG]
        else:
            self.engine.script = [case.answer]
        status, body = await asyncio.wait_for(self.raw(case), 60)
        self.statuses[status or 0] = self.statuses.get(status or 0, 0) + 1
        check(case, status, body)
        if status is not None and status >= 400:
            assert not self.told(body), body
        assert (self.hosted.session.records, self.hosted.logged) == self.before
        assert self.engine.asked[1].request not in self.engine.aborted
        assert not self.hanging.done()

    async def change_sessions(self) -> None:
        if self.key:
            await self.end_session()
        self.closed = self.key or await self.dispatcher.open(SessionSpec("closed"))
        limits = SessionLimits(calls=10**6, tokens=10**9, wall_s=1e6, concurrent=4)
        self.key = await self.dispatcher.open(SessionSpec(f"e{self.examples}", limits=limits))
        self.keys += [self.key, self.closed]

    async def end_session(self) -> None:
        """All calls of the session have a record, the records make a tree, and the log holds them all."""
        summary = await self.dispatcher.close(self.key)
        assert (summary.undelivered, summary.failed) == (0, "")
        records = [record for record in self.sink.records if record.session == summary.session]
        assert sorted(record.ordinal for record in records) == list(range(summary.calls))
        builder = TreeBuilder(summary.session)
        for record in records:
            builder.add(record)
        assert builder.missing(summary.calls) == builder.waiting() == []
        logged = self.journal.read(self.key)
        assert logged is not None
        assert [entry.record.call for entry in logged.entries] == [
            r.call for r in sorted(records, key=lambda r: r.ordinal)
        ]
        self.sink.records = [record for record in self.sink.records if record.session == "witness"]

    async def end(self) -> None:
        """The witness goes on as if nothing had been."""
        await self.end_session()
        self.engine.gate.set()
        answer = await self.hanging
        again = answer["tool_calls"][0]
        await self.ask([*self.history, answer, {"role": "tool", "tool_call_id": again["id"], "content": "out"}])
        summary = await self.dispatcher.close(self.witness)
        assert (summary.calls, summary.forks, summary.drift, summary.final_answer) == (3, {}, 0, True)
        records = [record for record in self.sink.records if record.session == "witness"]
        last = full_ids(records, records[-1].call)
        assert last == [*self.engine.asked[-1].ids, *records[-1].sampled_ids.tolist()]
        for record in records:
            assert last[: len(full_ids(records, record.call))] == full_ids(records, record.call)
        assert self.dispatcher.stats()["calls_running"] == 0


def check(case: Case, status: int | None, body: bytes) -> None:
    """An answer in the form of its protocol, or a refusal in the form of its protocol; never a fault of ours."""
    if status is None or status == 499:
        assert case.leaves
        return
    assert status in (200, 400, 401, 404, 405, 408, 413, 429), (status, body)
    if status != 200:
        shapes = [shape(json.loads(body, parse_constant=no_constant), status)]
        assert not case.known or case.protocol in shapes[0], (case.path, body)
    elif body.startswith((b"data:", b"event:", b":", b"\n")) and b"data:" in body:
        for line in body.splitlines():
            if line.startswith(b"data:") and line != b"data: [DONE]":
                json.loads(line[5:], parse_constant=no_constant)
    else:
        json.loads(body, parse_constant=no_constant)


def no_constant(name: str) -> None:
    raise AssertionError(f"got {name}, which is no JSON")


def shape(told: Any, status: int) -> tuple[str, ...]:
    """The protocols in whose shape an error is."""
    if set(told) == {"type", "error"} and told["type"] == "error" and set(told["error"]) == {"type", "message"}:
        return ("anthropic-messages",)
    if set(told) == {"error"} and {"code", "message", "status"} <= set(told["error"]) <= {
        "code",
        "message",
        "status",
        "details",
    }:
        assert told["error"]["code"] == status
        return ("gemini",)
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert all(value is None or isinstance(value, str) for value in told["error"].values())
    return ("openai-chat", "openai-responses")


class Lines(logging.Handler):
    """All that anybody logs, with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def everything_logged() -> Any:
    root, lines = logging.getLogger(), Lines()
    level = root.level
    root.addHandler(lines)
    root.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    try:
        yield lines
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        root.removeHandler(lines)


@pytest.fixture(scope="module", params=["qwen3", "default"])
def rendering(request, tmp_path_factory):
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), ITEMS if request.param == "default" else None)
    made = Rendering(folder)
    assert made.name == request.param
    return made


def assault(rendering: Rendering, folder: Any, examples: int) -> Place:
    with everything_logged() as log:
        place = Place(rendering, folder)
        place.loop.run_until_complete(place.begin())

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large],
        )
        @given(case=cases())
        def attack(case: Case) -> None:
            place.loop.run_until_complete(place.one(case))

        attack()
        place.loop.run_until_complete(place.end())
        gc.collect()
        place.loop.close()
        assert not place.told("\n".join(log.lines).encode())
        assert [line for line in log.lines if line.startswith(("ERROR", "CRITICAL", "WARNING"))] == []
        return place


def test_hostile_requests(rendering, tmp_path):
    assert assault(rendering, tmp_path, 150).examples >= 150


@pytest.mark.harness
def test_ten_thousand_hostile_requests(rendering, tmp_path):
    place = assault(rendering, tmp_path, 5000)
    assert place.examples >= 5000
    assert min(place.statuses[status] for status in (200, 400, 401, 404, 405, 408)) > 50
