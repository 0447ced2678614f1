"""An OpenAI-compatible endpoint as an engine, for evaluation only: words in, words out.

Invariant: the harness is answered with the text, the reasoning, the tool names and the arguments that the endpoint
gave. The ids are what the session's renderer makes of that answer; nobody sampled them, so their log-probabilities
are NaN, and a tree builder refuses to have them trained.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from renderers import ParsedToolCall

from actors.engines.base import EngineDownError, Generate, Generated, Spoken
from actors.rendering import Rendering
from actors.toolcalls import valid_call
from configs.schema import EndpointConfig
from envs.protocols import fields, openai_chat, wire
from envs.protocols.canonical import Message, ToolCall
from envs.protocols.errors import WireError
from trees.record import Finish, VersionSpan

logger = logging.getLogger(__name__)

_CONNECT_S = 15.0
_FIRST_S, _MOST_S = 0.5, 30.0
"""Waits between tries, where the endpoint asks for none."""
_AGAIN = (408, 409, 429)
_TOLD = 500
"""Characters of what an endpoint says that go into an error."""
_UNREADABLE = (WireError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""How the reading of an answer ends that is no chat completion."""
_REMEDIES = {
    401: "; put a valid key into {key_env}",
    403: "; put a key with the right to use the model into {key_env}",
    404: "; set engine.endpoint.url to the base URL, mostly one that ends in /v1, and engine.endpoint.model to a "
    "model that is there",
}


class EndpointEngine:
    """A ``Sampler``; lives in the replica of the proxy."""

    takes_words = True
    """``Generate.conversation`` is what it answers."""

    def __init__(self, config: EndpointConfig, rendering: Rendering) -> None:
        """Raises ``ValueError`` for a URL that is none, or a key that no header can carry."""
        self._config = config
        self._rendering = rendering
        self._url = _completions(config.url)
        self._key = os.environ.get(config.key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(f"{config.key_env}: got a key with characters that no header can carry; set it anew")
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=httpx.Limits(max_connections=None))
        self._reasoning = ""
        self._running: dict[asyncio.Task[Spoken], str] = {}

    async def generate(self, request: Generate) -> Generated:
        """Ask for the next turn of the conversation.

        Raises ``EngineDownError`` when the last try has failed, ``ValueError`` with the endpoint's word when it
        refuses the request.
        """
        task = asyncio.create_task(self._answer(request))
        self._running[task] = request.request
        try:
            await asyncio.wait({task})
        finally:
            del self._running[task]
            task.cancel()
        return Generated([], [], "abort", ()) if task.cancelled() else task.result()

    async def abort(self, request: str) -> None:
        for task in [task for task, handle in self._running.items() if request and handle == request]:
            task.cancel()

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, request: Generate) -> Spoken:
        if request.conversation is None:
            raise ValueError("got a request without its conversation, expected one: an endpoint takes words, not ids")
        body = {
            "model": self._config.model,
            "messages": _messages(request.conversation.messages, self._reasoning),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
        }
        if request.conversation.tools:
            body["tools"] = list(request.conversation.tools)
        if request.conversation.sampling.stop:
            body["stop"] = list(request.conversation.sampling.stop)
        message, readable, cut = await self._ask(json.dumps(body).encode())
        ids = self._rendering.spoken(message, cut)
        spans = (VersionSpan(0, 0, len(ids)),) if ids else ()
        finish: Finish = "length" if cut else "stop"
        return Spoken(ids, [math.nan] * len(ids), finish, spans, message=message, readable=readable)

    async def _ask(self, body: bytes) -> tuple[Message, bool, bool]:
        """As ``_read``. Tries again what may be better the next time."""
        for tries in itertools.count(1):
            asked: float | None = None
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    response = await self._client.post(self._url, content=body)
            except TimeoutError:
                trouble = f"no answer in {self._config.timeout_s:g} s"
            except httpx.RequestError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                said = response.text[:_TOLD]
                if response.status_code == 200:
                    try:
                        return self._read(response.content)
                    except _UNREADABLE as error:
                        trouble = f"an answer that is no chat completion ({type(error).__name__}): {said}"
                elif response.status_code in _AGAIN or response.status_code >= 500:
                    trouble, asked = f"status {response.status_code}: {said}", _retry_after(response.headers)
                else:
                    raise ValueError(self._refusal(response.status_code, said))
            trouble = self._safe(f"{self._url}: {trouble}")
            if tries > self._config.retries:
                raise EngineDownError(f"{trouble} (after {tries} tries)")
            logger.warning("the endpoint is asked again: %s", trouble)
            backoff = min(_FIRST_S * 2 ** (tries - 1), _MOST_S) * random.uniform(0.75, 1.0)
            await asyncio.sleep(backoff if asked is None else min(asked, self._config.timeout_s))
        raise AssertionError("unreachable")

    def _read(self, content: bytes) -> tuple[Message, bool, bool]:
        """The answer; whether all of its tool calls can be read; whether it was cut at ``max_tokens``."""
        choice = wire.loads(content)["choices"][0]
        given = {**choice["message"], "role": "assistant"}
        given["content"] = given.get("content") or given.get("refusal")
        message = openai_chat.parse({"messages": [given]}, {}).messages[0]
        if message.reasoning:
            self._reasoning = "reasoning_content" if given.get("reasoning_content") else "reasoning"
        written = [call["function"].get("arguments") for call in given.get("tool_calls") or ()]
        calls = [_readable(call, text) for call, text in zip(message.tool_calls, written, strict=True)]
        message = replace(message, tool_calls=tuple(calls))
        readable = not any(isinstance(call.arguments, str) for call in calls)
        return message, readable, choice.get("finish_reason") == "length"

    def _refusal(self, status: int, said: str) -> str:
        remedy = _REMEDIES.get(status, "").format(key_env=self._config.key_env)
        return self._safe(f"{self._url} refuses the request with status {status}: {said}") + remedy

    def _safe(self, text: str) -> str:
        """Text that others wrote, without the key, should it be in it."""
        return text.replace(self._key, "...") if self._key else text


def _completions(base: str) -> str:
    """The URL to post to. Raises ``ValueError``."""
    expected = "engine.endpoint.url: expected a base URL such as https://api.example.com/v1"
    try:
        url = httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ValueError(f"{expected}, got {base!r}: {error}") from None
    if url.userinfo:
        raise ValueError(f"{expected}, got one with a password in it; put the key into engine.endpoint.key_env")
    if url.scheme not in ("http", "https") or not url.host or url.query:
        raise ValueError(f"{expected}, got {base!r}")
    return f"{base.rstrip('/')}/chat/completions"


def _messages(messages: Sequence[Message], reasoning: str) -> list[dict[str, Any]]:
    """A conversation in Chat Completions.

    ``reasoning``: the field in which the endpoint gives reasoning, empty as long as it has given none. Public servers
    disagree about what they take: some refuse a turn without the field, others one with a field that they do not know,
    and all take back what they give. Ids of tool calls are counted anew: some take only nine letters and digits.
    """
    written: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []
    numbers = itertools.count()
    for message in messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "assistant":
            calls = [replace(call, id=f"call{next(numbers):05d}") for call in message.tool_calls]
            unanswered += [(old.id, new.id) for old, new in zip(message.tool_calls, calls, strict=True)]
            if calls:
                plain["content"] = message.text or None
                plain["tool_calls"] = [_call(call) for call in calls]
            if reasoning:
                plain[reasoning] = message.reasoning
        if message.role == "tool":
            found = next((pair for pair in unanswered if pair[0] == message.tool_call_id), None)
            if found is not None:
                unanswered.remove(found)
            plain["tool_call_id"] = message.tool_call_id if found is None else found[1]
        written.append(plain)
    return written


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": fields.arguments_text(call)},
    }


def _readable(call: ToolCall, written: Any) -> ToolCall:
    """The call; with its arguments as they were ``written`` where a policy's own call of that kind would be none."""
    found = valid_call(ParsedToolCall(raw="", name=call.name, arguments=call.arguments))
    text = written if isinstance(written, str) else json.dumps(written)
    return replace(call, arguments=text) if found is None else found


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds until the endpoint wants to be asked again; None where it says nothing that can be read."""
    said = headers.get("retry-after", "")
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return None
