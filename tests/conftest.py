"""Puts what the tests share where they can import it; under CI generated examples are the same in every run."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders with the longest tests first, so that of several workers none is left alone with them."""
    items.sort(key=lambda item: item.path.parent.name not in ("run", "harness"))
