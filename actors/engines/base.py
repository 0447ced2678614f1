"""What an engine is: ids in, ids and their exact log-probabilities out, under a versioned policy."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from envs.protocols.canonical import Message, Request
from trees.record import Finish, VersionSpan


class EngineDownError(ConnectionError):
    """What samples is gone for now: the rest of the request may be asked again when the engine is ``ready``.

    ``partial``: what a ``generate`` had got, which stays good.
    """

    def __init__(self, message: str, partial: Sequence[Piece] = ()) -> None:
        super().__init__(message)
        self.partial = tuple(partial)


@dataclass(frozen=True, slots=True, eq=False)
class Generate:
    """One request. ``temperature`` 0 is greedy; log-probabilities are then those at temperature 1."""

    ids: Sequence[int] | np.ndarray
    """The prompt; from the proxy an int32 array [T], which costs little to hand over."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    session: str = ""
    """Cache affinity: the calls of one session share prefixes."""
    request: str = ""
    """Handle for ``abort``."""
    seed: int | None = None
    """With a seed the draws of this request do not depend on what else is in the batch."""
    conversation: Request | None = None
    """What the prompt says, for a sampler that takes words; None for all others."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of a stream; spans count from its own first token. The last one says how it ended."""

    ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish: Finish | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generated:
    """``ids`` includes the stop id that ended it; ``logprobs``: one per id, at the sampling temperature."""

    ids: list[int]
    logprobs: list[float]
    finish: Finish
    versions: tuple[VersionSpan, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken(Generated):
    """An answer that came as words. ``readable``: whether every tool call in it can be read without a doubt."""

    message: Message
    readable: bool


@dataclass(frozen=True, slots=True)
class Health:
    """``version``: of the policy in use. ``pid``: of the process that samples, 0 where it is not ours."""

    version: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start: tokens, requests and seconds spent in the model."""

    version: int
    running: int
    waiting: int
    prefill_tokens: int
    cached_tokens: int
    decode_tokens: int
    decode_steps: int
    busy_s: float
    extra: dict[str, float] = field(default_factory=dict)


class Sampler(Protocol):
    """All that the proxy asks of an engine."""

    async def generate(self, request: Generate) -> Generated: ...

    async def abort(self, request: str) -> None:
        """End a request early; its ``generate`` returns what was sampled with finish ``abort``."""
        ...


class Engine(Sampler, Protocol):
    """Served by a Ray Serve deployment; usable in-process as well."""

    def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        """The tokens of ``generate`` as they come. Closing it early aborts.

        Raises ``EngineDownError`` where what samples has gone; the tokens that came before it stay good.
        """
        ...

    async def load_weights(self, version: int, path: Path) -> None:
        """Take the weights in ``path`` (a folder with ``model.safetensors`` or shards) between two tokens.

        What runs goes on under them, and no token after them rests on keys and values of before. On an error
        the old weights go on serving.
        """
        ...

    async def pause(self) -> None:
        """Sample nothing more until ``resume``; what runs keeps what it has."""
        ...

    async def resume(self) -> None: ...

    async def ready(self) -> None:
        """Return when requests can be served (again)."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it serves, or will when a restart that is under way has ended."""
        ...

    async def health(self) -> Health:
        """Raises where the engine cannot serve."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End what the engine started. Idempotent."""
        ...


def check(request: Generate, max_len: int, vocabulary: int) -> None:
    """Raise ``ValueError`` for a request that an engine of ``max_len`` tokens and so many ids cannot serve."""
    size = len(request.ids)
    if not 0 < size < max_len:
        raise ValueError(
            f"got a prompt of {size} tokens, expected 1 to {max_len - 1} "
            f"(max_len {max_len}, less one token to sample); shorten the prompt or raise max_len"
        )
    least, most = np.min(request.ids), np.max(request.ids)
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"got token ids {least} to {most}, expected 0 to {vocabulary - 1}; use the tokenizer of this model"
        )
    if request.max_tokens < 1:
        raise ValueError(f"got max_tokens {request.max_tokens}, expected at least 1; ask for a token")
    if not 0 <= request.temperature < math.inf or not 0 < request.top_p <= 1:
        raise ValueError(
            f"got temperature {request.temperature} and top_p {request.top_p}, "
            f"expected a finite temperature >= 0 and 0 < top_p <= 1; use temperature 0 for greedy"
        )


def joined(pieces: Iterable[Piece]) -> Generated:
    """All pieces of one stream as one answer; neighbouring spans of one version become one. A stream without an
    end was aborted.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    finish: Finish = "abort"
    cached = 0
    for nth, piece in enumerate(pieces):
        for span in piece.versions:
            start, end = len(ids) + span.start, len(ids) + span.end
            if spans and spans[-1].version == span.version:
                start = spans.pop().start
            spans.append(VersionSpan(span.version, start, end))
        ids += piece.ids
        logprobs += piece.logprobs
        finish = piece.finish or finish
        cached = piece.cached_tokens if nth == 0 else cached
    return Generated(ids, logprobs, finish, tuple(spans), cached)
