"""The workflow in its base variant (W0): call the model, carry out its tool calls, stop at an answer without.

Invariant: the history only grows; an assistant message is replayed as it came.
"""

from __future__ import annotations

from . import context, prompts, schemas
from .client import ApiError, Client
from .tools import Tools


def run(client: Client, tools: Tools, instruction: str, max_turns: int) -> dict:
    """One task, as ``{"end", "turns", "message"}``.

    ``end`` is ``final_answer``, ``max_turns`` or ``error`` (the API refused or stayed out of reach);
    ``turns`` counts the answers of the model; ``message`` is the last answer, or what went wrong.
    """
    messages: list[dict] = [
        {"role": "system", "content": prompts.SYSTEM},
        {"role": "user", "content": instruction},
    ]
    for turn in range(max_turns):
        try:
            choice = client.complete(context.view(messages), schemas.TOOLS)
        except ApiError as error:
            return {"end": "error", "turns": turn, "message": str(error)}
        message = choice["message"]
        calls = message.get("tool_calls") or []
        messages.append({**message, "role": "assistant"})
        if not calls:
            return {"end": "final_answer", "turns": turn + 1, "message": message.get("content") or ""}
        for call in calls:
            function = call.get("function") or {}
            result = tools.call(function.get("name"), function.get("arguments"))
            messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": result})
    return {"end": "max_turns", "turns": max_turns, "message": f"no final answer within {max_turns} turns"}
