"""What backends share whose processes have a view of the file system of their own.

The paths inside are the same for every sandbox and backend, so that prompts are. Started as root, each sandbox has
a user id of its own, derived from its label.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from envs.sandbox.base import Mount
from envs.sandbox.room import Room

HOME = "/root"
HOSTNAME = "sandbox"
RELAY_PORT = 8080
ETC = ("passwd", "group", "hosts", "nsswitch.conf")
"""What a sandbox has in /etc of its own; it lies in the folder ``etc`` of the room."""
SHM_MB = 64


class Enclosed(Room):
    """A room that is seen at the paths of its own."""

    relay_port = RELAY_PORT
    inside_home = HOME

    def __init__(self, root: Path, label: str, mount_dir: str) -> None:
        super().__init__(root, label, mount_dir, uid_of(label))

    @property
    def inside_workspace(self) -> str:
        return self.mount_dir

    def inside(self, mount: Mount) -> str:
        return mount.inside

    def make_etc(self, uid: int, gid: int) -> None:
        """Write the files of ``ETC`` for a user inside."""
        others = "root:x:0:0::/:/bin/false\nnobody:x:65534:65534::/:/bin/false"
        texts = {
            "passwd": f"user:x:{uid}:{gid}::{HOME}:/bin/bash\n{others}",
            "group": f"user:x:{gid}:\nroot:x:0:\nnogroup:x:65534:",
            "hosts": f"127.0.0.1 localhost {HOSTNAME}",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files",
        }
        etc = self.base / "etc"
        etc.mkdir(mode=0o755)
        for name in ETC:
            (etc / name).write_text(f"{texts[name]}\n")

    def make_mount_point(self, own: Sequence[tuple[str, Path]]) -> None:
        """Where the workspace lies below a folder of the agent's own, make its mount point, so that the folders on the
        way belong to the agent too. ``own``: such folders, by their path inside.
        """
        for inside, folder in own:
            if Path(self.mount_dir).is_relative_to(inside):
                for part in Path(self.mount_dir).relative_to(inside).parts:
                    folder = folder / part
                    if not folder.exists():
                        self.make(folder)


@functools.cache
def _first_uid() -> int:
    # Container engines often map only the first 65,536 ids; where all are there, stay away from people's ids.
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return 0x70000000 if any(int(start) == 0 and int(count) > 0x7F000000 for start, _, count in ranges) else 20000


def uid_of(label: str) -> int | None:
    """The user id of a sandbox; None where we are not root and have but our own."""
    if os.geteuid() != 0:
        return None
    first = _first_uid()
    return first + zlib.crc32(label.encode()) % (1 << 24 if first > 65536 else 40000)
