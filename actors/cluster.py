"""The parts of one run on a Ray cluster, and what happens when one of them dies.

Invariants: a call that fails because an actor died is answered here, by waiting for its successor or by ``failed``;
a learner that died is brought back to its last checkpoint and trained again on the trees that lie on disk, so
versions mean the same weights as before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve.exceptions import RayServeException

from actors.handles import Builders
from actors.learner_group import GroupLostError, LearnerGroup
from actors.sandbox import session_id
from envs.episode import EpisodeOutcome, EpisodeSpec

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_RESTART_S = 180
_PAUSE_S = 1.0


class PartLostError(RuntimeError):
    """A part of the run keeps dying; the message names it and says what to do."""


class Cluster:
    """Handles to engine, proxy, sandbox actors, tree builders and learner of one run.

    ``engine``: None where an endpoint samples, which takes no weights and has no counters of its own. ``learner``: None
    where nothing is trained.
    """

    def __init__(
        self,
        run_dir: Path,
        engine: Any,
        proxy: Any,
        builders: Builders,
        learner: LearnerGroup | None,
        sandboxes: Sequence[Any],
    ) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._proxy = proxy
        self._builders = builders
        self._optional_learner = learner
        self._sandboxes = list(sandboxes)
        self._busy = [0] * len(sandboxes)
        self._plans: dict[int, dict[str, str]] = {}
        self._deaths: Counter[str] = Counter()

    @property
    def deaths(self) -> Counter[str]:
        """How often a call met a dead part, by part."""
        return self._deaths

    @property
    def _learner(self) -> LearnerGroup:
        assert self._optional_learner is not None, "got a call to the learner of a run that trains nothing"
        return self._optional_learner

    async def run_episode(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """On the sandbox actor with the fewest episodes; one that dies gives status ``failed``."""
        place = self._busy.index(min(self._busy))
        self._busy[place] += 1
        actor = self._sandboxes[place]
        try:
            return await actor.run_episode.remote(spec)
        except RayActorError as error:
            await self._return_of("sandbox", lambda: actor.ping.remote(), error)
            return failed(spec, "the sandbox actor died")
        finally:
            self._busy[place] -= 1

    async def build_tree(self, spec: EpisodeSpec, outcome: EpisodeOutcome) -> dict[str, Any] | None:
        """Finish the tree; a builder that lost its records is told them again by the proxy."""
        session = session_id(spec)
        builder = self._builders.of(session)
        meta = {
            "episode": spec.id,
            "task": spec.task.id,
            "instruction": spec.task.instruction,
            "harness": spec.harness,
            "group": spec.group,
            "seed": spec.seed,
            "step": spec.step,
            "split": spec.split,
            "status": outcome.status,
            "reward": outcome.reward,
        }
        for _ in range(_ATTEMPTS):
            try:
                report = await builder.finish.remote(session, outcome.calls, meta)
                if report is not None:
                    await self._forget(self._proxy.discard(session))
                    return report
            except RayActorError as error:
                await self._return_of("tree builder", lambda: builder.ping.remote(), error)
            try:
                await self._proxy.resend(session)
            except (RayActorError, RayServeException, KeyError):
                # A proxy that died has no records to tell again.
                return None
        return None

    async def discard(self, spec: EpisodeSpec) -> None:
        """Forget an attempt everywhere."""
        session = session_id(spec)
        await self._forget(self._proxy.discard(session))
        await self._forget(self._builders.of(session).discard.remote(session))

    async def _forget(self, forgetting: Awaitable[None]) -> None:
        try:
            await forgetting
        except (RayActorError, RayServeException):
            # What is dead has forgotten already.
            return

    async def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        """One training step; after a death the learner is first brought back to this step."""
        self._plans[step] = dict(groups)
        return await self._learning(step, lambda: self._learner.train(step, groups))

    async def checkpoint(self, step: int, score: float | None = None, wait: bool = False) -> None:
        """Save; only steps after the newest whole one have to be kept for a learner that dies."""
        whole = await self._learning(step, lambda: self._learner.save(step, score, wait))
        self._plans = {s: groups for s, groups in self._plans.items() if s >= whole}
        await self._forget(self._builders.of("gather").gather.remote(whole))

    async def update_engine(self, version: int) -> None:
        """Load published weights; an engine that restarts meanwhile takes the newest by itself."""
        path = self._run_dir / "weights" / f"v{version:08d}"
        await self._patiently("engine", lambda: self._engine.load_weights(version, path))

    async def statistics(self) -> dict[str, float]:
        """Counters since the parts started, and how often a part died."""
        engine = {} if self._engine is None else await self._patiently("engine", lambda: self._engine.stats())
        proxy = await self._patiently("proxy", lambda: self._proxy.stats())
        row = {f"engine/{name}": value for name, value in engine.items()}
        row |= {f"proxy/{name}": value for name, value in proxy.items()}
        return row | {f"deaths/{name.replace(' ', '_')}": n for name, n in self._deaths.items()}

    async def _learning(self, step: int, call: Callable[[], Any]) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                if attempt:
                    await self._bring_back(step)
                return await call()
            except (RayActorError, GroupLostError) as error:
                await self._return_of("learner", self._learner.ping, error)
        raise PartLostError(
            f"the learner died {_ATTEMPTS} times in a row at step {step}; look at Ray's logs for the reason "
            "(often memory: lower learner.max_tokens_per_microbatch), then go on with --resume"
        )

    async def _return_of(self, name: str, ping: Callable[[], Any], error: RayActorError | GroupLostError) -> None:
        """Wait until the successor of a dead actor answers."""
        if isinstance(error, ActorDiedError | ActorUnavailableError | GroupLostError):
            self._deaths[name] += 1
        logger.warning("the %s died; waiting for its successor", name)
        deadline = time.monotonic() + _RESTART_S
        while time.monotonic() < deadline:
            try:
                await ping()
                return
            except RayActorError:
                await asyncio.sleep(_PAUSE_S)
        raise PartLostError(
            f"the {name} died and did not come back within {_RESTART_S} s ({_first_line(error)}); look at Ray's logs "
            "for the reason, then go on with --resume"
        )

    async def _bring_back(self, step: int) -> None:
        """A restarted learner begins at a checkpoint: train the steps since then again, on the same trees."""
        version = await self._learner.load()
        for past in range(version, step):
            if past not in self._plans:
                raise PartLostError(
                    f"the learner died, and its newest checkpoint is damaged: that of step {version} is too far back "
                    "to train again from here; go on with --resume"
                )
            await self._learner.train(past, self._plans[past])

    async def _patiently(self, name: str, call: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                return await call()
            except (RayActorError, RayServeException) as error:
                self._deaths[name] += 1
                if time.monotonic() > deadline:
                    raise PartLostError(
                        f"the {name} did not come back within {_RESTART_S} s ({_first_line(error)}); look at Ray "
                        "Serve's logs for the reason, then go on with --resume"
                    ) from None
                await asyncio.sleep(_PAUSE_S)


def failed(spec: EpisodeSpec, reason: str) -> EpisodeOutcome:
    """The outcome of an attempt whose actor is gone."""
    return EpisodeOutcome(spec.id, "failed", reason, None, None, False, 0, 0, 0, None)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
