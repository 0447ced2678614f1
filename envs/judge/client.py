"""The judge's endpoint, and what asking it costs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.judge import JudgeConfig
from envs.judge.prompt import response_format
from envs.sandbox.base import SandboxError
from envs.tasks.rubric import Criterion


class JudgeError(SandboxError):
    """The judge gave no grade; the message says why, and what to do. Never a score."""


@dataclass(slots=True)
class Cost:
    """What gradings took. ``usd`` is None while the prices are not known."""

    requests: int = 0
    cached: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float | None = None

    def add(self, other: Cost) -> None:
        self.requests += other.requests
        self.cached += other.cached
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        if other.usd is not None:
            self.usd = (self.usd or 0.0) + other.usd


class Client:
    """Asks the endpoint, a bounded number of requests at the same time."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._room = asyncio.Semaphore(config.concurrency)
        self._api: Any = None

    async def ask(self, conversation: list[dict[str, str]], criteria: Sequence[Criterion], cost: Cost) -> str:
        """The text of an answer; what it took is added to ``cost``. Raises JudgeError."""
        # Only who has a judge pays for this import.
        import openai

        config = self._config
        if self._api is None:
            # A server of one's own takes any key; the client insists on one.
            key = os.environ.get(config.key_env) or "none"
            self._api = openai.AsyncOpenAI(
                base_url=config.url, api_key=key, max_retries=config.retries, timeout=config.timeout_s
            )
        options = {
            "response_format": response_format(config.structured, criteria),
            "temperature": config.temperature,
            "max_completion_tokens": config.max_tokens,
        }
        given = {name: value for name, value in options.items() if value is not None}
        async with self._room:
            try:
                reply = await self._api.chat.completions.create(model=config.model, messages=conversation, **given)
            except openai.APIStatusError as error:
                raise JudgeError(
                    f"the judge at {config.url} refused with status {error.status_code}: {error.message[:300]}; "
                    f"look at judge.model, judge.structured, and the key in {config.key_env}"
                ) from error
            except openai.OpenAIError as error:
                raise JudgeError(f"the judge at {config.url} cannot be reached: {error}; look at judge.url") from error
        cost.add(self._cost(reply.usage))
        return (reply.choices[0].message.content or "") if reply.choices else ""

    def _cost(self, usage: Any) -> Cost:
        if usage is None:
            return Cost(1)
        dear, cheap = self._config.usd_per_million_out, self._config.usd_per_million_in
        usd = None
        if dear is not None and cheap is not None:
            usd = (usage.prompt_tokens * cheap + usage.completion_tokens * dear) / 1e6
        return Cost(1, 0, usage.prompt_tokens, usage.completion_tokens, usd)
