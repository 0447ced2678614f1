"""The stage of an environment in this process: the sandbox actor and the proxy of a run, without Ray.

Invariant: when the stage is closed its thread ends, and with it the harness, its sandbox and the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.engines.base import Generate
from actors.environment.agent import WaitingAgent
from actors.plain_rendering import PlainRendering
from actors.renderer import Renderer
from actors.sandbox import SandboxActor, session_id
from actors.session import Prepared, Session
from actors.session_contract import SessionSpec, Summary
from actors.socket_server import SocketServer
from configs.environment import EnvironmentConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.gym import folders
from envs.gym.stage import Answer, Asked, Over, Turn
from envs.sandbox.base import SandboxError
from trees import filters
from trees.build import TreeBuilder
from trees.record import CallRecord
from trees.tree import Tree

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LocalStage:
    """A ``Stage`` whose parts live in a thread with an event loop of its own."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reins-environment", daemon=True)
        self._thread.start()
        try:
            self._parts = self._wait(_start(config))
        except BaseException:
            self._end()
            raise

    def ready(self) -> bool:
        """True: what is asked of an actor that is to be up."""
        return True

    def begin(self, spec: EpisodeSpec) -> Turn:
        return self._wait(self._parts.begin(spec))

    def answer(self, call: str, answer: Answer) -> Turn:
        return self._wait(self._parts.answer(call, answer))

    def close(self) -> None:
        if threading.current_thread() is self._thread:
            # The garbage collector may find a forgotten environment in any thread, also in the one that is to end.
            threading.Thread(target=self.close).start()
            return
        if self._loop.is_closed():
            return
        try:
            self._wait(self._parts.close())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the harness runs in the process that this one was forked from: close() this copy first")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            # Interrupted while waiting: nobody waits for it any more.
            running.cancel()
            raise


async def _start(config: EnvironmentConfig) -> _Parts:
    return _Parts(config)


@dataclass(eq=False)
class _Episode:
    """What is known of the episode under way."""

    spec: EpisodeSpec
    running: asyncio.Task[EpisodeOutcome]
    progress: float = 0.0
    """What its step grader said last."""


class _Parts:
    """All that lives in the loop. It is the proxy as a sandbox actor sees it."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        root = folders.root(config.sandbox.root)
        rendering = _rendering(config)
        run = config.run()
        self._agent = WaitingAgent(rendering)
        self._records: list[CallRecord] = []
        self._dispatcher = Dispatcher(run.proxy, rendering, self._agent, self._take, config.context)
        self._app = build_app(self._dispatcher)
        self._actor = SandboxActor(run, root, self)
        # Last: a part that cannot be made leaves no folder.
        self._folder = folders.make(root)
        self._server = SocketServer(self._folder / "api")
        self._episode: _Episode | None = None

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        socket = await self._server.start(self._app)
        steps = self._episode is not None and self._episode.spec.task.gives_steps
        spec = replace(spec, transcript=spec.transcript or steps)
        return {"key": await self._dispatcher.open(spec), "socket": str(socket)}

    async def close_session(self, key: str) -> Summary:
        return await self._dispatcher.close(key)

    async def since_call(self, key: str) -> float:
        return self._dispatcher.since_call(key)

    async def _take(self, records: Sequence[CallRecord]) -> None:
        self._records += records

    async def begin(self, spec: EpisodeSpec) -> Turn:
        await self._abandon()
        self._records = []
        self._episode = _Episode(spec, asyncio.create_task(self._actor.run_episode(spec)))
        return await self._next(self._episode, True)

    async def answer(self, call: str, answer: Answer) -> Turn:
        assert self._episode is not None, "answer before begin"
        return await self._next(self._episode, self._agent.answer(call, answer))

    async def close(self) -> None:
        await self._abandon()
        await self._actor.close()
        await self._server.stop()
        await asyncio.to_thread(folders.remove, self._folder)

    async def _next(self, episode: _Episode, answered: bool) -> Turn:
        while True:
            coming = asyncio.create_task(self._agent.asked())
            try:
                await asyncio.wait({coming, episode.running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()
            if episode.running.done():
                return await self._over(episode)
            for request in self._agent.waiting()[:1]:
                # A call that its harness takes back just now may be gone.
                found = self._dispatcher.under_way(request.session, request.request)
                if found is not None:
                    return await self._asked(episode, request, *found, answered)
            await asyncio.sleep(0)

    async def _asked(
        self, episode: _Episode, request: Generate, session: Session, call: Prepared, answered: bool
    ) -> Asked:
        task = episode.spec.task
        if task.gives_steps:
            try:
                episode.progress = await self._actor.progress(task, session.heard(call))
            except SandboxError as error:
                logger.warning("task %s: no step reward: %s", task.id, error)
        return Asked(
            call=request.request,
            ordinal=call.ordinal,
            request=call.plan.request,
            prompt_ids=call.path.ids.copy(),
            room=request.max_tokens,
            kind=call.kind,
            why=call.why,
            waiting=len(self._agent.waiting()) - 1,
            answered=answered,
            progress=episode.progress,
        )

    async def _over(self, episode: _Episode) -> Over:
        outcome = episode.running.result()
        tree = self._tree(episode.spec, outcome)
        await self._forget(episode)
        return Over(outcome, tree)

    def _tree(self, spec: EpisodeSpec, outcome: EpisodeOutcome) -> Tree:
        builder = TreeBuilder(session_id(spec))
        for record in self._records:
            builder.add(record)
        meta = {
            "episode": spec.id,
            "task": spec.task.id,
            "harness": spec.harness,
            "group": spec.group,
            "seed": spec.seed,
            "step": spec.step,
            "split": spec.split,
            "status": outcome.status,
            "reward": outcome.reward,
        }
        kept = self._config.trees
        return filters.apply(builder.tree(meta), max_leaves=kept.max_leaves, train_kinds=kept.train_kinds)[0]

    async def _abandon(self) -> None:
        """End the episode under way, if there is one."""
        episode, self._episode = self._episode, None
        if episode is None:
            return
        episode.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await episode.running
        await self._forget(episode)

    async def _forget(self, episode: _Episode) -> None:
        await self._dispatcher.discard(session_id(episode.spec))


def _rendering(config: EnvironmentConfig) -> Renderer:
    if config.tokenizer is None:
        return PlainRendering()
    # Only who has a tokenizer pays for the libraries that read one.
    from actors.rendering import Rendering

    return Rendering(Path(config.tokenizer).expanduser(), config.renderer)
