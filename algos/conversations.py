"""Rows of OpenAI-style messages as the tree that the proxy would hold of the same conversation.

Invariant: a row goes through the proxy's own code for prompts, so the prompt of every assistant turn is exactly the ids
held for what came before plus the newly rendered tail; an assistant turn is the ids that the policy would have to
sample to say it, reasoning and tool calls included, with the stop id that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from actors.prompts import Prompts
from actors.rendering import Rendering
from configs.proxy import ProxyConfig
from envs.protocols import openai_chat, wire
from envs.protocols.canonical import Message, Request
from envs.protocols.errors import WireError, invalid
from trees.build import TreeBuilder
from trees.record import CallRecord, VersionSpan
from trees.tree import Tree


def row_of(line: bytes) -> dict[str, Any]:
    """One JSON line. Raises ``WireError``."""
    try:
        row = wire.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"got no valid JSON, expected an object with messages: {error}") from error
    if not isinstance(row, dict):
        raise invalid("row", row, "an object with messages")
    return row


def reward_of(row: Mapping[str, Any]) -> float | None:
    """The row's ``reward``, which may be missing. Raises ``WireError``."""
    reward = row.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise invalid("reward", reward, "a number or null")
    return reward


def tree_of(row: Mapping[str, Any], rendering: Rendering) -> Tree:
    """The tree of a row with ``messages`` and ``tools`` in the form of Chat Completions.

    Assistant turns are marked trained, but for those with ``"weight": 0``. What follows the last one is left out.
    Log-probabilities are 0 and versions are 0: nobody sampled it.

    Raises ``WireError`` that names the field, what came and what was expected.
    """
    request = openai_chat.parse({"messages": row.get("messages"), "tools": row.get("tools")}, {})
    weights = [_weight(message, f"messages[{i}]") for i, message in enumerate(row["messages"])]
    _check(request)
    records: dict[str, CallRecord] = {}
    prompts = Prompts(rendering, ProxyConfig(), records)
    builder = TreeBuilder("row")
    untrained = set()
    for call, place, message in _answers(request):
        plan = prompts.plan(replace(request, messages=request.messages[:place]))
        said = np.array(rendering.spoken(message), np.int32)
        record = CallRecord(
            session="row",
            call=call,
            parent=plan.parent,
            ordinal=len(records),
            prompt_ids=np.array(plan.new, np.int32),
            sampled_ids=said,
            logprobs=np.zeros(len(said), np.float32),
            versions=(VersionSpan(0, 0, len(said)),),
            temperature=1.0,
            finish="stop",
        )
        prompts.begin(call, plan)
        records[call] = record
        prompts.end(record, plan.held.then(plan.new))
        prompts.answer(call, message)
        builder.add(record)
        if not weights[place]:
            untrained.add(call)
    tree = builder.tree()
    nodes = tuple(replace(node, trained=False) if node.call in untrained else node for node in tree.nodes)
    return Tree(nodes, tree.meta)


def _answers(request: Request) -> Iterator[tuple[str, int, Message]]:
    """(a name for the call, place, message) of each assistant turn."""
    for place, message in enumerate(request.messages):
        if message.role == "assistant":
            yield f"turn{place}", place, message


def _weight(message: Mapping[str, Any], field: str) -> bool:
    weight = message.get("weight")
    if weight is None or (weight in (0, 1) and message.get("role") == "assistant"):
        return weight != 0
    raise invalid(f"{field}.weight", weight, "0 or 1, on an assistant message")


def _check(request: Request) -> None:
    """What a harness may send and nobody should learn from. Raises ``WireError``."""
    messages = request.messages
    if not any(message.role == "assistant" for message in messages):
        raise invalid("messages", [message.role for message in messages], "an assistant turn, which is what is trained")
    if not any(message.role != "system" for message in messages[: next(_answers(request))[1]]):
        raise invalid("messages[0].role", messages[0].role, "a user message before the first assistant turn")
    open_calls: set[str] = set()
    for i, message in enumerate(messages):
        if message.role == "assistant":
            if not (message.text or message.reasoning or message.tool_calls):
                raise invalid(f"messages[{i}].content", message.text, "content, reasoning_content or tool_calls")
            for j, call in enumerate(message.tool_calls):
                if isinstance(call.arguments, str):
                    field = f"messages[{i}].tool_calls[{j}].function.arguments"
                    raise invalid(field, call.arguments, "a JSON object as a string")
            open_calls = {call.id for call in message.tool_calls}
        elif message.role == "tool" and message.tool_call_id not in open_calls:
            expected = f"the id of a call in the assistant turn before it: {sorted(open_calls)}"
            raise invalid(f"messages[{i}].tool_call_id", message.tool_call_id, expected)
