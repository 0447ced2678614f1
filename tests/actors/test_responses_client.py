"""The official client's Responses half against the whole proxy, on a real Unix socket."""

import asyncio
import contextlib
from itertools import pairwise

import httpx
import openai
import pytest
from scripted import ListSink, ScriptedEngine, full_ids, make_tokenizer

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.rendering import Rendering
from actors.session_contract import SessionSpec
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig, SessionLimits
from trees import forks

ASK = {"role": "user", "content": "hello world"}
SYSTEM = {"role": "developer", "content": "You work on files through tools."}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
DESK = {"type": "namespace", "name": "mcp__desk", "description": "", "tools": [LOOK]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'
TWO = f"{CALL}\n{CALL}"
THOUGHT = "<think>\nhm, notes\n</think>\n\n"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Talk:
    """A session, and the official client in it."""

    def __init__(self, dispatcher, key, client, engine, sink):
        self.dispatcher, self.key, self.client, self.engine, self.sink = dispatcher, key, client, engine, sink

    async def ask(self, items, stream=False, **more):
        """The answer, whichever way it comes."""
        asked = {"model": "policy", "input": items, "tools": [LOOK], **more}
        if not stream:
            return await self.client.responses.create(**asked)
        events = [event async for event in await self.client.responses.create(**asked, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return events[-1].response

    def records(self):
        return sorted(self.sink.records, key=lambda record: record.ordinal)

    def assert_one_chain(self):
        """Each call extends the one before by tokens that were never encoded again."""
        records = self.records()
        for (before, record), request in zip(pairwise(records), self.engine.requests[1:], strict=True):
            assert (record.parent, record.fork, record.drift) == (before.call, "", 0)
            assert request.ids + record.sampled_ids.tolist() == full_ids(records, record.call)


@pytest.fixture
def talk(rendering):
    @contextlib.asynccontextmanager
    async def begin(*script, config=None, **spec):
        engine, sink = ScriptedEngine(rendering.tokenizer, list(script)), ListSink()
        dispatcher = Dispatcher(config or ProxyConfig(abort_wait_s=2), rendering, engine, sink, 4096)
        key = await dispatcher.open(SessionSpec("e1", **spec))
        server = SocketServer()
        path = await server.start(build_app(dispatcher))
        http = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=30)
        async with openai.AsyncOpenAI(api_key=key, base_url="http://proxy/v1", http_client=http) as client:
            yield Talk(dispatcher, key, client, engine, sink)
        await server.stop()

    return begin


def replayed(response, *drop):
    """The items of an answer as a client keeps them, without some of their fields."""
    items = [{k: v for k, v in item.to_dict().items() if k not in drop} for item in response.output]
    return [{**item, "content": []} if item["type"] == "reasoning" and drop else item for item in items]


def outputs(response, text="out"):
    calls = [item for item in response.output if item.type.endswith("_call")]
    return [{"type": f"{call.type}_output", "call_id": call.call_id, "output": text} for call in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drop", [(), ("id", "status"), ("id", "status", "encrypted_content")])
async def test_stateless_turns_extend_each_other_exactly(talk, stream, drop):
    """As Codex talks: every item of an answer comes back on its own. With parallel calls, case M4."""
    script = (THOUGHT + "first " + TWO + END, THOUGHT + CALL + END, "done " + END)
    async with talk(*script) as here:
        history = [SYSTEM, ASK]
        for kinds in (["reasoning", "message", "function_call", "function_call"], ["reasoning", "function_call"]):
            answer = await here.ask(history, stream, store=False)
            assert [item.type for item in answer.output] == kinds
            assert answer.output[0].summary[0].text == "hm, notes"
            assert answer.output[-1].arguments == '{"path": "a"}'
            assert answer.usage.input_tokens == len(here.engine.requests[-1].ids)
            history += [*replayed(answer, *drop), *outputs(answer)]
        last = await here.ask(history, stream, store=False)
        assert (last.output_text.strip(), last.status) == ("done", "completed")
        counted = await here.client.responses.input_tokens.count(model="policy", input=history, tools=[LOOK])
        assert counted.input_tokens == last.usage.input_tokens
        here.assert_one_chain()
        summary = await here.dispatcher.close(here.key)
    assert (summary.calls, summary.drift, summary.final_answer) == (3, 0, True)


async def test_parallel_calls_are_rendered_as_the_whole_history_would_be(talk):
    """Case M4, and outputs that stand between the calls of one answer."""
    async with talk(TWO + END) as here:
        answer = await here.ask([ASK])
        calls, outs = replayed(answer), outputs(answer)
        for items in ([*calls, *outs], [calls[0], outs[0], calls[1], outs[1]]):
            await here.ask([ASK, *items])
    async with talk() as fresh:
        await fresh.ask([ASK, *calls, *outs])
    assert [request.ids for request in here.engine.requests[1:]] == [fresh.engine.requests[0].ids] * 2


async def test_a_replay_in_another_spelling_is_no_drift(talk):
    """Case M5."""
    async with talk("first  " + TWO.replace('"a"', '"é", "n": 1.0') + END) as here:
        answer = await here.ask([ASK])
        message, one, two = replayed(answer, "id", "status")
        message["content"] = message["content"][0]["text"].strip()
        one |= {"call_id": "call_a", "arguments": '{"n":1,"path":"\\u00e9"}'}
        two |= {"call_id": "call_b"}
        outs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "out"} for call in (one, two)]
        await here.ask([ASK, message, one, two, *outs])
        here.assert_one_chain()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete_and_can_be_gone_on_from(talk, stream):
    async with talk("a cut", "and on" + END) as here:
        cut = await here.ask([ASK], stream)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.output[0].status, cut.output_text) == ("incomplete", "a cut")
        more = await here.ask([ASK, *replayed(cut), {"role": "user", "content": "go on"}], stream)
        assert more.output_text == "and on"
        here.assert_one_chain()


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_response_id_goes_on_from_tokens(talk, stream):
    async with talk(THOUGHT + "first " + CALL + END, "then" + END, "other" + END) as here:
        first = await here.ask("hello world", stream, instructions="You work on files.")
        asked = {"instructions": "You work on files.", "previous_response_id": first.id}
        second = await here.ask(outputs(first), stream, **asked)
        assert (second.output_text, second.previous_response_id) == ("then", first.id)
        await here.ask("thank you", stream, **{**asked, "previous_response_id": second.id})
        here.assert_one_chain()
        await here.ask("thank you", stream, previous_response_id=second.id, instructions="Be short.")
        last = here.records()[-1]
        text = here.engine.tokenizer.decode(here.engine.requests[-1].ids)
    assert last.fork == forks.SYSTEM_CHANGED
    assert "Be short." in text
    assert "You work on files." not in text
    assert "first" in text


async def test_developer_messages_are_part_of_what_a_previous_response_goes_on_from(talk):
    async with talk("first" + END) as here:
        first = await here.ask([SYSTEM, ASK])
        second = await here.ask("thank you", previous_response_id=first.id)
        await here.ask([{**SYSTEM, "content": "hello"}, ASK], previous_response_id=second.id)
        here.assert_one_chain()
        await here.ask("thank you", previous_response_id=second.id, instructions="Be short.")
        text = here.engine.tokenizer.decode(here.engine.requests[-1].ids)
    assert text.startswith("<|im_start|>system\nBe short.")
    assert SYSTEM["content"] in text


@pytest.mark.parametrize("previous", ["resp_nothing", "resp_", "x", "not kept"])
async def test_a_previous_response_that_is_not_there(talk, previous):
    async with talk("one" + END) as here:
        if previous == "not kept":
            previous = (await here.ask([ASK], store=False)).id
        with pytest.raises(openai.NotFoundError) as caught:
            await here.ask([ASK], previous_response_id=previous)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert caught.value.type == "not_found_error"


async def test_a_previous_response_of_another_session_is_not_there(talk):
    async with talk("one" + END) as here, talk() as there:
        answer = await here.ask([ASK])
        with pytest.raises(openai.NotFoundError):
            await there.ask([ASK], previous_response_id=answer.id)


async def test_the_stream_helper_of_the_official_client(talk):
    """Cases P3 and P4 as the official client adds them up."""
    async with talk("hi " + CALL + END) as here:
        asked = {"model": "policy", "input": [ASK], "tools": [LOOK]}
        async with here.client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *inner, "output_item.done"] for inner in (text, call)]
    assert kinds == ["created", "in_progress", *items[0], *items[1], "completed"]
    assert final.output_text.strip() == "hi"
    assert (final.output[1].name, final.output[1].arguments) == ("look", '{"path": "a"}')
    assert final.output[1].call_id.isalnum()
    assert len(final.output[1].call_id) <= 40


async def test_tools_of_other_forms_come_and_go(talk):
    desk = CALL.replace("look", "mcp__desk__look")
    patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>'
    async with talk(desk + "\n" + patch + END) as here:
        tools = [DESK, PATCH, {"type": "web_search"}]
        answer = await here.ask([ASK], tools=tools)
        look, change = answer.output
        assert (look.type, look.namespace, look.name) == ("function_call", "mcp__desk", "look")
        assert (change.type, change.name, change.input) == ("custom_tool_call", "apply_patch", "*** Begin\n")
        await here.ask([ASK, *replayed(answer, "id"), *outputs(answer)], stream=True, tools=tools)
        here.assert_one_chain()
        assert "web_search" not in here.engine.tokenizer.decode(here.engine.requests[0].ids)


@pytest.mark.parametrize("text", ["<tool_call>\n{bad\n</tool_call>", CALL.replace("look", "nobody"), CALL[:30]])
async def test_malformed_calls_are_a_call_or_text_and_the_session_lives_on(talk, text):
    """Case T1."""
    async with talk(text + END, text + END) as here:
        whole, streamed = await here.ask([ASK]), await here.ask([ASK], stream=True)
        for answer in (whole, streamed):
            (item,) = replayed(answer, "id", "call_id")
            assert item == replayed(whole, "id", "call_id")[0]
            assert (item["type"] == "function_call") != bool(answer.output_text)
        again = await here.ask([ASK, *replayed(whole), *outputs(whole), ASK])
        assert again.output_text == "done"
        first, _, last = here.records()
    assert first.sampled_ids.tolist() == here.engine.encode(text + END)
    assert (last.parent, last.drift) == (first.call, 0)


async def test_pings_and_then_an_error_that_the_client_raises(talk):
    config = ProxyConfig(ping_s=0.05, engine_wait_s=0.3)
    async with talk(*[ConnectionError("gone")] * 9, config=config) as here:
        with pytest.raises(openai.APIError, match="not available") as caught:
            await here.ask([ASK], stream=True)
        assert caught.value.code == "engine_unavailable"


async def test_pings_are_comments(talk):
    async with talk(ScriptedEngine.HANG, "late" + END, config=ProxyConfig(ping_s=0.05)) as here:
        asked = asyncio.create_task(here.ask([ASK], stream=True))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if here.engine.hanging:
                break
        await asyncio.sleep(0.2)
        await here.engine.abort(here.engine.requests[0].request)
        assert (await asked).output_text == "late"


async def test_limits_and_keys_are_told_in_shape_and_not_asked_again(talk):
    async with talk(limits=SessionLimits(calls=1)) as here:
        await here.ask([ASK])
        with pytest.raises(openai.RateLimitError) as caught:
            await here.ask([ASK], stream=True)
        assert (caught.value.code, "retry-after" in caught.value.response.headers) == ("limit_reached", False)
        assert len(here.engine.requests) == 1
        with pytest.raises(openai.AuthenticationError):
            await here.client.with_options(api_key="no").responses.create(model="policy", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await here.ask([{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}])
        assert refused.value.code == "unsupported_content"
