"""Writers of weights that are killed, forked from one process that has imported torch already.

Reads an order as a line of JSON from stdin and answers with a line, the exit code of the writer. An order has
``folder``, ``keep`` and ``rows`` of the publication and the ``value`` of all its numbers; then either its ``version``
and the ``step`` of the file system before which the writer kills itself, or the ``seconds`` after which it is killed
while it publishes version after version, value after value.
"""

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from actors.engines import weights

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink"}


def tensors(version, value, rows):
    """Three shards of ``rows`` times 4 kB, all of them of one value."""
    return {"version": torch.tensor(version)} | {name: torch.full((rows, 1024), float(value)) for name in "abc"}


def publish(folder, version, value, keep, rows):
    weights.publish(tensors(version, value, rows), Path(folder), version, keep, rows * 5e-3)


def kill_before(step, folder):
    seen = itertools.count(1)

    def hook(event, args):
        here = event in CHANGES or (event == "open" and str(args[0]).startswith(folder))
        if here and next(seen) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def write(order):
    rest = order["keep"], order["rows"]
    if "step" in order:
        # Of no use against a mere kill, and slow.
        os.fsync = lambda handle: None
        kill_before(order["step"], order["folder"])
        publish(order["folder"], order["version"], order["value"], *rest)
        return
    for value in itertools.count(order["value"]):
        # Each version is published several times, at first as a new one.
        publish(order["folder"], value // 3 + value % 2, value, *rest)


def main():
    # The first publication imports much, and threads of torch would not survive the fork.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        publish(folder, 0, 0, keep=1, rows=1)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            write(order)
            os._exit(0)
        if "seconds" in order:
            time.sleep(order["seconds"])
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
