"""Bounds over all processes of a sandbox together: control groups, where this machine lets us make them.

Whether it does is found by trying, once per process: version 1 and 2, each of the controllers memory, pids and cpu,
the last only where cores are to be bounded.
A group is made below our own, so that whatever bounds us bounds the sandboxes too. In version 2 a group that holds
processes cannot have bounded groups below it; then the nearest group above is taken, as long as none that is
stepped over has a memory bound.

Invariant: a group's name holds its owner (process namespace, process and its start time), so that garbage
collection tells what the dead left from what is in use, whatever has become of the rooms.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox.base import Limits, SandboxError
from envs.sandbox.proc import start_time

_PREFIX = "reins-"
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_PATIENCE_S = 2.0
_UNITED = 2
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
_MEMSW = "memory.memsw.limit_in_bytes"
_OPTIONAL = (_MEMSW, "memory.swap.max")
"""What a kernel without accounting of swap lacks."""


@dataclass(frozen=True, slots=True)
class Parent:
    """A folder below which groups can be made that bound ``controllers``."""

    folder: Path
    version: int
    controllers: frozenset[str]


def _settings(controller: str, version: int, limits: Limits) -> list[tuple[str, str]]:
    """Files and values, in the order of writing."""
    held = str(limits.memory_mb << 20)
    if controller == "pids":
        return [("pids.max", str(limits.processes))]
    if controller == "memory" and version == _UNITED:
        return [("memory.max", held), ("memory.swap.max", "0")]
    if controller == "memory":
        # The bound with swap is never below the one without, not even while both are being changed.
        return [(_MEMSW, "-1"), ("memory.limit_in_bytes", held), (_MEMSW, held)]
    quota = round(limits.cpus * _PERIOD_US) or _PERIOD_US
    if version == _UNITED:
        return [("cpu.max", f"{quota} {_PERIOD_US}")]
    return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]


def _limit(folder: Path, version: int, controllers: Iterable[str], limits: Limits) -> None:
    """Raises OSError where a bound cannot be set."""
    for controller in controllers:
        for name, value in _settings(controller, version, limits):
            if name not in _OPTIONAL or (folder / name).exists():
                (folder / name).write_text(value)


def _space() -> str:
    """How the names of groups begin whose owners' process ids are of our own process namespace."""
    return f"{_PREFIX}{Path('/proc/self/ns/pid').stat().st_ino}"


def _owned() -> str:
    """How the names of our own groups begin."""
    return f"{_space()}.{os.getpid()}.{start_time(os.getpid())}"


class Group:
    """The control groups of one sandbox, one per hierarchy; none where none can be made."""

    def __init__(self, label: str, cpu: bool = False) -> None:
        """``cpu``: whether cores are bounded too. Without that a sandbox stays out of the groups of that controller,
        where it would no longer be as nice as we are. Raises SandboxError.
        """
        name = f"{_owned()}.{label}"
        wanted = {*_CONTROLLERS} if cpu else {*_CONTROLLERS} - {"cpu"}
        asked = [replace(parent, controllers=parent.controllers & wanted) for parent in parents()]
        self._parents = [parent for parent in asked if parent.controllers]
        self._folders = [parent.folder / name for parent in self._parents]
        for folder in self._folders:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                self.remove()
                raise SandboxError(f"sandbox {label!r}: could not make the control group {folder}: {error}") from error

    def limit(self, limits: Limits) -> None:
        """Bound all processes of the group together. Raises SandboxError."""
        for parent, folder in zip(self._parents, self._folders, strict=True):
            try:
                _limit(folder, parent.version, parent.controllers, limits)
            except OSError as error:
                raise SandboxError(f"could not set the bounds of the control group {folder}: {error}") from error

    def entering(self, argv: Sequence[str]) -> list[str]:
        """``argv`` such that it begins inside the group, where a process can enter by itself: in version 1.

        A process of one thread that enters by itself is done at once. Whoever moves another one waits until the
        kernel has looked at all processes, for ten milliseconds and more on a busy machine.
        """
        entered = [
            f"{folder}/tasks"
            for parent, folder in zip(self._parents, self._folders, strict=True)
            if parent.version == 1
        ]
        return ["/bin/sh", "-c", _ENTER, "sh", *entered, "--", *argv] if entered else list(argv)

    def add(self, pid: int) -> None:
        """Take a process in where it could not enter by itself; its children follow.

        Raises ProcessLookupError if it is gone.
        """
        for parent, folder in zip(self._parents, self._folders, strict=True):
            if parent.version == _UNITED:
                (folder / "cgroup.procs").write_text(str(pid))

    def ran_out(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        return any(
            _kills(folder / name) for folder in self._folders for name in ("memory.oom_control", "memory.events")
        )

    def remove(self) -> None:
        """Remove the groups, whose processes are dead or about to be. Raises SandboxError."""
        for folder in self._folders:
            if not _removed(folder):
                raise SandboxError(f"could not remove the control group {folder}: a process stays in it")


def _kills(counters: Path) -> bool:
    if not counters.is_file():
        return False
    counts = dict(line.split() for line in counters.read_text().splitlines())
    return int(counts.get("oom_kill", 0)) > 0


def collect() -> list[Path]:
    """Remove the groups whose owners are gone; the folders removed."""
    mounted = _mounted(Path("/proc/self/mountinfo").read_text(), "")
    ours = f"{_space()}."
    found = []
    for top in set(mounted.values()):
        for above, folders, _ in os.walk(top):
            found += [Path(above, name) for name in folders if name.startswith(ours)]
    dead = []
    for folder in found:
        pid, start = folder.name.removeprefix(ours).split(".")[:2]
        if start_time(int(pid)) != start and _removed(folder):
            dead.append(folder)
    return dead


def _removed(folder: Path) -> bool:
    """Whether it is gone, after a while of trying."""
    deadline = time.monotonic() + _PATIENCE_S
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:
            # A process that was killed leaves its group a moment later.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
    return True


@functools.cache
def parents() -> tuple[Parent, ...]:
    """Where groups can be made that really bound, by version and hierarchy."""
    mounted = _mounted(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    by_folder: dict[Path, set[str]] = {}
    missing = set(_CONTROLLERS)
    for controller in _CONTROLLERS:
        folder = mounted.get(controller)
        if folder is not None and _works(folder, 1, (controller,)):
            by_folder.setdefault(folder, set()).add(controller)
            missing.discard(controller)
    found = [Parent(folder, 1, frozenset(controllers)) for folder, controllers in by_folder.items()]
    if "" in mounted and (united := _united(mounted[""], missing)):
        found.append(united)
    return tuple(found)


def _united(own: Path, wanted: set[str]) -> Parent | None:
    """The nearest place for groups in the hierarchy of version 2, from our own group upwards."""
    for folder in (own, *own.parents):
        if not (folder / "cgroup.controllers").is_file():
            return None
        there = wanted & set((folder / "cgroup.controllers").read_text().split())
        for controller in there:
            # Refused where the folder holds processes.
            with contextlib.suppress(OSError):
                (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        works = frozenset(controller for controller in there if _works(folder, _UNITED, (controller,)))
        if works:
            return Parent(folder, _UNITED, works)
        if (folder / "memory.max").is_file() and (folder / "memory.max").read_text().strip() != "max":
            return None
    return None


def _mounted(mountinfo: str, cgroup: str) -> dict[str, Path]:
    """Our own group's folder by controller; the hierarchy of version 2 under the empty name."""
    own = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found = {}
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        root, point = head.split()[3:5]
        kind, _, options = tail.split(None, 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        for name in [""] if kind == "cgroup2" else set(options.split(",")) & set(_CONTROLLERS):
            path = own.get(name, "/")
            # In a container the mount may show only our own part, under its own root.
            below = os.path.relpath(path, root) if path == root or path.startswith(root.rstrip("/") + "/") else "."
            folder = Path(point, below)
            found[name] = folder if folder.is_dir() else Path(point)
    return found


def _works(folder: Path, version: int, controllers: Iterable[str]) -> bool:
    """Whether a group below ``folder`` can be made, bounded and entered."""
    group = folder / f"{_owned()}.probe"
    probe = None
    try:
        group.mkdir(exist_ok=True)
        _limit(group, version, controllers, Limits())
        probe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        (group / "cgroup.procs").write_text(str(probe.pid))
    except OSError:
        return False
    finally:
        if probe is not None:
            probe.communicate()
        _removed(group)
    return True


def holding() -> str:
    """What bounds a whole sandbox on this machine, for people."""
    held = {controller: f"version {parent.version}" for parent in parents() for controller in parent.controllers}
    if not held:
        return "no control groups can be made here: memory counts per process, processes per user id (rlimits)"
    named = ", ".join(f"{controller} ({held[controller]})" for controller in _CONTROLLERS if controller in held)
    rest = [controller for controller in _CONTROLLERS if controller not in held]
    text = f"control groups bound the whole sandbox: {named}"
    return text + (f"; per process only: {', '.join(rest)}" if rest else "")
