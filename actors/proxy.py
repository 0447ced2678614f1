"""The serving proxy: the model API that a harness believes it talks to.

Invariants: the key is the session, and without the key of an open session nothing is answered but
``/health``; an answer starts only when the completion is final, until then a stream carries comments; what
goes wrong in the engine is not the harness's business.

The same app is served twice: through Ray Serve, and by the replica itself on a Unix socket, which is what
sandboxes use: one hop less, and a session stays with its replica because the socket does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from actors.dispatch import Dispatcher, Running, Sink
from actors.engines.base import Generate, Generated, Sampler
from actors.engines.endpoint import EndpointEngine
from actors.journal import Journal
from actors.rendering import RendererName, Rendering
from actors.routing import SessionRouter
from actors.session_contract import SessionSpec, Summary
from actors.session_key import IN_PATH, carried, redacted
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig
from configs.schema import EndpointConfig
from envs.protocols import canonical, wire
from envs.protocols.base import Route, WireProtocol
from envs.protocols.errors import WireError
from envs.protocols.registry import HEADERS, PROTOCOLS, spoken

logger = logging.getLogger(__name__)

MODEL = "policy"
_THREAD_BYTES = 1 << 20
"""Bodies from this size on are read and rendered in a thread, so that pings and other calls go on."""
_PATH_SHOWN = 200
_EVENT_STREAM = "text/event-stream; charset=utf-8"


def build_app(dispatcher: Dispatcher, at_end: Callable[[], Awaitable[None]] | None = None) -> FastAPI:
    """The HTTP side of a dispatcher. ``at_end`` is awaited when the app's lifespan ends.

    Every path is there twice, the second time under ``/s/KEY`` for clients that cannot send a key of their own.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        if at_end is not None:
            await at_end()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)

    async def health(request: Request) -> Response:  # noqa: ARG001
        return JSONResponse({"status": "ok"})

    async def wire_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, WireError)
        return _error(_spoken(request), error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {_shown(request)}: {error.detail}"
        return _error(_spoken(request), WireError(error.status_code, message, "unknown_url"))

    async def bug(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, _shown(request), exc_info=error)
        return _error(_spoken(request), _bug())

    app.add_route("/health", health, methods=["GET"])
    taken: dict[tuple[str, str], list[WireProtocol]] = {}
    for protocol in PROTOCOLS:
        for route in protocol.ROUTES:
            same = taken.setdefault((route.method, route.path), [])
            same.append(protocol)
            if len(same) == 1:
                handler = _handler(dispatcher, route, same)
                app.add_route(route.path, handler, methods=[route.method])
                app.add_route("/s/{session_key}" + route.path, handler, methods=[route.method])
    app.add_exception_handler(WireError, wire_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
    return app


def _handler(
    dispatcher: Dispatcher, route: Route, protocols: list[WireProtocol]
) -> Callable[[Request], Awaitable[Response]]:
    """What answers a route. A path that several protocols have is answered by the one that the headers speak."""

    async def handle(request: Request) -> Response:
        protocol = protocols[0]
        if len(protocols) > 1 and _spoken(request) in protocols:
            protocol = _spoken(request)
        hosted = dispatcher.find(carried(request.scope))
        if route.action == "models":
            return JSONResponse(protocol.models((MODEL,)))
        if route.action == "model":
            return JSONResponse(protocol.model(request.path_params["model"]))
        try:
            body = await _body(request, dispatcher.config)
        except ClientDisconnect:
            return Response(status_code=499)
        params = {**request.query_params, **request.path_params, **route.params}
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        large = len(body) >= _THREAD_BYTES
        try:
            asked = await asyncio.to_thread(_parse, protocol, body, params) if large else _parse(protocol, body, params)
            asked = replace(asked, headers=headers, protocol=protocol.NAME)
            if route.action == "count":
                return JSONResponse(protocol.count(await dispatcher.count(hosted, asked, threaded=large)))
            running = await dispatcher.start(hosted, asked, threaded=large)
        except RecursionError as error:
            raise WireError(400, "body: arguments or tools nest too deeply", "invalid_value") from error
        return Answer(dispatcher, running, protocol, asked)

    return handle


class Answer(Response):
    """Waits for a call and tells its end in the protocol; aborts the call when the client leaves first."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        running: Running,
        protocol: WireProtocol,
        request: canonical.Request,
    ) -> None:
        self.background = None
        self._dispatcher = dispatcher
        self._running = running
        self._protocol = protocol
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_client_left(receive))
        try:
            await self._answer(scope, receive, send, gone)
        finally:
            gone.cancel()
            if not self._running.task.done():
                self._dispatcher.abort(self._running)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None]) -> None:
        task = self._running.task
        started = False
        while not task.done():
            timeout = self._dispatcher.config.ping_s if self._request.stream else None
            await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                break
            if gone.done():
                return
            if not started:
                await send(self._start())
                started = True
            await send(_part(self._protocol.PING, more=True))
        error = task.exception()
        if error is None:
            await self._reply(scope, receive, send, started)
        elif started:
            if not isinstance(error, WireError):
                logger.error("a call failed in the middle of its stream", exc_info=error)
                error = _bug()
            await send(_part(self._protocol.error_event(_told(error)), more=False))
        elif not isinstance(error, WireError):
            raise error
        else:
            await _error(self._protocol, error)(scope, receive, send)

    async def _reply(self, scope: Scope, receive: Receive, send: Send, started: bool) -> None:
        reply = self._running.task.result()
        if not self._request.stream:
            await JSONResponse(self._protocol.dump(reply, self._request))(scope, receive, send)
            return
        if not started:
            await send(self._start())
        whole = b"".join(self._protocol.stream(reply, self._request))
        await send(_part(whole, more=False))

    def _start(self) -> Message:
        """The head of a stream; a protocol whose streams are no events names their type in the request."""
        kind = self._request.wire.get("content_type", _EVENT_STREAM).encode()
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _spoken(request: Request) -> WireProtocol:
    return spoken(IN_PATH.sub("", request.scope["path"]), request.headers)


def _shown(request: Request) -> str:
    """The path as it may be logged and told: on one line and without a key."""
    return redacted(IN_PATH.sub("/s/...", request.scope["path"]))[:_PATH_SHOWN].encode("unicode_escape").decode()


async def _body(request: Request, config: ProxyConfig) -> bytes:
    """The body; one that is too large is still read to its end, so that the client hears the answer."""
    most = int(config.max_body_mb * (1 << 20))
    size = 0
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(config.body_wait_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    chunks.append(chunk)
                elif size > 4 * most:
                    break
                else:
                    chunks.clear()
    except TimeoutError:
        message = f"body: not complete after {config.body_wait_s:g} s; {size} bytes came"
        raise WireError(408, message, "request_timeout") from None
    if size > most:
        raise WireError(413, f"body: got {size} bytes, expected at most {most}", "request_too_large")
    return b"".join(chunks)


def _parse(protocol: WireProtocol, body: bytes, params: Mapping[str, str]) -> canonical.Request:
    return protocol.parse(wire.read(body), params)


def _error(protocol: WireProtocol, error: WireError) -> JSONResponse:
    # The official clients repeat 429 and 5xx unless told not to; most of what is told here does not get better.
    headers = {"x-should-retry": "false"} if error.status in (408, 429) or error.status >= 500 else {}
    if error.retry_after is not None:
        headers = {"retry-after": f"{error.retry_after:g}"}
    status = protocol.STATUS.get(error.status, error.status)
    return JSONResponse(protocol.error(_told(error)), status_code=status, headers=headers)


def _told(error: WireError) -> WireError:
    """The error without a key in its message, wherever in a request it stood."""
    error.message = redacted(error.message)
    return error


def _bug() -> WireError:
    return WireError(500, "internal error", "internal_error")


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
