"""What the image of the backend ``docker`` is made of, and the name that says so.

Invariant: the name holds a digest of everything that decides about the contents, so that a changed recipe is another
image, and one that is there under its name need not be made again.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

DOCKERFILE = Path(__file__).with_name("Dockerfile")
PYTHON_LABEL = "reins.python"
REPOSITORY = "reins-sandbox"
FINISH = """set -e
ln -sf "$PYTHON" usr/local/bin/python
rm -rf var/lib/apt/lists/* var/cache/apt/archives/*.deb
rm -f etc/shadow* etc/gshadow*
"""
"""What the last lines of the Dockerfile do, in the folder of a root from debootstrap."""


def _argument(name: str) -> str:
    """The default of an ARG of the Dockerfile."""
    found = re.search(rf'^ARG {name}="?([^"\n]+)"?$', DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{DOCKERFILE}: no line `ARG {name}=...`, expected one: debootstrap takes it from there")
    return found[1]


@functools.cache
def suite() -> str:
    """The release of Debian."""
    return _argument("SUITE")


@functools.cache
def packages() -> tuple[str, ...]:
    """The packages beside the essential ones."""
    return tuple(_argument("PACKAGES").split())


@functools.cache
def python() -> str:
    """The interpreter inside; its version is in the name, since byte code is made for it outside."""
    return _argument("PYTHON")


@functools.cache
def image_name() -> str:
    """``reins-sandbox:`` and the digest of the recipe."""
    return f"{REPOSITORY}:{hashlib.sha256(DOCKERFILE.read_bytes() + FINISH.encode()).hexdigest()[:12]}"
