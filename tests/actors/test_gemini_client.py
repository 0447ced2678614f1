"""Gemini's wire format through the proxy, with the official client on a real Unix socket."""

import asyncio
import contextlib
import json

import aiohttp
import httpx
import pytest
from desk import Desk, until
from google import genai
from google.genai import errors, types
from scripted import ScriptedEngine, full_ids, make_tokenizer

from actors.rendering import Rendering
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig, SessionLimits

LOOK = types.FunctionDeclaration(
    name="look",
    description="Look at a file.",
    parameters=types.Schema(type="OBJECT", properties={"path": types.Schema(type="STRING")}),
)
TOOLS = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[LOOK])])
ASK = {"contents": [{"role": "user", "parts": [{"text": "hello world"}]}]}
END = "<|im_end|>"


def called(*arguments):
    calls = [json.dumps({"name": "look", "arguments": given}) for given in arguments]
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + END


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@contextlib.asynccontextmanager
async def client(desk, key, through="httpx"):
    """The official client over either of the libraries that it may use; they read streams in their own ways."""
    server = SocketServer()
    path = str(await server.start(desk.app))
    if through == "httpx":
        own = {"httpx_async_client": httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), timeout=30)}
    else:
        own = {"aiohttp_client": aiohttp.ClientSession(connector=aiohttp.UnixConnector(path))}
    try:
        async with genai.Client(api_key=key, http_options=types.HttpOptions(base_url="http://proxy", **own)).aio as aio:
            yield aio
    finally:
        await (own["httpx_async_client"].aclose() if through == "httpx" else own["aiohttp_client"].close())
        await server.stop()


async def asked(aio, stream, **call):
    """All parts of an answer, its finish reason and its usage, whole or from a stream."""
    if stream:
        chunks = [chunk async for chunk in await aio.models.generate_content_stream(model="policy", **call)]
    else:
        chunks = [await aio.models.generate_content(model="policy", **call)]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    return parts, chunks[-1].candidates[0].finish_reason, chunks[-1].usage_metadata


def assert_one_chain(desk, calls):
    """Every prompt holds the one before it, with what was sampled, token by token."""
    records = desk.sink.records
    assert len(records) == len(desk.engine.requests) == calls
    assert [record.parent for record in records] == [None, *(record.call for record in records[:-1])]
    assert {(record.fork, record.drift) for record in records} == {("", 0)}
    for request, record in zip(desk.engine.requests, records, strict=True):
        assert request.ids + record.sampled_ids.tolist() == full_ids(records, record.call)


@pytest.mark.parametrize("through", ["httpx", "aiohttp"])
async def test_models_and_answers_whole_and_streamed(rendering, through):
    desk = Desk(rendering, ["<think>\nwhy\n</think>\n\nhello" + called({"path": "a"}, {})] * 2 + ["hello world"])
    async with client(desk, await desk.open(), through) as aio:
        assert [model.name async for model in await aio.models.list()] == ["models/policy"]
        model = await aio.models.get(model="policy")
        assert (model.name, model.supported_actions) == ("models/policy", ["generateContent", "countTokens"])
        whole, streamed = [await asked(aio, stream, contents="hello", config=TOOLS) for stream in (False, True)]
        cut = await asked(aio, False, contents="hello")
    for parts, finish, usage in (whole, streamed):
        assert [(part.text, part.thought) for part in parts[:2]] == [("why", True), ("hello", None)]
        assert [part.function_call.args for part in parts[2:]] == [{"path": "a"}, {}]
        assert finish == "STOP"
        assert usage.prompt_token_count == len(desk.engine.requests[0].ids)
        assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
        assert usage.cached_content_token_count == 1
    assert ([part.text for part in cut[0]], cut[1]) == (["hello world"], "MAX_TOKENS")
    ids = [part.function_call.id for parts, *_ in (whole, streamed) for part in parts[2:]]
    assert len(set(ids)) == 4
    assert all(id_.isalnum() and len(id_) <= 40 for id_ in ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_that_call_functions_by_themselves(rendering, stream):
    """The client runs the functions and sends results without ids; an empty answer stays in its history."""
    paths = []

    def look(path: str) -> str:
        paths.append(path)
        return f"page {path}"

    script = [
        "<think>\nhm\n</think>\n\nfirst " + called({"path": "a"}, {"path": "b"}),
        called({"path": "c"}),
        END,
        "bye" + END,
    ]
    desk = Desk(rendering, script)
    config = types.GenerateContentConfig(tools=[look], system_instruction="be kind")
    async with client(desk, await desk.open()) as aio:
        chat = aio.chats.create(model="policy", config=config)
        for message in ("hello", "world"):
            if stream:
                texts = [chunk.text async for chunk in await chat.send_message_stream(message)]
            else:
                texts = [(await chat.send_message(message)).text]
    assert (paths, texts[-1]) == (["a", "b", "c"], "bye")
    assert_one_chain(desk, 4)
    prompt = rendering.tokenizer.decode(desk.engine.requests[-1].ids)
    assert prompt.index("be kind") < prompt.index("page a") < prompt.index("page b") < prompt.index("page c")


@pytest.mark.parametrize("stream", [False, True])
async def test_history_as_gemini_cli_keeps_it(rendering, stream):
    """Thoughts dropped, ids invented, arguments in another order, results too: the tokens stay."""
    answers = [
        "<think>\nhm\n</think>\n\nlooking " + called({"path": "a", "far": 1.0}, {"far": 2, "path": "b"}),
        "only text " + END,
        called({"path": "a"}),
        "done" + END,
    ]
    desk = Desk(rendering, answers)
    contents = [types.Content(role="user", parts=[types.Part(text="hello")])]
    async with client(desk, await desk.open()) as aio:
        for turn in range(len(answers)):
            parts, *_ = await asked(aio, stream, contents=contents, config=TOOLS)
            kept = [part for part in parts if not part.thought]
            calls = [part.function_call for part in kept if part.function_call]
            for n, call in enumerate(calls):
                call.id = f"look_{turn}_{n}"
                call.args = dict(reversed([(name, int(v) if name == "far" else v) for name, v in call.args.items()]))
            given = [
                types.Part(
                    function_response=types.FunctionResponse(id=call.id, name="look", response={"output": call.id})
                )
                for call in reversed(calls)
            ]
            contents += [
                types.Content(role="model", parts=kept),
                types.Content(role="user", parts=given or [types.Part(text="go on")]),
            ]
    assert kept[0].text == "done"
    assert_one_chain(desk, len(answers))
    assert "look_0_1" in rendering.tokenizer.decode(desk.engine.requests[1].ids)


async def test_altered_text_is_known_by_its_signature(rendering):
    desk = Desk(rendering, ["hello world" + END, "hello world, thank you" + END, "done" + END])
    async with client(desk, await desk.open()) as aio:
        first, *_ = await asked(aio, False, contents="hello")
        await asked(aio, False, contents="hello")
        first[0].text = "hello world, thank yo"
        history = [
            types.Content(role=role, parts=parts)
            for role, parts in (("user", [types.Part(text="hello")]), ("model", first))
        ]
        await asked(aio, False, contents=[*history, types.Content(role="user", parts=[types.Part(text="go")])])
    retried, third = desk.sink.records[1:]
    assert (retried.fork, third.parent) == ("retry", desk.sink.records[0].call)
    assert third.drift == len(", thank yo")


async def test_counts_are_those_of_the_prompt(rendering):
    desk = Desk(rendering)
    body = {**ASK, "tools": TOOLS.model_dump(exclude_none=True, mode="json")["tools"], "systemInstruction": "be kind"}
    key = await desk.open()
    async with client(desk, key) as aio, desk.http() as http:
        answer = await http.post("/v1beta/models/policy:generateContent", json=body, headers={"x-goog-api-key": key})
        assert answer.status_code == 200
        wrapped = {"generateContentRequest": {"model": "models/policy", **body}}
        counted = await http.post(f"/s/{key}/v1/models/policy:countTokens", json=wrapped)
        assert counted.json() == {"totalTokens": len(desk.engine.requests[0].ids)}
        plain = await aio.models.count_tokens(model="policy", contents="hello world")
        await asked(aio, False, contents="hello world")
    assert plain.total_tokens == len(desk.engine.requests[1].ids)


@pytest.mark.parametrize("version", ["v1beta", "v1", "v1alpha"])
async def test_keys_and_paths(rendering, version):
    desk = Desk(rendering)
    key = await desk.open()
    models = f"/{version}/models"
    async with desk.http() as http:
        for place in ({"headers": {"x-goog-api-key": key}}, {"params": {"key": key}}):
            answer = await http.post(f"{models}/policy:generateContent", json=ASK, **place)
            assert answer.json()["candidates"][0]["content"]["parts"][0]["text"] == "done"
        assert (await http.get(models, headers={"x-goog-api-key": key})).json()["models"][0]["name"] == "models/policy"
        refused = await http.post(f"{models}/policy:generateContent", json=ASK, params={"key": "no"})
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_clients_own(rendering, stream):
    desk = Desk(rendering, config=ProxyConfig(engine_wait_s=0.2))
    image = types.Part.from_bytes(data=b"x", mime_type="image/png")
    key = await desk.open(limits=SessionLimits(calls=2))
    async with client(desk, "no") as aio:
        with pytest.raises(errors.ClientError) as caught:
            await asked(aio, stream, contents="hello")
        assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")
    async with client(desk, key) as aio:
        with pytest.raises(errors.ClientError, match="reads no images") as caught:
            await asked(aio, stream, contents=[image])
        assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
        await asked(aio, stream, contents="hello")
        desk.engine.script = [ConnectionError("gone")] * 9
        with pytest.raises(errors.ServerError) as caught:
            await asked(aio, stream, contents="hello")
        assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
    limited = await desk.open("e2", limits=SessionLimits(calls=1))
    async with client(desk, limited) as aio:
        desk.engine.script = []
        await asked(aio, stream, contents="hello")
        with pytest.raises(errors.ClientError) as caught:
            await asked(aio, stream, contents="hello")
        assert (caught.value.code, caught.value.status) == (429, "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("through", ["httpx", "aiohttp"])
async def test_pings_disturb_no_client(rendering, through):
    desk = Desk(rendering, [ScriptedEngine.HANG, "late" + END] * 2, ProxyConfig(ping_s=0.02))
    key = await desk.open()
    url = "/v1beta/models/policy:streamGenerateContent"

    async def wake():
        await until(lambda: desk.engine.hanging)
        await asyncio.sleep(0.1)
        await desk.engine.abort(next(iter(desk.engine.hanging)))
        desk.engine.hanging.clear()

    async with client(desk, key, through) as aio, desk.http() as http:
        (parts, *_), _ = await asyncio.gather(asked(aio, True, contents="hello"), wake())
        raw, _ = await asyncio.gather(http.post(url, json=ASK, headers={"x-goog-api-key": key}), wake())
    assert [part.text for part in parts] == ["late"]
    assert raw.text.startswith("\n\n")
    assert [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in raw.json()] == ["late"]


@pytest.mark.parametrize("through", ["httpx", "aiohttp"])
async def test_failure_after_the_first_ping_is_told_in_the_stream(rendering, through):
    desk = Desk(rendering, [ConnectionError("gone")] * 9, ProxyConfig(ping_s=0.05, engine_wait_s=0.3))
    async with client(desk, await desk.open(), through) as aio:
        with pytest.raises(errors.ServerError, match="not available") as caught:
            await asked(aio, True, contents="hello")
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
