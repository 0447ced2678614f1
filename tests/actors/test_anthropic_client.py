"""The official Anthropic client against the real app on a Unix socket."""

import asyncio
import contextlib
import json
import re

import anthropic
import httpx2
import pytest
from desk import Desk, until
from scripted import ScriptedEngine, full_ids, make_tokenizer

from actors.rendering import Rendering
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig, SessionLimits
from envs.protocols import anthropic_messages

LOOK = {
    "name": "look",
    "description": "Look at a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
ASK = {"role": "user", "content": "hello world"}
THOUGHT = "<think>\nhm\n</think>\n\n"


def called(name="look", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def body(*messages, **more):
    return {"model": "policy", "max_tokens": 99, "messages": list(messages) or [ASK], "tools": [LOOK], **more}


def said(message):
    """An answer as clients send it back."""
    return {"role": "assistant", "content": message.to_dict()["content"]}


def results(*answers):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in answers]}


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@contextlib.asynccontextmanager
async def connected(desk, key, **options):
    server = SocketServer()
    transport = httpx2.AsyncHTTPTransport(uds=str(await server.start(desk.app)))
    http = httpx2.AsyncClient(transport=transport, timeout=30)
    secret = {"api_key": key} if "auth_token" not in options else {}
    try:
        async with anthropic.AsyncAnthropic(base_url="http://proxy", http_client=http, **secret, **options) as client:
            yield client
    finally:
        await server.stop()


async def ask(client, stream=True, **asked):
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as answer:
        return await answer.get_final_message()


def assert_one_chain(desk):
    """Every call extends the one before, and every prompt is the very ids that are held and its new tail."""
    records = sorted(desk.sink.records, key=lambda record: record.ordinal)
    for before, record, request in zip([None, *records], records, desk.engine.requests, strict=False):
        assert (record.parent, record.fork) == (before and before.call, "")
        assert request.ids + record.sampled_ids.tolist() == full_ids(records, record.call)
        assert record.prompt_ids.size


@pytest.mark.parametrize("stream", [False, True])
async def test_official_client_runs_an_episode(rendering, stream):
    desk = Desk(rendering, [THOUGHT + "a " + called(path="é\n") + "<|im_end|>", "done<|im_end|>"])
    key = await desk.open()
    async with connected(desk, key, auth_token=key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).type == "model"
        first = await ask(client, stream, **body())
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        thought, text, use = first.content
        assert (thought.thinking, text.text, use.name, use.input) == ("hm", "a", "look", {"path": "é\n"})
        assert (first.stop_reason, first.usage.input_tokens) == ("tool_use", len(desk.engine.requests[0].ids))
        assert first.usage.output_tokens == len(desk.engine.encode(THOUGHT + "a " + called(path="é\n") + "<|im_end|>"))
        last = await ask(client, stream, **body(ASK, said(first), results((use.id, "out"))))
        assert (last.content[0].text, last.stop_reason) == ("done", "end_turn")
    summary = await desk.dispatcher.close(key)
    assert (summary.calls, summary.final_answer, summary.drift) == (2, True, 0)
    assert_one_chain(desk)


async def test_events_of_a_stream(rendering):
    """Cases P1 and P2."""
    desk = Desk(rendering, [called(city="X") + "<|im_end|>"])
    async with connected(desk, await desk.open()) as client:
        events = [event async for event in await client.messages.create(**body(), stream=True)]
    assert events[0].message.usage.input_tokens == len(desk.engine.requests[0].ids) > 0
    assert not events[0].message.usage.cache_read_input_tokens
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1].content_block.input == {}
    assert "".join(event.delta.partial_json for event in events[2:5]) == '{"city": "X"}'


LONG = [{"role": "user", "content": "hello"}]
for turn in range(4):
    use = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {"path": "a"}}
    LONG += [{"role": "assistant", "content": [use]}, results((f"t{turn}", "out"))]
LONG += [{"role": "system", "content": "a reminder"}]


@pytest.mark.parametrize("history", [[ASK], LONG])
async def test_a_count_is_the_length_of_the_prompt(rendering, history):
    """Case P5; once more where the call extends what is held."""
    desk = Desk(rendering, [called(path="b") + "<|im_end|>"])
    asked = {"system": "You work.", "model": "policy", "tools": [LOOK]}
    async with connected(desk, await desk.open()) as client:
        for _ in range(2):
            counted = await client.messages.count_tokens(messages=history, **asked)
            answer = await client.messages.create(messages=history, max_tokens=9, **asked)
            assert counted.input_tokens == len(desk.engine.requests[-1].ids) == answer.usage.input_tokens
            tail = results((answer.content[0].id, "out")) if answer.content[0].type == "tool_use" else ASK
            history = [*history, said(answer), tail]
    assert len(desk.sink.records) == 2
    assert_one_chain(desk)


def billed(nonce):
    line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=sdk-cli;"}
    return [line, {"type": "text", "text": "You work.", "cache_control": {"type": "ephemeral"}}]


async def test_a_billing_header_that_changes_is_not_seen(rendering):
    """Case P6: at the head of the system text only."""
    desk = Desk(rendering)
    quoted = {"role": "user", "content": billed("67c")[0]["text"]}
    async with connected(desk, await desk.open()) as client:
        first = await ask(client, **body(quoted, system=billed("67c")))
        await ask(client, **body(quoted, said(first), ASK, system=billed("f9d")))
    assert_one_chain(desk)
    prompt = rendering.tokenizer.decode(desk.engine.requests[1].ids)
    assert prompt.count("x-anthropic-billing-header") == 1
    assert "f9d" not in prompt


async def test_parallel_calls_answered_in_another_order(rendering):
    """Case M4, and results in the order of completion."""
    text = "\n".join(called(path=path) for path in "abc")
    desk = Desk(rendering, [text + "<|im_end|>"])
    async with connected(desk, await desk.open()) as client:
        first = await ask(client, **body())
        ids = [use.id for use in first.content]
        assert len(set(ids)) == 3
        asked = body(ASK, said(first), results((ids[1], "B"), (ids[2], "C"), (ids[0], "A")))
        await ask(client, **asked)
    assert_one_chain(desk)
    request = anthropic_messages.parse(asked, {})
    assert [message.tool_call_id for message in request.messages[2:]] == [ids[1], ids[2], ids[0]]
    in_order = sorted(request.messages[2:], key=lambda message: message.text)
    assert desk.engine.requests[1].ids == rendering.first([*request.messages[:2], *in_order], request.tools)


def reordered(content):
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = dict(reversed(block["input"].items()))
    return content


def renamed(content):
    for block in content:
        block.pop("signature", None)
        if block["type"] == "tool_use":
            block["id"] = "toolu_1"
    return content


def without_thinking(content):
    return [block for block in content if block["type"] != "thinking"]


def edited(content):
    """What Claude Code does to the arguments of its tools."""
    for block in content:
        if block["type"] == "tool_use":
            old = block["input"]
            block["input"] = {"replace_all": False, **old, "new": old["new"].replace("  ", ""), "command": "ls"}
            block["input"] |= {"limit": 5000, "deep": True}
    return content


@pytest.mark.parametrize(
    ("change", "drifts"),
    [
        (lambda content: content, False),
        (reordered, False),
        (renamed, False),
        (without_thinking, False),
        (lambda content: renamed(reordered(without_thinking(content))), False),
        (edited, True),
        (lambda content: edited(without_thinking(content)), True),
    ],
)
async def test_an_answer_that_comes_back_altered(rendering, change, drifts):
    """Case M5, and the rewrites of Claude Code."""
    call = called(path="é", new="BETA  \n\ty", command="cd /w && ls", limit="5000", deep="true", n=1.0)
    desk = Desk(rendering, [THOUGHT + " looking \n" + call + "<|im_end|>", " \n" + called(path="b") + "<|im_end|>"])
    async with connected(desk, await desk.open()) as client:
        first = await ask(client, **body())
        content = change(said(first)["content"])
        history = [ASK, {"role": "assistant", "content": content}, results((content[-1]["id"], "out"))]
        second = await ask(client, **body(*history))
        # White space alone is no block of its own when it comes back.
        kept = [block for block in said(second)["content"] if block.get("text", "x").strip()]
        history += [{"role": "assistant", "content": kept}, results((kept[-1]["id"], "out"))]
        await ask(client, **body(*history))
    assert_one_chain(desk)
    assert (sum(record.drift for record in desk.sink.records) > 0) == drifts


async def test_a_session_as_claude_code_has_it(rendering):
    """System messages in the middle, moving cache markers, a sub-agent, and a compaction of the main line."""
    desk = Desk(rendering, [called(path="a") + "<|im_end|>", "sub<|im_end|>", "summary<|im_end|>", "on<|im_end|>"])
    reminder = {"role": "system", "content": "skills: none"}
    marked = {"role": "user", "content": [{"type": "text", "text": "task", "cache_control": {"type": "ephemeral"}}]}
    compact = {"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."}
    continued = {"role": "user", "content": "This session is being continued from a previous conversation. summary"}
    asked = {"system": billed("67c"), "thinking": {"type": "adaptive"}, "betas": ["mid-conversation-system-2026-04-07"]}
    async with connected(desk, await desk.open()) as client:

        async def beta(*messages, **more):
            async with client.beta.messages.stream(**{**body(*messages), **asked, **more}) as answer:
                return await answer.get_final_message()

        first = await beta(marked, reminder)
        await beta(ASK, system="An agent.", extra_headers={"x-claude-code-agent-id": "ab12"})
        plain = {"role": "user", "content": "task"}
        done = results((first.content[0].id, "out"))
        done["content"].append(compact)
        await beta(plain, reminder, said(first), done)
        await beta(continued, reminder, system=billed("f9d"))
    records = sorted(desk.sink.records, key=lambda record: record.ordinal)
    assert [record.kind for record in records] == ["main", "subagent", "compaction", "after-compaction"]
    assert [record.parent for record in records] == [None, None, records[0].call, None]
    assert desk.engine.requests[2].ids + records[2].sampled_ids.tolist() == full_ids(records, records[2].call)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{bad}\n</tool_call>",
        '<tool_call>\n{"name": "look", "arguments": {"path": "a',
        called("nobody", path="a"),
        "x <parameter=path>a",
    ],
)
async def test_stream_and_whole_agree_on_malformed_calls(rendering, text):
    """Case T1; the session lives on."""
    desk = Desk(rendering, [text + "<|im_end|>"] * 2)
    async with connected(desk, await desk.open()) as client:
        whole, streamed = [(await ask(client, stream, **body())).to_dict() for stream in (False, True)]
        for answer in (whole, streamed):
            assert [block["type"] for block in answer["content"]] in (["text"], ["tool_use"])
            for block in answer["content"]:
                block.pop("id", None)
        assert whole["content"] == streamed["content"]
        assert (await ask(client, **body())).content[0].text == "done"
    assert [r.sampled_ids.tolist() for r in desk.sink.records[:2]] == [desk.engine.encode(text + "<|im_end|>")] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("line", "more", "text", "reason", "stop"),
    [
        ("<|im_end|>", {}, "", "end_turn", None),
        (THOUGHT + "one END two<|im_end|>", {"stop_sequences": ["END"]}, "one ", "stop_sequence", "END"),
        ("hello wor", {}, "hello wor", "max_tokens", None),
    ],
)
async def test_how_answers_end(rendering, stream, line, more, text, reason, stop):
    """An answer of nothing included: it has a text, which clients ask for at once."""
    desk = Desk(rendering, [line])
    async with connected(desk, await desk.open()) as client:
        answer = await ask(client, stream, **body(**more))
        assert (answer.content[-1].text, answer.stop_reason, answer.stop_sequence) == (text, reason, stop)
        await ask(client, **body(ASK, said(answer), ASK))
    assert_one_chain(desk)
    assert desk.engine.requests[0].max_tokens == 99


async def test_pings_before_the_answer(rendering):
    """In the protocol's own words, which the client passes over."""
    desk = Desk(rendering, [ScriptedEngine.HANG, "late<|im_end|>"] * 2, ProxyConfig(ping_s=0.05))

    async def released(request):
        await until(lambda: request < len(desk.engine.requests) and desk.engine.hanging)
        await asyncio.sleep(0.2)
        await desk.engine.abort(desk.engine.requests[request].request)

    async with connected(desk, await desk.open()) as client:
        answer, _ = await asyncio.gather(ask(client, **body()), released(0))
        assert answer.content[0].text == "late"
        raw = client.messages.with_streaming_response.create(**body(), stream=True)
        async with raw as response:
            release = asyncio.create_task(released(2))
            lines = [line async for line in response.iter_lines()]
            await release
    assert lines[:6] == ["event: ping", 'data: {"type":"ping"}', ""] * 2
    assert set(lines[lines.index("event: message_start") :]) & {"event: ping"} == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(rendering, stream):
    """Case P8: of the very first call; the retry is a sibling of what was left."""
    desk = Desk(rendering, [ScriptedEngine.HANG, "ok<|im_end|>"], ProxyConfig(ping_s=0.05))
    async with connected(desk, await desk.open()) as client:
        leaving = asyncio.create_task(ask(client, stream, **body()))
        await until(lambda: desk.engine.hanging)
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait({leaving})
        await until(lambda: desk.sink.records)
        assert desk.engine.aborted == [desk.engine.requests[0].request]
        assert (await ask(client, stream, **body())).content[0].text == "ok"
    await until(lambda: len(desk.sink.records) == 2)
    first, second = desk.sink.records
    assert (first.finish, len(first.sampled_ids), second.finish) == ("abort", 2, "stop")
    assert (first.parent, second.parent, second.fork) == (None, None, "retry")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "kind", "type_", "says"),
    [
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages: got"),
        (body({"role": "user", "content": [IMAGE]}), anthropic.BadRequestError, "invalid_request_error", "no images"),
        (
            body({"role": "user", "content": "hello " * 4096}),
            anthropic.BadRequestError,
            "invalid_request_error",
            r"^prompt is too long: \d+ tokens > 4095 maximum$",
        ),
        (body(ASK, ASK), anthropic.RateLimitError, "rate_limit_error", "limit of this session reached: calls"),
        (body({"role": "user", "content": "x" * (1 << 20)}), anthropic.APIStatusError, "request_too_large", "at most"),
    ],
)
async def test_errors_as_the_client_raises_them(rendering, stream, asked, kind, type_, says):
    desk = Desk(rendering, config=ProxyConfig(max_body_mb=1))
    key = await desk.open(limits=SessionLimits(calls=1))
    async with connected(desk, key) as client:
        if kind is anthropic.RateLimitError:
            await ask(client, **body())
        with pytest.raises(kind) as caught:
            await ask(client, stream, **{**body(), **asked})
    told = caught.value.body
    assert (told["type"], told["error"]["type"]) == ("error", type_)
    assert caught.value.status_code == {"request_too_large": 413, "rate_limit_error": 429}.get(type_, 400)
    assert re.search(says, told["error"]["message"])
    assert len(desk.engine.requests) == (kind is anthropic.RateLimitError)


async def test_unknown_keys_and_paths(rendering):
    desk = Desk(rendering)
    async with connected(desk, "no") as client:
        for asked in (client.messages.create(**body()), client.models.retrieve("policy")):
            with pytest.raises(anthropic.AuthenticationError, match="unknown key"):
                await asked
    async with connected(desk, await desk.open()) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()


@pytest.mark.parametrize(("ping_s", "in_stream"), [(5, False), (0.05, True)])
async def test_an_engine_that_stays_away(rendering, ping_s, in_stream):
    """Overloaded in the words of the protocol, and nobody insists."""
    desk = Desk(rendering, [ConnectionError("gone")] * 9, ProxyConfig(ping_s=ping_s, engine_wait_s=0.3))
    key = await desk.open()
    async with connected(desk, key) as client:
        with pytest.raises(anthropic.APIStatusError, match="not available") as caught:
            await ask(client, **body())
        assert caught.value.body["error"]["type"] == "overloaded_error"
        assert caught.value.status_code == (200 if in_stream else 529)
        with pytest.raises(anthropic.OverloadedError, match="session has failed"):
            await ask(client, **body())
    assert (await desk.dispatcher.close(key)).calls == 1
