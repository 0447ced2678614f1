"""A request as the turns that are matched: pure functions, no state."""

from __future__ import annotations

import re
from dataclasses import replace

from envs.protocols.canonical import Message, Request
from trees.turns import PrefixKey, Turn, prefix_key

_OUR_ID = re.compile(r"c[0-9a-f]{18}t\d+")
_INLINE_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def instructions(request: Request) -> tuple[Message, ...]:
    """The system message at the head that holds for this request alone."""
    head = request.messages[:1]
    return head if request.instructed and head and head[0].role == "system" else ()


def split(request: Request) -> tuple[PrefixKey, tuple[Message, ...]]:
    """What stands before every turn, and the turns: a system message at the head belongs to the first."""
    messages = request.messages
    if messages[0].role == "system":
        return prefix_key(messages[0].text, request.tools), messages[1:]
    return prefix_key(None, request.tools), messages


def ordered(request: Request) -> Request:
    """The request with the results of parallel tool calls in the order of the calls.

    Harnesses send them as they come, and most chat templates write no ids: the order is all that tells the policy
    which result is whose.
    """
    messages = list(request.messages)
    place: dict[str, int] = {}
    start = len(messages)
    for i, message in enumerate([*messages, Message("user")]):
        if message.role == "tool":
            start = min(start, i)
            continue
        run = messages[start:i]
        if len(run) > 1 and all(result.tool_call_id in place for result in run):
            messages[start:i] = sorted(run, key=lambda result: place[result.tool_call_id])
        start = len(messages)
        if message.role == "assistant":
            place = {call.id: nth for nth, call in enumerate(message.tool_calls)}
    return replace(request, messages=tuple(messages))


def without_remnants(request: Request) -> Request:
    """The request without assistant turns that say nothing and are followed by another.

    A harness whose stream broke before anything was said leaves such a turn before the answer of its next try.
    """
    following = (*(message.role for message in request.messages[1:]), "")
    pairs = zip(request.messages, following, strict=True)
    kept = tuple(message for message, after in pairs if not (after == "assistant" and _says_nothing(message)))
    return replace(request, messages=kept)


def _says_nothing(message: Message) -> bool:
    said = message.text.strip() or message.reasoning.strip() or message.tool_calls
    return message.role == "assistant" and not said


def _our_id(text: str) -> str:
    """The tool-call id of ours that a harness has put into one of its own; else the id as it is."""
    found = _OUR_ID.search(text)
    return found[0] if found else text


def turn_of(message: Message) -> Turn:
    text, reasoning = message.text, message.reasoning
    if message.role == "assistant" and not reasoning and (thought := _INLINE_THOUGHT.match(text)):
        # Clients without a field for reasoning keep it in the text.
        reasoning, text = thought[1], text[thought.end() :]
    return Turn.of(
        message.role,
        text,
        reasoning,
        [(call.name, call.arguments) for call in message.tool_calls],
        [*(_our_id(call.id) for call in message.tool_calls), *([message.node] if message.node else [])],
    )
