"""The embedded engine: a causal decoder of Transformers, batched across requests, on one model thread.

Invariant: a request's tokens are sampled one after the other from the model's own distribution under
exactly one policy version each; keys and values of one version never serve another.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.engines.base import EngineStats, Generate, Generated, Health, Piece, check
from actors.engines.batch import Batch, Running
from actors.engines.weights import fit, read

T = TypeVar("T")


class TransformersEngine:
    """Continuous batching with prefix reuse over a model in a local folder.

    Args:
        path: folder with ``config.json`` and safetensors, as ``save_pretrained`` writes it.
        version: policy version of the weights.
        weights: folder with the weights of ``version``, when they are not those in ``path``.
        slots: rows in the cache, running requests and idle prefixes together; more requests wait.
        max_len: tokens that one row can hold, prompt and sampled together.
        chunk: tokens, padding included, of one prefill call; running rows decode between two such calls.
        threads: CPU threads of the model thread.
        dtype: name of a torch float dtype.
        device: torch device.

    Raises ValueError when ``max_len`` exceeds the model's positions or the model's attention is not
    over the whole context, or ``weights`` do not fit; FileNotFoundError when they are not there.
    """

    def __init__(
        self,
        path: Path,
        *,
        version: int = 0,
        weights: Path | None = None,
        slots: int = 64,
        max_len: int = 2048,
        chunk: int = 2048,
        threads: int = 1,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), local_files_only=True, attn_implementation="sdpa"
        )
        self.model = model.to(device).eval().requires_grad_(False)
        if weights is not None:
            self.model.load_state_dict(fit(read(weights), self.model, weights), strict=False)
        self.max_len = max_len
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and max_len > positions:
            raise ValueError(
                f"got max_len {max_len}, expected at most the {positions} positions of the model in {path}; "
                f"lower max_len"
            )
        with torch.inference_mode():
            self._batch = Batch(self.model, version=version, slots=slots, max_len=max_len, chunk=chunk)
        self._threads = threads
        self._loading = asyncio.Lock()
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Generate) -> Generated:
        """Sample a continuation of ``request.ids``.

        Raises ValueError for a request that cannot be served, RuntimeError when the engine is closed, and
        whatever the model raised in a step that this request was part of. Cancelling the caller aborts.
        """
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()

        def settle(result: Generated | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        with self._asked(request, settle):
            return await answer

    async def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        """The same, token by token. Raises likewise; closing it early aborts."""
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def settle(result: Generated | Exception) -> None:
            # The tokens have been put already.
            pieces.put_nowait(result if isinstance(result, Exception) else Piece([], [], (), result.finish))

        with self._asked(request, settle, pieces.put_nowait):
            while True:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish:
                    return

    @contextlib.contextmanager
    def _asked(
        self,
        request: Generate,
        settle: Callable[[Generated | Exception], None],
        progress: Callable[[Piece], None] | None = None,
    ) -> Iterator[None]:
        """Have a request served; both callbacks run in this loop. What has not ended at the end is aborted."""
        check(request, self.max_len, self.vocabulary)
        loop = asyncio.get_running_loop()
        ended = False

        def call(callback: Callable[[Any], None]) -> Callable[[Any], None]:
            def post(value: Any) -> None:
                # A loop that has been closed meanwhile has nobody left to tell.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(callback, value)

            return post

        def end(result: Generated | Exception) -> None:
            nonlocal ended
            ended = True
            settle(result)

        seeded = None if request.seed is None else np.random.default_rng(request.seed)
        entry = Running(request, call(end), np.asarray(request.ids, np.int32), seeded, progress and call(progress))
        self._post(lambda: self._batch.add(entry))
        try:
            yield
        finally:
            if not ended:
                with contextlib.suppress(RuntimeError):
                    self._post(lambda: self._batch.abort(lambda e: e is entry))

    async def abort(self, request: str) -> None:
        """End the requests with this handle: they return what was sampled. No effect when there is none."""
        if request:
            self._post(lambda: self._batch.abort(lambda e: e.request.request == request))

    async def load_weights(self, version: int, path: Path) -> None:
        """Read and check the weights off the model thread, then swap them in between two tokens.

        Returns when they are in use. Raises FileNotFoundError or ValueError, with the old weights kept.
        An older or equal version is taken too, and counted in ``stats().extra["weight_rollbacks"]``.
        """
        # In the order of the calls: a large file must not overtake a small one.
        async with self._loading:
            loop = asyncio.get_running_loop()
            tensors = await loop.run_in_executor(None, lambda: fit(read(path), self.model, path))
            await self._in_thread(lambda: self._batch.swap_weights(version, tensors))

    async def pause(self) -> None:
        """Sample nothing more until ``resume``. Requests are taken in meanwhile, aborts and weights take effect."""
        await self._in_thread(lambda: self._batch.pause(True))

    async def resume(self) -> None:
        await self._in_thread(lambda: self._batch.pause(False))

    async def ready(self) -> None:
        """Return at once: the model is loaded before the engine is there."""

    @property
    def alive(self) -> bool:
        """Whether the model thread runs."""
        return self._thread.is_alive()

    async def health(self) -> Health:
        """Answered by the model thread."""
        return Health((await self.stats()).version, os.getpid())

    async def stats(self) -> EngineStats:
        """Counters; answered between two tokens, so this is also a sign of life of the model thread."""
        return await self._in_thread(self._batch.stats)

    async def close(self) -> None:
        """End the model thread; running and waiting requests raise RuntimeError. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _post(self, call: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise RuntimeError("got a call on a closed engine, expected an open one; start a new engine")
            self._inbox.append(call)
            self._wake.notify()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """The result of ``call`` on the model thread, between two steps."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        batch = self._batch
        with torch.inference_mode():
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._inbox or self._closed or batch.busy)
                    calls, self._inbox = self._inbox, []
                    closed = self._closed
                for work in [*calls, *([] if closed else [batch.step])]:
                    try:
                        work()
                    except Exception as error:
                        # The running requests hear of it; the engine goes on with those that wait.
                        batch.fail(error)
                if closed:
                    batch.end(RuntimeError("got close() while requests ran, expected them to end first"))
                    return
