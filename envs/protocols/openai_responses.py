"""OpenAI Responses: wire JSON to the canonical conversation and back.

Invariants: the items of one answer of ours become one canonical message again, wherever and with whichever
of its ids they come back; a tool is called by one flat name, from which its kind and namespace are found again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envs.protocols import fields, openai_chat, openai_responses_events
from envs.protocols.base import Route
from envs.protocols.canonical import Message, Reply, Request, Role, Sampling, ToolCall, signature, signed_call
from envs.protocols.errors import WireError, invalid

NAME = "openai-responses"
ROUTES: tuple[Route, ...] = (
    Route("complete", "/v1/responses"),
    Route("count", "/v1/responses/input_tokens"),
)
STATUS: Mapping[int, int] = {}
PING = b": ping\n\n"
models, model = openai_chat.models, openai_chat.model
error, error_event = openai_chat.error, openai_responses_events.error_event

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_CALL = re.compile(r"c[0-9a-f]{18}")
"""The id of a call as sessions make it. Other servers' item ids have the same prefixes and tell nothing."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NOT_TEXT = ("input_image", "input_file", "input_audio", "computer_screenshot", "image_url")
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
"""Starts of the names of tools that run at the provider. The policy is not offered them: there is no provider."""
_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_REFUSED = {
    "background": "false: answers are given at once",
    "conversation": "null: send the whole input, or previous_response_id",
    "prompt": "null: this server keeps no prompt templates",
}
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What an answer repeats of its request, and what it says where the request says nothing."""
_ECHO_MARGIN = 100
"""Levels of nesting kept free, so that writing the answer cannot fail for a depth that reading let pass."""


@dataclass(frozen=True, slots=True)
class _Offered:
    """A tool as the client knows it. ``kind``: ``function``, ``custom`` or ``tool_search``."""

    kind: str
    name: str
    namespace: str = ""


def parse(body: Any, params: Mapping[str, str]) -> Request:  # noqa: ARG001
    """Read a request body, as ``wire.read`` gives it.

    Raises ``WireError`` (400) that names the field, what came and what was expected.
    """
    if not isinstance(body, dict):
        raise invalid("body", body, "a JSON object")
    for field, expected in _REFUSED.items():
        if body.get(field):
            raise invalid(field, body[field], expected, "unsupported_parameter")
    offered: dict[str, _Offered] = {}
    tools = _tools(body.get("tools"), "tools", offered)
    instructions = fields.text(body.get("instructions"), "instructions")
    messages = _messages(body.get("input"), offered)
    if instructions:
        messages = (Message("system", instructions), *messages)
    previous = fields.text(body.get("previous_response_id"), "previous_response_id")
    return Request(
        model=fields.text(body.get("model"), "model") or "policy",
        messages=messages,
        tools=tuple(tools),
        sampling=Sampling(
            max_tokens=fields.whole(body.get("max_output_tokens"), "max_output_tokens"),
            temperature=fields.number(body.get("temperature"), "temperature"),
            top_p=fields.number(body.get("top_p"), "top_p"),
        ),
        stream=fields.flag(body.get("stream"), "stream"),
        previous=previous.removeprefix("resp_") or previous,
        instructed=bool(instructions),
        keep=body.get("store") is None or fields.flag(body["store"], "store"),
        wire={"offered": offered, "echo": _echo(body)},
    )


def dump(reply: Reply, request: Request) -> dict[str, Any]:
    """The whole answer as a ``response`` object."""
    now = int(time.time())
    cut = reply.finish == "length"
    usage = reply.usage
    return {
        **openai_responses_events.skeleton(f"resp_{reply.id}", reply.model, now),
        **request.wire["echo"],
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else now,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(reply, request.wire["offered"]),
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        },
    }


def stream(reply: Reply, request: Request) -> Iterator[bytes]:
    """The answer as server-sent events."""
    return openai_responses_events.events(dump(reply, request))


def count(tokens: int) -> dict[str, Any]:
    """The answer of ``/v1/responses/input_tokens``."""
    return {"object": "response.input_tokens", "input_tokens": tokens}


def _echo(body: dict[str, Any]) -> dict[str, Any]:
    echo = {field: default if body.get(field) is None else body[field] for field, default in _ECHOED.items()}
    deeper: Any = echo
    for _ in range(_ECHO_MARGIN):
        deeper = [deeper]
    try:
        json.dumps(deeper, allow_nan=False)
    except ValueError as fault:
        message = f"body: got a number that is not finite, expected one that JSON has: {fault}"
        raise WireError(400, message, "invalid_value", "body") from fault
    return echo


def _messages(wire: Any, offered: dict[str, _Offered]) -> tuple[Message, ...]:
    if isinstance(wire, str):
        return (Message("user", wire),)
    if not isinstance(wire, list):
        raise invalid("input", wire, "a string or a list of items")
    found = (_item(item, f"input[{i}]", offered) for i, item in enumerate(wire))
    messages = _grouped(message for message in found if message is not None)
    if not messages:
        raise invalid("input", wire, "at least one item with content")
    return messages


def _grouped(pieces: Iterable[Message]) -> tuple[Message, ...]:
    """Join what belongs to one answer: what names the same call, or stands side by side and names no other.

    Pieces that name the call may have outputs of its tools between them.
    """
    groups: list[list[Message]] = []
    answer: list[Message] | None = None
    node, adjacent = "", False
    for piece in pieces:
        if piece.role != "assistant":
            groups.append([piece])
            answer, adjacent = (answer if piece.role == "tool" else None), False
            continue
        if answer is None or not (piece.node == node if piece.node and node else adjacent):
            answer, node = [], ""
            groups.append(answer)
        answer.append(piece)
        node, adjacent = node or piece.node, True
    return tuple(group[0] if len(group) == 1 else _joined(group) for group in groups)


def _joined(pieces: list[Message]) -> Message:
    return Message(
        "assistant",
        "".join(piece.text for piece in pieces),
        reasoning="\n\n".join(piece.reasoning for piece in pieces if piece.reasoning),
        tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
        node=next((piece.node for piece in pieces if piece.node), ""),
    )


def _item(wire: Any, field: str, offered: dict[str, _Offered]) -> Message | None:
    """One item as a message, a part of one, or nothing where it holds nothing."""
    if not isinstance(wire, dict):
        raise invalid(field, wire, "an object with a type")
    kind = wire.get("type") or ("message" if "role" in wire else "item_reference" if "id" in wire else None)
    match kind:
        case "message":
            return _message(wire, field)
        case "reasoning":
            return _reasoning(wire, field)
        case "function_call" | "custom_tool_call" | "tool_search_call":
            return _call(wire, field, offered)
        case "function_call_output" | "custom_tool_call_output":
            # Parts of an output are things of their own: a heading and what it is about.
            text = _tool_output(wire.get("output"), f"{field}.output")
            return Message("tool", text, tool_call_id=_call_id(wire, field))
        case "tool_search_output":
            found = _tools(wire.get("tools"), f"{field}.tools", offered)
            text = json.dumps([tool["function"] for tool in found], ensure_ascii=False)
            return Message("tool", text, tool_call_id=_call_id(wire, field))
        case "item_reference":
            expected = "the item itself (with store: false clients send it), or previous_response_id alone"
            raise invalid(field, wire.get("id"), expected, "unsupported_item")
    expected = "message, reasoning, function_call, custom_tool_call, tool_search_call or one of their outputs"
    raise invalid(f"{field}.type", kind, expected, "unsupported_item")


def _message(wire: dict[str, Any], field: str) -> Message:
    role = _ROLES.get(wire["role"]) if isinstance(wire.get("role"), str) else None
    if role is None:
        raise invalid(f"{field}.role", wire.get("role"), "one of " + ", ".join(_ROLES))
    text = _content(wire.get("content"), f"{field}.content")
    return Message(role, text, node=_named(wire) if role == "assistant" else "")


def _reasoning(wire: dict[str, Any], field: str) -> Message | None:
    texts = _parts(wire.get("content"), f"{field}.content") or _parts(wire.get("summary"), f"{field}.summary")
    message = Message("assistant", reasoning="\n\n".join(texts), node=_named(wire))
    return message if message.reasoning or message.node else None


def _call(wire: dict[str, Any], field: str, offered: dict[str, _Offered]) -> Message:
    arguments: dict[str, Any] | str
    if wire["type"] == "tool_search_call":
        name, namespace = "tool_search", ""
    else:
        name, namespace = _name(wire, field), fields.text(wire.get("namespace"), f"{field}.namespace")
    if wire["type"] == "custom_tool_call":
        arguments = {"input": fields.text(wire.get("input"), f"{field}.input")}
    else:
        arguments = fields.arguments(wire.get("arguments"), f"{field}.arguments")
    call = ToolCall(_call_id(wire, field), _flat(offered, _Offered("", name, namespace)), arguments)
    return Message("assistant", tool_calls=(call,), node=_named(wire))


def _named(wire: dict[str, Any]) -> str:
    """The call of ours whose answer an item was part of; empty where none of its ids says so."""
    for text in (wire.get("id"), wire.get("call_id")):
        if isinstance(text, str):
            found = text[text.find("_") + 1 :].partition("t")[0]
            if _CALL.fullmatch(found):
                return found
    return signed_call(wire.get("encrypted_content"))


def _call_id(wire: dict[str, Any], field: str) -> str:
    call_id = wire.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise invalid(f"{field}.call_id", call_id, "the id of a tool call")
    return call_id


def _name(wire: dict[str, Any], field: str) -> str:
    name = wire.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", name, "a name")
    return name


def _content(wire: Any, field: str) -> str:
    return wire if isinstance(wire, str) else "".join(_parts(wire, field))


def _tool_output(wire: Any, field: str) -> str:
    """The output of a tool: its parts on lines of their own."""
    return wire if isinstance(wire, str) else "\n".join(_parts(wire, field, of_tool=True))


def _parts(wire: Any, field: str, of_tool: bool = False) -> list[str]:
    return fields.parts(wire, field, _TEXTS, _NOT_TEXT, of_tool)


def _tools(wire: Any, field: str, offered: dict[str, _Offered], space: str = "", about: str = "") -> list[Any]:
    """The function specifications of a list of tools, which are added to ``offered`` by their flat names.

    ``space``: the namespace that holds them; ``about``: what is said of it, which goes to the first of them.
    """
    if wire is None:
        return []
    if not isinstance(wire, list):
        raise invalid(field, wire, "a list of tools or null")
    specs: list[Any] = []
    for i, tool in enumerate(wire):
        where = f"{field}[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(where, tool, "an object with a type")
        if kind == "namespace" and not space:
            about = fields.text(tool.get("description"), f"{where}.description")
            specs += _tools(tool.get("tools"), f"{where}.tools", offered, _name(tool, where), about)
        elif kind in ("function", "custom") or (kind == "tool_search" and tool.get("execution") == "client"):
            specs.append(_spec(tool, where, offered, space, about))
            about = ""
        elif not kind.startswith(_HOSTED):
            expected = "function, custom or namespace: other tools can be offered as functions"
            raise invalid(f"{where}.type", kind, expected, "unsupported_tool")
    return specs


def _spec(tool: dict[str, Any], field: str, offered: dict[str, _Offered], space: str, about: str) -> dict[str, Any]:
    kind = tool["type"]
    entry = _Offered(kind, "tool_search" if kind == "tool_search" else _name(tool, field), space)
    flat = _flat(offered, entry)
    offered.setdefault(flat, entry)
    described = [about, fields.text(tool.get("description"), f"{field}.description")]
    parameters = tool.get("parameters")
    if kind == "custom":
        parameters = _FREEFORM
        described.append("The argument `input` is the whole input, as it is.")
        form = tool.get("format")
        if isinstance(form, dict) and isinstance(form.get("definition"), str):
            described.append(f"Grammar of the input:\n{form['definition']}")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{field}.parameters", parameters, "a JSON schema as an object")
    function: dict[str, Any] = {"name": flat}
    if description := "\n\n".join(text for text in described if text):
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _flat(offered: Mapping[str, _Offered], tool: _Offered) -> str:
    """The name by which the policy calls a tool: one that no tool of another name or namespace has."""
    flat = f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name
    while flat in offered and (offered[flat].namespace, offered[flat].name) != (tool.namespace, tool.name):
        flat += "_"
    return flat


def _output(reply: Reply, offered: Mapping[str, _Offered]) -> list[dict[str, Any]]:
    message = reply.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        item = {
            "id": f"rs_{reply.id}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": message.reasoning}],
            "content": [{"type": "reasoning_text", "text": message.reasoning}],
            "encrypted_content": signature(reply.id),
        }
        items.append(item)
    if message.text or not (items or message.tool_calls):
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "content": [part]})
    items += [_call_item(call, offered.get(call.name, _Offered("function", call.name))) for call in message.tool_calls]
    for item in items:
        item["status"] = "completed"
    if reply.finish == "length":
        items[-1]["status"] = "incomplete"
    return items


def _call_item(call: ToolCall, tool: _Offered) -> dict[str, Any]:
    if tool.kind == "tool_search":
        arguments = fields.arguments_object(call)
        item = {"id": f"tsc_{call.id}", "type": "tool_search_call", "execution": "client", "arguments": arguments}
        return {**item, "call_id": call.id}
    item = {"call_id": call.id, "name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.kind == "custom":
        return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **item, "input": _freeform(call)}
    return {"id": f"fc_{call.id}", "type": "function_call", **item, "arguments": fields.arguments_text(call)}


def _freeform(call: ToolCall) -> str:
    """The input of a custom tool; what the policy called it with, where that is no input alone."""
    if isinstance(call.arguments, dict) and list(call.arguments) == ["input"]:
        text = call.arguments["input"]
        if isinstance(text, str):
            return text
    return fields.arguments_text(call)
