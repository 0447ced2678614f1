"""The Responses wire format to the canonical conversation and back."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from envs.protocols import fields, openai_responses, wire
from envs.protocols.canonical import Message, Reply, ToolCall, Usage, signature
from envs.protocols.errors import WireError

C1, C2 = "c" + "1a" * 9, "c" + "2b" * 9
USER = {"role": "user", "content": "hi"}
ASKED = {"model": "policy", "input": "hi"}
EVENT = TypeAdapter(ResponseStreamEvent)
CALENDAR = {
    "type": "namespace",
    "name": "mcp__desk",
    "description": "The desk.",
    "tools": [
        {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    ],
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}}


def parse(**body):
    return openai_responses.parse({**ASKED, **body}, {})


def reply(message, finish="stop"):
    return Reply(C1, "policy", message, finish, Usage(7, 3, 2))


def events(answer, request):
    found = []
    for event in b"".join(openai_responses.stream(answer, request)).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assistant(text, call="", **more):
    ids = {"id": f"msg_{call}"} if call else {}
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **ids, **more}


def called(call_id, arguments="{}", name="look", **more):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id, text="out"):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def thought(text, **more):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", (Message("user", "hi"),)),
        ([USER], (Message("user", "hi"),)),
        ([{**USER, "content": None}], (Message("user"),)),
        ([{**USER, "type": "message", "content": []}], (Message("user"),)),
        (
            [{**USER, "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}],
            (Message("user", "ab"),),
        ),
        ([{"role": "developer", "content": "s"}, USER], (Message("system", "s"), Message("user", "hi"))),
        (
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            (Message("user", "hi"), Message("assistant", "no")),
        ),
        (
            [output("x", [{"type": "input_text", "text": "a:"}, {"type": "input_text", "text": "b"}])],
            (Message("tool", "a:\nb", tool_call_id="x"),),
        ),
        (
            [{**output("x"), "type": "custom_tool_call_output", "id": "fco_1", "status": "completed"}],
            (Message("tool", "out", tool_call_id="x"),),
        ),
    ],
)
def test_items(given, messages):
    assert parse(input=given).messages == messages


@pytest.mark.parametrize(
    ("item", "node"),
    [
        (assistant("a", C1), C1),
        (assistant("a", "68ab12"), ""),
        (assistant("a"), ""),
        (thought("why", id=f"rs_{C1}"), C1),
        (thought("why", id="rs_68ab", encrypted_content=signature(C1)), C1),
        (thought("why", encrypted_content="gAAAA"), ""),
        (called(f"{C1}t0"), C1),
        (called("renamed", id=f"fc_{C1}t12"), C1),
        (called("call_1t0", id="fc_1"), ""),
    ],
)
def test_any_id_of_ours_names_the_call(item, node):
    (message,) = parse(input=[item]).messages
    assert (message.role, message.node) == ("assistant", node)


A, B = ToolCall(f"{C1}t0", "look", {"a": 1}), ToolCall(f"{C1}t1", "look", {})
WHOLE = Message("assistant", "text", "why", (A, B), node=C1)
OUTS = (Message("tool", "out", tool_call_id=A.id), Message("tool", "out", tool_call_id=B.id))


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            # As Codex sends them back.
            [
                thought("why", encrypted_content=signature(C1)),
                assistant("text"),
                called(A.id, '{"a":1}'),
                called(B.id),
                output(A.id),
                output(B.id),
            ],
            (WHOLE, *OUTS),
        ),
        (
            # Outputs between the calls of one answer.
            [
                thought("why", id=f"rs_{C1}"),
                assistant("text", C1),
                called(A.id, '{"a": 1.0}'),
                output(A.id),
                called(B.id),
                output(B.id),
            ],
            (WHOLE, *OUTS),
        ),
        (
            # Two answers with nothing in between.
            [thought("one", id=f"rs_{C1}"), assistant("a", C1), thought("two", id=f"rs_{C2}"), assistant("b", C2)],
            (Message("assistant", "a", "one", node=C1), Message("assistant", "b", "two", node=C2)),
        ),
        (
            [called(A.id, '{"a": 1}'), called(f"{C2}t0")],
            (
                Message("assistant", tool_calls=(A,), node=C1),
                Message("assistant", tool_calls=(ToolCall(f"{C2}t0", "look", {}),), node=C2),
            ),
        ),
        (
            # Without ids of ours, what stands side by side is one answer; outputs end it.
            [thought("r"), assistant("a"), assistant("b"), called("x"), output("x"), called("y")],
            (
                Message("assistant", "ab", "r", (ToolCall("x", "look", {}),)),
                Message("tool", "out", tool_call_id="x"),
                Message("assistant", tool_calls=(ToolCall("y", "look", {}),)),
            ),
        ),
        (
            # A user's message ends an answer whatever the ids say.
            [assistant("a", C1), USER, assistant("b", C1)],
            (Message("assistant", "a", node=C1), Message("user", "hi"), Message("assistant", "b", node=C1)),
        ),
        ([USER, thought("", encrypted_content="gAAAA"), USER], (Message("user", "hi"),) * 2),
    ],
)
def test_items_of_one_answer_become_one_message(items, messages):
    assert parse(input=items).messages == messages


def test_many_items_of_one_answer_take_linear_time():
    (message,) = parse(input=[assistant("x" * 100)] * 50_000).messages
    assert len(message.text) == 5_000_000


def test_an_image_that_a_tool_shows_is_named_and_not_refused():
    shown = [{"type": "input_text", "text": "the plot"}, {"type": "input_image", "image_url": "data:..."}]
    assert parse(input=[output("x", shown)]).messages[-1].text == f"the plot\n{fields.UNSEEN}"


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "text", "why", (A, B), node=C1),
        Message("assistant", "  text\n", node=C1),
        Message("assistant", reasoning="why", node=C1),
        Message("assistant", "", node=C1),
        Message("assistant", tool_calls=(ToolCall(A.id, "mcp__desk__look", {"é": [1]}),), node=C1),
        Message("assistant", tool_calls=(ToolCall(A.id, "mcp__desk__patch", {"input": "*** \n"}),), node=C1),
        Message("assistant", tool_calls=(ToolCall(A.id, "tool_search", {"query": "x"}),), node=C1),
        Message("assistant", tool_calls=(ToolCall(A.id, "nobody", {}),), node=C1),
    ],
)
def test_answers_come_back_as_they_were_and_streams_tell_the_same(message, finish):
    request = parse(tools=[CALENDAR, SEARCH])
    whole = openai_responses.dump(reply(message, finish), request)
    parsed = Response.model_validate(whole)
    assert parsed.output
    assert parsed.output_text == message.text
    assert parse(input=whole["output"], tools=[CALENDAR, SEARCH]).messages == (message,)

    told = events(reply(message, finish), request)
    for event in told:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[0]["response"]["output"] == []
    assert told[-1] == {**told[-1], "type": f"response.{whole['status']}", "response": told[-1]["response"]}
    assert told[-1]["response"] | {"created_at": 0, "completed_at": 0} == whole | {"created_at": 0, "completed_at": 0}
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert {item["status"] for item in done[:-1]} <= {"completed"}
    assert done[-1]["status"] == whole["status"] == ("incomplete" if finish == "length" else "completed")


def test_stream_of_a_text():
    """Case P3."""
    told = events(reply(Message("assistant", "hi")), parse())
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for event in told[3:7]:
        assert (event["output_index"], event["content_index"], event["item_id"]) == (0, 0, f"msg_{C1}")
    assert (told[2]["item"]["content"], told[4]["delta"], told[5]["text"]) == ([], "hi", "hi")
    final = told[-1]["response"]
    assert (final["id"], final["object"], final["model"]) == (f"resp_{C1}", "response", "policy")
    assert final["output"][0]["content"][0]["text"] == "hi"
    assert final["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }


def test_stream_of_reasoning_and_calls():
    """Case P4."""
    told = events(reply(Message("assistant", "", "why", (A, B)), "tool_calls"), parse())
    assert [event["type"].removeprefix("response.") for event in told[2:-1]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
    ]
    first = [event for event in told if event.get("output_index") == 1]
    assert first[0]["item"] == {**first[-1]["item"], "arguments": "", "status": "in_progress"}
    assert first[1]["item_id"] == first[2]["item_id"] == f"fc_{A.id}"
    assert first[1]["delta"] == first[2]["arguments"] == '{"a": 1}'
    item = {"type": "function_call", "call_id": A.id, "name": "look", "arguments": '{"a": 1}'}
    assert first[-1]["item"] == {**item, "id": f"fc_{A.id}", "status": "completed"}
    assert told[-1]["response"]["output"][1] == first[-1]["item"]


def test_tools_have_flat_names_that_lead_back():
    plain = {"type": "function", "name": "mcp__desk__look", "parameters": None, "description": None}
    request = parse(tools=[plain, CALENDAR, SEARCH, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
    specs = [tool["function"] for tool in request.tools]
    assert [spec["name"] for spec in specs] == [
        "mcp__desk__look",
        "mcp__desk__look_",
        "mcp__desk__patch",
        "tool_search",
    ]
    assert specs[0] == {"name": "mcp__desk__look"}
    assert specs[1] == {"name": "mcp__desk__look_", "description": "The desk.\n\nd", "parameters": {"type": "object"}}
    assert specs[2]["parameters"]["required"] == ["input"]
    assert "start: X" in specs[2]["description"]
    calls = tuple(ToolCall(f"{C1}t{i}", spec["name"], {"input": "x"}) for i, spec in enumerate(specs))
    whole = openai_responses.dump(reply(Message("assistant", tool_calls=calls, node=C1)), request)
    assert [(item["type"], item.get("namespace"), item.get("name")) for item in whole["output"]] == [
        ("function_call", None, "mcp__desk__look"),
        ("function_call", "mcp__desk", "look"),
        ("custom_tool_call", "mcp__desk", "patch"),
        ("tool_search_call", None, None),
    ]
    (message,) = parse(input=whole["output"], tools=request.wire["echo"]["tools"]).messages
    assert message.tool_calls == calls


def test_tools_that_a_search_found_are_shown_and_can_be_called():
    searched = {"type": "tool_search_call", "call_id": f"{C1}t0", "execution": "client", "arguments": {"query": "desk"}}
    found = {"type": "tool_search_output", "call_id": f"{C1}t0", "execution": "client", "tools": [CALENDAR]}
    request = parse(input=[searched, found, called(f"{C2}t0", namespace="mcp__desk")], tools=[SEARCH])
    assert [tool["function"]["name"] for tool in request.tools] == ["tool_search"]
    assert request.messages[0].tool_calls == (ToolCall(f"{C1}t0", "tool_search", {"query": "desk"}),)
    assert [tool["name"] for tool in json.loads(request.messages[1].text)] == ["mcp__desk__look", "mcp__desk__patch"]
    assert request.messages[2].tool_calls[0].name == "mcp__desk__look"
    call = ToolCall(f"{C1}t0", "mcp__desk__patch", {"input": "p"})
    (item,) = openai_responses.dump(reply(Message("assistant", tool_calls=(call,))), request)["output"]
    assert (item["type"], item["namespace"], item["input"]) == ("custom_tool_call", "mcp__desk", "p")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"input": "x"}, "x"), ("{bad", "{bad"), ({"input": 3}, '{"input": 3}'), ({"patch": "x"}, '{"patch": "x"}')],
)
def test_a_custom_tool_gets_what_the_policy_gave_it(arguments, text):
    request = parse(tools=CALENDAR["tools"])
    call = ToolCall(f"{C1}t0", "patch", arguments)
    (item,) = openai_responses.dump(reply(Message("assistant", tool_calls=(call,))), request)["output"]
    assert item["input"] == text


def test_fields_of_a_request():
    request = parse(
        instructions="s",
        previous_response_id=f"resp_{C1}",
        store=False,
        stream=True,
        max_output_tokens=9,
        temperature=0.3,
        top_p=0.5,
        metadata={"a": "b"},
        tool_choice="required",
        future={"a": 1},
        client_metadata={},
        include=["reasoning.encrypted_content"],
    )
    assert request.messages == (Message("system", "s"), Message("user", "hi"))
    assert (request.previous, request.keep, request.stream, request.instructed) == (C1, False, True, True)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (9, 0.3, 0.5)
    assert parse().keep
    assert parse(store=None).keep
    assert not parse().previous
    assert not parse(input=[{"role": "developer", "content": "s"}, USER]).instructed
    answer = Response.model_validate(openai_responses.dump(reply(Message("assistant", "x")), request))
    assert (answer.instructions, answer.metadata, answer.tool_choice) == ("s", {"a": "b"}, "required")
    assert (answer.previous_response_id, answer.max_output_tokens, answer.temperature) == (f"resp_{C1}", 9, 0.3)
    assert (answer.parallel_tool_calls, answer.error, answer.incomplete_details) == (True, None, None)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{**USER, "content": 3}]}, "input[0].content"),
        ({"input": [{**USER, "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{**USER, "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [output("x", [{"type": "hologram"}])]}, "input[0].output[0]"),
        ({"input": [output(None)]}, "input[0].call_id"),
        ({"input": [called("")]}, "input[0].call_id"),
        ({"input": [called("x", name=None)]}, "input[0].name"),
        ({"input": [called("x", 3)]}, "input[0].arguments"),
        ({"input": [{**called("x"), "type": "custom_tool_call", "input": {}}]}, "input[0].input"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input[0].summary[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "description": 3}]}, "tools[0].description"),
        ({"tools": [{**CALENDAR, "tools": [CALENDAR]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": float("inf")}}]}, "body"),
        ({"instructions": []}, "instructions"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True}, "background"),
        ({"store": "no"}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"model": 3}, "model"),
    ],
)
def test_errors_name_the_field(body, names):
    with pytest.raises(WireError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert caught.value.param == names
    assert "expected" in caught.value.message
    assert "got" in caught.value.message


def test_an_answer_repeats_whatever_nesting_was_read():
    message = reply(Message("assistant", "x"))
    for depth in range(600, 1000):
        request = None
        with contextlib.suppress(RecursionError, WireError):
            parameters = wire.read(b'{"a":' * depth + b"1" + b"}" * depth)
            request = parse(tools=[{"type": "function", "name": "f", "parameters": parameters}])
        if request is not None:
            assert events(message, request)


def test_an_error_in_a_stream_is_told_to_either_kind_of_client():
    raw = openai_responses.error_event(WireError(503, "gone", "engine_unavailable")).decode()
    first, second = (json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: "))
    assert (EVENT.validate_python(first).type, first["message"]) == ("error", "gone")
    assert first["error"] == openai_responses.error(WireError(503, "gone", "engine_unavailable"))["error"]
    assert (second["type"], second["response"]["status"]) == ("response.failed", "failed")
    assert second["response"]["error"] == {"code": "engine_unavailable", "message": "gone"}
    assert second["sequence_number"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CALLS = ["function_call", "custom_tool_call", "tool_search_call"]
OUTPUTS = ["function_call_output", "custom_tool_call_output", "tool_search_output"]
KINDS = ["message", "reasoning", *CALLS, *OUTPUTS, "item_reference", "local_shell_call"]
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "summary_text", "input_image"]) | JSON},
    optional={"text": JSON, "refusal": JSON},
)
TEXT = st.text(max_size=9) | JSON | st.lists(PART, max_size=3)
NAMES = st.sampled_from([f"msg_{C1}", f"rs_{C2}", f"fc_{C1}t0", f"{C1}t0", "x"]) | JSON
TOOL = st.deferred(
    lambda: st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom", "namespace", "tool_search", "web_search"]) | JSON},
        optional={
            "name": st.sampled_from(["a", "b", "a__b"]) | JSON,
            "description": JSON,
            "parameters": st.dictionaries(st.text(max_size=3), JSON, max_size=2) | JSON,
            "execution": st.just("client"),
            "format": JSON,
            "tools": st.lists(TOOL, max_size=2) | JSON,
        },
    )
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JSON},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "developer"]) | JSON,
        "content": TEXT,
        "summary": TEXT,
        "output": TEXT,
        "id": NAMES,
        "call_id": NAMES,
        "name": st.just("a") | JSON,
        "namespace": st.just("b") | JSON,
        "arguments": st.just('{"a": 1}') | JSON,
        "input": st.text(max_size=4) | JSON,
        "encrypted_content": st.just(signature(C1)) | JSON,
        "tools": st.lists(TOOL, max_size=2) | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"input": st.lists(ITEM, max_size=5) | JSON},
    optional={
        "tools": st.lists(TOOL, max_size=3) | JSON,
        **dict.fromkeys(["instructions", "previous_response_id", "store", "stream", "max_output_tokens"], JSON),
        **dict.fromkeys(["metadata", "tool_choice", "text", "reasoning", "background", "temperature"], JSON),
    },
)


@settings(max_examples=400, deadline=None)
@given(body=BODY | JSON)
def test_any_body_parses_or_is_refused_by_name(body):
    refused = request = None
    try:
        request = openai_responses.parse(body, {})
    except WireError as trouble:
        refused = trouble
    if request is None:
        assert refused.status == 400
        assert refused.param
        return
    assert request.messages
    answer = reply(Message("assistant", "x", "r", (ToolCall(f"{C1}t0", "a", {"input": "x"}),), node=C1))
    json.dumps(openai_responses.dump(answer, request), allow_nan=False)
    assert events(answer, request)[-1]["type"] == "response.completed"
