"""The event stream of OpenAI Responses.

Invariant: the events are made of the whole answer, so that a client that adds them up has that answer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from envs.protocols import fields
from envs.protocols.errors import WireError
from envs.protocols.openai_chat import error

_Event = tuple[str, dict[str, Any]]
_SUMMARY = ("reasoning_summary_part", "reasoning_summary_text")
_CONTENT = ("content_part", "output_text")


def skeleton(response: str, model: str, created_at: int) -> dict[str, Any]:
    """A ``response`` object that has just begun; ``created_at`` in seconds since 1970."""
    return {
        "id": response,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
    }


def events(response: dict[str, Any]) -> Iterator[bytes]:
    """A finished ``response`` object as server-sent events."""
    numbers = itertools.count()
    begun = {**response, **skeleton(response["id"], response["model"], response["created_at"])}
    yield _sse("response.created", numbers, {"response": begun})
    yield _sse("response.in_progress", numbers, {"response": begun})
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield _sse("response.output_item.added", numbers, {**place, "item": _begun(item)})
        for name, data in _item_events(item):
            yield _sse(f"response.{name}", numbers, {"item_id": item["id"], **place, **data})
        yield _sse("response.output_item.done", numbers, {**place, "item": item})
    yield _sse(f"response.{response['status']}", numbers, {"response": response})


def error_event(trouble: WireError) -> bytes:
    """An error in a stream that has no other events yet.

    As two events, because clients heed one or the other: the official library ``error``, Codex ``response.failed``.
    """
    numbers = itertools.count()
    told = error(trouble)
    failed = {
        **skeleton("resp_failed", "policy", int(time.time())),
        "status": "failed",
        "error": {"code": trouble.code or "server_error", "message": trouble.message},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    flat = {key: told["error"][key] for key in ("code", "message", "param")}
    return _sse("error", numbers, {**flat, **told}) + _sse("response.failed", numbers, {"response": failed})


def _sse(kind: str, numbers: Iterator[int], data: dict[str, Any]) -> bytes:
    return fields.sse({"type": kind, "sequence_number": next(numbers), **data}, kind)


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    """An item before anything of it has come."""
    empty: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "input": ""}
    if item["type"] == "tool_search_call":
        empty["arguments"] = {}
    return {key: empty.get(key, value) for key, value in item.items()} | {"status": "in_progress"}


def _item_events(item: dict[str, Any]) -> Iterator[_Event]:
    match item["type"]:
        case "reasoning":
            # Reasoning is told once, as a summary: clients that show both would show it twice.
            for index, part in enumerate(item["summary"]):
                yield from _part_events(part, {"summary_index": index}, *_SUMMARY)
        case "message":
            for index, part in enumerate(item["content"]):
                yield from _part_events(part, {"content_index": index}, *_CONTENT)
        case "function_call":
            yield "function_call_arguments.delta", {"delta": item["arguments"]}
            yield "function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}
        case "custom_tool_call":
            yield "custom_tool_call_input.delta", {"delta": item["input"]}
            yield "custom_tool_call_input.done", {"input": item["input"]}


def _part_events(part: dict[str, Any], at: dict[str, int], whole: str, text: str) -> Iterator[_Event]:
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield f"{whole}.added", {**at, "part": {**part, "text": ""}}
    if part["text"]:
        yield f"{text}.delta", {**at, "delta": part["text"], **more}
    yield f"{text}.done", {**at, "text": part["text"], **more}
    yield f"{whole}.done", {**at, "part": part}
