"""Starting and stopping the parts of a run on Ray.

Invariant: what ``started`` starts is gone when it ends, however it ends; a Ray cluster that was there before
stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster import Cluster
from actors.engines.board import WeightsBoard
from actors.engines.deployment import bound
from actors.handles import Builders, HandleEngine, HandleProxy, LearnerByName
from actors.learner_group import LearnerGroup, LearnerRank
from actors.proxy import Proxy
from actors.sandbox import SandboxActor
from actors.tree_builder import TreeBuilderActor
from configs.schema import RunConfig
from envs.sandbox.aio import uninterrupted
from envs.sandbox.gc import start_time

APP = "reins"
_PREFIX = "reins-"
_OWNER = "owner"
_T = TypeVar("_T")
_ERROR_LINE = re.compile(r"[A-Za-z_.]*(Error|Exception)\b.*:")


class StartError(RuntimeError):
    """A part could not be started; the message holds its own word for why."""


@asynccontextmanager
async def started(config: RunConfig, run_dir: Path, model: Path, start: int = 0) -> AsyncIterator[Cluster]:
    """All parts, up and answering, at version ``start``: that of the newest checkpoint in the run folder, 0 for none.

    ``model``: the policy's folder. Where ``config.steps`` is 0 there is no learner. Raises StartError.
    """
    run_dir, model = run_dir.resolve(), model.resolve()
    if config.sandbox.root is not None:
        config.sandbox.root.mkdir(parents=True, exist_ok=True)
    _sweep(Path(config.sandbox.root or tempfile.gettempdir()))
    rooms = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=config.sandbox.root))
    (rooms / _OWNER).write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
    ours = "RAY_ADDRESS" not in os.environ
    actors: list[Any] = []
    try:
        await uninterrupted(asyncio.to_thread(connect))
        try:
            cluster = await uninterrupted(_start(config, run_dir, model, start, rooms, actors))
        except StartError:
            raise
        except (RayError, RuntimeError) as error:
            raise StartError(cause(error, APP)) from error
        yield cluster
    finally:
        await asyncio.shield(asyncio.to_thread(_stop, rooms, actors, ours))


def _sweep(parent: Path) -> None:
    """Remove what runs that were killed have left; their processes are gone with them, or with their wardens."""
    for base in parent.glob(_PREFIX + "*"):
        owner = base / _OWNER
        if owner.is_file():
            pid, _, started = owner.read_text().strip().partition(" ")
            if not pid.isdigit() or start_time(int(pid)) != started:
                shutil.rmtree(base, ignore_errors=True)


def cause(error: Exception, app: str) -> str:
    """The one line of a failed start of a Serve application that says why: Ray and Serve hide it below their own."""
    text = str(error)
    if serve.context._get_global_client(raise_if_no_controller_running=False) is not None:
        found = serve.status().applications.get(app)
        for part in found.deployments.values() if found is not None else ():
            text = part.message if "Error" in part.message else text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if _ERROR_LINE.match(line)]
    return f"the parts could not be started: {(told or lines or [type(error).__name__])[-1]}"


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine. Raises StartError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # On a slow or busy machine a node takes longer than the 30 s that Ray gives it.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Workers inherit it. uvloop forks with Python's handlers for a child that goes on as Python. One of them takes a
    # lock that another thread may have held at the fork: now and then a child waited for ever, and the worker for it.
    os.environ.setdefault("RAY_USE_UVLOOP", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises that very class
        raise StartError(f"Ray could not be started: {' '.join(str(error).split())}") from error


async def _start(config: RunConfig, run_dir: Path, model: Path, start: int, rooms: Path, actors: list[Any]) -> Cluster:
    ranks = _ranks(config, run_dir, model, f"{rooms.name}-learner") if config.steps else []
    learner = LearnerGroup(ranks) if ranks else None
    sink = LearnerByName(f"{rooms.name}-learner-0") if ranks else None
    shards = [
        ray.remote(TreeBuilderActor).options(num_cpus=0, max_restarts=-1).remote(run_dir, sink, config.trees)
        for _ in range(config.trees.builders)
    ]
    builders = Builders(shards)
    board = ray.remote(WeightsBoard).options(num_cpus=0, max_restarts=-1).remote()
    actors += [*ranks, *shards, board]
    proxy, engine = await _loaded_and_served(
        learner, run_dir / "weights", start, lambda: _serve(config, run_dir, model, builders, board, rooms)
    )
    sandboxes = [
        ray.remote(SandboxActor)
        .options(num_cpus=0, max_restarts=-1, max_concurrency=4 * config.sandbox.concurrency + 8)
        .remote(config, rooms / "rooms", proxy)
        for _ in range(config.sandbox.actors)
    ]
    actors += sandboxes
    await asyncio.gather(*(actor.ping.remote() for actor in actors))
    return Cluster(run_dir, engine, proxy, builders, learner, sandboxes)


async def _loaded_and_served(learner: LearnerGroup | None, weights: Path, start: int, serving: Callable[[], _T]) -> _T:
    """What ``serving`` returns, with the learner, if there is one, at version ``start`` and no engine at any other.

    An engine begins with the newest weights that are published and never goes back. Where a killed run has published
    some after its last checkpoint, the learner must have published its own before an engine looks; otherwise both can
    start at the same time. Raises StartError.
    """
    if learner is None:
        return await asyncio.to_thread(serving)
    loading = asyncio.create_task(learner.load())
    try:
        if (weights / "LATEST").exists():
            _at_start(await loading, start)
        served = await asyncio.to_thread(serving)
        _at_start(await loading, start)
        return served
    finally:
        loading.cancel()


def _at_start(version: int, start: int) -> None:
    if version != start:
        raise StartError(
            f"the learner loaded the checkpoint of step {version}, expected that of step {start}, with which the run "
            "goes on: the checkpoints changed meanwhile, or another machine sees others; check the run folder and "
            "--resume again"
        )


def _ranks(config: RunConfig, run_dir: Path, model: Path, name: str) -> list[Any]:
    """An actor for each rank of the learner, called ``name-RANK``; those with GPUs as near to each other as can be."""
    gpus = config.learner.each_gpus
    count = config.learner.ranks
    options: list[dict[str, Any]] = [{} for _ in range(count)]
    if gpus and count > 1:
        group = placement_group([{"GPU": gpus}] * count, strategy="PACK")
        options = [
            {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)}
            for i in range(count)
        ]
    return [
        ray.remote(LearnerRank)
        .options(num_cpus=0, num_gpus=gpus, max_restarts=-1, name=f"{name}-{rank}", **options[rank])
        .remote(
            model,
            run_dir,
            config.learner,
            rank,
            total_steps=config.steps,
            seed=config.seed,
            keep=config.checkpoint.keep,
            keep_best=config.checkpoint.keep_best,
        )
        for rank in range(count)
    ]


def _serve(
    config: RunConfig, run_dir: Path, model: Path, builders: Builders, board: Any, rooms: Path
) -> tuple[HandleProxy, HandleEngine | None]:
    """The proxy, and what steers its engine: None where an endpoint samples."""
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    # Sandboxes come through Unix sockets, everybody else by handles: there is nobody for a port of Serve's.
    serve.start(proxy_location="Disabled", logging_config=quiet)
    foreign = config.engine.kind == "endpoint"
    engine = bound(
        model,
        config.engine,
        config.update,
        weights=run_dir / "weights",
        board=board,
        logs=run_dir / "engine",
        beside=config.learner.each_gpus * config.learner.ranks if config.steps else 0,
    )
    app = (
        cast(Any, Proxy)
        .options(num_replicas=config.proxy.replicas)
        .bind(
            config.proxy,
            model,
            config.engine.endpoint if foreign else engine,
            builders,
            config.engine.max_len,
            renderer=config.model.renderer,
            socket_dir=rooms / "api",
            log_dir=rooms / "calls",
        )
    )
    proxy = HandleProxy(serve.run(app, name=APP, logging_config=quiet), config.proxy.replicas)
    if foreign:
        return proxy, None
    handle = serve.get_deployment_handle("EngineServer", APP)
    return proxy, HandleEngine(handle, board, config.engine.replicas)


def _stop(rooms: Path, actors: list[Any], ours: bool) -> None:
    if not ours and ray.is_initialized():
        serve.delete(APP)
        for actor in actors:
            ray.kill(actor)
    ray.shutdown()
    shutil.rmtree(rooms, ignore_errors=True)
