"""A second learner waits for the first to be gone."""

import signal
import subprocess
import sys
import time

import pytest

from actors.one_writer import hold

HOLDS = """
import sys, time
from pathlib import Path
from actors.one_writer import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_living_writer_is_told_and_a_killed_one_makes_way(holder, tmp_path):
    with pytest.raises(TimeoutError, match=r"another learner that still writes.*--resume"):
        hold(tmp_path, 0.3)
    holder.send_signal(signal.SIGKILL)
    began = time.monotonic()
    hold(tmp_path, 20).close()
    assert time.monotonic() - began < 20


def test_what_is_closed_can_be_held_again(tmp_path):
    first = hold(tmp_path, 0)
    with pytest.raises(TimeoutError):
        hold(tmp_path, 0)
    first.close()
    hold(tmp_path, 0).close()
