"""The call record: what the proxy hands to the tree builder about one model call.

Invariant: a record carries only the tokens that are *new*. The full prompt of a call is
``full ids of its parent call (prompt + sampled) + prompt_ids``; with no parent, ``prompt_ids`` is
the whole prompt. Sampled ids are the engine's own, never re-derived from text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Finish = Literal["stop", "length", "abort"]
Kind = Literal["main", "subagent", "compaction", "after-compaction", "side"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens ``[start, end)`` of a call that policy ``version`` sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """One model call of a session.

    Arrays are one-dimensional: ids int32, log-probabilities float32 (natural log, at the sampling
    temperature), one per sampled id.
    """

    session: str
    call: str
    """Minted id, alphanumeric, at most 40 characters; tool-call ids start with it."""
    parent: str | None
    """The call whose prompt and sampled ids this prompt extends; None attaches at the root."""
    ordinal: int
    """Position in the session's order of arrival, from 0."""
    prompt_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    temperature: float
    finish: Finish
    kind: Kind = "main"
    why: str = ""
    """Why the call has this kind."""
    fork: str = ""
    """Why the call does not extend the newest call of its line; empty when it does."""
    drift: int = 0
    """Characters by which the replayed history differed from the held one."""
    clean: bool = True
    """False when the completion was cut or a tool call in it could not be parsed."""
    seconds: float = 0.0
    cached_tokens: int = 0
    extra: dict[str, str | int | float | bool] = field(default_factory=dict)
