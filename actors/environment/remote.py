"""The stage of an environment in an actor on the Ray cluster: where the sandboxes are, which need not be here.

The cluster is that of ``RAY_ADDRESS``, or one on this machine, which ends with the last environment that uses it.
Task folders must be found under the same path there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.environment.local import LocalStage
from actors.start import connect
from configs.environment import EnvironmentConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.gym.stage import Answer, Over, Turn
from trees.build import TreeBuilder

_lock = threading.Lock()
_users = 0
_ours = False


def _join() -> None:
    global _users, _ours
    with _lock:
        if not ray.is_initialized():
            connect()
            _ours = True
        _users += 1


def _leave() -> None:
    global _users, _ours
    with _lock:
        _users -= 1
        if _ours and not _users:
            ray.shutdown()
            _ours = False


class RemoteStage:
    """A ``Stage``. An actor that dies ends its episode as ``failed``; the next one is in a new actor."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises StartError without a cluster, and what ``LocalStage`` raises."""
        self._config = config
        self._spec: EpisodeSpec | None = None
        _join()
        self._closed = False
        try:
            self._actor = self._made()
        except BaseException:
            self._closed = True
            _leave()
            raise

    def begin(self, spec: EpisodeSpec) -> Turn:
        self._spec = spec
        with self._watched() as lost:
            return ray.get(self._actor.begin.remote(spec))
        return lost[0]

    def answer(self, call: str, answer: Answer) -> Turn:
        with self._watched() as lost:
            return ray.get(self._actor.answer.remote(call, answer))
        return lost[0]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(RayActorError):
                ray.get(self._actor.close.remote())
            ray.kill(self._actor)
        finally:
            _leave()

    def _made(self) -> Any:
        actor = ray.remote(LocalStage).options(num_cpus=0).remote(self._config)
        ray.get(actor.ready.remote())
        return actor

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[Over]]:
        lost: list[Over] = []
        try:
            yield lost
        except RayActorError as error:
            assert self._spec is not None
            lost.append(_lost(self._spec, str(error)))
            self._actor = self._made()


def _lost(spec: EpisodeSpec, error: str) -> Over:
    reason = f"the sandbox actor died: {' '.join(error.split())[:300]}"
    outcome = EpisodeOutcome(spec.id, "failed", reason, None, None, False, 0, 0, 0, None)
    return Over(outcome, TreeBuilder(spec.id).tree({"episode": spec.id, "status": "failed", "reward": None}))
