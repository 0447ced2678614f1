"""What the backends with a view of their own share: the same paths, the same user, the same handful of files.

Inside, every sandbox looks the same whichever backend made it: the workspace at the task's ``mount_dir``, the home
at ``/root``, a private ``/tmp``, a user id derived from the label, and a loopback address of its own.
"""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path

from envs.sandbox.base import Mount
from envs.sandbox.room import Room

HOME = "/root"
HOSTNAME = "sandbox"
RELAY_PORT = 8080
ETC = ("passwd", "group", "hosts", "nsswitch.conf")
"""The files of ``/etc`` that a sandbox has of its own, in the folder ``etc`` of its room."""


@functools.cache
def _first_uid() -> int:
    # Container engines often map only the first 65,536 ids; where all are there, stay away from people's ids.
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return 0x70000000 if any(int(start) == 0 and int(count) > 0x7F000000 for start, _, count in ranges) else 20000


def own_uid(label: str) -> int | None:
    """The user id of a sandbox's own, where we may give files away; else None."""
    if os.geteuid() != 0:
        return None
    first = _first_uid()
    return first + zlib.crc32(label.encode()) % (1 << 24 if first > 65536 else 40000)


class Enclosed(Room):
    """A room that is seen at fixed paths inside."""

    relay_port = RELAY_PORT
    inside_home = HOME

    def __init__(self, root: Path, label: str, mount_dir: str, foreign_uid: int) -> None:
        """``foreign_uid``: the user id inside where the sandbox has none of its own."""
        super().__init__(root, label, mount_dir, own_uid(label))
        self.inside_uid = foreign_uid if self.uid is None else self.uid

    @property
    def inside_workspace(self) -> str:
        return self.mount_dir

    def inside(self, mount: Mount) -> str:
        return mount.inside

    def build(self, input_files: Path | None) -> None:
        super().build(input_files)
        uid = self.inside_uid
        etc = self.base / "etc"
        etc.mkdir(mode=0o755)
        (etc / "passwd").write_text(
            f"user:x:{uid}:{uid}::{HOME}:/bin/bash\nroot:x:0:0::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
        )
        (etc / "group").write_text(f"user:x:{uid}:\nroot:x:0:\nnogroup:x:65534:\n")
        (etc / "hosts").write_text(f"127.0.0.1 localhost {HOSTNAME}\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        self._make_mount_point()

    def _make_mount_point(self) -> None:
        # Where the workspace lies below a folder of the agent's own, its mount point is made here, so that
        # the folders on the way belong to the agent too.
        for inside, folder in ((HOME, self.home), ("/tmp", self.tmp)):
            if Path(self.mount_dir).is_relative_to(inside):
                for part in Path(self.mount_dir).relative_to(inside).parts:
                    folder = folder / part
                    if not folder.exists():
                        self.make(folder)
