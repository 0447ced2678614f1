"""The Anthropic Messages wire format to the canonical conversation and back."""

import json

import pytest
from anthropic.types import Message as WireMessage
from anthropic.types import MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from envs.protocols import anthropic_messages, fields
from envs.protocols.canonical import Message, Reply, Request, ToolCall, Usage, signature
from envs.protocols.errors import WireError

ASKED = Request("policy", ())
USER = {"role": "user", "content": "hi"}
MARK = {"cache_control": {"type": "ephemeral"}}
EVENT = TypeAdapter(RawMessageStreamEvent)
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def text(said, **more):
    return {"type": "text", "text": said, **more}


def result(call="t1", content="out", **more):
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def parse(body, **params):
    return anthropic_messages.parse({"max_tokens": 9, **body}, params)


def messages(*wire, **body):
    return parse({"messages": list(wire), **body}).messages


def user(*content):
    return {"role": "user", "content": list(content)}


def assistant(*content):
    return {"role": "assistant", "content": list(content)}


def reply(message, finish="stop", stop=""):
    return Reply("c1", "policy", message, finish, Usage(7, 3, 2), stop)


def events(data):
    found = []
    for raw in b"".join(data).decode().split("\n\n")[:-1]:
        kind, line = raw.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    return found


def built(parts):
    """What a client makes of a stream."""
    message = dict(parts[0]["message"])
    for part in parts[1:]:
        if part["type"] == "content_block_start":
            assert part["index"] == len(message["content"])
            message["content"] = [*message["content"], dict(part["content_block"])]
            whole = ""
        elif part["type"] == "content_block_delta":
            block, delta = message["content"][part["index"]], part["delta"]
            if delta["type"] == "input_json_delta":
                whole += delta["partial_json"]
            for key in {"text", "thinking", "signature"} & delta.keys():
                block[key] += delta[key]
        elif part["type"] == "content_block_stop" and message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(whole)
        elif part["type"] == "message_delta":
            message |= {**part["delta"], "usage": {**message["usage"], **part["usage"]}}
    return message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("hi", "hi"),
        ([text("hi", **MARK)], "hi"),
        ([text("a"), text(""), text("b", **MARK)], "a\n\nb"),
        (" \U0001f600 é\t", " \U0001f600 é\t"),
        ([], ""),
        ("", ""),
        (None, ""),
    ],
)
def test_texts_of_user_and_system(content, said):
    system = (Message("system", said),) if said else ()
    asked = messages(USER, {"role": "system", "content": content}, {"role": "user", "content": content}, system=content)
    assert asked == (*system, Message("user", "hi"), *system, Message("user", said))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("out", "out"),
        ([text("a", **MARK), text("b")], "a\n\nb"),
        ([{"type": "tool_reference", "tool_name": "look"}], "look"),
        ("", ""),
        ([], ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("failed", [None, False, True])
def test_tool_results(content, said, failed):
    asked = messages(user(result(content=content, is_error=failed, **MARK)))
    assert asked == (Message("tool", said or ("error" if failed else ""), tool_call_id="t1"),)


def test_results_and_texts_keep_their_order():
    asked = messages(user(text("0"), result("b"), result("a"), text("1"), text("2"), result("c"), text("3")))
    assert [(m.role, m.tool_call_id or m.text) for m in asked] == [
        ("user", "0"),
        ("tool", "b"),
        ("tool", "a"),
        ("user", "1\n\n2"),
        ("tool", "c"),
        ("user", "3"),
    ]


THOUGHT = {"type": "thinking", "thinking": "why", "signature": signature("c5")}
USE = {"type": "tool_use", "id": "c5t0", "name": "f", "input": {"a": 1}, **MARK}
REDACTED = {"type": "redacted_thinking", "data": "xyz"}


@pytest.mark.parametrize(
    "turn",
    [
        [assistant(THOUGHT, text("a"), text("b"), USE)],
        [assistant(THOUGHT), assistant(REDACTED, text("ab")), assistant(USE)],
        [assistant(THOUGHT), {"role": "assistant", "content": "ab"}, assistant(USE)],
    ],
)
def test_a_turn_of_ours_however_it_is_cut(turn):
    call = ToolCall("c5t0", "f", {"a": 1})
    expected = Message("assistant", "ab", reasoning="why", tool_calls=(call,), node="c5")
    assert messages(USER, *turn, user(result("c5t0")))[1] == expected


@pytest.mark.parametrize("signed", [None, "", "EqQBCgIYAhIM", "é", 3, ["x"], signature("")])
def test_other_signatures_point_nowhere(signed):
    turn = assistant({"type": "thinking", "thinking": "why", "signature": signed})
    assert messages(USER, turn, USER)[1] == Message("assistant", reasoning="why")


def test_tools_sampling_and_what_is_ignored():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    request = parse(
        {
            "model": "policy",
            "messages": [USER],
            "tools": [
                {"name": "f", "description": "d", "input_schema": schema, "strict": True, **MARK},
                {"type": "custom", "name": "g", "input_schema": {"type": "object"}},
            ],
            "max_tokens": 8,
            "temperature": 0.3,
            "top_p": 0.9,
            "stop_sequences": ["END"],
            "stream": True,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "{}"},
            "tool_choice": {"type": "auto"},
            "future": {},
        },
        beta="true",
    )
    assert request.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.stop) == (8, 0.3, 0.9, ("END",))
    assert request.stream


def test_a_count_needs_no_bound_and_may_end_with_an_answer():
    request = anthropic_messages.parse({"messages": [USER, assistant(text("a"))]}, {"action": "count"})
    assert (len(request.messages), request.sampling.max_tokens) == (2, None)
    assert MessageTokensCount.model_validate(anthropic_messages.count(5)).input_tokens == 5


def test_an_image_that_a_tool_shows_is_named_and_not_refused():
    shown = parse({"messages": [user(result(content=[text("the plot"), IMAGE]))]}).messages[0]
    assert shown.text == f"the plot\n\n{fields.UNSEEN}"


@pytest.mark.parametrize(
    ("body", "names", "says"),
    [
        ([], "body", "JSON object"),
        ({}, "messages", "at least one message"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"role": "system", "content": "s"}]}, "messages", "role user"),
        ({"messages": ["x"]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant or system"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "user, assistant or system"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "content blocks"),
        ({"messages": [user("x")]}, "messages[0].content[0]", "block"),
        ({"messages": [user({"type": "text", "text": 3})]}, "messages[0].content[0].text", "string"),
        ({"messages": [USER, user(text("a"), IMAGE)]}, "messages[1].content[1].type", "reads no images"),
        ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type", "documents"),
        (
            {"messages": [user(result(content=[{"type": "x"}]))]},
            "messages[0].content[0].content[0].type",
            "text",
        ),
        ({"messages": [user(USE)]}, "messages[0].content[0].type", "text or tool_result"),
        ({"messages": [user(result(None))]}, "messages[0].content[0].tool_use_id", "tool_use block"),
        ({"messages": [user(result(is_error="yes"))]}, "messages[0].content[0].is_error", "true, false"),
        ({"messages": [USER, assistant(result()), USER]}, "messages[1].content[0].type", "tool_use"),
        ({"messages": [USER, assistant({"type": "tool_use"}), USER]}, "messages[1].content[0].name", "tool"),
        ({"messages": [USER, assistant(text("a")), assistant(text("b"))]}, "messages[2].role", "does not go on"),
        ({"messages": [USER], "system": [IMAGE]}, "system[0].type", "text"),
        ({"messages": [USER], "tools": {}}, "tools", "list of tools"),
        ({"messages": [USER], "tools": ["x"]}, "tools[0]", "input_schema"),
        ({"messages": [USER], "tools": [{"name": "f"}]}, "tools[0].input_schema", "JSON schema"),
        ({"messages": [USER], "tools": [{"input_schema": {}}]}, "tools[0].name", "name of the tool"),
        (
            {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
            "no built-in tools",
        ),
        ({"messages": [USER], "tools": [{"type": "mcp_toolset"}]}, "tools[0].type", "no built-in tools"),
        ({"messages": [USER], "max_tokens": None}, "max_tokens", "at least 1"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": [USER], "temperature": "hot"}, "temperature", "number"),
        ({"messages": [USER], "stream": "yes"}, "stream", "true, false"),
        ({"messages": [USER], "stop_sequences": [1]}, "stop_sequences", "list of strings"),
        ({"messages": [USER], "model": 3}, "model", "string"),
    ],
)
def test_errors_name_the_field(body, names, says):
    with pytest.raises(WireError) as caught:
        anthropic_messages.parse({"max_tokens": 9, **body} if isinstance(body, dict) else body, {})
    assert (caught.value.status, caught.value.param) == (400, names)
    assert "got" in caught.value.message
    assert says in caught.value.message.partition("expected")[2]


CALLS = (ToolCall("c1t0", "f", {"a": "é\U0001f600\n", "b": [1, None]}), ToolCall("c1t1", "g", {}))
ANSWERS = [
    (Message("assistant", "text", reasoning="why", tool_calls=CALLS), "tool_calls", ["thinking", "text", "tool_use"]),
    (Message("assistant", " \n", tool_calls=CALLS[:1]), "length", ["text", "tool_use"]),
    (Message("assistant", tool_calls=(ToolCall("c1t0", "f", "{bad"),)), "tool_calls", ["tool_use"]),
    (Message("assistant", reasoning="why"), "stop", ["thinking"]),
    (Message("assistant"), "stop", ["text"]),
]


@pytest.mark.parametrize(("message", "finish", "kinds"), ANSWERS)
def test_stream_and_whole_answer_agree(message, finish, kinds):
    answer = reply(message, finish)
    whole = anthropic_messages.dump(answer, ASKED)
    WireMessage.model_validate(whole)
    assert list(dict.fromkeys(block["type"] for block in whole["content"])) == kinds
    parts = events(anthropic_messages.stream(answer, ASKED))
    assert built(parts) == whole
    back = messages(USER, {"role": "assistant", "content": whole["content"]}, USER)[1]
    assert (back.text, back.reasoning) == (message.text, message.reasoning)
    assert back.node == ("c1" if message.reasoning else "")
    if message.tool_calls == CALLS:
        assert back.tool_calls == CALLS


def test_events_in_their_order():
    """Cases P1 and P2: the true prompt length at the start, an empty input that grows to the whole JSON."""
    calls = (ToolCall("c1t0", "f", {"city": "X"}), CALLS[1])
    message = Message("assistant", "text", reasoning="why", tool_calls=calls)
    parts = events(anthropic_messages.stream(reply(message, "tool_calls"), ASKED))
    started = parts[0]["message"]
    assert (started["content"], started["stop_reason"], started["stop_sequence"]) == ([], None, None)
    assert started["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 1,
    }
    assert [part.get("index", part["type"]) for part in parts] == [
        "message_start",
        *[0] * 4,
        *[1] * 3,
        *[2] * 5,
        *[3] * 4,
        "message_delta",
        "message_stop",
    ]
    opened = [part["content_block"] for part in parts if part["type"] == "content_block_start"]
    assert opened[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert opened[1] == {"type": "text", "text": ""}
    assert opened[2] == {"type": "tool_use", "id": "c1t0", "name": "f", "input": {}}
    deltas = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas[:3]] == ["thinking_delta", "signature_delta", "text_delta"]
    assert "".join(part["delta"]["partial_json"] for part in parts[9:12]) == '{"city": "X"}'
    assert parts[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert parts[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", "", "end_turn"),
        ("length", "", "max_tokens"),
        ("tool_calls", "", "tool_use"),
        ("stop", "END", "stop_sequence"),
    ],
)
def test_why_an_answer_ended(finish, stop, reason):
    whole = anthropic_messages.dump(reply(Message("assistant", "x"), finish, stop), ASKED)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop or None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_shape(status, kind):
    told = anthropic_messages.error(WireError(status, "m", "c", "p"))
    assert told == {"type": "error", "error": {"type": kind, "message": "m"}}
    if status != 413:
        ErrorResponse.model_validate(told)
    assert (
        anthropic_messages.error_event(WireError(status, "m"))
        == b"event: error\ndata: %s\n\n" % json.dumps(told, separators=(",", ":")).encode()
    )


def test_a_context_that_is_too_long_in_the_words_that_start_a_compaction():
    data = {"tokens": 210, "most": 199}
    told = anthropic_messages.error(WireError(400, "m", "context_length_exceeded", "messages", data=data))
    assert told["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 210 tokens > 199 maximum",
    }


def test_models():
    assert ModelInfo.model_validate({**anthropic_messages.model("policy"), "lifecycle": "active"}).id == "policy"
    page = anthropic_messages.models(("policy", "b"))
    assert [model["id"] for model in page["data"]] == ["policy", "b"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "policy", "b")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "tool_reference"])
FIELDS = ["text", "thinking", "signature", "id", "name", "input", "tool_use_id", "is_error", "tool_name"]
BLOCK = st.recursive(
    JSON,
    lambda inner: st.fixed_dictionaries(
        {"type": KINDS | JSON},
        optional={**dict.fromkeys(FIELDS, st.text(max_size=8) | JSON), "content": st.lists(inner, max_size=3) | inner},
    ),
    max_leaves=4,
)
CONTENT = st.text(max_size=8) | JSON | st.lists(BLOCK, max_size=3)
BODY = st.fixed_dictionaries(
    {
        "messages": JSON
        | st.lists(
            JSON
            | st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "system"]) | JSON}, optional={"content": CONTENT}
            ),
            max_size=4,
        )
    },
    optional={
        "system": CONTENT,
        "tools": JSON
        | st.lists(
            JSON
            | st.fixed_dictionaries(
                {"name": st.text() | JSON},
                optional={"type": JSON, "input_schema": st.just({}) | JSON, "description": JSON},
            ),
            max_size=3,
        ),
        "max_tokens": st.just(5) | JSON,
        **dict.fromkeys(["model", "stream", "stop_sequences", "temperature", "top_p", "thinking", "metadata"], JSON),
    },
)


@settings(max_examples=500, deadline=None)
@given(body=JSON | BODY, params=st.sampled_from([{}, {"action": "complete"}, {"action": "count"}]))
def test_any_body_parses_or_is_refused(body, params):
    refused = None
    try:
        request = anthropic_messages.parse(body, params)
    except WireError as trouble:
        refused = trouble
    if refused is None:
        assert any(message.role != "system" for message in request.messages)
        assert all(isinstance(message.text, str) for message in request.messages)
    else:
        assert (refused.status, bool(refused.param)) == (400, True)
