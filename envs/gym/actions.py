"""From an action to an answer. What cannot be one is an error that names the field, and changes nothing."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.gym.spaces import LEAST_LOGPROB, is_unicode
from envs.gym.stage import Answer
from envs.protocols.canonical import Message, ToolCall
from envs.protocols.fields import arguments, shallow

Action = Mapping[str, Any]
_WORDS = ("text", "reasoning", "tool_calls")
_TOKENS = ("token_ids", "logprobs")


class ActionError(ValueError):
    """An action that is no answer. The request still waits: ``step`` may be called again with another."""


def words(text: str = "", tool_calls: Sequence[tuple[str, Any]] = (), reasoning: str = "") -> dict[str, Any]:
    """An action in words. ``tool_calls`` are (name, arguments), the arguments as an object or as JSON text."""
    calls = tuple(
        {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        for name, given in tool_calls
    )
    return {"text": text, "reasoning": reasoning, "tool_calls": calls}


def answer_of(action: Any, vocabulary: int | None) -> Answer:
    """Read an action: a dictionary with some of the fields of the action space, or a text alone.

    Arguments that are no JSON object go to the harness as they are, as a policy's malformed call would.
    Raises ActionError.
    """
    if isinstance(action, str):
        action = {"text": action}
    if not isinstance(action, Mapping):
        raise ActionError(f"action: got {_shown(action)}, expected a dictionary with some of {', '.join(_WORDS)}")
    known = (*_WORDS, *_TOKENS)
    for name in action:
        if name not in known:
            near = difflib.get_close_matches(name if isinstance(name, str) else "", known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ActionError(f"action: got the field {_shown(name)}, expected some of {', '.join(known)}{hint}")
    ids = action.get("token_ids", ())
    if _length("token_ids", ids):
        return _tokens(action, vocabulary)
    if _length("logprobs", action.get("logprobs", ())):
        raise ActionError("action.logprobs: got some without token_ids, expected one for each id")
    return Answer(message=_message(action))


def _message(action: Action) -> Message:
    calls = action.get("tool_calls", ())
    _length("tool_calls", calls)
    return Message(
        "assistant",
        _text("text", action.get("text", "")),
        reasoning=_text("reasoning", action.get("reasoning", "")),
        tool_calls=tuple(_call(f"tool_calls[{number}]", call) for number, call in enumerate(calls)),
    )


def _call(field: str, call: Any) -> ToolCall:
    if not isinstance(call, Mapping) or not {"name"} <= call.keys() <= {"id", "name", "arguments"}:
        raise ActionError(f"action.{field}: got {_shown(call)}, expected a dictionary with name and arguments")
    name, given = _text(f"{field}.name", call["name"]), call.get("arguments", "{}")
    if isinstance(given, Mapping):
        if (written := _written(given)) is None:
            raise ActionError(f"action.{field}.arguments: got {_shown(given)}, expected what JSON can hold")
        given = written
    given = _text(f"{field}.arguments", given)
    parsed = arguments(given, field)
    readable = isinstance(parsed, dict) and shallow(parsed) and _written(parsed) is not None
    return ToolCall("", name, parsed if readable else given)


def _written(value: Any) -> str | None:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text


def _tokens(action: Action, vocabulary: int | None) -> Answer:
    if vocabulary is None:
        raise ActionError("action.token_ids: got some without a tokenizer; make the environment with tokenizer=FOLDER")
    if any(_length(name, action[name]) for name in _WORDS if name in action):
        raise ActionError("action: got token_ids and words, expected one of the two: the ids say it all")
    ids = _array("token_ids", action["token_ids"], np.int64, 0, vocabulary - 1)
    given = action.get("logprobs", ())
    if not _length("logprobs", given):
        return Answer(ids=ids.astype(np.int32), logprobs=np.full(len(ids), np.nan, np.float32))
    logprobs = _array("logprobs", given, np.float32, LEAST_LOGPROB, 0.0)
    if len(logprobs) != len(ids):
        raise ActionError(f"action.logprobs: got {len(logprobs)}, expected {len(ids)}, one for each id")
    return Answer(ids=ids.astype(np.int32), logprobs=logprobs)


def _array(field: str, values: Any, dtype: Any, low: float, high: float) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # lists of lists that are no array
        found = np.array(None)
    if found.ndim != 1 or found.dtype.kind not in ("iu" if np.dtype(dtype).kind == "i" else "iuf"):
        raise ActionError(f"action.{field}: got {_shown(values)}, expected a one-dimensional array of numbers")
    if not ((found >= low) & (found <= high)).all():
        worst = found[~((found >= low) & (found <= high))][0]
        raise ActionError(f"action.{field}: got {worst}, expected numbers from {low:g} to {high:g}")
    return found.astype(dtype)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ActionError(f"action.{field}: got {_shown(value)}, expected a text")
    if not is_unicode(value):
        raise ActionError(f"action.{field}: got half a surrogate pair in {_shown(value)}, expected Unicode")
    return str(value)


def _length(field: str, value: Any) -> int:
    kinds = (str,) if field in ("text", "reasoning") else (list, tuple, np.ndarray)
    if not isinstance(value, kinds) or (isinstance(value, np.ndarray) and not value.ndim):
        expected = "a text" if kinds == (str,) else "a sequence"
        raise ActionError(f"action.{field}: got {_shown(value)}, expected {expected}")
    return len(value)


def _shown(value: Any) -> str:
    """The value for an error message, which must not fail itself at what nests too deeply or cannot be written."""
    try:
        text = ascii(value)
    except Exception:
        text = "a value that cannot be shown"
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"
