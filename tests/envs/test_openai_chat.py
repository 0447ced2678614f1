"""The Chat Completions wire format to the canonical conversation and back."""

import json
from dataclasses import replace

import pytest

from envs.protocols import fields, openai_chat, wire
from envs.protocols.canonical import Message, Reply, Request, ToolCall, Usage
from envs.protocols.errors import WireError

ASKED = Request("policy", (), wire={"include_usage": False})
USER = {"role": "user", "content": "hi"}


def reply(message, finish="stop"):
    return Reply("c1", "policy", message, finish, Usage(7, 3, 2))


def chunks(data):
    events = [line for line in b"".join(data).decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("\U0001f600 é", "\U0001f600 é"),
    ],
)
def test_contents(content, text):
    request = openai_chat.parse({"model": "m", "messages": [{"role": "user", "content": content}]}, {})
    assert request.messages == (Message("user", text),)


def test_an_image_that_a_tool_shows_is_named_and_not_refused():
    content = [{"type": "text", "text": "plot: "}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    body = {"model": "m", "messages": [USER, {"role": "tool", "tool_call_id": "x", "content": content}]}
    assert openai_chat.parse(body, {}).messages[1].text == f"plot: {fields.UNSEEN}"


def test_developer_is_system_and_unknown_keys_are_ignored():
    body = {
        "model": "m",
        "messages": [{"role": "developer", "content": "s", "cache_control": 1}, USER],
        "future": {},
    }
    assert [m.role for m in openai_chat.parse(body, {}).messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("", ""),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
    ],
)
def test_arguments(arguments, parsed):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert openai_chat.parse(body, {}).messages[1].tool_calls == (ToolCall("x", "f", parsed),)


def test_tool_message_reasoning_and_sampling():
    request = openai_chat.parse(
        {
            "model": "policy",
            "messages": [
                USER,
                {"role": "assistant", "content": "a", "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "out"}]},
            ],
            "max_completion_tokens": 9,
            "max_tokens": 8,
            "temperature": 0.3,
            "stop": "END",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {},
    )
    assert request.messages[1].reasoning == "r"
    assert request.messages[2] == Message("tool", "out", tool_call_id="x")
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.stop) == (
        9,
        0.3,
        ("END",),
    )
    assert request.stream
    assert request.wire["include_usage"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ([], "body"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [USER], "tools": [{"type": "web"}]}, "tools[0]"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "max_tokens": True}, "max_tokens"),
        ({"messages": [USER], "temperature": "hot"}, "temperature"),
        ({"messages": [USER], "temperature": float("nan")}, "temperature"),
        ({"messages": [USER], "stream": "yes"}, "stream"),
        ({"messages": [USER], "stop": [1]}, "stop"),
        ({"messages": [USER], "n": 2}, "n"),
        ({"messages": [USER], "model": 3}, "model"),
    ],
)
def test_errors_name_the_field(body, names):
    with pytest.raises(WireError) as caught:
        openai_chat.parse(body, {})
    assert caught.value.status == 400
    assert caught.value.param == names
    assert "expected" in caught.value.message
    assert "got" in caught.value.message


def test_stream_and_whole_answer_agree():
    calls = (ToolCall("c1t0", "f", {"a": "é"}), ToolCall("c1t1", "g", {}))
    message = Message("assistant", "text", reasoning="why", tool_calls=calls)
    whole = openai_chat.dump(reply(message, "tool_calls"), ASKED)
    parts = chunks(openai_chat.stream(reply(message, "tool_calls"), replace(ASKED, wire={"include_usage": True})))
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    built = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        built["content"] += delta.get("content", "")
        built["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(built["tool_calls"]):
                built["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                built["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    sent = whole["choices"][0]["message"]
    assert built == {key: sent[key] for key in built}
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(deltas) - 1) + ["tool_calls"]


def test_no_usage_chunk_unless_asked():
    assert all("usage" not in part for part in chunks(openai_chat.stream(reply(Message("assistant", "x")), ASKED)))


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")]
)
def test_error_shape(status, kind):
    assert openai_chat.error(WireError(status, "m", "c", "p")) == {
        "error": {"message": "m", "type": kind, "param": "p", "code": "c"}
    }


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": "\\ud800x"}', {"a": "\ufffdx"}),
        (b'{"\\uDFFF": ["\\ud83d\\ude00", 1.5]}', {"\ufffd": ["\U0001f600", 1.5]}),
        (b'"\\\\ud800"', "\\ud800"),
    ],
)
def test_wire_json_holds_no_half_pairs(body, value):
    assert wire.read(body) == value


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b"[" * 100_000])
def test_wire_json_that_is_none(body):
    with pytest.raises(WireError) as caught:
        wire.read(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
