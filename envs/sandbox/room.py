"""What every backend shares: the directories of one sandbox, who owns them, and their removal.

Invariant: everything that a sandbox keeps on the host lies under ``root/<label>``, beside a file that names
the owning process by pid and start time, so that ``gc`` can tell an orphan from a living sandbox.
"""

from __future__ import annotations

import asyncio
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path

from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Mount, SandboxError
from envs.sandbox.files import copy_tree, open_up, remove_tree
from envs.sandbox.gc import claim

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _checked(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(
            f"sandbox label {label!r}: expected letters, digits, '.', '_' or '-', at most 128, "
            "beginning with a letter or digit"
        )
    return label


def _taken(label: str, base: Path) -> SandboxError:
    return SandboxError(
        f"sandbox {label!r}: {base} is already there. Use a new label for every sandbox, "
        f"or remove what dead owners left with `python -m envs.sandbox gc {base.parent}`."
    )


class Room(ABC):
    """The directories ``workspace``, ``home``, ``tmp``, ``shm`` and ``frozen`` of one sandbox."""

    def __init__(self, root: Path, label: str, mount_dir: str, uid: int | None) -> None:
        self._name(root.resolve() / _checked(label))
        self.mount_dir = mount_dir
        self.uid = uid
        """The user id that everything inside belongs to; None for our own."""
        self._dirty = False

    def _name(self, base: Path) -> None:
        self.label = base.name
        self.base = base
        self.workspace = base / "workspace"
        self.home = base / "home"
        self.tmp = base / "tmp"
        self.shm = base / "shm"
        self._frozen = base / "frozen"

    def build(self, input_files: Path | None) -> None:
        """Make the directories. Raises SandboxError when a sandbox of this label is already there."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.base.mkdir(mode=0o700)
        except FileExistsError:
            raise _taken(self.label, self.base) from None
        self._dirty = True
        claim(self.base)
        for folder in (self.home, self.tmp, self.shm):
            self.make(folder)
        if input_files is None:
            self.make(self.workspace)
        else:
            copy_tree(input_files, self.workspace, self.uid)

    @property
    def writable(self) -> tuple[Path, ...]:
        folders = (self.workspace, self.home, self.tmp, self.shm)
        # A backend may keep some of them elsewhere than on the disk.
        return tuple(folder for folder in folders if folder.is_dir())

    def rename(self, label: str) -> None:
        """Give the sandbox another label. Raises as ``build`` and the constructor."""
        base = self.base.parent / _checked(label)
        if base.exists():
            raise _taken(label, base)
        self.base.rename(base)
        self._name(base)

    def make(self, folder: Path) -> None:
        folder.mkdir()
        if self.uid is not None:
            os.chown(folder, self.uid, self.uid)

    def put_home(self, name: str, text: str) -> str:
        path = self.home
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts:
            raise ValueError(f"put_home name {name!r}: expected a relative path without '..'")
        for part in parts[:-1]:
            path = path / part
            if not path.is_dir():
                self.make(path)
        path = path / parts[-1]
        path.write_text(text, encoding="utf-8")
        if self.uid is not None:
            os.chown(path, self.uid, self.uid)
        return f"{self.inside_home}/{name}"

    @property
    @abstractmethod
    def inside_home(self) -> str: ...

    @abstractmethod
    def inside(self, mount: Mount) -> str: ...

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a command runs."""

    @abstractmethod
    async def kill(self) -> None: ...

    async def freeze(self) -> Path:
        if self.busy:
            raise SandboxError(f"sandbox {self.label!r}: freeze while a command runs; kill it first")

        def copy() -> None:
            remove_tree(self._frozen)
            try:
                copy_tree(self.workspace, self._frozen)
            except PermissionError:
                # Only where we are not root: the agent took its own permissions away.
                remove_tree(self._frozen)
                open_up(self.workspace)
                copy_tree(self.workspace, self._frozen)

        await uninterrupted(asyncio.to_thread(copy))
        return self._frozen

    async def destroy(self) -> None:
        await uninterrupted(self._destroy())

    async def _destroy(self) -> None:
        await self.kill()
        if self._dirty:
            await asyncio.to_thread(remove_tree, self.base)
            self._dirty = False
