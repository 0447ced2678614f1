"""The deployment on a real Ray Serve, with a replica that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray import serve
from tiny_models import logprobs_of, make

from actors.engines import weights
from actors.engines.base import Generate
from actors.engines.board import WeightsBoard
from actors.engines.deployment import bound
from actors.handles import HandleEngine
from configs.schema import EngineConfig

pytestmark = [pytest.mark.harness, pytest.mark.xdist_group("deployment")]

PROMPT = list(range(20))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    return folder, {version: make("qwen3", folder / str(version), seed=version) for version in range(4)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


def healthy(handle, condition, seconds: float = 60) -> dict[str, int]:
    """The first answer of ``health`` that fulfils ``condition``; a call to a dead replica is asked again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = handle.health.remote().result(timeout_s=10)
        except (ray.exceptions.RayActorError, TimeoutError):
            answer = None
        if answer is not None and condition(answer):
            return answer
        time.sleep(0.2)
    raise AssertionError(f"no such health within {seconds} s, last answer {answer}")


def test_a_killed_replica_comes_back_with_the_newest_weights(cluster, models, tmp_path: Path):
    folder, versions = models
    published = tmp_path / "weights"
    weights.publish(versions[1].state_dict(), published, 1)
    handle = serve.run(
        bound(folder / "0", EngineConfig(slots=4, max_len=256), weights=published),
        name="engine",
        route_prefix=None,
    )

    def sampled_under(version: int) -> None:
        got = handle.generate.remote(Generate(PROMPT, max_tokens=8)).result(timeout_s=30)
        assert [span.version for span in got.versions] == [version]
        expected = logprobs_of(versions[version], PROMPT, got.ids)
        assert torch.allclose(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)

    sampled_under(1)
    first = healthy(handle, lambda h: True)
    path = weights.publish(versions[2].state_dict(), published, 2)
    handle.load_weights.remote(2, path).result(timeout_s=30)
    sampled_under(2)
    assert handle.stats.remote().result(timeout_s=30)[1].extra["weight_loads"] == 1

    weights.publish(versions[3].state_dict(), published, 3)
    os.kill(first["pid"], signal.SIGKILL)
    began = time.monotonic()
    second = healthy(handle, lambda h: h["pid"] != first["pid"])
    print(f"\nback after {time.monotonic() - began:.1f} s")
    assert second["version"] == 3
    sampled_under(3)


async def test_abort_and_cancellation_cross_the_handle(cluster, models):
    folder, _ = models
    handle = serve.run(bound(folder / "0", EngineConfig(slots=4, max_len=1024)), name="engine", route_prefix=None)
    long = handle.generate.remote(Generate(PROMPT, max_tokens=1000, request="long"))
    while not (await handle.stats.remote())[1].decode_tokens:
        pass
    await handle.abort.remote("long")
    got = await long
    assert got.finish == "abort"
    assert 0 < len(got.ids) < 1000

    other = handle.generate.remote(Generate(PROMPT, max_tokens=1000))
    while not (await handle.stats.remote())[1].running:
        pass
    other.cancel()
    while (await handle.stats.remote())[1].running:
        pass
    assert (await handle.stats.remote())[1].decode_tokens < 1500


async def test_every_replica_takes_new_weights_and_sessions_stay(cluster, models, tmp_path):
    folder, versions = models
    published = tmp_path / "weights"
    board = ray.remote(WeightsBoard).options(num_cpus=0).remote()
    app = bound(folder / "0", EngineConfig(slots=4, max_len=256, replicas=2), weights=published, board=board)
    handle = serve.run(app, name="engine", route_prefix=None)
    engine = HandleEngine(handle, board, 2)

    def at(session):
        return handle.options(session_id=session)

    homes = {(await at(f"s{i}").health.remote())["replica"] for i in range(16)}
    assert len(homes) == 2
    for _ in range(5):
        assert len({(await at("one").health.remote())["replica"] for _ in range(4)}) == 1
    path = weights.publish(versions[1].state_dict(), published, 1)
    await engine.load_weights(1, path)
    assert list((await board.versions.remote()).values()) == [1, 1]
    for i in range(8):
        got = await at(f"s{i}").generate.remote(Generate(PROMPT, max_tokens=4, session=f"s{i}"))
        assert [span.version for span in got.versions] == [1]

    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="did not take version 9"):
        await engine.load_weights(9, torn)
    assert (await engine.stats())["version"] == 1

    victim = (await at("s0").health.remote())["replica"]
    os.kill(victim, signal.SIGKILL)
    path = weights.publish(versions[2].state_dict(), published, 2)
    await asyncio.wait_for(engine.load_weights(2, path), 30)
    await asyncio.to_thread(healthy, at("s0"), lambda a: a["replica"] != victim and a["version"] == 2)
    await asyncio.wait_for(engine.load_weights(2, path), 30)
    assert set((await board.versions.remote()).values()) == {2}
    stats = await engine.stats()
    assert stats["version"] == 2
    assert "decode_tokens" in stats
