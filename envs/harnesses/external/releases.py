"""Which version of each outside program is used, where it is installed, and whether it is there.

Invariant: a folder of this name exists only when its installation is complete; ``installed.json`` in it says
what it holds.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VERSIONS = Path(__file__).with_name("versions.json")
STAMP = "installed.json"
FOLDER_VARIABLE = "REINS_HARNESSES"
_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class NotInstalledError(ValueError):
    """A harness, or what it needs, is not there in the pinned version; the message names the command."""


@dataclass(frozen=True, slots=True)
class Release:
    """The packages that make one program, by exact version, and the releases that it needs besides."""

    name: str
    registry: Literal["npm", "pypi"]
    packages: dict[str, str]
    needs: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        return next(iter(self.packages.values()))

    @property
    def folder(self) -> Path:
        return root() / self.name


def root() -> Path:
    """Where programs are installed: the environment variable ``REINS_HARNESSES``, or a folder of the user's cache."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "~/.cache/reins/harnesses").expanduser().absolute()


def architecture() -> str:
    """The architecture as npm packages spell it."""
    machine = platform.machine().lower()
    if machine not in _ARCHITECTURES:
        raise NotInstalledError(f"got a machine of type {machine!r}, expected one of {sorted(_ARCHITECTURES)}")
    return _ARCHITECTURES[machine]


def releases() -> dict[str, Release]:
    """All releases by name, in the order of ``versions.json``."""
    found = {}
    for name, entry in json.loads(VERSIONS.read_text(encoding="utf-8")).items():
        registry: Literal["npm", "pypi"] = "npm" if "npm" in entry else "pypi"
        packages = {
            package.replace("{arch}", architecture()) if "{arch}" in package else package: version
            for package, version in entry[registry].items()
        }
        found[name] = Release(name, registry, packages, tuple(entry.get("needs", ())))
    return found


def missing(release: Release) -> str:
    """What is wrong with the installation of a release; empty when it is there in the pinned version."""
    stamp = release.folder / STAMP
    if not stamp.is_file():
        return f"not in {release.folder}"
    got = json.loads(stamp.read_text(encoding="utf-8"))["packages"]
    return "" if got == release.packages else f"{release.folder} holds {got}, expected {release.packages}"


def require(name: str) -> None:
    """Raise ``NotInstalledError`` unless a harness and all that it needs are installed."""
    known = releases()
    for part in (*known[name].needs, name):
        if fault := missing(known[part]):
            raise NotInstalledError(
                f"harness {name}: {part} {known[part].version} is not installed ({fault}); "
                f"install it with `python -m envs.harnesses install {name}`, or set {FOLDER_VARIABLE} "
                "to the folder that holds it"
            )
