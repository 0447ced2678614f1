"""Makes the image of the backend ``docker``: from our Dockerfile, or, without a registry, from debootstrap.

Invariant: the image's name is given only to one that is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from docker import APIClient
from docker.errors import DockerException, ImageNotFound
from requests.exceptions import RequestException

from envs.sandbox.base import SandboxError
from envs.sandbox.engine import asking, connect
from envs.sandbox.files import remove_tree
from envs.sandbox.recipe import DOCKERFILE, FINISH, PYTHON_LABEL, packages, python, suite

Say = Callable[[str], None]
SOURCES = ("auto", "dockerfile", "debootstrap")
_REGISTRY_S = 20.0
_LAST_LINES = 15
_INSTALL = "apt-get install debootstrap"


def make(name: str, source: str, again: bool, mirror: str, say: Say, show: Say) -> str:
    """Make the image ``name`` unless it is there, or also then with ``again``; its name.

    ``source``: one of ``SOURCES``; auto asks the registry whether it can be reached. ``mirror``: where debootstrap
    finds Debian; empty for its own default. ``say`` takes lines, ``show`` what goes on at the moment. Raises
    SandboxError, with what to do.
    """
    if ":" not in name.rpartition("/")[2]:
        name = f"{name}:latest"
    began = time.monotonic()
    with contextlib.closing(connect()) as client:
        if not again and _there(client, name):
            say(f"the image {name} is there already")
            return name
        if source == "auto":
            show("asking the registry for Debian")
            source = "dockerfile" if _registry(client) else "debootstrap"
            say("from the Dockerfile" if source == "dockerfile" else "no registry can be reached: with debootstrap")
        if source == "dockerfile":
            _build(client, name, show)
        else:
            with _root_folder(mirror, show) as folder:
                show("importing it")
                _import(client, folder, name)
        if not _there(client, name):
            raise SandboxError(f"the Docker engine made no image {name}, and said nothing about it")
    say(f"made in {time.monotonic() - began:.0f} s")
    return name


def _there(client: APIClient, name: str) -> bool:
    with asking(f"look at the image {name}"):
        try:
            client.inspect_image(name)
        except ImageNotFound:
            return False
    return True


def _registry(client: APIClient) -> bool:
    """Whether the engine has, or can get, what our Dockerfile begins with."""
    base = f"debian:{suite()}-slim"
    if _there(client, base):
        return True
    with contextlib.closing(connect(_REGISTRY_S)) as asker:
        try:
            asker.inspect_distribution(base)
        except (DockerException, RequestException):
            return False
    return True


def _build(client: APIClient, name: str, show: Say) -> None:
    # With the host's network, since the engine may have no other. Nothing of our folder is sent but the Dockerfile.
    with DOCKERFILE.open("rb") as recipe, asking("build the image"):
        last: list[str] = []
        for event in client.build(fileobj=recipe, tag=name, rm=True, forcerm=True, decode=True, network_mode="host"):
            line = (event.get("stream") or event.get("status") or "").strip()
            if line:
                last = [*last[-_LAST_LINES:], line]
                show(line)
            if "error" in event:
                words = "\n".join([*last, event["error"]])
                raise SandboxError(f"the Docker engine could not build {DOCKERFILE}:\n{words}")


@contextlib.contextmanager
def _root_folder(mirror: str, show: Say) -> Iterator[Path]:
    """A Debian root that debootstrap makes, removed at the end."""
    program = shutil.which("debootstrap")
    if program is None or os.geteuid() != 0:
        raise SandboxError(
            "no registry can be reached, and "
            + (
                "debootstrap was not found on PATH"
                if not program
                else f"we are user id {os.geteuid()}, while debootstrap needs root"
            )
            + f". Install it with `{_INSTALL}` and run this "
            "as root, or load a Debian image into the engine (`docker load`) and give it the name "
            f"debian:{suite()}-slim."
        )
    # Not in /tmp, which may be in memory or forbid devices.
    work = Path(tempfile.mkdtemp(prefix="reins-image-", dir="/var/tmp"))
    try:
        folder = work / "root"
        extra = [mirror] if mirror else []
        listed = ",".join(packages())
        # A mount namespace of its own: what it mounts is gone with it, however it ends.
        start = ["unshare", "--mount", program, "--variant=minbase", f"--include={listed}"]
        _run([*start, suite(), os.fspath(folder), *extra], work, show)
        _run(["sh", "-c", FINISH], folder, show, {"PYTHON": python()})
        if not (folder / python().lstrip("/")).exists():
            raise SandboxError(f"{DOCKERFILE}: {suite()} has no {python()}; change ARG PYTHON to the one that it has")
        yield folder
    finally:
        remove_tree(work)


def _run(argv: list[str], folder: Path, show: Say, more: dict[str, str] | None = None) -> None:
    """Run a program and show its lines. Raises SandboxError with the last of them when it fails."""
    last: list[str] = []
    with subprocess.Popen(
        argv,
        cwd=folder,
        env=os.environ | (more or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-_LAST_LINES:], line.rstrip()]
            show(last[-1])
    if process.returncode:
        words = "\n".join(last)
        raise SandboxError(f"`{' '.join(argv[:4])} ...` failed ({process.returncode}):\n{words}")


def _import(client: APIClient, folder: Path, name: str) -> None:
    repository, _, tag = name.rpartition(":")
    changes = [f"LABEL {PYTHON_LABEL}={python()}"]
    with subprocess.Popen(["tar", "-C", folder, "--numeric-owner", "-c", "."], stdout=subprocess.PIPE) as packing:
        with asking("import the image"):
            client.import_image_from_stream(packing.stdout, repository=repository, tag=tag, changes=changes)
        if packing.wait():
            raise SandboxError(f"tar could not pack {folder} (exit code {packing.returncode})")
