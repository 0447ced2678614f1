"""The reaper ends a tree by what the kernel says, not by one reading of /proc."""

import subprocess
import sys

BLIND_ONCE = """
import os, time
from envs.sandbox import reaper

child = os.fork()
if child == 0:
    time.sleep(60)
real, blind = reaper.descendants, [True]
reaper.descendants = lambda of: [] if blind and blind.pop() else real(of)
reaper.end_all()
try:
    os.kill(child, 0)
except ProcessLookupError:
    print("gone")
"""


def test_a_process_that_a_reading_of_proc_missed_is_ended_by_the_next():
    done = subprocess.run([sys.executable, "-c", BLIND_ONCE], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "gone\n", done.stderr
