"""Compiled forms of the programs that run inside, so that they are not compiled anew for every episode.

Whether there is one changes nothing but the time that a start takes: where a folder cannot be written, the
sources run as they are.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

_COMPILE = """
import py_compile, sys
for path in sys.argv[1:]:
    print(py_compile.compile(path, doraise=True))
"""


@functools.cache
def compiled(python: str, *sources: Path) -> tuple[Path, ...]:
    """The byte code of each of ``sources`` in its ``__pycache__``, made now by the interpreter ``python``.

    The sources themselves where it cannot be made. An interpreter that the host does not have under that name
    is the one that runs this, shown elsewhere inside, unless its name holds another version.
    """
    host = python if Path(python).exists() else sys.executable
    version = re.fullmatch(r"python(\d+\.\d+)", Path(python).name)
    if host != python and version and version[1] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sources
    made = subprocess.run(
        [host, "-I", "-S", "-c", _COMPILE, *map(os.fspath, sources)],
        capture_output=True,
        text=True,
        check=False,
    )
    return tuple(map(Path, made.stdout.splitlines())) if made.returncode == 0 else sources
