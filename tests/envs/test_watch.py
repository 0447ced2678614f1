"""Bounds that the kernel does not hold: output, disk, silence."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from needs import require

from envs.sandbox import watch
from envs.sandbox.base import Command, Limits, Sandbox
from envs.sandbox.create import create, unavailable
from envs.sandbox.files import remove_tree
from envs.sandbox.watch import Bounds, used_bytes, watched

LONG = Limits(wall_s=120.0)


@pytest.fixture(params=["bubblewrap", "process"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    made = await create(request.param, "one", None, "/root/workspace", tmp_path / "rooms")
    yield made
    await made.destroy()
    assert list((tmp_path / "rooms").iterdir()) == []


def bash(sandbox: Sandbox, script: str) -> Command:
    return Command(("/bin/bash", "-c", script), sandbox.environment(), limits=LONG)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PAUSE_S", 0.1)


@pytest.mark.parametrize(
    ("script", "bounds", "reached"),
    [
        ("yes", Bounds(output_mb=1), "output_mb"),
        ("yes >&2", Bounds(output_mb=1), "output_mb"),
        ("head -c 20M /dev/zero > big; sleep 100", Bounds(disk_mb=8), "disk_mb"),
        ("head -c 20M /dev/zero > ~/big; rm -rf x; sleep 100", Bounds(disk_mb=8), "disk_mb"),
        ("echo once; sleep 100", Bounds(idle_s=0.5), "idle_s"),
    ],
)
async def test_a_bound_ends_the_command(sandbox, script, bounds, reached):
    finished, why = await watched(sandbox, bash(sandbox, script), bounds)
    assert (finished.code, why) == (None, reached)
    assert finished.seconds < 60
    again, why = await watched(sandbox, bash(sandbox, "echo fine"), Bounds())
    assert (again.stdout, why) == (b"fine\n", "")


async def test_what_stays_below_its_bounds_is_left_alone(sandbox):
    script = "for i in 1 2 3 4; do echo $i; sleep 0.1; done; truncate -s 100M holes; sleep 0.5; exit 3"
    finished, why = await watched(sandbox, bash(sandbox, script), Bounds(output_mb=1, disk_mb=8, idle_s=30.0))
    assert (finished.code, why) == (3, "")


async def test_a_harness_that_waits_for_the_model_is_not_idle(sandbox):
    asked = 0

    async def since_call() -> float:
        nonlocal asked
        asked += 1
        return 0.0 if asked < 3 else 99.0

    finished, why = await watched(sandbox, bash(sandbox, "sleep 100"), Bounds(idle_s=0.5), since_call)
    assert (finished.code, why, asked) == (None, "idle_s", 3)


async def test_a_watch_that_is_cancelled_leaves_nothing_running(sandbox):
    looked = asyncio.Event()

    async def since_call() -> float:
        looked.set()
        return 0.0

    bounds = Bounds(disk_mb=100, idle_s=0.01)
    running = asyncio.ensure_future(watched(sandbox, bash(sandbox, "sleep 100"), bounds, since_call))
    await looked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not sandbox.busy


async def test_a_watch_that_is_cancelled_at_once_starts_nothing(sandbox):
    running = asyncio.ensure_future(watched(sandbox, bash(sandbox, "sleep 100"), Bounds()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 30)
    assert not sandbox.busy


async def test_disk_is_counted_as_it_is_taken(tmp_path):
    """Holes not at all, hard links once, and no depth is too deep to be seen."""
    folder = tmp_path / "folder"
    folder.mkdir()
    before = await used_bytes([folder])
    with (folder / "holes").open("wb") as holes:
        holes.truncate(10 << 30)
    (folder / "one").write_bytes(b"x" * (1 << 20))
    for number in range(5):
        (folder / f"link{number}").hardlink_to(folder / "one")
    level = os.open(folder, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=level)
        level, above = os.open("d" * 100, os.O_RDONLY, dir_fd=level), level
        os.close(above)
    deep = os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=level)
    assert os.write(deep, b"x" * (2 << 20)) == 2 << 20
    os.close(deep)
    os.close(level)
    used = await used_bytes([folder])
    assert 3 << 20 <= used - before < 4 << 20
    remove_tree(folder)


async def test_empty_files_take_disk(tmp_path):
    for number in range(256):
        (tmp_path / str(number)).touch()
    assert await used_bytes([tmp_path]) >= 1 << 20
