"""Folders that go with whoever made them, also where that is killed.

Invariant: every folder of an environment lies under one root beside the sandboxes and names its owner as they do, so
that the owner's warden removes it (``envs.sandbox.gc``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from envs.sandbox.base import SandboxError
from envs.sandbox.files import remove_tree
from envs.sandbox.gc import claim


def root(given: Path | None) -> Path:
    """Where the sandboxes and folders of this user's environments are; ``given`` stands in for the one in /tmp.

    Raises SandboxError where it is not this user's, or cannot be made.
    """
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(f"sandbox.root {given}: {error.strerror}; expected a folder of your own") from None
        return given.resolve()
    path = _own_root()
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise SandboxError(f"{path}: it is another user's; set sandbox.root to a folder of your own")
    return path


def make(parent: Path) -> Path:
    """A new folder under a root that only this user can reach."""
    folder = parent / secrets.token_hex(4)
    folder.mkdir(mode=0o700)
    claim(folder)
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of ``make``, and with the last one the root in /tmp."""
    remove_tree(folder)
    if folder.parent == _own_root():
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _own_root() -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"reins-envs-{os.getuid()}"
