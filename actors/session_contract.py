"""What a session of the proxy is opened with and what it leaves behind: the terms between proxy and sandbox actor.

Apart from ``actors/session.py``, so that a sandbox actor starts without loading tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.proxy import SessionLimits
from trees.record import Finish


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a sandbox actor asks for. ``temperature`` and ``top_p`` override the harness's."""

    id: str
    """The episode; it names the session in every record."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    """With a seed every call of the session has its own, derived from it and the call's ordinal."""
    limits: SessionLimits | None = None
    """None takes the proxy's setting."""
    transcript: bool = False
    """Whether the summary is to hold the transcript."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a session. Prompt tokens count once however many calls share them."""

    session: str
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    last_finish: Finish | None
    """How the newest call ended; None without calls."""
    last_clean: bool
    final_answer: bool
    """Whether the newest call is a clean, whole answer with text and without tool calls."""
    limit: str
    """What cut it short: ``calls``, ``tokens``, ``wall_s``, ``concurrent`` or ``context``; or empty."""
    failed: str
    """Why the session cannot be judged (``engine: ...``), or empty."""
    drift: int
    forks: dict[str, int]
    """Calls that did not extend the newest call of their line, by reason."""
    seconds: float
    undelivered: int = 0
    """Records that the sink has not taken; ``resend`` offers them again."""
    final_message: str = ""
    """The text of the newest answer on the main line, where it makes no tool call; cut after the first million
    characters.
    """
    transcript: str | None = ""
    """``Transcript.text``, where it was asked for; None when it was lost with the replica that had it."""
    touched: tuple[str, ...] = ()
    """What in the tool calls looks like a path of a grader, see ``envs.sandbox.flags``."""
