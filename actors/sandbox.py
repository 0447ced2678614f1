"""The sandbox actor: one episode from an empty room to a verdict.

Invariants: grading starts only after every process of the sandbox is gone, on a copy that the agent never saw;
whatever happens, the session is closed and the sandbox destroyed before ``run_episode`` returns; infrastructure
trouble is status ``failed`` and never a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from actors.session_contract import SessionSpec, Summary
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec, Status
from envs.harnesses.base import Endpoint
from envs.harnesses.registry import harness
from envs.sandbox.base import Command, Finished, Limits, Sandbox, WorkspaceTooLarge
from envs.sandbox.gc import gc
from envs.sandbox.grading import grade
from envs.sandbox.pool import Pool
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay

_LOG_CHARACTERS = 2000
_PROBE_S = 1.0
_LOST_S = 60.0
_KILLED = 128
"""Exit codes from here on say that a signal ended the process inside the sandbox."""


class ProxyLostError(RuntimeError):
    """The proxy that held the session is gone."""


class ProxyClient(Protocol):
    """What of the proxy a sandbox actor uses; in a run, methods of the Serve handle."""

    async def open_session(self, spec: SessionSpec) -> dict[str, str]: ...

    async def close_session(self, key: str) -> Summary: ...


@dataclass(slots=True)
class _Seconds:
    """Wall seconds by stage."""

    spent: dict[str, float] = field(default_factory=dict)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - began


class SandboxActor:
    """Runs many episodes at the same time, each in a room of its own under ``root``."""

    def __init__(self, config: RunConfig, root: Path, proxy: ProxyClient) -> None:
        self._config = config
        self._root = root
        self._proxy = proxy
        self._losses: dict[Path, asyncio.Task[None]] = {}
        gc(root)
        sandbox = config.sandbox
        self._pool = Pool(sandbox.backend, root, sandbox.pool)
        self._limits = Limits(
            wall_s=sandbox.wall_s,
            cpu_s=sandbox.cpu_s,
            memory_mb=sandbox.memory_mb,
            processes=sandbox.processes,
            cpus=sandbox.cpus,
            file_mb=sandbox.file_mb,
        )
        self._grading = Limits(wall_s=sandbox.grade_s, cpu_s=sandbox.grade_s, output_bytes=1 << 16)

    async def ping(self) -> bool:
        return True

    async def close(self) -> None:
        """Remove the rooms that wait for an episode, and stop listening for proxies that are lost."""
        for watching in self._losses.values():
            watching.cancel()
        await self._pool.close()

    async def run_episode(self, spec: EpisodeSpec) -> EpisodeOutcome:
        """One attempt at an episode; trouble that is not the agent's comes back as ``failed``."""
        seconds = _Seconds()
        try:
            return await self._attempt(spec, seconds)
        except Exception as error:  # reported as the outcome: the coordinator decides about another attempt
            return _failed(spec, f"{type(error).__name__}: {error}", seconds)

    async def _attempt(self, spec: EpisodeSpec, seconds: _Seconds) -> EpisodeOutcome:
        config = self._config
        room = f"{session_id(spec)}-{id(seconds):x}"
        async with seconds.stage("create"):
            session = await self._proxy.open_session(
                SessionSpec(session_id(spec), temperature=spec.temperature, seed=spec.seed)
            )
        closed: Summary | None = None
        sandbox = None
        try:
            async with seconds.stage("create"):
                sandbox = await self._pool.create(spec.harness, room, spec.task.input_files, spec.task.mount_dir)
                adapter = harness(config.harness)
                endpoint = Endpoint(RELAY_BASE_URL, session["key"], context=config.engine.max_len)
                command = adapter.command(sandbox, spec.task, endpoint, self._limits)
                command = through_relay(sandbox, command, Path(session["socket"]))
                self._pool.expect(spec.harness, sandbox, command)
            async with seconds.stage("run"):
                finished = await self._run_beside_proxy(sandbox, command, Path(session["socket"]))
                closed = await self._proxy.close_session(session["key"])
            status, reason = judge(finished, closed, *adapter.ended(finished))
            if status == "failed":
                return _failed(spec, reason, seconds, closed, finished)
            async with seconds.stage("grade"):
                score, log = await self._grade(spec, sandbox)
            clean = closed.last_clean and (finished.code is None or finished.code < _KILLED)
            reward = score if clean or not config.reward.clean_end else 0.0
            return EpisodeOutcome(
                id=spec.id,
                status=status,
                reason=reason,
                reward=reward,
                grade=score,
                clean_end=clean,
                calls=closed.calls,
                prompt_tokens=closed.prompt_tokens,
                sampled_tokens=closed.sampled_tokens,
                exit_code=finished.code,
                seconds=seconds.spent,
                log=log,
            )
        finally:
            await asyncio.shield(self._clean_up(session["key"] if closed is None else None, sandbox, seconds))

    async def _run_beside_proxy(self, sandbox: Sandbox, command: Command, socket: Path) -> Finished:
        """Run the harness. A proxy that dies and comes back goes on with the session; one that stays away loses it."""
        running = asyncio.create_task(sandbox.run(command))
        sockets = socket.parent
        lost = self._losses.get(sockets)
        if lost is None or lost.done():
            lost = self._losses[sockets] = asyncio.create_task(_loss_of(sockets))
        try:
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ProxyLostError("the proxy died during the episode and did not come back")
            return running.result()
        finally:
            if not running.done():
                await sandbox.kill()
                await asyncio.gather(running, return_exceptions=True)

    async def _grade(self, spec: EpisodeSpec, sandbox: Any) -> tuple[float, str]:
        try:
            frozen = await sandbox.freeze()
        except WorkspaceTooLarge as error:
            return 0.0, str(error)
        verdict = await grade(spec.task, frozen, self._config.sandbox.backend, self._root, self._grading)
        return verdict.score, verdict.log

    async def _clean_up(self, key: str | None, sandbox: Any, seconds: _Seconds) -> None:
        async with seconds.stage("destroy"):
            if sandbox is not None:
                await sandbox.destroy()
            if key is not None:
                await self._proxy.close_session(key)


async def _loss_of(sockets: Path) -> None:
    """Return once nobody has listened at any of the ``sockets`` for a while."""
    heard = time.monotonic()
    while time.monotonic() - heard < _LOST_S:
        for path in sockets.glob("*.sock"):
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except OSError:
                continue
            writer.close()
            heard = time.monotonic()
            break
        await asyncio.sleep(_PROBE_S)


def session_id(spec: EpisodeSpec) -> str:
    """Every attempt has a session of its own, so that records of a failed one never mix with the next."""
    return f"{spec.id}a{spec.attempt}"


def judge(finished: Finished, session: Summary, ended: bool, reason: str) -> tuple[Status, str]:
    """The status of an episode, from the session's own record first and from what the harness said second."""
    if session.failed:
        return "failed", session.failed
    if session.limit:
        return "truncated", f"limit: {session.limit}"
    if finished.code is None:
        return "truncated", "limit: sandbox.wall_s"
    if session.calls == 0:
        return "failed", f"the harness made no call ({reason}): {_tail(finished)}"
    if ended:
        return "completed", reason
    if finished.code < 0:
        return "failed", f"the sandbox was killed (signal {-finished.code})"
    if finished.code >= _KILLED:
        # Only what is inside can have done that: an agent must not be able to void its own episode.
        return "truncated", f"the harness was killed from inside (signal {finished.code - _KILLED})"
    if reason == "max turns":
        return "truncated", reason
    return "failed", f"{reason}: {_tail(finished)}"


def _failed(
    spec: EpisodeSpec,
    reason: str,
    seconds: _Seconds,
    session: Summary | None = None,
    finished: Finished | None = None,
) -> EpisodeOutcome:
    return EpisodeOutcome(
        id=spec.id,
        status="failed",
        reason=reason,
        reward=None,
        grade=None,
        clean_end=False,
        calls=session.calls if session else 0,
        prompt_tokens=session.prompt_tokens if session else 0,
        sampled_tokens=session.sampled_tokens if session else 0,
        exit_code=finished.code if finished else None,
        seconds=seconds.spent,
        log=_tail(finished) if finished else "",
    )


def _tail(finished: Finished) -> str:
    text = finished.stdout.decode(errors="replace") + finished.stderr.decode(errors="replace")
    return text[-_LOG_CHARACTERS:].strip()
