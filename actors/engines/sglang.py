"""SGLang as an engine: ids in, ids out through the server's ``/generate``.

Invariant: weights change while generation is paused, and before it goes on no key or value of the old ones is left,
unless ``keep_cache`` says so; a span of ``generate`` is what the server itself says of its tokens. Of a server that
died before it could say so only the tokens are kept that it sent before any update.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from transformers import AutoConfig

from actors.engines import weights as published
from actors.engines.base import EngineDownError, EngineStats, Generate, Generated, Health, Piece, check, joined
from actors.engines.sglang_server import Launch, SGLangServer
from actors.engines.sglang_weights import Fitting, Held, buckets
from trees.record import Finish, VersionSpan

Transport = Literal["disk", "tensor"]
"""How weights get into the server: it reads the published folder, or is sent the tensors over HTTP."""

_FOREVER = httpx.Timeout(None, connect=10.0)
_GONE = (httpx.TransportError, httpx.StreamError)


class SGLangEngine:
    """A server of its own, or with ``url`` one that is there already, which must see the same file system.

    Args:
        launch: how to start the server; of a server that is there already only model and ``max_len`` are used.
        url: of a server that was started with ``--skip-tokenizer-init``.
        version, weights: those to begin with, also after a restart; None for the model's own.
        transport: see ``Transport``.
        keep_cache: go on with keys and values of older weights, which saves computing them anew.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        url: str | None = None,
        version: int = 0,
        weights: Path | None = None,
        transport: Transport = "disk",
        keep_cache: bool = False,
    ) -> None:
        self._server = None if url is not None else SGLangServer(launch, self._prepare)
        self._url = None if url is None else url.rstrip("/")
        self._max_len = launch.max_len
        self._vocabulary = int(AutoConfig.from_pretrained(launch.model, local_files_only=True).vocab_size)
        self._model = launch.model
        self._fitting = Fitting(launch.model)
        self._weights = Held(version, weights)
        self._transport = transport
        self._keep_cache = keep_cache
        self._paused = False
        self._adopted = False
        self._adopting = asyncio.Lock()
        self._control = asyncio.Lock()
        self._client = httpx.AsyncClient(timeout=_FOREVER, limits=httpx.Limits(max_connections=None))
        self._running: dict[str, str] = {}
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._busy_s, self._busy_since = 0.0, 0.0

    async def generate(self, request: Generate) -> Generated:
        """Sample a continuation. Raises ValueError for a request that cannot be served, and ``EngineDownError``."""
        pieces: list[Piece] = []
        spans: list[VersionSpan] = []
        try:
            async with aclosing(self._ask(request, spans)) as stream:
                async for piece in stream:
                    pieces.append(piece)
        except EngineDownError as error:
            raise EngineDownError(str(error), _certain(pieces)) from error
        whole = joined(pieces)
        return replace(whole, versions=tuple(spans)) if spans else whole

    def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        """Token by token, so that each is told under the version that sampled it."""
        return self._ask(request, [], interval=1)

    async def abort(self, request: str) -> None:
        """End the requests with this handle; what has not reached the server yet goes on."""
        for rid in [rid for rid, handle in self._running.items() if request and handle == request]:
            await self._forget(rid)

    async def load_weights(self, version: int, path: Path) -> None:
        """Raises ``ValueError`` or ``FileNotFoundError`` where the weights are not whole or the server refuses them;
        the old ones are then put back.
        """
        path = await asyncio.to_thread(self._fitting.verified, path)
        # Half of an update is none: it runs to its end also when the caller is cancelled.
        await asyncio.shield(asyncio.create_task(self._load(Held(version, path))))

    async def _load(self, new: Held) -> None:
        async with self._control:
            await self.ready()
            try:
                await self._swap(new)
            except ValueError:
                await self._put_back()
                raise
            self._weights = new
            self._counts["weight_loads"] += 1

    async def pause(self) -> None:
        async with self._control:
            await self._post("/pause_generation", {"mode": "retract"})
            self._paused = True

    async def resume(self) -> None:
        async with self._control:
            self._paused = False
            await self._post("/continue_generation", {})

    async def ready(self) -> None:
        """Raises ``EngineGaveUpError`` for a server that does not come up, ``EngineDownError`` for a foreign one."""
        await self._base()

    @property
    def alive(self) -> bool:
        """False for a server that has been given up."""
        return self._server is None or not self._server.failed

    async def health(self) -> Health:
        if self._server is not None and self._server.url is None:
            raise EngineDownError("SGLang is being started")
        response = await self._request("GET", "/model_info", None)
        if response.status_code != 200:
            raise EngineDownError(f"SGLang answers {response.status_code}: {response.text[:200]}")
        return Health(self._weights.version, self._server.pid if self._server is not None else 0)

    async def stats(self) -> EngineStats:
        """Counted here, from what the server says of each request."""
        busy = self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)
        own = ("prefill_tokens", "cached_tokens", "decode_tokens")
        extra = {name: float(value) for name, value in self._counts.items() if name not in own}
        extra["server_restarts"] = float(self._server.restarts) if self._server is not None else 0.0
        numbers = {name: self._counts[name] for name in own}
        return EngineStats(
            self._weights.version, len(self._running), 0, **numbers, decode_steps=0, busy_s=busy, extra=extra
        )

    async def close(self) -> None:
        await self._client.aclose()
        if self._server is not None:
            await self._server.stop()

    async def _ask(
        self, request: Generate, spans: list[VersionSpan], interval: int | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of a request, of ``interval`` tokens; ``spans`` takes what the server says at its end."""
        # An id that the model does not have ends the server, with all its requests.
        check(request, self._max_len, self._vocabulary)
        base = await self._base()
        # The server aborts every request whose id begins with the one named.
        rid = f"{request.request or 'r'}/{next(self._numbers)}/"
        body = self._body(request, rid)
        body["sampling_params"]["stream_interval"] = interval
        if not self._running:
            self._busy_since = time.monotonic()
        self._running[rid] = request.request
        said, ended = 0, False
        try:
            async with self._client.stream("POST", f"{base}/generate", json=body) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    piece = self._piece(json.loads(line[6:]), said, spans)
                    self._count(piece, len(request.ids) if not said else 0)
                    said += len(piece.ids)
                    ended = piece.finish is not None
                    yield piece
            if not ended:
                raise EngineDownError("the stream of SGLang broke off")
        except _GONE as error:
            raise self._gone(error) from error
        finally:
            del self._running[rid]
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since
            if not ended:
                await self._forget(rid)

    async def _forget(self, rid: str) -> None:
        """Have the server drop a request; with a server that has gone it is gone already."""
        base = self._url if self._server is None else self._server.url
        if base is not None:
            with contextlib.suppress(*_GONE):
                await self._client.post(f"{base}/abort_request", json={"rid": rid}, timeout=5)

    def _piece(self, said: dict[str, Any], before: int, spans: list[VersionSpan]) -> Piece:
        if "error" in said:
            raise _refused(400, json.dumps(said["error"]))
        meta = said["meta_info"]
        ids, logprobs = said["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]]
        if len(ids) > meta["completion_tokens"] - before:
            # A foreign server may repeat in each piece what it has said.
            ids, logprobs = ids[before:], logprobs[before:]
        if not len(ids) == len(logprobs) == sum(lp is not None and math.isfinite(lp) for lp in logprobs):
            raise FloatingPointError(
                f"got log-probabilities {logprobs} for ids {ids} under policy version {meta['weight_version']}, "
                "expected a finite one for each; load weights that have not diverged"
            )
        finish = _finish(meta["finish_reason"])
        if finish is not None:
            spans += [VersionSpan(_number(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions", ())]
        own = (VersionSpan(_number(meta["weight_version"]), 0, len(ids)),) if ids else ()
        return Piece(ids, logprobs, own, finish, meta.get("cached_tokens", 0))

    def _count(self, piece: Piece, prompt: int) -> None:
        self._counts["decode_tokens"] += len(piece.ids)
        if prompt:
            self._counts["requests"] += 1
            self._counts["cached_tokens"] += piece.cached_tokens
            self._counts["prefill_tokens"] += prompt - piece.cached_tokens

    def _body(self, request: Generate, rid: str) -> dict[str, Any]:
        ids = np.asarray(request.ids).tolist()
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_new_tokens": min(request.max_tokens, self._max_len - len(ids)),
            "stop_token_ids": list(request.stop_ids),
        }
        return {"rid": rid, "input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True}

    async def _swap(self, new: Held) -> None:
        mode = "in_place" if self._keep_cache else "retract"
        await self._post("/pause_generation", {"mode": mode})
        try:
            await self._send(new)
        finally:
            if not self._paused:
                await self._post("/continue_generation", {})

    async def _send(self, new: Held, base: str | None = None) -> None:
        flush = not self._keep_cache
        if new.path is None or self._transport == "disk":
            path = str(new.path or self._model)
            disk = {"model_path": path, "weight_version": str(new.version), "flush_cache": flush}
            await self._post("/update_weights_from_disk", disk, base)
            return
        tensors = await asyncio.to_thread(published.read, new.path)
        await self._post("/begin_weight_update", {}, base)
        try:
            for last, bucket in buckets(tensors):
                body: dict[str, Any] = {"serialized_named_tensors": [bucket], "flush_cache": flush and last}
                if last:
                    body["weight_version"] = str(new.version)
                await self._post("/update_weights_from_tensor", body, base)
        finally:
            await self._post("/end_weight_update", {}, base)

    async def _put_back(self) -> None:
        """The old weights again; a server that does not take them is started anew, with them."""
        try:
            await self._swap(self._weights)
        except ValueError:
            if self._server is None:
                raise
            await self._server.restart()

    async def _prepare(self, base: str) -> None:
        """Bring a server that has come up to the newest weights, or where those are not whole to those in use."""
        if self._weights.path is not None:
            self._weights = await asyncio.to_thread(self._fitting.newest, self._weights)
            await self._send(self._weights, base)
        elif self._weights.version:
            await self._post("/update_weight_version", {"new_version": str(self._weights.version)}, base)
        if self._paused:
            await self._post("/pause_generation", {"mode": "retract"}, base)

    async def _base(self) -> str:
        if self._server is not None:
            return await self._server.ready()
        assert self._url is not None
        if not self._adopted:
            async with self._adopting:
                if not self._adopted:
                    await self._adopt(self._url)
                    self._adopted = True
        return self._url

    async def _adopt(self, base: str) -> None:
        """See that a foreign server is one that can be used, and bring it to the weights in use."""
        info = _json(await self._request("GET", "/server_info", None, base))
        if not isinstance(info, dict) or not info.get("skip_tokenizer_init"):
            raise ValueError(
                f"engine.sglang.url: got a server at {base} that is not SGLang with --skip-tokenizer-init, expected "
                "one; start it so, and with --incremental-streaming-output"
            )
        await self._prepare(base)

    async def _post(self, path: str, body: Mapping[str, Any], base: str | None = None) -> None:
        """Raises ``ValueError`` with the server's word where it refuses."""
        response = await self._request("POST", path, body, base)
        said = _json(response)
        if response.status_code != 200 or not isinstance(said, dict) or said.get("success") is False:
            raise ValueError(f"SGLang refuses {path}: {response.text[:500]}")

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, base: str | None = None
    ) -> httpx.Response:
        base = base or await self._base()
        try:
            return await self._client.request(method, base + path, json=body)
        except _GONE as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> EngineDownError:
        if self._server is not None:
            self._server.doubt()
        self._adopted = False
        return EngineDownError(f"SGLang is gone: {type(error).__name__}")


def _json(response: httpx.Response) -> Any:
    """What the server says; None where it is not JSON, which SGLang would have sent."""
    try:
        return response.json()
    except ValueError:
        return None


def _refused(status: int, text: str) -> Exception:
    if status == 400:
        return ValueError(f"SGLang refuses the request: {text[:500]}")
    return EngineDownError(f"SGLang answers {status}: {text[:500]}")


def _certain(pieces: list[Piece]) -> list[Piece]:
    """What came before the version changed: a piece that was sent after an update may hold tokens of before."""
    versions = [span.version for piece in pieces for span in piece.versions]
    return [piece for piece in pieces if all(span.version == versions[0] for span in piece.versions)]


def _finish(reason: dict[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    if reason["type"] == "abort" and reason.get("err_type"):
        raise ValueError(f"SGLang refuses the request: {reason.get('message')}")
    return {"stop": "stop", "length": "length"}.get(reason["type"], "abort")  # type: ignore[return-value]


def _number(version: str) -> int:
    """Versions are numbers here; a foreign server's name for its weights is 0."""
    return int(version) if version.isdigit() else 0
