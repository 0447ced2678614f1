"""What of the docker backend needs no engine: who is an orphan, what is said where none is, frames, the recipe."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema import SandboxConfig
from envs.harnesses.external.program import python_minor
from envs.sandbox import bytecode, engine, recipe, relay
from envs.sandbox.base import DockerOptions, SandboxError
from envs.sandbox.create import chosen, create, unavailable
from envs.sandbox.docker import _Output
from envs.sandbox.gc import gc, gc_containers


def found(**other: str) -> dict[str, str]:
    return engine.labels(Path("/rooms/one")) | {getattr(engine, name): value for name, value in other.items()}


def test_an_owner_is_known_by_pid_start_and_machine():
    boot, space = engine.machine().split(" ")
    assert found()[engine.ROOT] == "/rooms"
    assert not engine.orphaned(found())
    assert engine.orphaned(found(OWNER=f"{os.getpid()} 1"))
    assert engine.orphaned(found(OWNER="999999999 1"))
    assert engine.orphaned(found(OWNER=f"{os.getpid()} 1", MACHINE=f"another {space}"))
    # Its pid means nothing to us.
    assert not engine.orphaned(found(OWNER="999999999 1", MACHINE=f"{boot} pid:[1]"))


@pytest.mark.parametrize("listening", [False, True])
def test_no_engine_is_said_with_what_to_do(tmp_path, monkeypatch, listening):
    address = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{address}")
    with socket.socket(socket.AF_UNIX) as server:
        if listening:
            # A socket that nobody serves any more.
            server.bind(str(address))
        assert str(address) in engine.unreachable()
        assert "systemctl start docker" in unavailable("docker")
    assert gc_containers(None) == gc(tmp_path / "rooms") == []


async def test_without_an_engine_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match="no Docker engine answers"):
        await create("docker", "one", None, "/root/workspace", tmp_path / "rooms")
    assert list(tmp_path.iterdir()) == []


def test_the_settings_choose_a_backend():
    assert chosen(SandboxConfig()) == "auto"
    settings = SandboxConfig.model_validate({"backend": "docker", "docker": {"image": "i:1", "runtime": "runsc"}})
    assert chosen(settings) == DockerOptions("i:1", "runsc")


async def test_frames_are_taken_apart_wherever_they_are_cut():
    text = b"".join(
        struct.pack(">BxxxL", stream, len(data)) + data
        for stream, data in [(1, b"out1 "), (2, b"err"), (1, b""), (1, b"x" * 300), (2, b"."), (1, b" end")]
    )
    for size in (1, 3, 8, 13, len(text)):
        ours, theirs = socket.socketpair()
        response = SimpleNamespace(close=ours.close)
        connection = SimpleNamespace(fileno=ours.fileno, close=ours.close, _response=response)
        output = _Output(connection, 2000)
        for start in range(0, len(text), size):
            theirs.send(text[start : start + size])
            await asyncio.sleep(0)
        assert not await output.end(0.0)
        theirs.close()
        assert await output.end(10.0)
        assert output.values() == (b"out1 " + b"x" * 300 + b" end", b"err.", False)
        assert ours.fileno() == -1


def test_the_recipe_is_read_from_the_dockerfile(tmp_path, monkeypatch):
    assert recipe.suite() == "bookworm"
    assert {"python3", "git", "ca-certificates"} <= set(recipe.packages())
    before = recipe.image_name()
    changed = tmp_path / "Dockerfile"
    changed.write_text(recipe.DOCKERFILE.read_text() + "RUN true\n")
    monkeypatch.setattr(recipe, "DOCKERFILE", changed)
    recipe.image_name.cache_clear()
    try:
        assert recipe.image_name() != before
    finally:
        recipe.image_name.cache_clear()


def test_byte_code_and_packages_suit_the_version_in_the_name():
    """The image's Python may be another than any of this machine."""
    source = Path(relay.__file__)
    assert python_minor("/none/python3.99") == "3.99"
    assert bytecode.compiled("/none/python3.99", source) == (source,)
    ours = f"/none/python{sys.version_info[0]}.{sys.version_info[1]}"
    assert bytecode.compiled(ours, source) != (source,)
