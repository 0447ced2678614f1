"""The Docker engine as sandboxes use it: how it is reached, what keeps it from being used, and what of ours is in it.

Invariant: every container of ours carries labels that name its sandbox, the root that this lies under, and the owning
process by pid, start time and machine, so that it can be found and judged by them alone.

The package ``docker`` is imported where it is used: who cleans up where there is no engine does without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envs.sandbox.base import DockerOptions, SandboxError
from envs.sandbox.gc import start_time
from envs.sandbox.recipe import PYTHON_LABEL, image_name

if TYPE_CHECKING:
    from docker import APIClient

_log = logging.getLogger(__name__)
LABEL = "reins.label"
ROOT = "reins.root"
OWNER = "reins.owner"
MACHINE = "reins.machine"
_DEFAULT = "unix:///var/run/docker.sock"
_TIMEOUT_S = 120.0
_LOOK_S = 10.0
_START = (
    "Start one (`systemctl start docker`, or as root `dockerd --bridge=none --iptables=false`; to install it: "
    "`apt-get install docker.io`), name another in DOCKER_HOST, or use the backend `bubblewrap`."
)


def unreachable() -> str:
    """Why no engine can be asked; empty when one listens. Only a socket is tried: this takes no time."""
    address = os.environ.get("DOCKER_HOST") or _DEFAULT
    if not address.startswith("unix://"):
        return ""
    with socket.socket(socket.AF_UNIX) as trial:
        try:
            trial.connect(address.removeprefix("unix://"))
        except PermissionError:
            return (
                f"this user may not talk to the Docker engine at {address}. Add it to the engine's group "
                "(`sudo usermod -aG docker $USER`, then log in again), or use the backend `bubblewrap`."
            )
        except OSError as error:
            return f"no Docker engine answers at {address} ({error.strerror or error}). {_START}"
    return ""


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Turns whatever goes wrong between us and the engine into a SandboxError that says so."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        raise SandboxError(f"the Docker engine refused to {what}: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise SandboxError(f"the Docker engine could not be asked to {what}: {error}. {_START}") from error


def connect(timeout_s: float = _TIMEOUT_S) -> APIClient:
    """A client of the engine; it is the caller's to close. Raises SandboxError where there is none."""
    if fault := unreachable():
        raise SandboxError(fault)
    from docker import APIClient
    from docker.utils import kwargs_from_env

    with asking("tell its version"):
        return APIClient(**kwargs_from_env(), version="auto", timeout=timeout_s)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Image:
    """What is to be known of an image: the engine's name for it, its interpreter, and the variables that it sets."""

    id: str
    python: str
    variables: tuple[str, ...]


@functools.cache
def look_at(options: DockerOptions) -> Image:
    """The image of ``options``. Raises SandboxError, with what to do, when the engine, image or runtime is missing."""
    from docker.errors import ImageNotFound

    name = options.image or image_name()
    with contextlib.closing(connect(_LOOK_S)) as client:
        with asking("list its runtimes"):
            runtimes = sorted(client.info().get("Runtimes", {}))
        if options.runtime and options.runtime not in runtimes:
            raise SandboxError(
                f"sandbox.docker.runtime: got {options.runtime!r}, expected one that the Docker engine knows: "
                f"{', '.join(runtimes)}. Install it and name it in /etc/docker/daemon.json, or leave the setting out."
            )
        try:
            with asking(f"look at the image {name}"):
                found = client.inspect_image(name)
        except SandboxError as error:
            if not isinstance(error.__cause__, ImageNotFound):
                raise
            remedy = f"python -m envs.sandbox image{f' --name {options.image}' if options.image else ''}"
            raise SandboxError(f"the Docker engine has no image {name}. Make it with `{remedy}`.") from None
    config = found.get("Config") or {}
    python = (config.get("Labels") or {}).get(PYTHON_LABEL)
    if not python:
        raise SandboxError(
            f"the image {name} has no label {PYTHON_LABEL}, expected the path of its Python with the version in it, "
            f"such as /usr/bin/python3.11. Begin your image `FROM {image_name()}`, or set the label."
        )
    return Image(found["Id"], python, tuple(entry.split("=")[0] for entry in config.get("Env") or ()))


@functools.cache
def machine() -> str:
    """The present boot of this machine, and the process namespace in which our pids count."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def labels(base: Path) -> dict[str, str]:
    """What a container of the sandbox in ``base`` carries while this process owns it."""
    pid = os.getpid()
    return {
        LABEL: base.name,
        ROOT: os.fspath(base.parent),
        OWNER: f"{pid} {start_time(pid)}",
        MACHINE: machine(),
    }


def orphaned(found: dict[str, str]) -> bool:
    """Whether the owner that the labels ``found`` name is gone; one in a namespace that we cannot see is not."""
    boot, _, space = found.get(MACHINE, "").partition(" ")
    our_boot, _, our_space = machine().partition(" ")
    if boot != our_boot:
        return True
    if space != our_space:
        return False
    pid, _, started = found[OWNER].partition(" ")
    return start_time(int(pid)) != started


def remove_orphans(root: Path | None, bases: Sequence[Path] = ()) -> list[str]:
    """Remove the containers whose owner is gone, and those of the sandboxes in ``bases``; the labels of the sandboxes.

    ``root``: only those under it. An engine that does not answer has nothing removed, which is logged.
    """
    filters = {"label": LABEL if root is None else f"{ROOT}={root}"}
    try:
        with contextlib.closing(connect(_LOOK_S)) as client:
            with asking("list containers"):
                containers = client.containers(all=True, filters=filters)
            return [name for found in containers if (name := _remove_orphan(client, found, bases))]
    except SandboxError as error:
        _log.warning("Containers of sandboxes whose owners are gone may be left: %s", error)
        return []


def _remove_orphan(client: APIClient, container: dict[str, Any], bases: Sequence[Path]) -> str:
    """Remove a container that nobody owns; the label of its sandbox, empty where it stays."""
    found = container["Labels"]
    if Path(found[ROOT], found[LABEL]) not in bases and not orphaned(found):
        return ""
    try:
        remove(client, container["Id"])
    except SandboxError as error:
        # One that the engine cannot remove must not keep the others.
        _log.warning("The container of the sandbox %s stays: %s", found[LABEL], error)
        return ""
    return found[LABEL]


def remove(client: APIClient, container: str) -> None:
    """Kill a container and remove it, if it is there. Raises SandboxError when it stays."""
    from docker.errors import APIError

    with asking(f"remove the container {container}"):
        try:
            client.remove_container(container, v=True, force=True)
        except APIError as error:
            # Not there, or somebody else is removing it.
            if error.status_code not in (404, 409):
                raise
