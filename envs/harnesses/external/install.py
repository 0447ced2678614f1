"""Installs outside programs in their pinned versions, and starts each once to see that it is whole.

Invariant: what is there is replaced only by a complete installation; an interrupted one leaves a folder
``NAME.partial`` that the next one removes. No package's own install scripts are run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.harnesses.external.adapters import PROGRAMS
from envs.harnesses.external.program import NODE, own_path, python_minor
from envs.harnesses.external.releases import STAMP, Release, missing, releases
from envs.sandbox import recipe
from envs.sandbox.bubblewrap import interpreter

Say = Callable[[str], None]
_LOOK_S = 2.0
_START_S = 120.0
_SHOW_VERSION = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib.metadata
print(importlib.metadata.version(sys.argv[2]))
"""


class InstallError(RuntimeError):
    """A package manager or a program failed; the message holds its last words."""


def install(names: Iterable[str], say: Say, show: Say, again: bool = False) -> None:
    """Install releases and what they need. ``say`` takes lines, ``show`` what goes on at the moment.

    Raises ValueError for an unknown name, InstallError when a package manager fails.
    """
    known = releases()
    wanted: list[str] = []
    for name in names:
        if name not in known:
            raise ValueError(f"harness {name!r}: expected some of {sorted(known)}")
        wanted += [part for part in (*known[name].needs, name) if part not in wanted]
    for name in wanted:
        release = known[name]
        if not again and not missing(release):
            say(f"{name} {release.version}: already in {release.folder}")
            continue
        began = time.monotonic()
        _install(release, lambda text, name=name: show(f"{name}: {text}"))  # type: ignore[misc]
        say(f"{name} {release.version}: installed in {release.folder}, {time.monotonic() - began:.0f} s")


def version(release: Release) -> str:
    """What an installed program says of its version. Raises InstallError when it cannot be started."""
    command = _version_command(release)
    with tempfile.TemporaryDirectory(prefix="reins-version-") as home:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home}
        try:
            done = subprocess.run(
                command, env=environment, cwd=home, capture_output=True, text=True, timeout=_START_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InstallError(f"{release.name} could not be started: {error}") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise InstallError(f"{release.name} failed ({done.returncode}): {(done.stderr or done.stdout)[-500:]}")
    return lines[-1]


def _install(release: Release, show: Say) -> None:
    partial = release.folder.with_name(f"{release.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    commands = _npm(release, partial) if release.registry == "npm" else _pip(release, partial)
    for command in commands:
        _run(command, partial, show)
    (partial / STAMP).write_text(json.dumps({"packages": release.packages}), encoding="utf-8")
    shutil.rmtree(release.folder, ignore_errors=True)
    partial.rename(release.folder)
    _open_to_all(release.folder)


def _npm(release: Release, folder: Path) -> list[list[str]]:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm was not found on PATH; install it with `apt-get install npm` or from nodejs.org")
    quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--ignore-scripts", "--omit=dev", "--save-exact"]
    packages = [f"{package}@{version}" for package, version in release.packages.items()]
    return [[npm, "install", "--prefix", os.fspath(folder), *quiet, *packages]]


def _pip(release: Release, folder: Path) -> list[list[str]]:
    """One set of packages for each Python that may run it: a sandbox's, the image's, and our own."""
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    minors = {python_minor(interpreter()[0]), python_minor(recipe.python()), ours}
    packages = [f"{package}=={version}" for package, version in release.packages.items()]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [
        [*pip, "--only-binary=:all:", "--python-version", minor, "--target", f"{folder}/python{minor}", *packages]
        for minor in sorted(minors)
    ]


def _run(command: list[str], folder: Path, show: Say) -> None:
    environment = dict(os.environ)
    node = releases()["node"].folder / own_path(NODE)
    if node.exists():
        # npm leaves out packages that do not suit the Node it runs under.
        environment["PATH"] = f"{node.parent}:{environment.get('PATH', os.defpath)}"
    with tempfile.TemporaryFile() as output, _growing(folder, show):
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        words = output.read().decode(errors="replace").strip()
    if done.returncode:
        raise InstallError(f"`{' '.join(command[:3])} ...` failed ({done.returncode}):\n{words[-2000:]}")


@contextmanager
def _growing(folder: Path, show: Say) -> Iterator[None]:
    """Show seconds and size of a folder while it is filled."""
    over = threading.Event()
    began = time.monotonic()

    def look() -> None:
        while not over.wait(_LOOK_S):
            size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
            show(f"{time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _open_to_all(folder: Path) -> None:
    """Agents run as users of their own: they must be able to read what was installed under any umask."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def _version_command(release: Release) -> list[str]:
    if release.registry == "pypi":
        package = next(iter(release.packages))
        folder = f"{release.folder}/python{python_minor(sys.executable)}"
        return [sys.executable, "-I", "-S", "-c", _SHOW_VERSION, folder, package]
    if release.name == "node":
        return [os.fspath(release.folder / own_path(NODE)), "--version"]
    return [*PROGRAMS[release.name].host_argv(), "--version"]
