"""Tests that share a server stay on one worker: not every pytest and pytest-xdist together keep that word."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import time
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("i", range(4))
def test_it(i):
    time.sleep(0.1)
"""


def test_a_group_stays_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider"]
    said = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path).stdout
    workers = [line.split()[0] for line in said.splitlines() if "PASSED" in line]
    assert len(workers) == 4, said
    assert len(set(workers)) == 1, "install the pytest and pytest-xdist that constraints.txt names"
