"""The model API over HTTP: what turns the requests of a harness into calls of a dispatcher.

Invariants: the key is the session, and without the key of an open session nothing is answered but
``/health``; an answer starts only when the completion is final, until then a stream carries comments; what
goes wrong in the engine is not the harness's business.

Apart from the deployment in ``actors/proxy.py``, so that it is served without Ray as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from actors.dispatch import Dispatcher, Running
from actors.session_key import IN_PATH, carried, redacted
from configs.proxy import ProxyConfig
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
