"""What the environment asks of whoever runs the harness, and what crosses between the two.

Who serves the harness's model API, runs its sandbox and grades its work are actors, which nothing here knows: the
stage is loaded by its name, as Gymnasium loads an environment, when an environment is first reset.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from configs.environment import EnvironmentConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.protocols.canonical import Message, Request
from trees.record import Kind
from trees.tree import Tree

_HERE = "actors.environment.local:LocalStage"
_ON_RAY = "actors.environment.remote:RemoteStage"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A model call of the harness that waits for its answer."""

    call: str
    """Names it when it is answered."""
    ordinal: int
    """Order of arrival in the episode, from 0."""
    request: Request
    """With the whole conversation."""
    prompt_ids: np.ndarray
    """int32 [T]."""
    room: int
    """Tokens that the answer may have."""
    kind: Kind
    why: str
    waiting: int
    """Calls that came later and wait as well."""
    answered: bool = True
    """Whether the answer before this one was still waited for."""
    progress: float = 0.0
    """In [0, 1], by the task's step grader; 0 for tasks that have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Over:
    """The end of an episode."""

    outcome: EpisodeOutcome
    tree: Tree


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An answer in words (``message``), or in tokens: ``ids`` int32 [n], ``logprobs`` float32 [n]."""

    message: Message | None = None
    ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None


Turn = Asked | Over


class Stage(Protocol):
    """One episode at a time."""

    def begin(self, spec: EpisodeSpec) -> Turn:
        """End what is under way, start the harness, and wait for its first call, or for its end without one."""
        ...

    def answer(self, call: str, answer: Answer) -> Turn:
        """Answer a call and wait for the next, or for the end. A call that nobody waits for any more is let go."""
        ...

    def close(self) -> None:
        """End everything and remove every trace. Safe to call twice."""
        ...


def open_stage(config: EnvironmentConfig, remote: bool) -> Stage:
    """``remote``: in an actor on the Ray cluster."""
    make = pkgutil.resolve_name(_ON_RAY if remote else _HERE)
    return cast(Callable[[EnvironmentConfig], Stage], make)(config)
