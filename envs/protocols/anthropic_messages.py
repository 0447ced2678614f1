"""Anthropic Messages: wire JSON to the canonical conversation and back.

Invariant: what a conforming client sends parses to one canonical request whatever its spelling (a string or
blocks, with cache markers or without, an assistant turn in one message or in several); unknown keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from envs.protocols import fields
from envs.protocols.base import Route
from envs.protocols.canonical import Message, Reply, Request, Sampling, ToolCall, signature, signed_call
from envs.protocols.errors import WireError, invalid

NAME = "anthropic-messages"
ROUTES: tuple[Route, ...] = (
    Route("complete", "/v1/messages", params={"action": "complete"}),
    Route("count", "/v1/messages/count_tokens", params={"action": "count"}),
    Route("models", "/v1/models", "GET"),
    Route("model", "/v1/models/{model}", "GET"),
)
STATUS: Mapping[int, int] = {503: 529}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_BLANK_LINE = "\n\n"
_JSON_PIECES = 3
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENED: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""What a block of each kind holds before its deltas."""


class _Block(NamedTuple):
    kind: str
    wire: dict[str, Any]
    field: str


def parse(body: Any, params: Mapping[str, str]) -> Request:
    """Read a request body, as ``wire.read`` gives it; ``params["action"]`` may be ``count``.

    Raises ``WireError`` (400) that names the field, what came and what was expected.
    """
    if not isinstance(body, dict):
        raise invalid("body", body, "a JSON object")
    counting = params.get("action") == "count"
    wire = body.get("messages")
    if not isinstance(wire, list) or not wire:
        raise invalid("messages", wire, "a list of at least one message")
    messages = _messages(wire)
    if all(message.role == "system" for message in messages):
        raise invalid("messages", wire, "at least one message of role user")
    if messages[-1].role == "assistant" and not counting:
        # A rendered answer is over: the policy would begin a second one, which no client that prefills expects.
        expected = "user: this policy does not go on with an answer that the request has begun"
        raise invalid(f"messages[{len(wire) - 1}].role", "assistant", expected, "unsupported_value")
    system = _text(body.get("system"), "system")
    return Request(
        model=fields.text(body.get("model"), "model") or "policy",
        messages=(*([Message("system", system)] if system else []), *messages),
        tools=_tools(body.get("tools")),
        sampling=_sampling(body, counting),
        stream=fields.flag(body.get("stream"), "stream"),
    )


def dump(reply: Reply, request: Request) -> dict[str, Any]:  # noqa: ARG001
    """The whole answer as a ``message`` object."""
    return {**_envelope(reply), "content": _content(reply), **_ending(reply), "usage": _usage(reply)}


def stream(reply: Reply, request: Request) -> Iterator[bytes]:  # noqa: ARG001
    """The answer as server-sent events: the message opens, each block opens, grows and ends, the message ends."""
    usage = _usage(reply)
    opened = {
        **_envelope(reply),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": min(1, usage["output_tokens"])},
    }
    yield _event("message_start", message=opened)
    for index, block in enumerate(_content(reply)):
        yield _event("content_block_start", index=index, content_block={**block, **_OPENED[block["type"]]})
        for delta in _deltas(block):
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_ending(reply), usage=usage)
    yield _event("message_stop")


def count(tokens: int) -> dict[str, Any]:
    """The answer of ``/v1/messages/count_tokens``."""
    return {"input_tokens": tokens}


def models(names: tuple[str, ...]) -> dict[str, Any]:
    """The answer of ``/v1/models``: one page."""
    return {
        "data": [model(name) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def model(name: str) -> dict[str, Any]:
    """The answer of ``/v1/models/NAME``."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }


def error(trouble: WireError) -> dict[str, Any]:
    """An error body in Anthropic's shape, whose only machine-readable word is its type."""
    status = trouble.status
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = trouble.message
    if trouble.code == "context_length_exceeded" and trouble.data:
        # By these words clients know that it is time to compact their context.
        message = f"prompt is too long: {trouble.data['tokens']} tokens > {trouble.data['most']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(trouble: WireError) -> bytes:
    """An error in the middle of a stream."""
    return fields.sse(error(trouble), "error")


def _messages(wire: list[Any]) -> list[Message]:
    found: list[Message] = []
    for role, group in groupby(enumerate(wire), _role):
        contents = [(message.get("content"), f"messages[{i}].content") for i, message in group]
        if role == "assistant":
            found.append(_assistant(block for content in contents for block in _blocks(*content)))
        elif role == "user":
            found += [message for content in contents for message in _user(*content)]
        else:
            texts = [_text(*content) for content in contents]
            found += [Message("system", text) for text in texts if text]
    return found


def _role(item: tuple[int, Any]) -> str:
    i, message = item
    if not isinstance(message, dict):
        raise invalid(f"messages[{i}]", message, "an object with role and content")
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"messages[{i}].role", role, "user, assistant or system")
    return role


def _blocks(wire: Any, field: str) -> Iterator[_Block]:
    """Content as blocks: a string is one text block, null is none."""
    if isinstance(wire, str):
        yield _Block("text", {"text": wire}, field)
        return
    if wire is not None and not isinstance(wire, list):
        raise invalid(field, wire, "a string or a list of content blocks")
    for i, block in enumerate(wire or ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise invalid(f"{field}[{i}]", block, 'a block such as {"type": "text", "text": "..."}')
        yield _Block(kind, block, f"{field}[{i}]")


def _refused(block: _Block, expected: str) -> WireError:
    expected = f"{expected}: this policy reads no images, documents or results of server tools"
    return invalid(f"{block.field}.type", block.kind, expected, "unsupported_content")


def _text_of(block: _Block) -> str:
    return fields.text(block.wire.get("text"), f"{block.field}.text")


def _text(wire: Any, field: str, of_tool: bool = False) -> str:
    """The texts of a content with blank lines between them."""
    texts = []
    for block in _blocks(wire, field):
        if block.kind == "text":
            texts.append(_text_of(block))
        elif block.kind == "tool_reference":
            # The tool that a search has found stands among the tools all along.
            texts.append(fields.text(block.wire.get("tool_name"), f"{block.field}.tool_name"))
        elif of_tool and block.kind in ("image", "document"):
            texts.append(fields.UNSEEN)
        else:
            raise _refused(block, "text")
    return _BLANK_LINE.join(filter(None, texts))


def _user(wire: Any, field: str) -> list[Message]:
    """Tool results and texts in their order; texts next to each other are one message."""
    found: list[Message] = []
    for is_text, group in groupby(_blocks(wire, field), lambda block: block.kind == "text"):
        if is_text:
            text = _BLANK_LINE.join(filter(None, map(_text_of, group)))
            found += [Message("user", text)] if text else []
        else:
            found += map(_result, group)
    return found or [Message("user")]


def _result(block: _Block) -> Message:
    if block.kind != "tool_result":
        raise _refused(block, "text or tool_result")
    call_id = block.wire.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise invalid(f"{block.field}.tool_use_id", call_id, "the id of the tool_use block that is answered")
    text = _text(block.wire.get("content"), f"{block.field}.content", of_tool=True)
    failed = fields.flag(block.wire.get("is_error"), f"{block.field}.is_error")
    return Message("tool", text or ("error" if failed else ""), tool_call_id=call_id)


def _assistant(blocks: Iterable[_Block]) -> Message:
    """One turn. Its texts are pieces of one text; redacted thinking holds nothing that can be read."""
    texts, thoughts, calls = [], [], []
    node = ""
    for block in blocks:
        if block.kind == "text":
            texts.append(_text_of(block))
        elif block.kind == "thinking":
            thoughts.append(fields.text(block.wire.get("thinking"), f"{block.field}.thinking"))
            node = node or signed_call(block.wire.get("signature"))
        elif block.kind == "tool_use":
            calls.append(_call(block))
        elif block.kind != "redacted_thinking":
            raise _refused(block, "text, thinking, redacted_thinking or tool_use")
    return Message(
        "assistant",
        "".join(texts),
        reasoning=_BLANK_LINE.join(filter(None, thoughts)),
        tool_calls=tuple(calls),
        node=node,
    )


def _call(block: _Block) -> ToolCall:
    name = block.wire.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{block.field}.name", name, "the name of a tool")
    return ToolCall(
        id=fields.text(block.wire.get("id"), f"{block.field}.id"),
        name=name,
        arguments=fields.arguments(block.wire.get("input"), f"{block.field}.input"),
    )


def _tools(wire: Any) -> tuple[dict[str, Any], ...]:
    if wire is None:
        return ()
    if not isinstance(wire, list):
        raise invalid("tools", wire, "a list of tools or null")
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(wire))


def _tool(wire: Any, field: str) -> dict[str, Any]:
    """A tool as a function specification. One without a schema is known by name to Anthropic's models only."""
    if not isinstance(wire, dict):
        raise invalid(field, wire, "an object with name, description and input_schema")
    name, schema, kind = wire.get("name"), wire.get("input_schema"), wire.get("type")
    if not isinstance(schema, dict) and kind not in (None, "custom"):
        expected = "custom: this policy knows no built-in tools; describe the tool with name and input_schema"
        raise invalid(f"{field}.type", kind, expected, "unsupported_tool")
    if not isinstance(schema, dict):
        raise invalid(f"{field}.input_schema", schema, "a JSON schema as an object")
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", name, "the name of the tool")
    description = fields.text(wire.get("description"), f"{field}.description")
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _sampling(body: dict[str, Any], counting: bool) -> Sampling:
    most = fields.whole(body.get("max_tokens"), "max_tokens")
    if most is None and not counting:
        raise invalid("max_tokens", None, "a whole number of at least 1", "missing_value")
    return Sampling(
        max_tokens=most,
        temperature=fields.number(body.get("temperature"), "temperature"),
        top_p=fields.number(body.get("top_p"), "top_p"),
        stop=fields.texts(body.get("stop_sequences"), "stop_sequences"),
    )


def _envelope(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _content(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature(reply.id)})
    # An answer of nothing has an empty text: clients take the first block for granted.
    if message.text or not (message.reasoning or message.tool_calls):
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": fields.arguments_object(call)})
    return blocks


def _deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What turns an opened block into the whole one."""
    if block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        size = -(-len(text) // _JSON_PIECES)
        for start in range(0, len(text), size):
            yield {"type": "input_json_delta", "partial_json": text[start : start + size]}
    elif block["text"]:
        yield {"type": "text_delta", "text": block["text"]}


def _ending(reply: Reply) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "stop_reason": "stop_sequence" if reply.stop else reasons[reply.finish],
        "stop_sequence": reply.stop or None,
    }


def _usage(reply: Reply) -> dict[str, int]:
    """``input_tokens`` is the whole prompt. Clients add the cached tokens to it, so none are told."""
    return {
        "input_tokens": reply.usage.prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": reply.usage.completion,
    }


def _event(kind: str, **data: Any) -> bytes:
    return fields.sse({"type": kind, **data}, kind)
