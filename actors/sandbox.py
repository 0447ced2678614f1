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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from actors.session_contract import SessionSpec, Summary
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec, Status
from envs.harnesses.base import Endpoint, Harness, check_tools
from envs.harnesses.own_files import OWN_FILES
from envs.harnesses.registry import harness
from envs.harnesses.sets import settings_of
from envs.judge.client import JudgeError
from envs.judge.judge import Judge, Verdict
from envs.mcp.outside import Servers
from envs.sandbox.base import Command, Finished, Limits, NotStartedError, Sandbox, WorkspaceTooLarge
from envs.sandbox.create import chosen
from envs.sandbox.flags import flags
from envs.sandbox.gc import gc
from envs.sandbox.grading import Grade, GraderFailureError, Told, grade, progress
from envs.sandbox.pool import Pool
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.sandbox.watch import Bounds, watched
from envs.tasks.task import Task

_LOG_CHARACTERS = 2000
_PROBE_S = 1.0
_LOST_S = 60.0
_KILLED = 128
"""Exit codes from here on say that a signal ended the process inside the sandbox."""
_SETTINGS = {"context": "engine.max_len"}
"""Settings that a session's limit comes from, where it is none of ``proxy.limits``."""


class ProxyLostError(RuntimeError):
    """The proxy that held the session is gone."""


class TranscriptLostError(RuntimeError):
    """A grader is to get the transcript, and the proxy has it no more."""


class ProxyClient(Protocol):
    """What of the proxy a sandbox actor uses; in a run, methods of the Serve handle."""

    async def open_session(self, spec: SessionSpec) -> dict[str, str]: ...

    async def close_session(self, key: str) -> Summary: ...

    async def since_call(self, key: str) -> float: ...


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
        self._judge = Judge(config.judge) if config.judge else None
        self._losses: dict[Path, asyncio.Task[None]] = {}
        gc(root)
        sandbox = config.sandbox
        self._backend = chosen(sandbox)
        self._pool = Pool(self._backend, root, sandbox.pool)
        self._limits = Limits(
            wall_s=sandbox.wall_s,
            cpu_s=sandbox.cpu_s,
            memory_mb=sandbox.memory_mb,
            processes=sandbox.processes,
            cpus=sandbox.cpus,
            file_mb=sandbox.file_mb,
        )
        self._bounds = Bounds(output_mb=sandbox.output_mb, disk_mb=sandbox.disk_mb, idle_s=sandbox.idle_s)
        self._grading = Limits(wall_s=sandbox.grade_s, cpu_s=sandbox.grade_s, output_bytes=1 << 16)

    async def ping(self) -> bool:
        return True

    async def close(self) -> None:
        """Remove the rooms that wait for an episode, and stop listening for proxies that are lost."""
        for watching in self._losses.values():
            watching.cancel()
        await self._pool.close()

    async def progress(self, task: Task, transcript: str) -> float:
        """How far an episode of the task has come. Raises as ``envs.sandbox.grading.progress``."""
        return await progress(task, transcript, self._backend, self._root, self._grading)

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
            asked = SessionSpec(
                session_id(spec),
                temperature=spec.temperature,
                seed=spec.seed,
                transcript=spec.transcript or spec.task.wants_transcript,
            )
            session = await self._proxy.open_session(asked)
        closed: Summary | None = None
        sandbox = None
        servers: Servers | None = None
        try:
            async with seconds.stage("create"):
                sandbox = await self._pool.create(spec.harness, room, spec.task.input_files, spec.task.mount_dir)
                adapter = harness(settings_of(config, spec.harness))
                check_tools(adapter, (spec.task,))
                servers = Servers(spec.task.mcp, sandbox)
                await servers.open()
                command = self._command(adapter, sandbox, spec.task, session, servers)
                self._pool.expect(spec.harness, sandbox, command)
            began_ns = time.time_ns()
            unstarted: NotStartedError | None = None
            async with seconds.stage("run"):
                try:
                    finished, reached = await self._run_beside_proxy(sandbox, command, session)
                    for instruction in spec.task.sessions:
                        if reached or not _told(adapter, finished)[0]:
                            break
                        command = self._command(
                            adapter, sandbox, replace(spec.task, instruction=instruction), session, servers
                        )
                        finished, reached = await self._run_beside_proxy(sandbox, command, session)
                except NotStartedError as error:
                    finished, reached, unstarted = error.finished, "", error
                await servers.close()
                closed = await self._proxy.close_session(session["key"])
            if unstarted is not None and not closed.calls:
                raise unstarted
            status, reason = status_of(finished, closed, *_told(adapter, finished), reached)
            if status == "failed":
                return replace(_failed(spec, reason, seconds, closed, finished), mcp=tuple(servers.log.rows))
            noted: tuple[str, ...] = ()
            if config.reward.flags:
                own = OWN_FILES.get(adapter.name, ())
                look = (spec.task, sandbox, finished, began_ns, closed.touched, own)
                async with seconds.stage("grade"):
                    noted = await asyncio.to_thread(flags, *look)
            outcome = await self._graded(spec, sandbox, finished, closed, seconds)
            if outcome.status != "failed":
                outcome = replace(outcome, status=status, reason=reason)
            said = closed.transcript if spec.transcript else None
            return replace(outcome, flags=noted, mcp=tuple(servers.log.rows), transcript=said)
        finally:
            await asyncio.shield(self._clean_up(session["key"] if closed is None else None, sandbox, servers, seconds))

    def _command(
        self, adapter: Harness, sandbox: Sandbox, task: Task, session: dict[str, str], servers: Servers
    ) -> Command:
        """What starts the harness with the task's instruction, behind the relay."""
        endpoint = Endpoint(RELAY_BASE_URL, session["key"], context=self._config.engine.max_len)
        command = adapter.command(sandbox, task, endpoint, self._limits, servers.given)
        command = replace(command, mounts=(*command.mounts, *servers.mounts))
        return through_relay(sandbox, command, Path(session["socket"]))

    async def _run_beside_proxy(
        self, sandbox: Sandbox, command: Command, session: dict[str, str]
    ) -> tuple[Finished, str]:
        """Run the harness within the bounds; how it ended, and the bound that it reached.

        A proxy that dies and comes back goes on with the session; one that stays away loses it.
        """

        async def since_call() -> float:
            try:
                return await self._proxy.since_call(session["key"])
            except Exception:  # a proxy that is away for a moment makes no harness idle; one that stays away is lost
                return 0.0

        running = asyncio.create_task(watched(sandbox, command, self._bounds, since_call))
        sockets = Path(session["socket"]).parent
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
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _graded(
        self, spec: EpisodeSpec, sandbox: Sandbox, finished: Finished, closed: Summary, seconds: _Seconds
    ) -> EpisodeOutcome:
        """The outcome of an episode that can be graded, but for how it ended; ``failed`` without a verdict."""
        try:
            async with seconds.stage("grade"):
                made, verdict = await self._grade(spec, sandbox, closed)
        except (GraderFailureError, JudgeError, TranscriptLostError) as error:
            return _failed(spec, str(error), seconds, closed, finished)
        clean = closed.last_clean and (finished.code is None or finished.code < _KILLED)
        return EpisodeOutcome(
            id=spec.id,
            status="completed",
            reason="",
            reward=made.score if clean or not self._config.reward.clean_end else 0.0,
            grade=made.score,
            clean_end=clean,
            calls=closed.calls,
            prompt_tokens=closed.prompt_tokens,
            sampled_tokens=closed.sampled_tokens,
            exit_code=finished.code,
            seconds=seconds.spent,
            log=made.log,
            judge=None if verdict is None else verdict.plain(),
        )

    async def _grade(self, spec: EpisodeSpec, sandbox: Sandbox, session: Summary) -> tuple[Grade, Verdict | None]:
        task = spec.task
        if session.transcript is None and task.wants_transcript:
            raise TranscriptLostError("the transcript that the grader is to get was lost with a replica of the proxy")
        told = Told(session.final_message, (session.transcript or "") if task.wants_transcript else "")
        try:
            frozen = await sandbox.freeze()
            verdict = None
            made = Grade(0.0, "")
            if task.scripted:
                made = await grade(task, frozen, self._backend, self._root, self._grading, told)
        except WorkspaceTooLarge as error:
            return Grade(0.0, str(error)), None
        if task.rubric is not None:
            if self._judge is None:
                raise JudgeError(f"task {task.id} needs a judge, and none is set; give judge.url and judge.model")
            verdict = await self._judge.grade(task, task.rubric, frozen, told.final_message, told.transcript)
            share = task.rubric.share
            made = Grade((1 - share) * made.score + share * verdict.score, made.log)
        return made, verdict

    async def _clean_up(self, key: str | None, sandbox: Any, servers: Servers | None, seconds: _Seconds) -> None:
        async with seconds.stage("destroy"):
            try:
                if servers is not None:
                    await servers.close()
            finally:
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


def status_of(finished: Finished, session: Summary, ended: bool, reason: str, reached: str = "") -> tuple[Status, str]:
    """The status of an episode, from the session's own record first and from what the harness said second.

    ``reached``: the bound of ``Bounds`` at which the harness was ended. A limit is told as the setting that it is.
    """
    if session.failed:
        return "failed", session.failed
    if session.limit:
        return "truncated", f"limit: {_SETTINGS.get(session.limit, f'proxy.limits.{session.limit}')}"
    limit = f"sandbox.{reached or 'wall_s'}" if finished.code is None else ""
    if session.calls == 0:
        # Nothing of this is the policy's doing, a limit included.
        why = f"limit: {limit}" if limit else reason
        return "failed", f"the harness made no call ({why}): {_tail(finished) or 'it printed nothing'}"
    if finished.code is None:
        return "truncated", f"limit: {limit}"
    if ended:
        return "completed", reason
    if finished.code < 0:
        return "failed", f"the sandbox was killed (signal {-finished.code})"
    if reason == "max turns":
        return "truncated", reason
    # The proxy and the engine were there, or the session would tell. What else ends a harness is in the agent's
    # power: its processes, its files, its output. An agent must not be able to void its own episode.
    if finished.code >= _KILLED:
        return "truncated", f"the harness was killed from inside (signal {finished.code - _KILLED})"
    return "truncated", f"the harness broke off: {reason}: {_tail(finished) or 'it printed nothing'}"


def _told(adapter: Harness, finished: Finished) -> tuple[bool, str]:
    """How the harness says that it ended."""
    try:
        return adapter.ended(finished)
    except Exception as error:  # the agent can write to its harness's output: what cannot be read voids no episode
        return False, f"no result: {type(error).__name__}: {error}"


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
