"""The judge's endpoint, and what asking it costs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

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


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(BaseModel):
    """What is read of a completion. An endpoint may answer anything, and the official client checks none of it."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_LONGEST_WAIT_S = 60.0
"""Before one further try, as long as the official client lets an endpoint ask for."""


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
        # The client's own timeout begins anew with each byte that comes.
        most_s = config.timeout_s + config.retries * (config.timeout_s + _LONGEST_WAIT_S)
        create = self._api.chat.completions.with_raw_response.create
        async with self._room:
            try:
                async with asyncio.timeout(most_s):
                    answered = await create(model=config.model, messages=conversation, **given)
            except openai.APIStatusError as error:
                raise JudgeError(
                    f"the judge at {config.url} refused with status {error.status_code}: {error.message[:300]}; "
                    f"look at judge.model, judge.structured, and the key in {config.key_env}"
                ) from error
            except TimeoutError as error:
                raise JudgeError(
                    f"the judge at {config.url} gave no whole answer in {most_s:g} s; look at judge.timeout_s"
                ) from error
            except openai.OpenAIError as error:
                raise JudgeError(f"the judge at {config.url} cannot be reached: {error}; look at judge.url") from error
        try:
            reply = _Reply.model_validate_json(answered.content)
        except ValidationError as error:
            raise JudgeError(
                f"the judge at {config.url} answered with what is no chat completion: {answered.content[:200]!r}; "
                "look at judge.url, which mostly ends in /v1"
            ) from error
        cost.add(self._cost(reply.usage))
        return (reply.choices[0].message.content or "") if reply.choices else ""

    def _cost(self, usage: _Usage | None) -> Cost:
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return Cost(1)
        dear, cheap = self._config.usd_per_million_out, self._config.usd_per_million_in
        usd = None
        if dear is not None and cheap is not None:
            usd = (usage.prompt_tokens * cheap + usage.completion_tokens * dear) / 1e6
        return Cost(1, 0, usage.prompt_tokens, usage.completion_tokens, usd)
