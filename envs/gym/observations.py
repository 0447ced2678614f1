"""From a model request to an observation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from envs.gym.spaces import MOST_TOKENS
from envs.gym.stage import Asked
from envs.protocols.canonical import Message
from envs.protocols.fields import arguments_text

Observation = dict[str, Any]


def observation(asked: Asked, with_ids: bool) -> Observation:
    """A request as ``envs.gym.spaces.observations`` has it; nothing in it is shared with another.

    ``max_tokens`` is the room that is left with ids, and what the harness asks for without. Ids of tool calls are
    counted anew in the order in which they come up, so that the same conversation is the same observation.
    """
    sampling = asked.request.sampling
    names: dict[str, str] = {}
    counted = (f"call_{number}" for number in itertools.count(1))

    def named(call: str) -> str:
        if call and call not in names:
            names[call] = next(counted)
        return names.get(call, "")

    room = asked.room if with_ids else sampling.max_tokens or 0
    return _assembled(
        tuple(_message(message, named) for message in asked.request.messages),
        tuple(_tool(tool) for tool in asked.request.tools),
        (room, sampling.temperature, sampling.top_p, sampling.stop),
        np.array(asked.prompt_ids, np.int32) if with_ids else None,
    )


def nothing_asked(with_ids: bool) -> Observation:
    """The observation at the end of an episode: no messages."""
    return _assembled((), (), (0, None, None, ()), np.zeros(0, np.int32) if with_ids else None)


def _assembled(
    messages: tuple[dict[str, Any], ...],
    tools: tuple[dict[str, Any], ...],
    sampling: tuple[int, float | None, float | None, tuple[str, ...]],
    ids: np.ndarray | None,
) -> Observation:
    most, temperature, top_p, stop = sampling
    found = {
        "messages": messages,
        "tools": tools,
        "sampling": {
            "max_tokens": np.array(min(most, MOST_TOKENS), np.int64),
            "temperature": np.array(-1.0 if temperature is None else temperature, np.float32),
            "top_p": np.array(-1.0 if top_p is None else top_p, np.float32),
            "stop": tuple(stop),
        },
    }
    return found if ids is None else found | {"prompt_ids": ids}


def _message(message: Message, named: Any) -> dict[str, Any]:
    return {
        "role": message.role,
        "text": message.text,
        "reasoning": message.reasoning,
        "tool_calls": tuple(
            {"id": named(call.id), "name": call.name, "arguments": arguments_text(call)} for call in message.tool_calls
        ),
        "tool_call_id": named(message.tool_call_id),
        "name": message.name,
    }


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": str(function.get("description") or ""),
        "parameters": json.dumps(function.get("parameters") or {}),
    }
