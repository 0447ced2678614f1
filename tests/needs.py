"""What a test needs of the machine."""

from __future__ import annotations

import os

import pytest

from envs.sandbox.create import unavailable


def require_docker() -> None:
    """``require`` a Docker engine that answers, and the image."""
    fault = unavailable("docker")
    require(not fault, fault)


def require(part: bool, how_to_install: str) -> None:
    """Skip the test where ``part`` is missing, saying how to install it; under CI nothing may be missing."""
    if part:
        return
    if os.environ.get("CI"):
        pytest.fail(f"missing under CI: {how_to_install}")
    pytest.skip(how_to_install)
