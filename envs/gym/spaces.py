"""The spaces of the environment: conversations as dictionaries of texts.

    observation = {
        "messages": ({"role", "text", "reasoning", "tool_calls": ({"id", "name", "arguments"}, ...),
                      "tool_call_id", "name"}, ...),
        "tools": ({"name", "description", "parameters"}, ...),
        "sampling": {"max_tokens", "temperature", "top_p", "stop"},
        "prompt_ids": int32 [T],                                     with a tokenizer
    }
    action = {
        "text", "reasoning", "tool_calls": ({"name", "arguments"}, ...),
        "token_ids": int32 [n], "logprobs": float32 [n],             with a tokenizer
    }

``arguments`` and ``parameters`` are JSON text. In ``sampling``, 0 for ``max_tokens`` and -1 for the others say that
the harness asks for nothing. An action is words or tokens, not both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ROLES = ("system", "user", "assistant", "tool")
LEAST_LOGPROB = -1e6
MOST_TOKENS = 2**31 - 1
_LONGEST = 1 << 30
"""Characters: more than a request may have."""
_SAMPLED = 24
"""Longest text and most tokens that are drawn at random."""
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t"


class Words(spaces.Text):
    """Any text that can be written as UTF-8, also an empty one. Samples are short and printable ASCII."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(_LONGEST, min_length=0, charset=_PRINTABLE, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        drawn = self.np_random.integers(len(_PRINTABLE), size=self.np_random.integers(_SAMPLED + 1))
        return "".join(_PRINTABLE[i] for i in drawn)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length and is_unicode(x)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __repr__(self) -> str:
        return "Words()"


class Role(Words):
    """Who speaks: one of ``ROLES``."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002
        return str(self.np_random.choice(ROLES))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x in ROLES

    def __repr__(self) -> str:
        return "Role()"


class Numbers(spaces.Sequence):
    """One-dimensional arrays of any length whose elements lie in [low, high]."""

    def __init__(self, low: float, high: float, dtype: type[np.integer] | type[np.floating]) -> None:
        super().__init__(spaces.Box(low, high, (), dtype))
        self._box = (low, high, np.dtype(dtype))

    def sample(self, mask: Any = None, probability: Any = None) -> NDArray[Any]:  # noqa: ARG002
        return self.draw(int(self.np_random.integers(_SAMPLED + 1)))

    def draw(self, length: int) -> NDArray[Any]:
        """A sample of this length."""
        low, high, dtype = self._box
        if dtype.kind == "i":
            return self.np_random.integers(int(low), int(high) + 1, size=length).astype(dtype)
        return self.np_random.uniform(low, high, size=length).astype(dtype)

    def contains(self, x: Any) -> bool:
        low, high, dtype = self._box
        fits = isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype == dtype
        return fits and bool(((x >= low) & (x <= high)).all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self._box == other._box

    def __repr__(self) -> str:
        return f"Numbers({self._box[0]}, {self._box[1]}, {self._box[2]})"


class Actions(spaces.Dict):
    """Answers in words and, where there is a vocabulary, in tokens: one of the two, or an empty answer."""

    def __init__(self, vocabulary: int | None = None) -> None:
        call = spaces.Dict({"name": Words(), "arguments": Words()})
        fields: dict[str, spaces.Space[Any]] = {
            "text": Words(),
            "reasoning": Words(),
            "tool_calls": spaces.Sequence(call),
        }
        if vocabulary is not None:
            fields["token_ids"] = Numbers(0, vocabulary - 1, np.int32)
            fields["logprobs"] = Numbers(LEAST_LOGPROB, 0.0, np.float32)
        super().__init__(fields)

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        action = super().sample(mask, probability)
        if "token_ids" not in self.spaces:
            return action
        ids, logprobs = self.spaces["token_ids"], self.spaces["logprobs"]
        assert isinstance(ids, Numbers)
        assert isinstance(logprobs, Numbers)
        if self.np_random.integers(2):
            length = len(action["token_ids"])
            return action | {"text": "", "reasoning": "", "tool_calls": (), "logprobs": logprobs.draw(length)}
        return action | {"token_ids": ids.draw(0), "logprobs": logprobs.draw(0)}

    def contains(self, x: Any) -> bool:
        if not super().contains(x) or "token_ids" not in self.spaces:
            return super().contains(x)
        words = bool(x["text"] or x["reasoning"] or x["tool_calls"])
        return len(x["logprobs"]) == len(x["token_ids"]) and not (words and len(x["token_ids"]))


def observations(vocabulary: int | None = None) -> spaces.Dict:
    """``vocabulary``: number of ids; None: there are none."""
    call = spaces.Dict({"id": Words(), "name": Words(), "arguments": Words()})
    message = spaces.Dict(
        {
            "role": Role(),
            "text": Words(),
            "reasoning": Words(),
            "tool_calls": spaces.Sequence(call),
            "tool_call_id": Words(),
            "name": Words(),
        }
    )
    tool = spaces.Dict({"name": Words(), "description": Words(), "parameters": Words()})
    sampling = spaces.Dict(
        {
            "max_tokens": spaces.Box(0, MOST_TOKENS, (), np.int64),
            "temperature": spaces.Box(-1.0, 1e6, (), np.float32),
            "top_p": spaces.Box(-1.0, 1e6, (), np.float32),
            "stop": spaces.Sequence(Words()),
        }
    )
    fields: dict[str, spaces.Space[Any]] = {
        "messages": spaces.Sequence(message),
        "tools": spaces.Sequence(tool),
        "sampling": sampling,
    }
    if vocabulary is not None:
        fields["prompt_ids"] = Numbers(0, vocabulary - 1, np.int32)
    return spaces.Dict(fields)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: half a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
