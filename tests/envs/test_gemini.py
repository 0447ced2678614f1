"""The Gemini wire format to the canonical conversation and back."""

import base64
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.protocols import fields, gemini
from envs.protocols.canonical import Message, Reply, Request, Sampling, ToolCall, Usage, signature
from envs.protocols.errors import WireError

USER = {"role": "user", "parts": [{"text": "hi"}]}
CALL = {"functionCall": {"name": "look", "args": {"path": "a"}}}


def reply(message, finish="stop"):
    return Reply("c1", "policy", message, finish, Usage(7, 3, 2))


def parse(*contents, **more):
    return gemini.parse({"contents": list(contents), **more}, {"model": "policy"})


def model(*parts):
    return {"role": "model", "parts": list(parts)}


def result(name="look", response=None, **more):
    return {"functionResponse": {"name": name, "response": response or {"output": "out"}, **more}}


def streamed(message, sse=True, finish="stop"):
    data = b"".join(gemini.stream(reply(message, finish), Request("policy", (), wire={"sse": sse})))
    if not sse:
        return json.loads(data)
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def snake(wire):
    """The body with every key of the API in its other spelling; what is the user's own stays."""
    if isinstance(wire, list):
        return [snake(item) for item in wire]
    if not isinstance(wire, dict):
        return wire
    own = ("args", "response", "properties", "parametersJsonSchema")
    return {
        re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), key): value if key in own else snake(value)
        for key, value in wire.items()
    }


FULL = {
    "systemInstruction": {"role": "user", "parts": [{"text": "be kind"}, {"text": "be brief"}]},
    "contents": [
        USER,
        model(
            {"text": "let me see", "thought": True},
            {"text": "a"},
            {**CALL, "thoughtSignature": signature("c7")},
        ),
        {"role": "user", "parts": [result(id="x1"), {"text": "go"}, {"text": ""}, {"text": "on"}]},
    ],
    "tools": [
        {"googleSearch": {}},
        {
            "functionDeclarations": [
                {
                    "name": "look",
                    "description": "Look.",
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"type": {"type": "STRING"}, "thePath": {"any_of": [{"type": "INTEGER"}]}},
                    },
                },
                {"name": "list", "parametersJsonSchema": {"type": "object", "properties": {"aB": {"enum": ["X"]}}}},
                {"name": "stop"},
            ]
        },
    ],
    "generationConfig": {
        "maxOutputTokens": 9,
        "temperature": 0.3,
        "topP": 0.9,
        "stopSequences": ["END"],
        "candidateCount": 1,
        "thinkingConfig": {"includeThoughts": True},
    },
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "safetySettings": [],
}


@pytest.mark.parametrize("spelling", [lambda body: body, snake, lambda body: {"generateContentRequest": body}])
def test_a_whole_request_in_every_spelling(spelling):
    request = gemini.parse(spelling(FULL), {"model": "policy", "stream": "true", "alt": "sse"})
    assert request.messages == (
        Message("system", "be kind\n\nbe brief"),
        Message("user", "hi"),
        Message(
            "assistant",
            "a",
            reasoning="let me see",
            tool_calls=(ToolCall("call1t0", "look", {"path": "a"}),),
            node="c7",
        ),
        Message("tool", "out", tool_call_id="call1t0", name="look"),
        Message("user", "go\n\non"),
    )
    assert [tool["type"] for tool in request.tools] == ["function"] * 3
    schema = {"type": "string"}, {"anyOf": [{"type": "integer"}]}
    assert [tool["function"] for tool in request.tools] == [
        {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"type": schema[0], "thePath": schema[1]}},
        },
        {"name": "list", "parameters": {"type": "object", "properties": {"aB": {"enum": ["X"]}}}},
        {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    ]
    assert request.sampling == Sampling(9, 0.3, 0.9, ("END",))
    assert (request.model, request.stream, request.wire) == ("policy", True, {"sse": True})


@pytest.mark.parametrize(
    "system",
    ["be kind", {"text": "be kind"}, {"parts": {"text": "be kind"}}, [{"text": "be kind"}, {"text": ""}]],
)
def test_system_instructions_and_lone_objects(system):
    body = {"contents": {"parts": {"text": "hi"}}, "systemInstruction": system}
    assert gemini.parse(body, {}).messages == (Message("system", "be kind"), Message("user", "hi"))


@pytest.mark.parametrize("system", [None, "", {}, {"parts": []}, []])
def test_no_system_message_where_nothing_is_said(system):
    assert parse(USER, systemInstruction=system).messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "é"}, "é"),
        ({"error": "no such file"}, "no such file"),
        ({"result": 3}, '{"result":3}'),
        ({"result": None}, '{"result":null}'),
        ({"output": "a", "exit": 1}, '{"output":"a","exit":1}'),
        ({"other": "é"}, '{"other":"é"}'),
        ({}, "{}"),
        (None, "{}"),
    ],
)
def test_what_the_policy_reads_of_a_result(response, text):
    part = {"functionResponse": {"name": "look", "response": response}}
    assert parse(USER, model(CALL), {"parts": [part]}).messages[2].text == text


@pytest.mark.parametrize(
    ("call_ids", "given_ids", "answers"),
    [
        (("a", "b", "c"), ("c", "a", "b"), ("c", "a", "b")),
        (("a", "b", "c"), (None, None, None), ("a", "b", "c")),
        (("a", "b", "c"), ("look_17_0", "look_17_1", "list_17_2"), ("a", "b", "c")),
        (("a", "b", "c"), ("look_17_0", "a", "c"), ("b", "a", "c")),
        ((None, None, None), ("look_17_0", "look_17_1", "list_17_2"), ("call1t0", "call1t1", "call1t2")),
        (("a", "b", None), ("b", None, "list_17_2"), ("b", "a", "call1t2")),
    ],
)
def test_results_find_their_calls(call_ids, given_ids, answers):
    """By id in any order, else by name and order: two calls of ``look`` and one of ``list``."""
    names = ("look", "look", "list")
    calls = [{"functionCall": {"id": i, "name": name}} for i, name in zip(call_ids, names, strict=True)]
    by_id = {i: name for i, name in zip(call_ids, names, strict=True) if i}
    given_names = [by_id.get(i, name) for i, name in zip(given_ids, names, strict=True)]
    results = [{"parts": [result(name, id=i)]} for i, name in zip(given_ids, given_names, strict=True)]
    later = [model(CALL), {"parts": [result(id="z")]}]
    messages = parse(USER, model(*calls), *results, *later).messages
    assert tuple(message.tool_call_id for message in messages[2:5]) == answers
    assert messages[6].tool_call_id == messages[5].tool_calls[0].id == "call5t0"


def test_a_result_without_a_call_keeps_its_id():
    message = parse(USER, {"role": "function", "parts": [result(id="gone")]}).messages[1]
    assert message == Message("tool", "out", tool_call_id="gone", name="look")


@pytest.mark.parametrize("coalesced", [False, True])
def test_chunks_of_one_answer_are_one_turn_and_two_answers_are_two(coalesced):
    mine, other = ({"thoughtSignature": signature(call)} for call in ("c1", "c2"))
    parts = [{"text": "why", "thought": True}, {"text": "a", **mine}, CALL, {"text": "b", **other}, {**CALL, **other}]
    contents = [model(*parts)] if coalesced else [model(part) for part in parts]
    assert parse(USER, *contents).messages[1:] == (
        Message("assistant", "a", "why", (ToolCall("call1t0", "look", {"path": "a"}),), node="c1"),
        Message("assistant", "b", "", (ToolCall("call2t0", "look", {"path": "a"}),), node="c2"),
    )


@pytest.mark.parametrize(
    ("signed", "node"),
    [
        (signature("c9"), "c9"),
        (base64.urlsafe_b64encode(base64.b64decode(signature("c9"))).decode(), "c9"),
        ("skip_thought_signature_validator", ""),
        ("c29tZWJvZHkgZWxzZQ==", ""),
        (["x"], ""),
    ],
)
@pytest.mark.parametrize("part", [{"text": "a"}, CALL, {"text": "a", "thought": True}, {}])
def test_signatures(part, signed, node):
    assert parse(USER, model({**part, "thoughtSignature": signed})).messages[1].node == node


def test_an_image_that_a_tool_shows_is_named_and_not_refused():
    shown = [{"inlineData": {"mimeType": "image/png", "data": "aGk="}}]
    body = {"contents": [{"parts": [result(response={"output": "the plot"}, parts=shown)]}]}
    assert gemini.parse(body, {}).messages[0].text == f"the plot\n{fields.UNSEEN}"


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ([], "body"),
        ({}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": ["hi"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"role": ["user"], "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": "hi"}]}, "contents[0].parts"),
        ({"contents": [{"parts": ["hi"]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"text": 3}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"inlineData": {"data": "AA=="}}]}]}, "contents[0].parts[0].inlineData"),
        ({"contents": [{"parts": [{"inline_data": {"data": "AA=="}}]}]}, "contents[0].parts[0].inlineData"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, "contents[0].parts[0].fileData"),
        ({"contents": [model({"executableCode": {"code": "x"}})]}, "contents[0].parts[0].executableCode"),
        ({"contents": [{"parts": [CALL]}]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model(result())]}, "contents[0].parts[0].functionResponse"),
        ({"contents": [model({"functionCall": {"args": {}}})]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [model({"functionCall": "f"})]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model({"functionCall": {"name": "f", "args": []}})]}, "contents[0].parts[0].functionCall.args"),
        ({"contents": [model({"text": "a", "thought": "yes"})]}, "contents[0].parts[0].thought"),
        ({"contents": [{"parts": [result(response="x")]}]}, "contents[0].parts[0].functionResponse.response"),
        ({"contents": [USER], "systemInstruction": 3}, "systemInstruction"),
        ({"contents": [USER], "systemInstruction": {"parts": [result()]}}, "systemInstruction.parts"),
        ({"contents": [USER], "cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"contents": [USER], "tools": "x"}, "tools"),
        ({"contents": [USER], "tools": [{"googleSearch": {}}]}, "tools"),
        ({"contents": [{"parts": [result(id=3)]}]}, "contents[0].parts[0].functionResponse.id"),
        ({"contents": [USER], "tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"contents": [USER], "tools": [{"functionDeclarations": [{"name": "f", "parameters": "x"}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
        ({"contents": [USER], "generationConfig": []}, "generationConfig"),
        ({"contents": [USER], "generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"contents": [USER], "generation_config": {"max_output_tokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"contents": [USER], "generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"contents": [USER], "generationConfig": {"topP": -1}}, "generationConfig.topP"),
        ({"contents": [USER], "generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences"),
        ({"generateContentRequest": "x"}, "generateContentRequest"),
    ],
)
def test_errors_name_the_field(body, names):
    with pytest.raises(WireError) as caught:
        gemini.parse(body, {})
    assert caught.value.status == 400
    assert caught.value.param == names
    assert "expected" in caught.value.message
    assert "got" in caught.value.message


CALLS = (ToolCall("c1t0", "look", {"path": "é"}), ToolCall("c1t1", "look", {}))


@pytest.mark.parametrize("sse", [True, False])
@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize(
    "message",
    [
        Message("assistant", "text\u2028"),
        Message("assistant"),
        Message("assistant", reasoning="why"),
        Message("assistant", tool_calls=CALLS),
        Message("assistant", "text", reasoning="why", tool_calls=CALLS),
    ],
)
def test_answers_come_back_as_the_turn_that_they_were(message, finish, sse):
    """Whole and in chunks, and as a client hands them back."""
    whole = gemini.dump(reply(message, finish), Request("policy", ()))
    chunks = streamed(message, sse, finish)
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert parts == whole["candidates"][0]["content"]["parts"]
    assert all(("thoughtSignature" in part) != ("thought" in part) for part in parts)
    assert all(chunk["candidates"][0]["content"]["parts"] for chunk in chunks)
    last = {"finishReason": "MAX_TOKENS" if finish == "length" else "STOP"}
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert whole["candidates"][0]["finishReason"] == chunks[-1]["candidates"][0]["finishReason"] == last["finishReason"]
    assert whole["usageMetadata"] == chunks[-1]["usageMetadata"]
    assert (whole["responseId"], whole["modelVersion"]) == ("c1", "policy")
    for contents in ([whole["candidates"][0]["content"]], [chunk["candidates"][0]["content"] for chunk in chunks]):
        turn = parse(USER, *contents).messages[1:]
        assert turn == (Message("assistant", message.text, message.reasoning, message.tool_calls, node="c1"),)


def test_usage_counts_cached_tokens_once():
    assert gemini.dump(reply(Message("assistant", "a")), Request("policy", ()))["usageMetadata"] == {
        "promptTokenCount": 7,
        "candidatesTokenCount": 3,
        "totalTokenCount": 10,
        "cachedContentTokenCount": 2,
    }


def test_pings_are_nothing_in_both_forms():
    message, ping = Message("assistant", "a", reasoning="why"), gemini.PING * 3
    data = b"".join(gemini.stream(reply(message), Request("policy", (), wire={"sse": False})))
    assert json.loads(ping + data) == streamed(message, sse=False)
    assert not ping.strip()


@pytest.mark.parametrize(
    ("trouble", "status", "reasons"),
    [
        (WireError(400, "m", "invalid_value", "contents"), "INVALID_ARGUMENT", ["INVALID_VALUE", "contents"]),
        (WireError(401, "m", "session_closed"), "UNAUTHENTICATED", ["SESSION_CLOSED"]),
        (WireError(404, "m"), "NOT_FOUND", []),
        (WireError(413, "m"), "INVALID_ARGUMENT", []),
        (WireError(429, "m", "busy", retry_after=2.5), "RESOURCE_EXHAUSTED", ["BUSY", "2.5s"]),
        (WireError(429, "m", "limit_reached", "calls"), "RESOURCE_EXHAUSTED", ["LIMIT_REACHED", "86400s"]),
        (WireError(500, "m"), "INTERNAL", []),
        (WireError(502, "m"), "INTERNAL", []),
        (WireError(503, "m"), "UNAVAILABLE", ["86400s"]),
    ],
)
def test_errors_in_googles_shape(trouble, status, reasons):
    body = gemini.error(trouble)
    details = body["error"].pop("details", [])
    assert body == {"error": {"code": trouble.status, "message": "m", "status": status}}
    found = [
        detail.get("reason") or detail.get("retryDelay") or detail["fieldViolations"][0]["field"] for detail in details
    ]
    assert found == reasons
    assert json.loads(gemini.PING + gemini.error_event(trouble))["error"]["code"] == trouble.status


def test_a_context_that_is_full_is_told_in_googles_words():
    trouble = WireError(400, "m", "context_length_exceeded", "messages", data={"tokens": 90, "most": 64})
    assert (
        "token count (90) exceeds the maximum number of tokens allowed (64)"
        in gemini.error(trouble)["error"]["message"]
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def odd(**known):
    """Objects with any of the known keys, in either spelling, holding what they should or anything."""
    either = {key: value | JSON for key, value in known.items()}
    return st.fixed_dictionaries({}, optional=either) | st.fixed_dictionaries({}, optional=either).map(snake) | JSON


NAMES = st.sampled_from(["look", "list"])
PART = odd(
    text=st.text(max_size=8),
    thought=st.booleans(),
    thoughtSignature=st.just(signature("c1")),
    functionCall=odd(id=NAMES, name=NAMES, args=st.just({})),
    functionResponse=odd(id=NAMES, name=NAMES, response=st.just({"output": "x"})),
    inlineData=st.nothing(),
)
PARTS = st.lists(PART, max_size=3)
SCHEMA = odd(type=st.just("OBJECT"), properties=st.just({"a": {"type": "STRING"}}), items=JSON, anyOf=JSON)
BODY = odd(
    contents=st.lists(odd(role=st.sampled_from(["user", "model"]), parts=PARTS), min_size=1, max_size=3),
    systemInstruction=odd(parts=PARTS),
    tools=st.lists(odd(functionDeclarations=st.lists(odd(name=NAMES, parameters=SCHEMA), max_size=2)), max_size=2),
    generationConfig=odd(maxOutputTokens=st.integers(), stopSequences=st.just("x"), candidateCount=st.just(1)),
    generateContentRequest=st.nothing(),
)


def attempt(body):
    try:
        return gemini.parse(body, {"model": "policy"})
    except WireError as trouble:
        return trouble


@settings(max_examples=300, deadline=None)
@given(body=BODY)
def test_odd_bodies_parse_or_are_refused_by_name(body):
    outcome = attempt(body)
    if isinstance(outcome, WireError):
        assert outcome.status == 400
        assert outcome.param
    else:
        assert all(isinstance(message.text, str) for message in outcome.messages)
        assert all(isinstance(tool["function"]["name"], str) for tool in outcome.tools)
