"""Making a sandbox: one call for every backend."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path, PurePosixPath
from typing import Literal

from envs.sandbox import bubblewrap
from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Sandbox, SandboxError
from envs.sandbox.process import Process

Backend = Literal["auto", "bubblewrap", "process"]

_LONGEST = 200
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/opt", "/proc", "/run", "/sbin", "/sys", "/usr"),
)


@functools.cache
def unavailable() -> str:
    """Why bubblewrap cannot be used on this machine; empty when it can. Tried once per process."""
    return bubblewrap.missing()


def available() -> bool:
    """Whether bubblewrap really works here."""
    return not unavailable()


def mount_dir_fault(mount_dir: str) -> str:
    """What is wrong with a workspace path inside the sandbox; empty when it can be used."""
    path = PurePosixPath(mount_dir)
    if not path.is_absolute() or ".." in path.parts or str(path) != mount_dir:
        return "expected an absolute path without '..' or a final '/', such as /root/workspace"
    if len(mount_dir) > _LONGEST or not mount_dir.isprintable():
        return f"expected at most {_LONGEST} printable characters, such as /root/workspace"
    if mount_dir in ("/", "/root", "/tmp") or any(path.is_relative_to(system) for system in _SYSTEM):
        return "expected a folder of its own outside the system's folders, such as /root/workspace"
    return ""


async def create(backend: Backend, label: str, input_files: Path | None, mount_dir: str, root: Path) -> Sandbox:
    """A sandbox under ``root/<label>`` whose workspace is a copy of ``input_files`` (None or missing: empty).

    ``auto`` takes bubblewrap where it works, else ``process``. Cancelled in the middle, it leaves nothing.
    Raises ValueError for a label or mount_dir that cannot be used, SandboxError when the backend is not
    available or the label is taken.
    """
    if fault := mount_dir_fault(mount_dir):
        raise ValueError(f"mount_dir {mount_dir!r}: {fault}")
    reason = "" if backend == "process" else unavailable()
    if backend == "bubblewrap" and reason:
        raise SandboxError(reason)
    kind = Process if backend == "process" or reason else bubblewrap.Bubblewrap
    sandbox = kind(root, label, mount_dir)
    try:
        await uninterrupted(asyncio.to_thread(sandbox.build, input_files))
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox
