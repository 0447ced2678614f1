"""Making a sandbox: one call for every backend."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from envs.sandbox import bubblewrap
from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import DockerOptions, Sandbox, SandboxError
from envs.sandbox.process import Process

if TYPE_CHECKING:
    from configs.schema import SandboxConfig
    from envs.sandbox.docker import Docker

BackendName = Literal["auto", "bubblewrap", "docker", "process"]
Backend = BackendName | DockerOptions
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

_LONGEST = 200
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/opt", "/proc", "/run", "/sbin", "/sys", "/usr"),
)


@functools.cache
def _bubblewrap_missing() -> str:
    return bubblewrap.missing()


def unavailable(backend: Backend = "bubblewrap") -> str:
    """Why a backend cannot be used on this machine; empty when it can. Bubblewrap is tried once per process."""
    if backend == "process":
        return ""
    if backend in ("auto", "bubblewrap"):
        return _bubblewrap_missing()
    from envs.sandbox import docker

    return docker.missing(_docker_options(backend))


def _docker_options(backend: Backend) -> DockerOptions:
    return backend if isinstance(backend, DockerOptions) else DockerOptions()


def chosen(config: SandboxConfig) -> Backend:
    """The backend of a run's settings."""
    return DockerOptions(config.docker.image, config.docker.runtime) if config.backend == "docker" else config.backend


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


def _room(backend: Backend, root: Path, label: str, mount_dir: str) -> bubblewrap.Bubblewrap | Docker | Process:
    if backend == "docker" or isinstance(backend, DockerOptions):
        # Only who asks for it pays for its imports. What is missing is found when it is built.
        from envs.sandbox.docker import Docker

        return Docker(root, label, mount_dir, _docker_options(backend))
    reason = unavailable(backend)
    if backend == "bubblewrap" and reason:
        raise SandboxError(reason)
    kind = Process if backend == "process" or reason else bubblewrap.Bubblewrap
    return kind(root, label, mount_dir)


async def create(backend: Backend, label: str, input_files: Path | None, mount_dir: str, root: Path) -> Sandbox:
    """A sandbox under ``root/<label>`` whose workspace is a copy of ``input_files`` (None or missing: empty).

    ``auto`` takes bubblewrap where it works, else ``process``; ``docker`` means ``DockerOptions()``. Cancelled in the
    middle, it leaves nothing. Raises ValueError for a label or mount_dir that cannot be used, SandboxError when the
    backend is not available or the label is taken.
    """
    if fault := mount_dir_fault(mount_dir):
        raise ValueError(f"mount_dir {mount_dir!r}: {fault}")
    sandbox = _room(backend, root, label, mount_dir)
    try:
        await uninterrupted(asyncio.to_thread(sandbox.build, input_files))
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox
