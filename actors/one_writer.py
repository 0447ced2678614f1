"""A run's folder has one learner that writes to it.

Invariant: whoever holds the folder's lock is alive, since the kernel opens it when its holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

_LOCK = ".learner"
_PAUSE_S = 0.2


def hold(folder: Path, seconds: float = 60.0) -> IO[bytes]:
    """The lock, held until it is closed or this process ends; waits ``seconds`` for a learner that is about to die.

    Raises TimeoutError where another one lives on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / _LOCK).open("ab")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise TimeoutError(
                    f"{folder}: got another learner that still writes there after {seconds:.0f} s, expected none: stop "
                    "the run that it belongs to, then go on with --resume"
                ) from None
            time.sleep(_PAUSE_S)


def is_held(folder: Path) -> bool:
    """Whether a learner lives that writes there."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # No learner has been there, or it is somebody else's folder.
        return False
    return False
