"""Stop sequences: where a completion would have ended had the engine known them.

What is sampled token by token does not depend on what comes after it, so the completion up to the token that
completes the sequence is exactly what an engine that stops there gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.engines.base import Generated
from envs.protocols.canonical import Message
from trees.record import VersionSpan

Decode = Callable[[Sequence[int]], str]


def cut(generated: Generated, stops: Sequence[str], decode: Decode) -> tuple[Generated, str]:
    """The completion up to the token that completes the first stop sequence, and that sequence; or as it is."""
    if not stops or not generated.ids:
        return generated, ""
    text = decode(generated.ids)
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return generated, ""
    stop = min(found)[1]
    low, high = 1, len(generated.ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stop in decode(generated.ids[:middle]) else (middle + 1, high)
    spans = [VersionSpan(s.version, s.start, min(s.end, low)) for s in generated.versions if s.start < low]
    return (
        replace(
            generated,
            ids=list(generated.ids[:low]),
            logprobs=list(generated.logprobs[:low]),
            finish="stop",
            versions=tuple(spans),
        ),
        stop,
    )


def without(message: Message, stop: str) -> Message:
    """The decoded message up to the stop sequence; tool calls that were whole before it stay."""
    if stop in message.reasoning:
        return replace(message, reasoning=message.reasoning.partition(stop)[0], text="", tool_calls=())
    return replace(message, text=message.text.partition(stop)[0])
