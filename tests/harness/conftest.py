"""What the tests of real harnesses share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="reins-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
