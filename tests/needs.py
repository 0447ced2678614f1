"""What a test needs of the machine."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import unavailable


def require_docker() -> None:
    """``require`` a Docker engine that answers, and the image."""
    fault = unavailable("docker")
    require(not fault, fault)


def require_harness(name: str) -> None:
    """``require`` an installed harness, what it needs itself, and bubblewrap."""
    known = releases()
    for part in (*known[name].needs, name):
        require(not missing(known[part]), f"python -m envs.harnesses install {name}")
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


def cold_policy() -> Path:
    """The folder of the quickstart's policy of seed 0; of the tests that ask for it at the same time one makes it."""
    from algos.coldstart import coldstart
    from configs.schema import ColdstartConfig

    cache = ColdstartConfig().cache.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".tests").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return coldstart(cache, 0)


def require(part: bool, how_to_install: str) -> None:
    """Skip the test where ``part`` is missing, saying how to install it; under CI nothing may be missing."""
    if part:
        return
    if os.environ.get("CI"):
        pytest.fail(f"missing under CI: {how_to_install}")
    pytest.skip(how_to_install)
