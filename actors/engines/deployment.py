"""The engine as a Ray Serve deployment.

Invariant: a replica begins with the newest published weights, so that one that was restarted serves
the current policy and says so in every version span.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.engines import weights as published
from actors.engines.base import Engine, EngineStats, Generate, Generated, Piece
from actors.engines.board import follow
from actors.engines.locate import interpreter
from actors.engines.steady import SteadyEngine
from actors.routing import SessionRouter
from configs.schema import EngineConfig, UpdateConfig


@serve.deployment(
    request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
    max_ongoing_requests=4096,
    # Calls that wait for a replica that died wait for the next check.
    health_check_period_s=1,
    graceful_shutdown_timeout_s=2,
)
class EngineServer:
    """An engine behind a Serve handle; the methods are those of ``Engine``.

    Args:
        path: folder of the model as it was before the first training step (version 0).
        config, update: which engine, and how it comes to new weights.
        weights: folder that the learner publishes to (``actors.engines.weights``); None for a fixed model.
        board: handle of the ``WeightsBoard`` that tells of new weights; None: only ``load_weights`` does.
        logs: folder for what servers say; None takes the working folder of the replica.
    """

    async def __init__(  # type: ignore[misc]  # Serve waits for it
        self,
        path: Path,
        config: EngineConfig,
        update: UpdateConfig | None = None,
        *,
        weights: Path | None = None,
        board: Any = None,
        logs: Path | None = None,
    ) -> None:
        update = update or UpdateConfig()
        version, folder = (published.latest(weights) if weights is not None else None) or (0, None)
        self._name = name = serve.get_replica_context().replica_id.unique_id
        inner = await asyncio.to_thread(_make, path, config, update, version, folder, logs or Path(), name)
        self._engine = SteadyEngine(inner, update.mode)
        await self._engine.ready()
        self._following = asyncio.create_task(follow(board, name, self._engine, version)) if board is not None else None

    async def generate(self, request: Generate) -> Generated:
        return await self._engine.generate(request)

    async def stream(self, request: Generate) -> AsyncGenerator[Piece, None]:
        async for piece in self._engine.stream(request):
            yield piece

    async def abort(self, request: str) -> None:
        await self._engine.abort(request)

    async def load_weights(self, version: int, path: Path) -> None:
        await self._engine.load_weights(version, path)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def stats(self) -> tuple[str, EngineStats]:
        """The name of this replica, and its counters."""
        return self._name, await self._engine.stats()

    async def health(self) -> dict[str, int]:
        """``replica``: its process; ``pid``: of the process that samples; ``version``: of the policy in use."""
        return {"replica": os.getpid(), **asdict(await self._engine.health())}

    async def check_health(self) -> None:
        """Serve's own question: a replica that cannot sample any more is replaced. One whose server is just being
        started again can.
        """
        if not self._engine.alive:
            raise RuntimeError("got an engine that has ended, expected a running one; Serve starts another replica")

    async def __del__(self) -> None:
        await self._engine.close()


def bound(
    model: Path,
    config: EngineConfig,
    update: UpdateConfig | None = None,
    *,
    weights: Path | None = None,
    board: Any = None,
    logs: Path | None = None,
    beside: float = 0,
) -> Any:
    """The Serve application of an engine, with as many replicas and GPUs as the settings say.

    ``beside``: GPUs that others of the run take. Raises ``RuntimeError`` where the cluster has not so many: Ray would
    wait for them without an end.
    """
    wanted, there = beside + config.replicas * config.each_gpus, ray.cluster_resources().get("GPU", 0)
    if wanted > there:
        raise RuntimeError(
            f"learner and engines want {wanted:g} GPUs and the Ray cluster has {there:g}: use cpu as a device, fewer "
            "engine.replicas, or say in learner.gpus and engine.gpus what share each may take"
        )
    if config.kind == "sglang" and config.sglang.url is None:
        found = config.sglang.model_copy(update={"python": interpreter(config.sglang)})
        config = config.model_copy(update={"sglang": found})
    return (
        cast(Any, EngineServer)
        .options(num_replicas=config.replicas, ray_actor_options={"num_cpus": 0, "num_gpus": config.each_gpus})
        .bind(model, config, update, weights=weights, board=board, logs=logs)
    )


def _make(
    path: Path, config: EngineConfig, update: UpdateConfig, version: int, folder: Path | None, logs: Path, name: str
) -> Engine:
    if config.kind == "transformers":
        from actors.engines.transformers import TransformersEngine

        own = {name: getattr(config, name) for name in ("threads", "slots", "max_len", "dtype", "device")}
        return TransformersEngine(path, version=version, weights=folder, **own)
    from actors.engines.sglang import SGLangEngine
    from actors.engines.sglang_server import Launch

    launch = Launch(
        python=config.sglang.python or interpreter(config.sglang),
        model=path,
        log=logs / f"sglang-{name}.log",
        dtype=config.dtype,
        device=config.device,
        max_len=config.max_len,
        threads=config.threads,
        tp=config.sglang.tp,
        pp=config.sglang.pp,
        dp=config.sglang.dp,
        args=tuple(config.sglang.args),
        start_s=config.sglang.start_s,
    )
    return SGLangEngine(
        launch,
        url=config.sglang.url,
        version=version,
        weights=folder,
        transport=update.transport,
        keep_cache=update.keep_cache,
    )
