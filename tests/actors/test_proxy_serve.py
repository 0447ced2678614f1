"""The proxy on real Ray Serve: a replica of the engine dies in the middle and no client hears of it."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray import serve
from scripted import full_ids, make_tokenizer

from actors.engines.base import Generate, Generated
from actors.handles import Builders, HandleProxy
from actors.ports import free_port
from actors.proxy import Proxy
from actors.session_contract import SessionSpec
from configs.proxy import ProxyConfig
from trees import codec
from trees.record import VersionSpan

pytestmark = [pytest.mark.harness, pytest.mark.timeout(240), pytest.mark.xdist_group("proxy-serve")]
SESSIONS, TURNS, DIES_AT, REPLICAS = 6, 8, 16, 2


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Port, handle of the proxy, and the actor that collects records."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    builder = collector()
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = ProxyConfig(engine_wait_s=100)
    sockets = tmp_path_factory.mktemp("s")
    engine = engine_deployment().bind(tokenizer / "died")
    deployment = Proxy.options(num_replicas=REPLICAS)
    app = deployment.bind(
        config,
        tokenizer,
        engine,
        Builders([builder]),
        4096,
        socket_dir=sockets,
        log_dir=tmp_path_factory.mktemp("calls"),
    )
    yield port, HandleProxy(serve.run(app, name="test"), REPLICAS), builder
    serve.shutdown()
    # One that was killed could not remove its own.
    assert len(list(sockets.iterdir())) <= 1
    ray.shutdown()


def engine_deployment():
    @serve.deployment(max_ongoing_requests=100, health_check_period_s=1, ray_actor_options={"num_cpus": 0})
    class Engine:
        def __init__(self, died: Path) -> None:
            self.died = died
            self.calls = 0
            self.hanging: dict[str, asyncio.Event] = {}

        async def generate(self, request: Generate) -> Generated:
            self.calls += 1
            await asyncio.sleep(0.05)
            if self.calls >= DIES_AT and not self.died.exists():
                self.died.touch()
                os._exit(1)
            if request.session == "hang":
                self.hanging[request.request] = asyncio.Event()
                await self.hanging[request.request].wait()
                return Generated([80], [-1.0], "abort", (VersionSpan(0, 0, 1),))
            ids = [80, 81, request.stop_ids[0]]
            return Generated(ids, [-1.0] * 3, "stop", (VersionSpan(os.getpid(), 0, 3),))

        async def abort(self, request: str) -> None:
            self.hanging[request].set()

    return Engine


def collector():
    @ray.remote(num_cpus=0)
    class Collector:
        def __init__(self) -> None:
            self.frames: list[bytes] = []

        def add(self, data: bytes) -> None:
            self.frames.append(data)

        def all(self) -> list[bytes]:
            return self.frames

    return Collector.remote()


async def episode(key, client):
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(TURNS):
        body = {"model": "policy", "messages": messages}
        response = await client.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"authorization": f"Bearer {key}"}
        )
        assert response.status_code == 200, response.text
        messages = [*messages, response.json()["choices"][0]["message"], {"role": "user", "content": "more"}]


async def run(proxy, port):
    opened = [await proxy.open_session(SessionSpec(f"e{i}")) for i in range(SESSIONS)]
    transports = {
        True: httpx.AsyncHTTPTransport(uds=opened[0]["socket"]),
        False: httpx.AsyncHTTPTransport(),
    }
    urls = {True: "http://proxy", False: f"http://127.0.0.1:{port}"}
    clients = {unix: httpx.AsyncClient(transport=transports[unix], base_url=urls[unix], timeout=120) for unix in urls}
    episodes = [episode(session["key"], clients[i % 2 == 0]) for i, session in enumerate(opened)]
    await asyncio.gather(*episodes)
    summaries = [await proxy.close_session(session["key"]) for session in opened]
    late = await clients[True].get("/v1/models", headers={"x-api-key": opened[0]["key"]})
    for client in clients.values():
        await client.aclose()
    return summaries, await proxy.stats(), late


async def leave(proxy, port, stream):
    """A client on Serve's own port that goes away in the middle of a generation."""
    session = await proxy.open_session(SessionSpec("hang"))
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    headers = {"authorization": f"Bearer {session['key']}"}
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        asked = asyncio.create_task(client.post(url, json=body, headers=headers))
        begun = await running(proxy, 1)
        asked.cancel()
        await asyncio.wait({asked})
    ended = await running(proxy, 0)
    return begun, ended, await proxy.close_session(session["key"])


async def running(proxy, wanted):
    """Whether the proxy comes to run so many calls."""
    for _ in range(300):
        if (await proxy.stats())["calls_running"] == wanted:
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_serve(served, stream):
    port, proxy, _ = served
    begun, ended, summary = asyncio.run(leave(proxy, port, stream))
    assert begun
    assert ended
    assert (summary.calls, summary.sampled_tokens, summary.last_finish) == (1, 1, "abort")


def test_an_engine_that_dies_is_not_seen(served):
    port, proxy, builder = served
    began = time.monotonic()
    summaries, stats, late = asyncio.run(run(proxy, port))
    records = [record for frame in ray.get(builder.all.remote()) for record in codec.decode_records(frame)]
    assert time.monotonic() - began < 100
    assert stats["engine_retries"] > 0
    assert [(s.calls, s.undelivered, s.failed) for s in summaries] == [(TURNS, 0, "")] * SESSIONS
    assert len({span.version for r in records for span in r.versions if r.session != "hang"}) == 2
    assert late.status_code == 401
    for i in range(SESSIONS):
        mine = sorted((r for r in records if r.session == f"e{i}"), key=lambda r: r.ordinal)
        assert [r.ordinal for r in mine] == list(range(TURNS))
        assert [r.parent for r in mine] == [None, *(r.call for r in mine[:-1])]
        assert len(full_ids(mine, mine[-1].call)) == sum(len(r.prompt_ids) + 3 for r in mine)


async def through_a_death(proxy, port):
    """Episodes on Serve's port; in the middle of them the replica of the first is killed for good."""
    opened = [await proxy.open_session(SessionSpec(f"d{i}")) for i in range(SESSIONS)]
    # Serve's ring, made of random names, decides who holds a session: all of a few may be at one replica.
    while len({session["socket"] for session in opened}) < REPLICAS:
        assert len(opened) < 100, "sessions are spread over the replicas"
        opened.append(await proxy.open_session(SessionSpec(f"d{len(opened)}")))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        episodes = [asyncio.create_task(patient_episode(session["key"], client)) for session in opened]
        await asyncio.sleep(0.3)
        victim = owner(opened[0]["socket"])
        os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*episodes)
    return [await proxy.close_session(session["key"]) for session in opened]


def owner(socket_path):
    """The process that listens at a Unix socket."""
    (found,) = {
        connection.pid
        for connection in psutil.net_connections("unix")
        if connection.laddr == socket_path and connection.pid
    }
    return found


async def patient_episode(key, client):
    """As harnesses do: a broken call is asked again."""
    messages = [{"role": "user", "content": "hello"}]
    turns = 0
    while turns < TURNS:
        body = {"model": "policy", "messages": messages}
        try:
            response = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        except httpx.TransportError:
            await asyncio.sleep(0.2)
            continue
        if response.status_code != 200:
            await asyncio.sleep(0.2)
            continue
        turns += 1
        messages = [*messages, response.json()["choices"][0]["message"], {"role": "user", "content": "more"}]


def test_a_replica_of_the_proxy_that_dies_loses_no_finished_call(served):
    _, proxy, builder = served
    summaries = asyncio.run(through_a_death(proxy, served[0]))
    records = [record for frame in ray.get(builder.all.remote()) for record in codec.decode_records(frame)]
    for i, summary in enumerate(summaries):
        mine = {r.ordinal: r for r in records if r.session == f"d{i}"}
        answered = [r for _, r in sorted(mine.items()) if r.finish == "stop"]
        assert len(answered) >= TURNS
        assert summary.calls >= TURNS
        assert set(mine) | {n for n in range(summary.calls) if n not in mine} == set(range(summary.calls))
        line = [answered[-1]]
        by_call = {r.call: r for r in mine.values()}
        while line[-1].parent is not None:
            line.append(by_call[line[-1].parent])
        assert len(line) == TURNS, "the whole history is held, across the death"
