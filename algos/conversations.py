"""Rows of OpenAI-style messages as the tree that the proxy would hold of the same conversation.

Invariant: a row goes through the proxy's own code for prompts, so the prompt of every assistant turn is exactly the ids
held for what came before plus the newly rendered tail; an assistant turn is the ids that the policy would have to
sample to say it, reasoning and tool calls included, with the stop id that ends it, and reads back as that turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from actors import conversation
from actors.prompts import Plan, Prompts
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
    request = _checked(request)
    records: dict[str, CallRecord] = {}
    prompts = Prompts(rendering, ProxyConfig(), records)
    builder = TreeBuilder("row")
    untrained = set()
    for place, message in enumerate(request.messages):
        if message.role != "assistant":
            continue
        call = _name(place)
        plan = prompts.plan(replace(request, messages=request.messages[:place]))
        said = np.array(rendering.spoken(message), np.int32)
        if weights[place]:
            _reads_back(message, said, plan, rendering, f"messages[{place}]")
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


def _reads_back(message: Message, said: np.ndarray, plan: Plan, rendering: Rendering, field: str) -> None:
    """Raises ``WireError`` where the tokens of a turn mean something else to the proxy than the turn does.

    A chat template may leave out calls or reasoning, and a text may spell out the marks of a call.
    """
    back, _ = rendering.parse(said.tolist(), plan.held.then(plan.new).ids, plan.request.tools)
    if conversation.turn_of(back).key != conversation.turn_of(message).key:
        expected = "tokens that are read as the turn itself: mend it, or choose a model.renderer that can say it"
        raise invalid(field, rendering.decode(said.tolist()), expected)


def _weight(message: Mapping[str, Any], field: str) -> bool:
    weight = message.get("weight")
    if weight is None or (weight in (0, 1) and message.get("role") == "assistant"):
        return weight != 0
    raise invalid(f"{field}.weight", weight, "0 or 1, on an assistant message")


def _checked(request: Request) -> Request:
    """The request with ids of calls such as the proxy mints, each once in the row and naming the turn that made it.

    Raises ``WireError`` for what a harness may send and nobody should learn from.
    """
    messages = request.messages
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
    if first is None:
        raise invalid("messages", [message.role for message in messages], "an assistant turn, which is what is trained")
    if all(message.role == "system" for message in messages[:first]):
        raise invalid("messages[0].role", messages[0].role, "a user message before the first assistant turn")
    minted: dict[str, str] = {}
    named = []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            minted = _minted(message, i)
            calls = tuple(replace(call, id=minted[call.id]) for call in message.tool_calls)
            message = replace(message, tool_calls=calls, node=_name(i))
        elif message.role == "tool":
            if message.tool_call_id not in minted:
                expected = f"the id of a call in the assistant turn before it: {list(minted)}"
                raise invalid(f"messages[{i}].tool_call_id", message.tool_call_id, expected)
            message = replace(message, tool_call_id=minted[message.tool_call_id])
        named.append(message)
    return replace(request, messages=tuple(named))


def _minted(message: Message, place: int) -> dict[str, str]:
    """For each id of a call of an assistant turn one that names the turn. Raises ``WireError``."""
    field = f"messages[{place}]"
    if not (message.text or message.reasoning or message.tool_calls):
        raise invalid(f"{field}.content", message.text, "content, reasoning_content or tool_calls")
    minted: dict[str, str] = {}
    for j, call in enumerate(message.tool_calls):
        if isinstance(call.arguments, str):
            where = f"{field}.tool_calls[{j}].function.arguments"
            raise invalid(where, call.arguments, "a JSON object as a string")
        if not call.id or call.id in minted:
            raise invalid(f"{field}.tool_calls[{j}].id", call.id, "an id that no other call of the turn has")
        minted[call.id] = f"{_name(place)}t{j}"
    return minted


def _name(place: int) -> str:
    """Of the call that made the assistant turn at a place of the row."""
    return f"turn{place}"
