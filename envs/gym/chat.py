"""Observations and actions as Chat Completions has them, for clients that speak it."""

from __future__ import annotations

import json
from typing import Any

from envs.gym.observations import Observation
from envs.protocols import openai_chat
from envs.protocols.fields import arguments_text


def chat_request(observation: Observation) -> dict[str, Any]:
    """``messages`` and ``tools`` of a request, as keyword arguments of an OpenAI client."""
    request: dict[str, Any] = {"messages": [_message(message) for message in observation["messages"]]}
    if observation["tools"]:
        request["tools"] = [_tool(tool) for tool in observation["tools"]]
    return request


def chat_action(message: Any) -> dict[str, Any]:
    """The action that an assistant message is: an object of the OpenAI client, or a dictionary.

    Raises ``WireError``, which names the field, where it is none.
    """
    plain = message.model_dump() if hasattr(message, "model_dump") else message
    read = openai_chat.parse({"messages": [{**plain, "role": "assistant"}]}, {}).messages[0]
    calls = tuple({"name": call.name, "arguments": arguments_text(call)} for call in read.tool_calls)
    return {"text": read.text, "reasoning": read.reasoning, "tool_calls": calls}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message["role"], "content": message["text"]}
    if message["reasoning"]:
        plain["reasoning_content"] = message["reasoning"]
    if message["tool_calls"]:
        plain["content"] = message["text"] or None
        plain["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in message["tool_calls"]
        ]
    if message["role"] == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
    elif message["name"]:
        plain["name"] = message["name"]
    return plain


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": json.loads(tool["parameters"])}
    if tool["description"]:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
