"""Conversations as JSON lines."""

import json

from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.tasks.desk import expert


def said(text="", *commands, at=0, **more):
    """An assistant turn; its calls are named by ``at``."""
    calls = [
        {
            "id": f"call{at}_{i}",
            "type": "function",
            "function": {"name": "execute_bash", "arguments": json.dumps({"command": command})},
        }
        for i, command in enumerate(commands)
    ]
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {}), **more}


def heard(text, at=0, nth=0):
    return {"role": "tool", "tool_call_id": f"call{at}_{nth}", "content": text}


USER = {"role": "user", "content": "count the lines"}


def desk_row(task, rng, bad_habit=False):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}]
    for turn in expert(task, rng, bad_habit):
        messages += [said("", turn.command), heard(turn.output)] if turn.command else [said(turn.text)]
    return {"messages": messages, "tools": TOOLS, "reward": float(not bad_habit)}


def write(path, rows):
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


GOOD = {"messages": [USER, said("x")]}
