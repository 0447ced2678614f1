"""A session as text, for people: what each call brought that no earlier one had, and its answer."""

from __future__ import annotations

import json

from envs.gym.observations import Observation
from envs.gym.stage import Answer, Over
from envs.protocols.canonical import Message
from envs.protocols.fields import arguments_text


class SessionText:
    """Grows with the episode."""

    def __init__(self, title: str) -> None:
        self._lines = [title]
        self._shown: dict[tuple[int, str], int] = {}
        """The conversations so far as a trie: which place follows another by a message; the places are counted."""

    def asked(self, ordinal: int, kind: str, observation: Observation) -> None:
        messages = observation["messages"]
        place, known = 0, 0
        for message in messages:
            way = (place, json.dumps(message))
            known += way in self._shown
            place = self._shown.setdefault(way, len(self._shown) + 1)
        self._lines.append(f"\n--- call {ordinal} ({kind}), {len(messages)} messages, {known} of them shown above")
        for message in messages[known:]:
            self._say(message["role"], message["text"], message["reasoning"])
            self._lines += [f"  -> {call['name']}({call['arguments']})" for call in message["tool_calls"]]

    def said(self, answer: Answer) -> None:
        message = answer.message
        if message is None:
            count = 0 if answer.ids is None else len(answer.ids)
            self._say("answer", f"{count} tokens, shown as text where the harness sends them again", "")
            return
        self._say("answer", message.text, message.reasoning)
        self._lines += _calls(message)

    def over(self, over: Over) -> None:
        outcome = over.outcome
        reward = "none" if outcome.reward is None else f"{outcome.reward:g}"
        self._lines.append(f"\n--- {outcome.status}: {outcome.reason or 'no reason given'}; reward {reward}")

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def _say(self, who: str, text: str, reasoning: str) -> None:
        if reasoning:
            self._lines.append(f"[{who}, thinking] {reasoning}")
        if text or not reasoning:
            self._lines.append(f"[{who}] {text}")


def _calls(message: Message) -> list[str]:
    return [f"  -> {call.name}({arguments_text(call)})" for call in message.tool_calls]
