"""A dispatcher with a scripted engine behind its real app: what the tests of the proxy talk to."""

import asyncio
import contextlib
import json

import httpx
import openai
from scripted import ListSink, ScriptedEngine

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.session_contract import SessionSpec
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig


class Desk:
    """A dispatcher with its engine, its sink and its app."""

    def __init__(self, rendering, script=(), config=None, context=4096, sink=None, engine=None):
        self.engine = engine or ScriptedEngine(rendering.tokenizer, list(script))
        self.sink = sink or ListSink()
        config = config or ProxyConfig(abort_wait_s=2)
        self.dispatcher = Dispatcher(config, rendering, self.engine, self.sink, context)
        self.app = build_app(self.dispatcher)

    async def open(self, episode="e1", **spec):
        return await self.dispatcher.open(SessionSpec(episode, **spec))

    def http(self):
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://proxy")

    async def post(self, key, body, **more):
        async with self.http() as http:
            headers = {"authorization": f"Bearer {key}"}
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post("/v1/chat/completions", content=content, headers=headers, **more)

    @contextlib.asynccontextmanager
    async def client(self, key):
        """The official client on a real Unix socket."""
        server = SocketServer()
        path = await server.start(self.app)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        http = httpx.AsyncClient(transport=transport, timeout=30)
        async with openai.AsyncOpenAI(api_key=key, base_url="http://proxy/v1", http_client=http) as client:
            yield client
        await server.stop()
        assert not path.parent.exists()


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError
