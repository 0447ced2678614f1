"""The process of an SGLang server: started, watched, and started again when it dies.

Invariant: no process of it outlives its owner, unless that is killed while the server still starts; while ``url`` is
not None the server has answered since its last start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engines.base import EngineDownError
from actors.ports import free_port
from envs.sandbox import reaper

logger = logging.getLogger(__name__)

_STARTS = 3
"""Starts in a row of which none came to serve, after which it is given up; one that has never served gets one."""
_POLL_S = 0.25
_STOP_S = 20.0
_PROBE_S = 15.0
"""Seconds between two looks at a server that serves."""
_SILENT_S = 30.0
"""A server that does not answer for so long is ended."""
_MORE = 8
"""Tokens that SGLang keeps of its context to itself, with some to spare."""
_STANDIN = Path(__file__).parent / "cpu_standin"
_CPU = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule")


class EngineGaveUpError(RuntimeError):
    """The server does not come up; the message says why."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with. ``args`` come last and so win over what is set here."""

    python: Path
    """Interpreter of an environment that has SGLang; it may be another than the one that this runs in."""
    model: Path
    log: Path
    """File that the server's output is added to."""
    dtype: str = "float32"
    device: str = "cpu"
    max_len: int = 2048
    threads: int = 1
    """Of the server on a CPU."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    args: tuple[str, ...] = ()
    start_s: float = 900.0
    """Seconds in which a start must come to serve."""

    def command(self, port: int) -> list[str]:
        config = AutoConfig.from_pretrained(self.model, local_files_only=True)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and self.max_len > positions:
            raise ValueError(
                f"got max_len {self.max_len}, expected at most the {positions} positions of the model in {self.model}; "
                "lower engine.max_len"
            )
        own: dict[str, object] = {
            "model-path": self.model,
            "dtype": self.dtype,
            "device": "cpu" if self.device == "cpu" else "cuda",
            "context-length": self.max_len + _MORE,
            "tp-size": self.tp,
            "pp-size": self.pp,
            "dp-size": self.dp,
            "host": "127.0.0.1",
            "port": port,
            "weight-version": 0,
            "stream-interval": 8,
            "log-level": "warning",
        }
        if config.architectures is None:
            # Transformers finds the class by the model's type, SGLang only by this.
            own["json-model-override-args"] = json.dumps(
                {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
            )
        named = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        switches = ["--skip-tokenizer-init", "--incremental-streaming-output", "--sleep-on-idle"]
        where = _CPU if self.device == "cpu" else ("--base-gpu-id", self.device.partition(":")[2] or "0")
        return [str(self.python), "-m", "sglang.launch_server", *named, *switches, *where, *self.args]

    def environment(self) -> dict[str, str]:
        # The few tokens over the model's positions are never reached.
        more = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if self.device == "cpu":
            paths = [str(_STANDIN), os.environ.get("PYTHONPATH", "")]
            more |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": ":".join(filter(None, paths))}
            more |= {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "passive"}
        return {**os.environ, **more}


@dataclass(eq=False)
class SGLangServer:
    """``prepare`` is called with the URL of a server that has come up, before it is used."""

    launch: Launch
    prepare: Callable[[str], Awaitable[None]]
    url: str | None = None
    restarts: int = 0
    _process: asyncio.subprocess.Process | None = None
    _watch: asyncio.Task[None] | None = None
    _doubted: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _failure: EngineGaveUpError | None = None

    @property
    def failed(self) -> bool:
        """Whether it has been given up."""
        return self._failure is not None

    @property
    def pid(self) -> int:
        """Of the process that keeps the server's processes together; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    async def ready(self) -> str:
        """The URL, when the server serves. Starts it at the first call. Raises ``EngineGaveUpError``."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep())
        async with self._changed:
            await self._changed.wait_for(lambda: self.url is not None or self._failure is not None)
        if self.url is None:
            assert self._failure is not None
            raise self._failure
        return self.url

    async def stop(self) -> None:
        """End the server and all its processes. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        # Nobody is to wait for a server that does not come back.
        await self._tell(None, EngineGaveUpError("the engine is closed"))
        await self._end()

    def doubt(self) -> None:
        """Say that it did not answer as it should: it is not ``ready`` again before it has been seen to serve."""
        self.url = None
        self._doubted.set()

    async def restart(self) -> None:
        """Replace a server that cannot be trusted any more."""
        await self._tell(None)
        await self._end()

    async def _keep(self) -> None:
        failed, most = 0, 1
        while failed < most:
            try:
                serving = await self._start()
            except Exception as error:
                # Whatever it is, whoever waits must hear of it.
                failed += 1
                logger.error("start %d of SGLang failed: %s", failed, error)
                await self._end()
                if failed == most:
                    await self._tell(None, EngineGaveUpError(f"SGLang did not come up: {error}"))
                continue
            failed, most = 0, _STARTS
            code = await self._serves(*serving)
            logger.warning("SGLang ended with code %d and is started again", code)
            self.restarts += 1

    async def _serves(self, process: asyncio.subprocess.Process, url: str) -> int:
        """The code with which the server ended; one that is doubted and does not answer is ended."""
        ended = asyncio.create_task(process.wait())
        while not ended.done():
            doubt = asyncio.create_task(self._doubted.wait())
            await asyncio.wait({ended, doubt}, return_when=asyncio.FIRST_COMPLETED, timeout=_PROBE_S)
            doubt.cancel()
            if self._doubted.is_set() or ended.done():
                self.url = None
                self._doubted.clear()
            if not ended.done():
                try:
                    # Its health is no sign of life: a server that is paused has none.
                    await asyncio.wait_for(self._answers(url, process, "/model_info"), _SILENT_S)
                    await self._tell(url)
                except (TimeoutError, EngineDownError):
                    await self._end()
        return await ended

    async def _start(self) -> tuple[asyncio.subprocess.Process, str]:
        port = free_port()
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        with self.launch.log.open("ab") as log:
            # Spawned in the loop's own thread: the kernel tells the reaper when the thread that made it ends.
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), "[]"),
                *self.launch.command(port),
                env=self.launch.environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            await asyncio.wait_for(self._answers(url, process), self.launch.start_s)
        except TimeoutError:
            raise EngineDownError(
                f"no answer within {self.launch.start_s:g} s; look at {self.launch.log}, or raise engine.sglang.start_s"
            ) from None
        await self.prepare(url)
        await self._tell(url)
        return process, url

    async def _answers(self, url: str, process: asyncio.subprocess.Process, path: str = "/health") -> None:
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while True:
                if process.returncode is not None:
                    raise EngineDownError(
                        f"the server ended with code {process.returncode}: {_last_error(self.launch.log)}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(path)).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)

    async def _tell(self, url: str | None, failure: EngineGaveUpError | None = None) -> None:
        async with self._changed:
            self.url, self._failure = url, failure
            self._changed.notify_all()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    errors = [line for line in lines[-200:] if "Error" in line]
    return f"{(errors or lines)[-1].strip()[:300]} (all of it in {log})"
