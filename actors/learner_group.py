"""The learner of a run: one Ray actor per rank, which answer as one.

Invariant: every call reaches all ranks in the same order, and each rank holds the same version. A group that lost a
rank is worth nothing: its other ranks wait for the lost one inside of a collective, so all are ended, come back
empty, and meet anew by ``load``, at a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from actors.learner import Learner
from actors.one_writer import hold
from actors.sharding import backend
from algos.ranks import ALONE, Ranks
from configs.learner import LearnerConfig

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
_MEETING = timedelta(minutes=5)


class GroupLostError(RuntimeError):
    """A rank died or came back empty; ``load`` makes the group whole again."""


class NotJoinedError(RuntimeError):
    """The rank was started, or started again, and does not hold a model yet: call ``join`` first."""


class LearnerRank:
    """One rank as a Ray actor. Empty until ``join``, since only then it is known where the ranks meet.

    Arguments as of ``Learner``.
    """

    def __init__(self, model_path: Path, run_dir: Path, settings: LearnerConfig, rank: int = 0, **more: Any) -> None:
        self._arguments = (model_path, run_dir, settings)
        self._run_dir = run_dir
        self._more = more
        self._settings = settings
        self._rank = rank
        self._learner: Learner | None = None
        self._early: list[bytes] = []
        self._lock: IO[bytes] | None = None

    def ping(self) -> bool:
        """True, as soon as nothing else runs."""
        return True

    def address(self) -> str:
        """Where the ranks can meet, asked of the first: on its machine, at a port that is free."""
        host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str) -> int:
        """Meet the other ranks, and go on from the newest checkpoint; returns the policy version."""
        torch.set_num_threads(self._settings.threads)
        if self._rank == 0 and self._lock is None:
            # Of a run that was killed, the learner may outlive the rest by a moment, and be in the middle of a save.
            self._lock = hold(self._run_dir)
        if self._learner is None:
            self._learner = Learner(*self._arguments, **self._more, ranks=self._met(address))
            for data in self._early:
                self._learner.add(data)
            self._early.clear()
        return self._learner.load()

    def add(self, data: bytes) -> None:
        """As of ``Learner``; kept until there is one. Only the first rank is sent trees, others read the files."""
        if self._learner is None:
            self._early.append(data)
        else:
            self._learner.add(data)

    def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        """As of ``Learner``."""
        return self._joined().train(step, groups)

    def save(self, step: int, score: float | None, wait: bool) -> int:
        """As of ``Learner``; returns the newest step whose checkpoint is whole."""
        return self._joined().save(step, score, wait)

    def _joined(self) -> Learner:
        if self._learner is None:
            raise NotJoinedError(f"rank {self._rank} of the learner has no model yet: call join first")
        return self._learner

    def _met(self, address: str) -> Ranks:
        size = self._settings.ranks
        if size == 1:
            return ALONE
        device = self._settings.device
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend(device), init_method=address, rank=self._rank, world_size=size, timeout=_MEETING
        )
        return Ranks(self._rank, size, dist.new_group(backend="gloo", timeout=timedelta(days=1)))


class LearnerGroup:
    """All ranks as one learner. ``ranks``: the actors, in order; they restart by themselves."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = list(ranks)
        self._fresh = True

    async def ping(self) -> None:
        """Return when every rank is up. Raises ``RayActorError`` where one is not."""
        await asyncio.gather(*(rank.ping.remote() for rank in self._ranks))

    async def load(self) -> int:
        """Bring all ranks to the newest checkpoint; returns the policy version. Raises as ``train``."""
        if not self._fresh and len(self._ranks) > 1:
            self._end_all()
            await self.ping()
        address = await self._ranks[0].address.remote()
        self._fresh = False
        return (await self._all("join", address))[0]

    async def train(self, step: int, groups: Mapping[str, str]) -> dict[str, float]:
        """As of ``Learner``. Raises ``GroupLostError`` where a rank died, and what all ranks raise."""
        return (await self._all("train", step, dict(groups)))[0]

    async def save(self, step: int, score: float | None = None, wait: bool = True) -> int:
        """As of ``LearnerRank``; raises as ``train``."""
        return (await self._all("save", step, score, wait))[0]

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        calls = [asyncio.ensure_future(_answer(rank, method, arguments)) for rank in self._ranks]
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if not any(call.done() and call.exception() for call in calls):
            return [call.result() for call in calls]
        # A rank that lost its neighbour may complain before the death itself is known.
        await asyncio.wait(calls, timeout=_GRACE_S if not _lost(calls) else 0)
        lost = _lost(calls)
        errors = [error for call in calls if call.done() and (error := call.exception())]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if not lost:
            raise errors[0]
        self._end_all()
        raise GroupLostError(f"the learner lost a rank during {method}: {lost[0]}") from lost[0]

    def _end_all(self) -> None:
        self._fresh = True
        for rank in self._ranks:
            ray.kill(rank, no_restart=False)


async def _answer(rank: Any, method: str, arguments: Sequence[Any]) -> Any:
    return await getattr(rank, method).remote(*arguments)


def _lost(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    errors = [call.exception() for call in calls if call.done()]
    return [error for error in errors if isinstance(error, RayActorError | NotJoinedError)]
