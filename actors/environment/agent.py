"""The agent of an environment as an engine: its calls wait, in order of arrival, until somebody answers them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from actors.engines.base import Generate, Generated, Spoken
from actors.renderer import Renderer
from envs.gym.stage import Answer
from envs.protocols.canonical import Message
from trees.record import Finish, VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A call and what gives its answer."""

    request: Generate
    answer: asyncio.Future[Generated]


class WaitingAgent:
    """A ``Sampler``. Lives in one event loop."""

    takes_words = True
    """``Generate.conversation`` is what is observed."""

    def __init__(self, rendering: Renderer) -> None:
        self._rendering = rendering
        self._waiting: dict[str, Waiting] = {}
        self._came = asyncio.Event()

    async def generate(self, request: Generate) -> Generated:
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting[request.request] = waiting
        self._came.set()
        try:
            return await waiting.answer
        finally:
            del self._waiting[request.request]

    async def abort(self, request: str) -> None:
        waiting = self._waiting.get(request)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(Generated([], [], "abort", ()))

    def waiting(self) -> list[Generate]:
        """The calls without an answer, in order of arrival."""
        return [call.request for call in self._waiting.values() if not call.answer.done()]

    async def asked(self) -> None:
        """Return once a call waits."""
        while not self.waiting():
            self._came.clear()
            await self._came.wait()

    def answer(self, request: str, answer: Answer) -> bool:
        """Give a call its answer; False where it waits no more."""
        waiting = self._waiting.get(request)
        if waiting is None or waiting.answer.done():
            return False
        waiting.answer.set_result(self._generated(answer, waiting.request))
        return True

    def _generated(self, answer: Answer, request: Generate) -> Generated:
        if answer.message is not None:
            return self._spoken(answer.message)
        assert answer.ids is not None
        assert answer.logprobs is not None
        ids = answer.ids.tolist()
        finish: Finish = "stop" if ids and ids[-1] in request.stop_ids else "length"
        return Generated(ids, answer.logprobs.tolist(), finish, (VersionSpan(0, 0, len(ids)),))

    def _spoken(self, message: Message) -> Spoken:
        """The words with the ids that they are written with; nobody sampled those: they have no log-probabilities."""
        message = replace(message, role="assistant")
        ids = self._rendering.spoken(message)
        readable = not any(isinstance(call.arguments, str) for call in message.tool_calls)
        spans = (VersionSpan(0, 0, len(ids)),) if ids else ()
        return Spoken(ids, [math.nan] * len(ids), "stop", spans, message=message, readable=readable)
