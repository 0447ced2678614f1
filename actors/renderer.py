"""What a session asks of whoever turns conversations into tokens and back.

Apart from ``actors/rendering.py``, so that a session without a tokenizer starts without loading the libraries for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from envs.protocols.canonical import Message

Tools = Sequence[dict[str, Any]]
Ids = Sequence[int] | np.ndarray


class UnrenderableError(ValueError):
    """The policy's chat template refuses the conversation."""


class Renderer(Protocol):
    """``actors.rendering.Rendering`` with a tokenizer, ``actors.plain_rendering.PlainRendering`` without."""

    stop_ids: tuple[int, ...]

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The prompt of a conversation from nothing. Raises ``UnrenderableError``."""
        ...

    def extend(
        self, prompt_ids: Ids, sampled_ids: Sequence[int], new: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """The ids that follow ``prompt_ids + sampled_ids`` when ``new`` messages come; None: not without the rest."""
        ...

    def parse(self, sampled_ids: Sequence[int], prompt_ids: Ids, tools: Tools = ()) -> tuple[Message, bool]:
        """The decoded copy of a completion, and whether it could be read without a doubt."""
        ...

    def spoken(self, message: Message, cut: bool = False) -> list[int]:
        """The ids of an answer that came as words, with a stop id at its end, unless it was cut."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the stop id that ends it."""
        ...
