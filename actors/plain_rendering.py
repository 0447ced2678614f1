"""Conversations as ids without a tokenizer: a session then has its tree, whose ids are pieces of the text itself.

Invariant: an id is the one to three bytes of UTF-8 that it stands for, so text and ids give each other exactly, and a
prompt has about as many ids as it would have tokens. No model has these ids, so nothing can be trained on them unseen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from actors.renderer import Ids, Tools
from envs.protocols.canonical import Message
from envs.protocols.fields import arguments_text

_END = 1
"""Ends a turn. Bytes begin at 256: a byte of 1 stands before those of each id."""
_PIECE = 3


class PlainRendering:
    """A ``Renderer``. Stateless."""

    stop_ids: tuple[int, ...] = (_END,)

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        head = [*_ids(f"tools\n{json.dumps(list(tools))}"), _END] if tools else []
        return [*head, *_turns(messages), *_OPENING]

    def extend(
        self,
        prompt_ids: Ids,  # noqa: ARG002 - turns do not depend on what stands before them
        sampled_ids: Sequence[int],
        new: Sequence[Message],
        tools: Tools = (),  # noqa: ARG002
    ) -> list[int]:
        closed = bool(sampled_ids) and sampled_ids[-1] == _END
        return [*([] if closed else [_END]), *_turns(new), *_OPENING]

    def parse(
        self,
        sampled_ids: Sequence[int],
        prompt_ids: Ids,  # noqa: ARG002
        tools: Tools = (),  # noqa: ARG002
    ) -> tuple[Message, bool]:
        return Message("assistant", self.decode(sampled_ids)), True

    def spoken(self, message: Message, cut: bool = False) -> list[int]:
        return [*_ids(_body(message)), *([] if cut else [_END])]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(token.to_bytes(4, "big").lstrip(b"\0")[1:] for token in ids if token != _END).decode()


def _turns(messages: Sequence[Message]) -> list[int]:
    return [token for message in messages for token in (*_ids(f"{message.role}\n{_body(message)}"), _END)]


def _body(message: Message) -> str:
    thought = f"<think>{message.reasoning}</think>\n" if message.reasoning else ""
    calls = [f"{call.name}({arguments_text(call)})" for call in message.tool_calls]
    return thought + "\n".join([message.text, *calls])


def _ids(text: str) -> list[int]:
    data = text.encode()
    return [int.from_bytes(b"\1" + data[i : i + _PIECE], "big") for i in range(0, len(data), _PIECE)]


_OPENING = _ids("assistant\n")
