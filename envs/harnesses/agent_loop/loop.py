"""The loop: call the model, carry out its tool calls, stop at an answer that the workflow takes for the last.

Invariant: the history only grows; an assistant message is replayed as it came.
"""

from __future__ import annotations

from . import prompts, schemas
from .client import ApiError, Client
from .parts import Chain, Part
from .tools import Tools


def run(client: Client, tools: Tools, instruction: str, max_turns: int, parts: Part | None = None) -> dict:
    """One task, as ``{"end", "turns", "message"}``.

    ``end`` is ``final_answer``, ``max_turns`` or ``error`` (the API refused or stayed out of reach);
    ``turns`` counts the answers of the model that the workflow did not ask for beside the work; ``message`` is the
    last answer, or what went wrong.
    """
    parts = parts or Chain([])
    offered = parts.tools(schemas.TOOLS)
    messages: list[dict] = [
        {"role": "system", "content": parts.system(prompts.SYSTEM)},
        {"role": "user", "content": parts.instruction(instruction)},
    ]

    def aside(view: list[dict]) -> dict:
        """An answer of the model that is no part of the history."""
        return client.complete(view, offered)["message"]

    turn = rounds = asides = 0
    while turn < max_turns and asides <= max_turns:
        try:
            message = client.complete(parts.view(messages, aside), offered)["message"]
        except ApiError as error:
            return {"end": "error", "turns": turn, "message": str(error)}
        calls = message.get("tool_calls") or []
        messages.append({**message, "role": "assistant"})
        if not calls:
            said = parts.reply(message, rounds)
            if said is None:
                return {"end": "final_answer", "turns": turn + 1, "message": message.get("content") or ""}
            messages.append({"role": "user", "content": said})
            asides += 1
            continue
        turn += 1
        rounds += 1
        for call in calls:
            function = call.get("function") or {}
            result = tools.call(function.get("name"), function.get("arguments"))
            messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": result})
        if said := parts.remark(rounds):
            messages.append({"role": "user", "content": said})
    return {"end": "max_turns", "turns": max_turns, "message": f"no final answer within {max_turns} turns"}
