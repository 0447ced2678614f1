"""OpenAI Chat Completions: wire JSON to the canonical conversation and back.

Invariant: what a conforming client sends parses to one canonical request whatever its spelling
(content as a string or as parts, null or empty, ``developer`` or ``system``); unknown keys are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from envs.protocols import fields
from envs.protocols.base import Route
from envs.protocols.canonical import Message, Reply, Request, Role, Sampling, ToolCall
from envs.protocols.errors import WireError, invalid

NAME = "openai-chat"
ROUTES: tuple[Route, ...] = (
    Route("complete", "/v1/chat/completions"),
    Route("models", "/v1/models", "GET"),
    Route("model", "/v1/models/{model}", "GET"),
)
STATUS: Mapping[int, int] = {}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_NOT_TEXT = ("image_url", "input_audio", "file", "image")
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def parse(body: Any, params: Mapping[str, str]) -> Request:  # noqa: ARG001
    """Read a request body, as ``wire.read`` gives it.

    Raises ``WireError`` (400) that names the field, what came and what was expected.
    """
    if not isinstance(body, dict):
        raise invalid("body", body, "a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", messages, "a list of at least one message")
    if body.get("n") not in (None, 1):
        raise invalid("n", body["n"], "1: one completion per call", "unsupported_value")
    options = body.get("stream_options")
    return Request(
        model=fields.text(body.get("model"), "model") or "policy",
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages)),
        tools=_tools(body.get("tools")),
        sampling=_sampling(body),
        stream=fields.flag(body.get("stream"), "stream"),
        wire={"include_usage": isinstance(options, dict) and options.get("include_usage") is True},
    )


def dump(reply: Reply, request: Request) -> dict[str, Any]:  # noqa: ARG001
    """The whole answer as a ``chat.completion`` object."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.text, "refusal": None}
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["content"] = reply.message.text or None
        message["tool_calls"] = [_wire_call(call) for call in reply.message.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model,
        "choices": [choice],
        "usage": _usage(reply),
    }


def stream(reply: Reply, request: Request) -> Iterator[bytes]:
    """The answer as server-sent events: role, reasoning, content, tool calls, finish, usage, ``[DONE]``."""
    base = {
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": reply.model,
    }

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return fields.sse({**base, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if reply.message.reasoning:
        yield chunk({"reasoning_content": reply.message.reasoning})
    if reply.message.text:
        yield chunk({"content": reply.message.text})
    for index, call in enumerate(reply.message.tool_calls):
        wire = _wire_call(call)
        arguments = wire["function"]["arguments"]
        wire["function"] = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, **wire}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    yield chunk({}, reply.finish)
    if request.wire["include_usage"]:
        yield fields.sse({**base, "choices": [], "usage": _usage(reply)})
    yield DONE


def count(tokens: int) -> dict[str, Any]:
    """A number of tokens; this protocol has no question for it."""
    return {"total_tokens": tokens}


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """The answer of ``/v1/models``."""
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    """The answer of ``/v1/models/NAME``."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "reins"}


def error(trouble: WireError) -> dict[str, Any]:
    """An error body in OpenAI's shape."""
    status = trouble.status
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": trouble.message, "type": kind, "param": trouble.param, "code": trouble.code or None}}


def error_event(trouble: WireError) -> bytes:
    """An error in the middle of a stream."""
    return fields.sse(error(trouble))


def _message(wire: Any, field: str) -> Message:
    if not isinstance(wire, dict):
        raise invalid(field, wire, "an object with role and content")
    role = _ROLES.get(wire["role"]) if isinstance(wire.get("role"), str) else None
    if role is None:
        raise invalid(f"{field}.role", wire.get("role"), "one of " + ", ".join(_ROLES))
    text = _content(wire.get("content"), f"{field}.content", of_tool=role == "tool")
    if role == "assistant":
        reasoning = wire.get("reasoning_content")
        if reasoning is None:
            reasoning = wire.get("reasoning")
        return Message(
            role,
            text,
            reasoning=fields.text(reasoning, f"{field}.reasoning_content"),
            tool_calls=_tool_calls(wire.get("tool_calls"), f"{field}.tool_calls"),
        )
    name = fields.text(wire.get("name"), f"{field}.name")
    if role == "tool":
        call_id = wire.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise invalid(f"{field}.tool_call_id", call_id, "the id of the tool call that is answered")
        return Message(role, text, tool_call_id=call_id, name=name)
    return Message(role, text, name=name)


def _content(wire: Any, field: str, of_tool: bool = False) -> str:
    return wire if isinstance(wire, str) else "".join(fields.parts(wire, field, ("text",), _NOT_TEXT, of_tool))


def _tool_calls(wire: Any, field: str) -> tuple[ToolCall, ...]:
    if wire is None:
        return ()
    if not isinstance(wire, list):
        raise invalid(field, wire, "a list of tool calls or null")
    calls = []
    for i, call in enumerate(wire):
        where = f"{field}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(where, call, 'an object with id and function {"name", "arguments"}')
        calls.append(
            ToolCall(
                id=fields.text(call.get("id"), f"{where}.id"),
                name=function["name"],
                arguments=fields.arguments(function.get("arguments"), f"{where}.function.arguments"),
            )
        )
    return tuple(calls)


def _tools(wire: Any) -> tuple[dict[str, Any], ...]:
    if wire is None:
        return ()
    if not isinstance(wire, list):
        raise invalid("tools", wire, "a list of function tools or null")
    for i, tool in enumerate(wire):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"tools[{i}]", tool, 'an object with "type": "function"')
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{i}].function", function, "an object with a name")
    return tuple(wire)


def _sampling(body: dict[str, Any]) -> Sampling:
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return Sampling(
        max_tokens=fields.whole(body.get(field), field),
        temperature=fields.number(body.get("temperature"), "temperature"),
        top_p=fields.number(body.get("top_p"), "top_p"),
        stop=fields.texts(body.get("stop"), "stop"),
    )


def _wire_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": fields.arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
