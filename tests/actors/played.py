"""An endpoint that says what a test wants, and a desk whose engine it is."""

import asyncio
import contextlib
import json
import socket

import uvicorn
from desk import Desk, until
from starlette.responses import Response

from actors.engines.endpoint import EndpointEngine
from configs.schema import EndpointConfig


@contextlib.asynccontextmanager
async def listening(app):
    """The base URL of an app on a port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", access_log=False, log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = server.force_exit = True
    await serving


class Played:
    """An endpoint that says the lines of its script: a message, a whole answer, or a status with what belongs to it.

    ``HANG`` says nothing until the client leaves, ``BREAK`` closes the connection.
    """

    HANG, BREAK = object(), object()

    def __init__(self, *script):
        self.script = list(script)
        self.bodies, self.headers, self.left = [], [], 0

    async def __call__(self, scope, receive, send):
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part["body"]
            if not part["more_body"]:
                break
        self.bodies.append(json.loads(body))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        line = self.script.pop(0) if self.script else {"content": "done"}
        if line is self.HANG:
            await receive()
            self.left += 1
        elif line is self.BREAK:
            raise ConnectionResetError
        elif isinstance(line, tuple):
            status, text, headers = (*line, {})[:3]
            await Response(text, status, headers)(scope, receive, send)
        else:
            answer = line if "choices" in line else {"choices": [{"message": {"role": "assistant", **line}}]}
            await Response(json.dumps(answer), media_type="application/json")(scope, receive, send)


def settings(url, **more):
    return EndpointConfig(url=url, model="theirs", key_env="REINS_TEST_KEY", **more)


@contextlib.asynccontextmanager
async def asking(rendering, played, config=None, context=4096, **more):
    """A desk whose engine is the endpoint."""
    async with listening(played) as url:
        engine = EndpointEngine(settings(url, **more), rendering)
        yield Desk(rendering, config=config, engine=engine, context=context)
        await engine.close()
