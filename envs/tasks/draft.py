"""A task as a loader read it, before anything of it is written: what every public format is turned into."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Content = str | bytes | Path
"""What a file of a task will hold: text, bytes, or a file that is copied."""
MOUNT_DIR = "/root/workspace"
_DIGEST = re.compile(r"-[0-9a-f]{8}$")


def size(content: Content) -> int:
    """Bytes of a file of a task."""
    if isinstance(content, Path):
        return content.stat().st_size
    return len(content if isinstance(content, bytes) else content.encode())


@dataclass(frozen=True, slots=True)
class Draft:
    """All that a task folder will hold. ``source`` says where it was read: file, and line where it has one."""

    source: str
    id: str
    instruction: str
    inputs: Mapping[str, Content] = field(default_factory=dict)
    """The workspace at the start, by paths in it."""
    reward: Mapping[str, Content] = field(default_factory=dict)
    """The grader, by paths in ``reward/``; empty: only a judge grades."""
    metadata: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    mount_dir: str = MOUNT_DIR
    grader_gets: tuple[str, ...] = ()
    rubric: Mapping[str, Any] | None = None
    """What ``rubric.json`` will hold, see ``envs.tasks.rubric``."""
    sessions: tuple[str, ...] = ()
    """Instructions of further sessions, one after the other, in the same workspace."""
    mcp: tuple[Mapping[str, Any], ...] = ()

    @property
    def folder_name(self) -> str:
        """The id where it can name a folder; else what of it can, with a digest that tells it apart."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.id).strip(".-")[:80]
        # One that looks as if it had a digest gets one too: no two ids share a folder.
        if plain == self.id and not _DIGEST.search(plain):
            return plain
        return f"{plain}-{hashlib.sha256(self.id.encode()).hexdigest()[:8]}"

    @property
    def graded_by(self) -> str:
        """``script``, ``judge`` or ``script and judge``."""
        parts = [word for word, given in (("script", self.reward), ("judge", self.rubric)) if given]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a loader found in a place: the sound tasks in its order, and a sentence for each fault."""

    drafts: list[Draft]
    faults: list[str]
