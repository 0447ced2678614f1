"""The proxy over HTTP: in process, and on a real Unix socket with the official client."""

import asyncio
import socket
import stat

import openai
import pytest
from desk import Desk, until
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import LOOK, PAGE, ListSink, ScriptedEngine, full_ids, make_tokenizer

from actors import serve
from actors.renderer import UnrenderableError
from actors.rendering import Rendering
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig, SessionLimits

ASK = {"role": "user", "content": "hello world"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'
BAD = "<tool_call>\n{bad}\n</tool_call>"


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def message_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def read_stream(stream):
    """What the official client makes of a stream, in the shape of a message."""
    content, calls, finish, usage = "", [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
    return content, calls, finish, usage


@pytest.mark.parametrize("stream", [False, True])
async def test_official_client_runs_an_episode(rendering, stream):
    desk = Desk(rendering, ["a " + CALL + "<|im_end|>", "done<|im_end|>"])
    key = await desk.open()
    async with desk.client(key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        asked = {"model": "policy", "messages": [ASK], "tools": [LOOK]}
        if stream:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            content, calls, finish, usage = await read_stream(await client.chat.completions.create(**asked, **options))
        else:
            answer = await client.chat.completions.create(**asked)
            choice = answer.choices[0]
            content, finish, usage = choice.message.content, choice.finish_reason, answer.usage
            calls = [[c.id, c.function.name, c.function.arguments] for c in choice.message.tool_calls]
        assert (content, finish) == ("a", "tool_calls")
        assert [call[1:] for call in calls] == [["look", '{"path": "a"}']]
        assert usage.prompt_tokens == len(desk.engine.requests[0].ids)
        wire = {"id": calls[0][0], "type": "function", "function": {"name": "look", "arguments": calls[0][2]}}
        history = [
            ASK,
            {"role": "assistant", "content": content, "tool_calls": [wire]},
            {"role": "tool", "tool_call_id": calls[0][0], "content": "out"},
        ]
        last = await client.chat.completions.create(model="policy", messages=history, tools=[LOOK])
        assert last.choices[0].message.content == "done"
    summary = await desk.dispatcher.close(key)
    assert (summary.calls, summary.final_answer, summary.undelivered) == (2, True, 0)
    first, second = desk.sink.records
    assert second.parent == first.call
    assert desk.engine.requests[1].ids + second.sampled_ids.tolist() == full_ids(desk.sink.records, second.call)


@pytest.mark.parametrize("text", [BAD, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'])
async def test_stream_and_whole_agree_on_malformed_calls(rendering, text):
    """Case T1."""
    desk = Desk(rendering, [text + "<|im_end|>"] * 2)
    async with desk.client(await desk.open()) as client:
        whole = (await client.chat.completions.create(model="policy", messages=[ASK])).choices[0]
        content, calls, finish, _ = await read_stream(
            await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
        )
    assert (content, finish) == (whole.message.content or "", whole.finish_reason)
    names = [call.function.name for call in whole.message.tool_calls or []]
    assert [call[1] for call in calls] == names
    assert bool(names) != bool(content)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}, {"authorization": "x"}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
async def test_without_the_key_of_an_open_session_there_is_401(rendering, headers, path):
    desk = Desk(rendering)
    async with desk.http() as http:
        response = await http.request("GET" if path.endswith("models") else "POST", path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


async def test_keys_by_either_header_and_only_while_the_session_is_open(rendering):
    desk = Desk(rendering)
    key, other = await desk.open("e1"), await desk.open("e2")
    async with desk.http() as http:
        for headers in ({"x-api-key": key}, {"authorization": f"bearer {other}"}):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        await desk.dispatcher.close(key)
        assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == 401
        assert (await http.get("/v1/models", headers={"x-api-key": other})).status_code == 200
        assert (await http.get("/health")).status_code == 200
    assert (await desk.post(key, {"messages": [ASK]})).json()["error"]["code"] == "session_closed"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"3", "invalid_value"),
        (b'{"messages": []}', "invalid_value"),
    ],
)
async def test_broken_bodies(rendering, body, code):
    desk = Desk(rendering)
    response = await desk.post(await desk.open(), body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_deep_arguments_are_refused_not_a_crash(rendering):
    desk = Desk(rendering)
    key = await desk.open()
    deep = '{"a": ' * 700 + "1" + "}" * 700
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": deep}}
    response = await desk.post(key, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}, ASK]})
    assert response.status_code in (200, 400)
    assert message_of(await desk.post(key, {"messages": [ASK]}))["content"] == "done"


async def test_half_of_a_surrogate_pair_anywhere_is_no_trouble(rendering):
    desk = Desk(rendering)
    half = "\ud800"
    call = {"id": half, "type": "function", "function": {"name": half, "arguments": '{"a": "\\ud800"}'}}
    messages = [
        {"role": "user", "content": half},
        {"role": "assistant", "content": half, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": half, "content": half},
    ]
    tool = {"type": "function", "function": {"name": half, "description": half, half: half}}
    response = await desk.post(await desk.open(), {"messages": messages, "tools": [tool]})
    assert message_of(response)["content"] == "done"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        '{"messages":[{"role":"user","content":"\\ud800"}]}'.encode("utf-16"),
        '{"messages":[{"role":"user","content":"\\ud800"}]}'.encode("utf-32"),
    ],
)
async def test_nor_is_half_of_a_pair_in_the_bytes(rendering, body):
    desk = Desk(rendering)
    assert message_of(await desk.post(await desk.open(), body))["content"] == "done"


@pytest.mark.parametrize(
    ("path", "header", "shape"),
    [
        ("/v1/chat/completions", "anthropic-version", "openai"),
        ("/v1/responses/nothing", "x-goog-api-key", "openai"),
        ("/v1/messages/nothing", "x-goog-api-key", "anthropic"),
        ("/v1/models/policy:streamGenerateContent", "anthropic-version", "gemini"),
        ("/v1alpha/models/policy:countTokens", "authorization", "gemini"),
        ("/v1/models/nothing/x", "anthropic-version", "anthropic"),
        ("/v1/models/nothing/x", "x-goog-api-key", "gemini"),
        ("/v1/models/nothing/x", "authorization", "openai"),
    ],
)
async def test_an_error_has_the_shape_of_the_path(rendering, path, header, shape):
    async with Desk(rendering).http() as http:
        told = (await http.post(path, content=b"{}", headers={header: "x"})).json()
    keys = {"type", "message"} if shape == "anthropic" else set(told["error"])
    assert set(told["error"]) == keys
    assert ("status" in keys, "param" in keys) == (shape == "gemini", shape == "openai")


async def test_a_key_in_an_odd_place_is_not_told(rendering, caplog):
    desk = Desk(rendering)
    key = await desk.open()
    async with desk.http() as http:
        for path in (f"//s/{key}/v1/models", f"/v1/s/{key}/models", f"/s/x/{key}%0A{key}", f"/v1/models/{key}/x/"):
            response = await http.get(path, headers={"x-api-key": key})
            assert response.status_code == 404
            assert key not in response.text
    odd = (await desk.post(key, {"messages": [{"role": key}]})).json()["error"]
    assert odd["message"].startswith("messages[0].role: got '...' (str)")


async def test_a_fault_of_ours_in_a_stream_is_told_and_logged(rendering, monkeypatch, caplog):
    desk = Desk(rendering, [ScriptedEngine.HANG], ProxyConfig(ping_s=0.02))
    key = await desk.open()
    monkeypatch.setattr(desk.dispatcher._by_key[key].session, "complete", lambda *_: 1 / 0)
    call = asyncio.create_task(desk.post(key, {"messages": [ASK], "stream": True}))
    await until(lambda: desk.engine.hanging)
    await asyncio.sleep(0.1)
    (running,) = desk.dispatcher._by_key[key].running
    running.aborting.set()
    await desk.engine.abort(running.request)
    assert '"internal_error"' in (await call).text
    assert "ZeroDivisionError" in caplog.text


async def test_an_episode_that_is_opened_twice_at_once_has_one_session(rendering):
    desk = Desk(rendering)
    await desk.open("e1")
    keys = await asyncio.gather(desk.open("e1"), desk.open("e1"))
    async with desk.http() as http:
        statuses = [(await http.get("/v1/models", headers={"x-api-key": key})).status_code for key in keys]
    assert sorted(statuses) == [200, 401]
    assert desk.dispatcher.stats()["sessions_open"] == len(desk.dispatcher._by_key) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ODD_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | JSON},
    optional={
        "content": st.text(max_size=20)
        | JSON
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON})),
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"id": JSON, "function": JSON})),
        "tool_call_id": JSON,
        "reasoning_content": JSON,
    },
)
ODD_BODY = st.fixed_dictionaries(
    {"messages": st.lists(ODD_MESSAGE, max_size=4) | JSON},
    optional={
        "tools": JSON,
        "max_tokens": JSON,
        "stream": JSON,
        "stop": JSON,
        "n": JSON,
        "stream_options": JSON,
    },
)


@settings(max_examples=150, deadline=None)
@given(body=ODD_BODY)
def test_odd_bodies_are_answered_or_refused_by_name(rendering, body):
    async def post():
        desk = Desk(rendering)
        return await desk.post(await desk.open(), body)

    response = asyncio.run(post())
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]["param"]


async def test_unknown_paths_and_methods_answer_in_shape(rendering):
    async with Desk(rendering).http() as http:
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "unknown_url"
        assert (await http.get("/v1/chat/completions")).status_code == 405


async def test_a_body_of_30_mb_is_served_and_one_above_the_limit_refused(rendering):
    """Case P7."""
    desk = Desk(rendering, config=ProxyConfig(max_body_mb=33), context=8192)
    key = await desk.open()
    file = PAGE * (30 * (1 << 20) // len(PAGE))
    body = {"messages": [{"role": "user", "content": file}]}
    async with desk.client(key) as client:
        answer = await client.chat.completions.create(model="policy", **body)
        assert answer.choices[0].message.content == "done"
        assert rendering.tokenizer.decode(desk.engine.requests[0].ids).count(PAGE) == len(file) // len(PAGE)
        body["messages"] *= 2
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="policy", **body)
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_trouble_does_not_reach_the_harness(rendering, stream):
    desk = Desk(rendering, [ConnectionError("replica died"), RuntimeError("again"), "fine<|im_end|>"])
    async with desk.client(await desk.open()) as client:
        asked = client.with_options(max_retries=0).chat.completions
        if stream:
            content, *_ = await read_stream(await asked.create(model="policy", messages=[ASK], stream=True))
        else:
            content = (await asked.create(model="policy", messages=[ASK])).choices[0].message.content
    assert content == "fine"
    assert len({request.request for request in desk.engine.requests}) == 3
    assert len({tuple(request.ids) for request in desk.engine.requests}) == 1
    assert desk.dispatcher.stats()["engine_retries"] == 2
    assert len(desk.sink.records) == 1


async def test_after_the_budget_the_session_fails(rendering):
    desk = Desk(rendering, [ConnectionError("gone")] * 9, ProxyConfig(engine_wait_s=0.2))
    key = await desk.open()
    for _ in range(2):
        response = await desk.post(key, {"messages": [ASK]})
        assert response.status_code == 503
        assert response.headers["x-should-retry"] == "false"
    summary = await desk.dispatcher.close(key)
    assert summary.failed.startswith("engine: no answer within 0.2 s; last: ConnectionError: gone")
    assert (summary.calls, len(desk.sink.records)) == (1, 1)


async def test_pings_while_the_engine_works(rendering):
    desk = Desk(rendering, [ScriptedEngine.HANG, "late<|im_end|>"], ProxyConfig(ping_s=0.05))
    key = await desk.open()
    async with desk.client(key) as client:
        stream = await client.chat.completions.with_raw_response.create(
            model="policy", messages=[ASK], stream=True, timeout=5
        )
        lines = stream.http_response.aiter_bytes()
        assert await anext(lines) == b": ping\n\n"
        assert await anext(lines) == b": ping\n\n"
        # The engine ends the generation by itself: not our abort, so it is asked again.
        await desk.engine.abort(desk.engine.requests[0].request)
        rest = b"".join([line async for line in lines]).decode()
    assert '"content":"late"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_failure_after_the_first_ping_is_told_in_the_stream(rendering):
    desk = Desk(rendering, [ConnectionError("gone")] * 9, ProxyConfig(ping_s=0.05, engine_wait_s=0.3))
    async with desk.client(await desk.open()) as client:
        stream = await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
        with pytest.raises(openai.APIError, match="not available"):
            await read_stream(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(rendering, stream):
    """Case P8: of the very first call; what was sampled is a leaf and the retry its sibling."""
    desk = Desk(rendering, [ScriptedEngine.HANG, "ok<|im_end|>"], ProxyConfig(ping_s=0.05))
    key = await desk.open()
    async with desk.client(key) as client:
        asked = client.chat.completions.create(model="policy", messages=[ASK], stream=stream)
        leaving = asyncio.create_task(read_stream(await asked) if stream else asked)
        await until(lambda: desk.engine.hanging)
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.wait({leaving})
        await until(lambda: desk.sink.records)
        assert desk.engine.aborted == [desk.engine.requests[0].request]
        assert message_of(await desk.post(key, {"messages": [ASK]}))["content"] == "ok"
    summary = await desk.dispatcher.close(key)
    first, second = desk.sink.records
    assert (first.finish, len(first.sampled_ids), second.finish) == ("abort", 2, "stop")
    assert (first.parent, second.parent, second.fork) == (None, None, "retry")
    assert summary.calls == 2


async def test_closing_aborts_what_runs(rendering):
    desk = Desk(rendering, [ScriptedEngine.HANG])
    key = await desk.open()
    call = asyncio.create_task(desk.post(key, {"messages": [ASK]}))
    await until(lambda: desk.engine.hanging)
    summary, again = await asyncio.gather(desk.dispatcher.close(key), desk.dispatcher.close(key))
    assert summary == again
    assert (summary.last_finish, summary.calls, summary.final_answer) == ("abort", 1, False)
    assert (await call).status_code == 401
    assert [record.finish for record in desk.sink.records] == ["abort"]


async def test_an_engine_deaf_to_aborts_is_left(rendering):
    class Deaf(ScriptedEngine):
        async def abort(self, request):
            raise ConnectionError("gone")

    engine = Deaf(rendering.tokenizer, [ScriptedEngine.HANG])
    desk = Desk(rendering, config=ProxyConfig(abort_wait_s=0.1), engine=engine)
    key = await desk.open()
    call = asyncio.create_task(desk.post(key, {"messages": [ASK]}))
    await until(lambda: desk.engine.hanging)
    summary = await desk.dispatcher.close(key)
    assert (summary.calls, summary.sampled_tokens) == (1, 0)
    assert (await call).status_code == 401


async def test_limits_are_told_once_and_the_client_does_not_insist(rendering):
    desk = Desk(rendering)
    key = await desk.open(limits=SessionLimits(calls=1))
    async with desk.client(key) as client:
        await client.chat.completions.create(model="policy", messages=[ASK])
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="policy", messages=[ASK])
    assert caught.value.code == "limit_reached"
    assert caught.value.param == "calls"
    assert len(desk.engine.requests) == 1
    assert (await desk.dispatcher.close(key)).limit == "calls"


async def test_records_that_the_sink_does_not_take_are_kept_and_sent_again(rendering):
    sink = ListSink(failures=100)
    desk = Desk(rendering, sink=sink)
    key = await desk.open()
    await desk.post(key, {"messages": [ASK]})
    summary = await desk.dispatcher.close(key)
    assert (summary.undelivered, sink.records) == (1, [])
    with pytest.raises(ConnectionError):
        await desk.dispatcher.resend("e1")
    sink.failures = 0
    assert await desk.dispatcher.resend("e1") == 1
    assert [record.session for record in sink.records] == ["e1"]
    assert desk.dispatcher.stats()["undelivered"] == 0
    await desk.dispatcher.discard("e1")
    await desk.dispatcher.discard("e1")
    with pytest.raises(KeyError, match="unknown session"):
        await desk.dispatcher.resend("e1")
    with pytest.raises(KeyError, match="unknown session key"):
        await desk.dispatcher.close(key)


async def test_a_sink_that_recovers_misses_nothing(rendering):
    sink = ListSink(failures=2)
    desk = Desk(rendering, sink=sink)
    key = await desk.open()
    await desk.post(key, {"messages": [ASK]})
    await desk.post(key, {"messages": [ASK, ASK]})
    assert (await desk.dispatcher.close(key)).undelivered == 0
    assert sorted(record.ordinal for record in sink.records) == [0, 1]


async def test_an_episode_that_runs_again_takes_the_place_of_its_session(rendering):
    desk = Desk(rendering)
    old = await desk.open("e1")
    await desk.post(old, {"messages": [ASK]})
    new = await desk.open("e1")
    assert (await desk.post(old, {"messages": [ASK]})).status_code == 401
    assert message_of(await desk.post(new, {"messages": [ASK]}))["content"] == "done"
    assert (await desk.dispatcher.close(new)).calls == 1


async def test_sessions_do_not_touch_each_other(rendering):
    desk = Desk(rendering)
    keys = [await desk.open(f"e{i}") for i in range(16)]
    bodies = [{"messages": [{"role": "user", "content": f"task {i}"}]} for i in range(16)]
    answers = await asyncio.gather(*(desk.post(*both) for both in zip(keys, bodies, strict=True)))
    assert {answer.status_code for answer in answers} == {200}
    summaries = await asyncio.gather(*(desk.dispatcher.close(key) for key in keys))
    assert [summary.session for summary in summaries] == [f"e{i}" for i in range(16)]
    assert {summary.calls for summary in summaries} == {1}
    assert len(set(keys)) == 16
    assert desk.dispatcher.stats()["calls"] == 16


async def test_the_socket_is_private_and_its_path_short(rendering):
    app = Desk(rendering).app
    server = SocketServer()
    path = await server.start(app)
    assert await server.start(app) == path
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert len(str(path)) < 60
    await server.stop()
    await server.stop()
    assert not path.exists()


async def test_a_socket_path_that_is_too_long_is_refused(rendering, tmp_path_factory):
    deep = tmp_path_factory.mktemp("x" * 100)
    with pytest.raises(ValueError, match="shorter folder"):
        await SocketServer(deep).start(Desk(rendering).app)


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.main(["--model", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port}: it is taken" in capsys.readouterr().out


async def test_a_history_that_the_template_refuses_whole_does_not_keep_a_session_open(rendering, monkeypatch):
    desk = Desk(rendering)
    key = await desk.open()
    await desk.post(key, {"messages": [ASK]})

    def refuse(*_):
        raise UnrenderableError("roles must alternate")

    monkeypatch.setattr(rendering, "first", refuse)
    assert (await desk.dispatcher.close(key)).calls == 1
    assert desk.dispatcher.stats()["histories_unlike"] == 1
