"""Gemini generateContent: wire JSON to the canonical conversation and back.

Invariants: what a conforming client sends parses to one canonical request whatever its spelling (camelCase or
snake_case, one item or a list of it); contents of the model that follow each other are one turn, because
clients keep every chunk of a stream as a content of its own. Unknown keys are ignored.

The signatures on the parts of an answer name the call: they come back with answers that call no tool, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any, Literal

from envs.protocols import fields
from envs.protocols.base import Action, Route
from envs.protocols.canonical import Message, Reply, Request, Sampling, ToolCall, signature, signed_call
from envs.protocols.errors import WireError, invalid

_PATHS: tuple[tuple[Action, str, Literal["GET", "POST"], str], ...] = (
    ("complete", "/{model}:generateContent", "POST", ""),
    ("complete", "/{model}:streamGenerateContent", "POST", "true"),
    ("count", "/{model}:countTokens", "POST", ""),
    ("models", "", "GET", ""),
    ("model", "/{model}", "GET", ""),
)

NAME = "gemini"
ROUTES = tuple(
    Route(action, f"/{version}/models{path}", method, {"stream": stream})
    for version in ("v1beta", "v1", "v1alpha")
    for action, path, method, stream in _PATHS
)
STATUS: Mapping[int, int] = {}
# Google's clients read a comment of an event stream as JSON. An empty line is nothing to any client, and white
# space in the array form.
_JSON = "application/json"
PING = b"\n"

_Part = tuple[dict[str, Any], str]
"""A part and the name of its field."""
_GIVEN_ROLES = (None, "", "user", "function")
_READABLE = ("text", "functionCall", "functionResponse")
_UNREADABLE = ("inlineData", "fileData", "executableCode", "codeExecutionResult", "toolCall", "toolResponse")
_DECLARED = ("functionDeclarations", "function_declarations")
_RESULT_KEYS = ("output", "result", "error")
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_NEVER_S = 86400
"""Told where asking again makes no sense: Gemini CLI gives up at a wait of over five minutes, else it insists."""
_TOO_LONG = "The input token count ({tokens}) exceeds the maximum number of tokens allowed ({most})."
_GOOGLE = "type.googleapis.com/google.rpc."


def parse(body: Any, params: Mapping[str, str]) -> Request:
    """Read a request body, as ``wire.read`` gives it. ``params``: ``model``, ``stream`` and ``alt`` of the URL.

    Raises ``WireError`` (400) that names the field, what came and what was expected.
    """
    wire = _object(body, "body")
    # A question for a number of tokens may wrap the request that it is about.
    wire = _object(_get(wire, "generateContentRequest") or wire, "generateContentRequest")
    cached = _get(wire, "cachedContent")
    if cached is not None:
        raise invalid("cachedContent", cached, "the whole conversation in contents", "unsupported_content")
    return Request(
        model=params.get("model") or "policy",
        messages=(*_system(_get(wire, "systemInstruction")), *_conversation(wire.get("contents"))),
        tools=_tools(wire.get("tools")),
        sampling=_sampling(_get(wire, "generationConfig")),
        stream=params.get("stream") == "true",
        wire={"sse": params.get("alt") == "sse"} | ({} if params.get("alt") == "sse" else {"content_type": _JSON}),
    )


def dump(reply: Reply, request: Request) -> dict[str, Any]:  # noqa: ARG001
    """The whole answer as a ``GenerateContentResponse``."""
    return _response(reply, [*_thoughts(reply), *_said(reply)], last=True)


def stream(reply: Reply, request: Request) -> Iterator[bytes]:
    """The answer as one or two chunks, as server-sent events or as a JSON array.

    Reasoning is a chunk of its own, for clients that take a chunk for what its first part is; all else comes
    together, for clients that call functions by themselves and then send back only the last chunk.
    """
    thoughts = _thoughts(reply)
    chunks = [_response(reply, thoughts, last=False)] if thoughts else []
    chunks.append(_response(reply, _said(reply), last=True))
    if request.wire["sse"]:
        yield from map(fields.sse, chunks)
        return
    yield b"[" + b",\n".join(_json(chunk).encode() for chunk in chunks) + b"]\n"


def count(tokens: int) -> dict[str, Any]:
    """The answer of ``countTokens``."""
    return {"totalTokens": tokens}


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """The answer of ``/v1beta/models``."""
    return {"models": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    """The answer of ``/v1beta/models/NAME``."""
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def error(trouble: WireError) -> dict[str, Any]:
    """An error body in Google's shape."""
    message = trouble.message
    if trouble.code == "context_length_exceeded" and trouble.data:
        message = _TOO_LONG.format_map(trouble.data)
    status = _STATUSES.get(trouble.status, "INTERNAL" if trouble.status >= 500 else "INVALID_ARGUMENT")
    details: list[dict[str, Any]] = []
    if trouble.code:
        details.append({"@type": _GOOGLE + "ErrorInfo", "reason": trouble.code.upper(), "domain": "reins"})
    if trouble.param and trouble.status == 400:
        violation = {"field": trouble.param, "description": message}
        details.append({"@type": _GOOGLE + "BadRequest", "fieldViolations": [violation]})
    wait_s = _NEVER_S if trouble.retry_after is None and trouble.status in (429, 503) else trouble.retry_after
    if wait_s is not None:
        details.append({"@type": _GOOGLE + "RetryInfo", "retryDelay": f"{wait_s:g}s"})
    told = {"code": trouble.status, "message": message, "status": status}
    return {"error": {**told, "details": details} if details else told}


def error_event(trouble: WireError) -> bytes:
    """An error in the middle of a stream."""
    return _json(error(trouble)).encode() + b"\n"


def _get(wire: dict[str, Any], name: str) -> Any:
    """A field by its camelCase name, or by the snake_case one that the API takes as well."""
    found = wire.get(name)
    return found if found is not None else wire.get(_snake(name))


@cache
def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(field, value, "a JSON object")
    return value


def _many(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of objects; one object alone is a list of it, null is none."""
    found = [value] if isinstance(value, dict) else [] if value is None else value
    if not isinstance(found, list):
        raise invalid(field, value, "a list of objects")
    return [_object(item, f"{field}[{i}]") for i, item in enumerate(found)]


def _system(wire: Any) -> tuple[Message, ...]:
    field = "systemInstruction"
    parts = [{"text": wire}] if isinstance(wire, str) else wire
    if isinstance(wire, dict) and "text" not in wire:
        field, parts = f"{field}.parts", wire.get("parts")
    given = _given(parts, field)
    if any(message.role != "user" for message in given):
        raise invalid(field, wire, "text")
    text = given[0].text
    return (Message("system", text),) if text else ()


def _conversation(wire: Any) -> tuple[Message, ...]:
    contents = _many(wire, "contents")
    if not contents:
        raise invalid("contents", wire, "a list of at least one content")
    messages: list[Message] = []
    for is_model, group in groupby(enumerate(contents), _is_model):
        parts = [(content.get("parts"), f"contents[{i}].parts") for i, content in group]
        if is_model:
            for node, turn in _turns(parts):
                messages.append(_turn(node, turn, f"call{len(messages)}t"))
        else:
            messages += [message for given in parts for message in _given(*given)]
    return _addressed(messages)


def _is_model(item: tuple[int, dict[str, Any]]) -> bool:
    i, content = item
    role = content.get("role")
    if role != "model" and role not in _GIVEN_ROLES:
        raise invalid(f"contents[{i}].role", role, "user or model")
    return role == "model"


def _turns(contents: Sequence[tuple[Any, str]]) -> Iterator[tuple[str, list[_Part]]]:
    """The parts of contents of the model in a row: of one turn, unless they are signed as different calls."""
    node = ""
    parts: list[_Part] = []
    for wire, field in contents:
        for i, part in enumerate(_many(wire, field)):
            signed = signed_call(_get(part, "thoughtSignature"))
            if node and signed not in ("", node):
                yield node, parts
                parts = []
            node = signed or node
            parts.append((part, f"{field}[{i}]"))
    yield node, parts


def _turn(node: str, parts: list[_Part], placeholder: str) -> Message:
    """What the model said; ``placeholder`` begins the ids of calls that came without one."""
    text, reasoning = "", ""
    calls: list[ToolCall] = []
    for part, where in parts:
        kind = _kind(part, where)
        if kind == "functionCall":
            calls.append(_call(_get(part, kind), f"{where}.{kind}", f"{placeholder}{len(calls)}"))
        elif kind == "functionResponse":
            raise invalid(f"{where}.{kind}", kind, "text or functionCall where the role is model")
        elif fields.flag(part.get("thought"), f"{where}.thought"):
            reasoning += fields.text(part.get("text"), f"{where}.text")
        else:
            text += fields.text(part.get("text"), f"{where}.text")
    return Message("assistant", text, reasoning=reasoning, tool_calls=tuple(calls), node=node)


def _given(wire: Any, field: str) -> list[Message]:
    """What the model was given in one content: results of functions and texts; texts in a row are one message."""
    messages: list[Message] = []
    for i, part in enumerate(_many(wire, field)):
        where = f"{field}[{i}]"
        kind = _kind(part, where)
        if kind == "functionResponse":
            messages.append(_function_response(_get(part, kind), f"{where}.{kind}"))
        elif kind == "functionCall":
            raise invalid(f"{where}.{kind}", kind, "text or functionResponse where the role is not model")
        elif text := fields.text(part.get("text"), f"{where}.text"):
            if messages and messages[-1].role == "user":
                text = f"{messages.pop().text}\n\n{text}"
            messages.append(Message("user", text))
    return messages or [Message("user")]


def _kind(part: dict[str, Any], field: str) -> str:
    """Which of the readable kinds a part is. A part with nothing but a signature is text."""
    for kind in _READABLE:
        if _get(part, kind) is not None:
            return kind
    for kind in _UNREADABLE:
        if _get(part, kind) is not None:
            expected = "text: this policy reads no images, audio or files, and runs no code by itself"
            raise invalid(f"{field}.{kind}", kind, expected, "unsupported_content")
    if _get(part, "thoughtSignature") is None and part.get("thought") is None:
        raise invalid(field, part, 'a part such as {"text": "..."}')
    return "text"


def _call(wire: Any, field: str, placeholder: str) -> ToolCall:
    call = _object(wire, field)
    arguments = call.get("args")
    return ToolCall(
        id=fields.text(call.get("id"), f"{field}.id") or placeholder,
        name=_name(call, field),
        arguments={} if arguments is None else _object(arguments, f"{field}.args"),
    )


def _function_response(wire: Any, field: str) -> Message:
    given = _object(wire, field)
    response = given.get("response")
    response = {} if response is None else _object(response, f"{field}.response")
    key, text = next(iter(response.items()), ("", ""))
    if len(response) > 1 or key not in _RESULT_KEYS or not isinstance(text, str):
        text = _json(response, ensure_ascii=False)
    if given.get("parts"):
        text = f"{text}\n{fields.UNSEEN}"
    call_id = fields.text(given.get("id"), f"{field}.id")
    return Message("tool", text, tool_call_id=call_id, name=_name(given, field))


def _name(wire: dict[str, Any], field: str) -> str:
    name = wire.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", name, "the name of a function")
    return name


def _addressed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with every result under the id of its call.

    By id among the calls of the turn before; else the first call of that name which nothing answers yet.
    """
    addressed = list(messages)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    for start, end in zip(turns, [*turns, len(messages)][1:], strict=True):
        results = [i for i in range(start + 1, end) if messages[i].role == "tool"]
        named = {messages[i].tool_call_id for i in results}
        unnamed = [call for call in messages[start].tool_calls if call.id not in named]
        known = {call.id for call in messages[start].tool_calls}
        for i in results:
            if messages[i].tool_call_id in known:
                continue
            found = next((call for call in unnamed if call.name == messages[i].name), None)
            if found is not None:
                unnamed.remove(found)
                addressed[i] = replace(messages[i], tool_call_id=found.id)
    return tuple(addressed)


def _tools(wire: Any) -> tuple[dict[str, Any], ...]:
    """The functions as OpenAI specifications. Tools that a server would run are left out of them."""
    specifications, foreign = [], []
    for i, tool in enumerate(_many(wire, "tools")):
        foreign += [key for key, value in tool.items() if key not in _DECLARED and value is not None]
        field = f"tools[{i}].functionDeclarations"
        declared = _many(_get(tool, "functionDeclarations"), field)
        specifications += [_specification(function, f"{field}[{j}]") for j, function in enumerate(declared)]
    if foreign and not specifications:
        expected = "functionDeclarations: there is no search or other tool on this side"
        raise invalid("tools", foreign[0], expected, "unsupported_tool")
    return tuple(specifications)


def _specification(wire: dict[str, Any], field: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": _name(wire, field)}
    if description := fields.text(wire.get("description"), f"{field}.description"):
        function["description"] = description
    spelling = "parameters" if _get(wire, "parametersJsonSchema") is None else "parametersJsonSchema"
    schema = _get(wire, spelling)
    schema = {"type": "object", "properties": {}} if schema is None else _object(schema, f"{field}.{spelling}")
    return {"type": "function", "function": {**function, "parameters": _schema(schema)}}


def _schema(wire: Any) -> Any:
    """A schema of this API, whose types are in capitals, as JSON schema. What is no schema in it stays as it is."""
    if not isinstance(wire, dict):
        return wire
    schema: dict[str, Any] = {}
    for key, value in wire.items():
        name = "anyOf" if key == "any_of" else key
        if name == "type" and isinstance(value, str):
            schema[name] = value.lower()
        elif name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            schema[name] = {inner: _schema(inside) for inner, inside in value.items()}
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, list):
            schema[name] = [_schema(inside) for inside in value]
        elif name in ("items", "additionalProperties"):
            schema[name] = _schema(value)
        else:
            schema[name] = value
    return schema


def _sampling(wire: Any) -> Sampling:
    field = "generationConfig"
    config = {} if wire is None else _object(wire, field)
    if (candidates := _get(config, "candidateCount")) not in (None, 1):
        raise invalid(f"{field}.candidateCount", candidates, "1: one candidate per call", "unsupported_value")
    return Sampling(
        max_tokens=fields.whole(_get(config, "maxOutputTokens"), f"{field}.maxOutputTokens"),
        temperature=fields.number(config.get("temperature"), f"{field}.temperature"),
        top_p=fields.number(_get(config, "topP"), f"{field}.topP"),
        stop=fields.texts(_get(config, "stopSequences"), f"{field}.stopSequences"),
    )


def _thoughts(reply: Reply) -> list[dict[str, Any]]:
    return [{"text": reply.message.reasoning, "thought": True}] if reply.message.reasoning else []


def _said(reply: Reply) -> list[dict[str, Any]]:
    """Text and calls, each signed; never without a part, which clients take for no answer at all."""
    message = reply.message
    parts: list[dict[str, Any]] = [{"text": message.text}] if message.text or not message.tool_calls else []
    for call in message.tool_calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": fields.arguments_object(call)}})
    signed = signature(reply.id)
    return [{**part, "thoughtSignature": signed} for part in parts]


def _response(reply: Reply, parts: list[dict[str, Any]], last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate], "modelVersion": reply.model, "responseId": reply.id}
    if last:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish == "length" else "STOP"
        response["usageMetadata"] = {
            "promptTokenCount": reply.usage.prompt,
            "candidatesTokenCount": reply.usage.completion,
            "totalTokenCount": reply.usage.prompt + reply.usage.completion,
            "cachedContentTokenCount": reply.usage.cached,
        }
    return response


def _json(value: Any, ensure_ascii: bool = True) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=ensure_ascii)
