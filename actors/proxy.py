"""The serving proxy: the model API that a harness believes it talks to, as a deployment.

The same app is served twice: through Ray Serve, and by the replica itself on a Unix socket, which is what
sandboxes use: one hop less, and a session stays with its replica because the socket does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import Receive, Scope, Send

from actors.api import build_app
from actors.dispatch import Dispatcher, Sink
from actors.engines.base import Generate, Generated, Sampler
from actors.engines.endpoint import EndpointEngine
from actors.journal import Journal
from actors.rendering import RendererName, Rendering
from actors.routing import SessionRouter
from actors.session_contract import SessionSpec, Summary
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig
from configs.schema import EndpointConfig


class HandleEngine:
    """The engine behind a Serve handle: the calls of a session go to one replica, whose cache has its prefix."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._sessions: dict[str, str] = {}

    async def generate(self, request: Generate) -> Generated:
        self._sessions[request.request] = request.session
        try:
            return await self._handle.options(session_id=request.session).generate.remote(request)
        finally:
            self._sessions.pop(request.request, None)

    async def abort(self, request: str) -> None:
        if request in self._sessions:
            await self._handle.options(session_id=self._sessions[request]).abort.remote(request)


@serve.deployment(
    request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
    max_ongoing_requests=4096,
    ray_actor_options={"num_cpus": 0},
    # A replica that stands in for one that died listens from its first check on.
    health_check_period_s=1,
    # Serve waits at least one loop before it lets a replica clean up, and then kills it at the timeout.
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=5,
)
@serve.ingress()
class Proxy:
    """The deployment: HTTP by Serve and by a Unix socket, sessions by handle."""

    def __init__(
        self,
        config: ProxyConfig,
        tokenizer: Path,
        engine: Sampler | DeploymentHandle | EndpointConfig,
        sink: Sink,
        context: int,
        renderer: RendererName = "auto",
        socket_dir: Path | None = None,
        log_dir: Path | None = None,
    ) -> None:
        """``tokenizer``: its folder. ``engine``: settings of an endpoint have the replica ask that itself.
        ``context``: the engine's longest sequence. ``socket_dir``: where the sockets of all replicas are; None takes
        a temporary folder. ``log_dir``: where the replicas keep the logs of sessions for each other; None keeps none.
        """
        rendering = Rendering(tokenizer, renderer)
        if isinstance(engine, EndpointConfig):
            engine = EndpointEngine(engine, rendering)
        elif isinstance(engine, DeploymentHandle):
            engine = HandleEngine(engine)
        self._sampler = engine
        journal = None if log_dir is None else Journal(log_dir)
        self._dispatcher = Dispatcher(config, rendering, engine, sink, context, journal)
        self._socket = SocketServer(socket_dir)
        self._asgi = build_app(self._dispatcher, at_end=self._stop)

    async def _stop(self) -> None:
        await self._socket.stop()
        if isinstance(self._sampler, EndpointEngine):
            await self._sampler.close()

    def __serve_build_asgi_app__(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        return self._asgi

    async def check_health(self) -> None:
        """Serve's own question; from the first one on the replica listens."""
        await self._socket.start(self._asgi)

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        """``key`` for the harness, and ``socket``: the path under which this replica listens."""
        socket = await self._socket.start(self._asgi)
        return {"key": await self._dispatcher.open(spec), "socket": str(socket)}

    async def close_session(self, key: str) -> Summary:
        """End a session: late calls get 401, what runs is aborted, all records are handed over."""
        return await self._dispatcher.close(key)

    async def since_call(self, key: str) -> float:
        """Seconds since the last call of a session ended; 0 while one runs."""
        return self._dispatcher.since_call(key)

    async def resend(self, session: str) -> int:
        """Hand all records of a session over again; returns how many."""
        return await self._dispatcher.resend(session)

    async def discard(self, session: str) -> None:
        """Close a session if it is open, and forget it."""
        await self._dispatcher.discard(session)

    async def stats(self) -> tuple[str, dict[str, float]]:
        """The name of this replica, and its counters since start and what is there now."""
        return serve.get_replica_context().replica_id.unique_id, self._dispatcher.stats()
