"""The bubblewrap backend: own namespaces, no network, a read-only system, an end that the kernel enforces.

Invariants:
- A command's processes live in one process namespace, and none outlives ``run`` (``namespace.py``).
- Inside, only /usr, a handful of files of /etc, the mounts of the command and four writable folders exist:
  workspace and home, which last as long as the sandbox, /tmp and /dev/shm, which are in memory, bounded, and new for
  every command. No other path of the host can be named.

Started as root, bubblewrap mounts as root and the command then runs as a user id of its own for each sandbox
(derived from the label) without capabilities, where the kernel allows it in a user namespace of its own too. Started
by another user, a user namespace maps the command to uid 1000.

What the limits hold. Where control groups can be made, memory (with what lies in /tmp and /dev/shm) and the number
of processes are bounded over the whole sandbox, and so are the cores if asked for; elsewhere memory counts per
process (private writable memory, ``RLIMIT_DATA``, since runtimes such as V8 reserve far more address space than they
use) and the number of processes by user id or user namespace (kernels before 5.14 count all processes of the user
there). CPU seconds, file size and open files count per process. What workspace and home take of the disk is not
bounded here. The kernel itself is shared: this keeps agents honest, it is no defence against an exploit of the
kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from envs.sandbox.aio import uninterrupted
from envs.sandbox.base import Command, Finished, Limits, Mount, SandboxError
from envs.sandbox.bytecode import compiled
from envs.sandbox.cgroups import Group
from envs.sandbox.enclosed import ETC, HOME, HOSTNAME, SHM_MB, Enclosed, uid_of
from envs.sandbox.files import copy_tree
from envs.sandbox.namespace import INSTALL, LostError, Namespace, Shape, Waiting, program
from envs.sandbox.relayed import RELAY_FOLDER
from envs.sandbox.spawn import within

_OWN_USERS = ("/usr/bin/unshare", "--user", "--map-user=1000", "--map-group=1000", "--")
_WAITING = Path(__file__).with_name("waiting.py")
_ETC = ("alternatives", "ld.so.cache", "mime.types", "protocols", "services")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@functools.cache
def interpreter() -> tuple[str, str | None]:
    """The interpreter as seen inside, and the prefix to show at /opt/python when it lies outside of /usr."""
    own = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if own.is_relative_to("/usr"):
        return os.fspath(own), None
    system = Path("/usr/bin/python3")
    if system.exists():
        return os.fspath(system), None
    return f"/opt/python/bin/{own.name}", sys.base_prefix


@functools.cache
def _system_arguments() -> tuple[str, ...]:
    """The part of the view that is the same for every sandbox of this machine."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.fspath(path.readlink()), f"/{name}"]
        elif path.is_dir():
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in _ETC:
        if Path("/etc", name).exists():
            arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    python, prefix = interpreter()
    if prefix is not None:
        arguments += ["--ro-bind", prefix, "/opt/python"]
    for name in ("python", "python3"):
        arguments += ["--symlink", python, f"/opt/bin/{name}"]
    return (*arguments, "--proc", "/proc", "--dev", "/dev")


def _folders_above(paths: Iterable[str]) -> list[str]:
    """Arguments that make the folders above mount points; those made unasked would be closed to others."""
    folders = sorted({str(above) for path in paths for above in PurePosixPath(path).parents} - {"/"})
    return [argument for folder in folders for argument in ("--dir", folder)]


class Bubblewrap(Enclosed):
    """A sandbox in namespaces; see the module's text. Made by ``envs.sandbox.create``."""

    def __init__(self, root: Path, label: str, mount_dir: str) -> None:
        super().__init__(root, label, mount_dir)
        self.python = interpreter()[0]
        self._running: Namespace | None = None
        self._waiting: Waiting | None = None
        self._dismissed: Waiting | None = None
        self._groups: dict[bool, Group] = {}

    @property
    def busy(self) -> bool:
        return self._running is not None

    def environment(self) -> dict[str, str]:
        env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/opt/bin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "USER": "user",
        }
        if interpreter()[1] is not None:
            env["LD_LIBRARY_PATH"] = "/opt/python/lib"
        return env

    def build(self, input_files: Path | None) -> None:
        super().build(input_files)
        uid = 1000 if self.uid is None or own_user_namespace() else self.uid
        self.make_etc(uid, uid)
        self.make_mount_point([(HOME, self.home), *([] if sized_tmpfs() else [("/tmp", self.tmp)])])

    def move_in(self, label: str, input_files: Path | None) -> None:
        """Make a sandbox that was built without a task the task's. Raises as ``build``."""
        self.rename(label)
        if input_files is not None:
            copy_tree(input_files, self.workspace, self.uid)

    def _arguments(self, shape: Shape) -> list[str]:
        base = os.fspath(self.base)
        arguments = [
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--hostname", HOSTNAME),
            *("--dir", "/etc", "--dir", "/opt", "--dir", "/opt/bin", "--dir", "/run"),
            *_system_arguments(),
            *self._scratch(shape.file_mb),
            *("--remount-ro", "/dev", "--bind", f"{base}/home", HOME),
            *_folders_above([self.mount_dir]),
            *("--bind", f"{base}/workspace", self.mount_dir),
        ]
        arguments += _folders_above(mount.inside for mount in shape.mounts)
        for name in ETC:
            arguments += ["--ro-bind", f"{base}/etc/{name}", f"/etc/{name}"]
        for mount in shape.mounts:
            arguments += ["--bind" if mount.writable else "--ro-bind", os.fspath(self.base / mount.host), mount.inside]
        if self.uid is None:
            arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        return [*arguments, "--remount-ro", "/", "--chdir", self.mount_dir]

    def _scratch(self, tmp_mb: int) -> list[str]:
        """/tmp and /dev/shm: in memory with a bound, where this bubblewrap can; else folders of the room."""
        if not sized_tmpfs():
            base = os.fspath(self.base)
            return ["--bind", f"{base}/shm", "/dev/shm", "--bind", f"{base}/tmp", "/tmp"]
        arguments = []
        for folder, size in (("/dev/shm", min(tmp_mb, SHM_MB)), ("/tmp", tmp_mb)):
            arguments += ["--perms", "1777", "--size", str(size << 20), "--tmpfs", folder]
        above = Path(self.mount_dir).parents
        for folder in sorted(os.fspath(path) for path in above if path.is_relative_to("/tmp/")):
            # The folders on the way to the workspace are the agent's too.
            arguments += [] if folder == "/tmp" else ["--perms", "0777", "--dir", folder]
        return arguments

    def _argv(self, argv: tuple[str, ...]) -> list[str]:
        if self.uid is None:
            return list(argv)
        uid = str(self.uid)
        become = ["/usr/bin/setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--bounding-set=-all"]
        return [*become, "--inh-caps=-all", "--", *(_OWN_USERS if own_user_namespace() else ()), *argv]

    def _bounds(self, limits: Limits) -> Group:
        """The control groups for a command: made with the first of its kind, bounded for this one."""
        cores = limits.cpus > 0
        if cores not in self._groups:
            self._groups[cores] = Group(f"{self.label}{'.cores' if cores else ''}", cores)
        self._groups[cores].limit(limits)
        return self._groups[cores]

    async def prepare(self, shape: Shape) -> None:
        """Have namespaces of ``shape`` wait for the command, which then begins at once if it is of that shape.

        Raises SandboxError. Whoever cancels it has to destroy the sandbox.
        """
        for mount in shape.mounts:
            if not mount.host.is_absolute():
                (self.base / mount.host).mkdir(mode=0o755, parents=True, exist_ok=True)
        group = self._bounds(Limits(cpus=shape.cpus))
        program = compiled(self.python, _WAITING)[0]
        shown = Mount(program, f"/opt/waiting/waiting{program.suffix}")
        relays = [mount.inside for mount in shape.mounts if PurePosixPath(mount.inside).is_relative_to(RELAY_FOLDER)]
        argv = (self.python, "-I", "-S", shown.inside, *(relays[:1] or [""]))
        arguments = self._arguments(replace(shape, mounts=(*shape.mounts, shown)))
        self._waiting = Waiting(self.base, group, self._argv(argv), arguments, self.environment(), shape)
        await uninterrupted(self._waiting.begin(None))
        await self._waiting.ready()

    @property
    def waits(self) -> bool:
        """Whether ``prepare`` was done, and nothing has ended it since."""
        return self._waiting is not None and self._waiting.alive()

    async def run(self, command: Command) -> Finished:
        if self._running is not None:
            raise SandboxError(f"sandbox {self.label!r}: one command at a time; one is still running")
        group = self._bounds(command.limits)
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.shape == Shape.of(command, self.base):
            with contextlib.suppress(LostError):
                return await self._run(waiting, waiting.hand_over(command), command)
        elif waiting is not None:
            waiting.kill()
            self._dismissed = waiting
        argv, arguments = self._argv(command.argv), self._arguments(Shape.of(command, self.base))
        started = Namespace(self.base, group, argv, arguments, command.env, command.limits.output_bytes)
        return await self._run(started, uninterrupted(started.begin(command.limits)), command)

    async def _run(self, running: Namespace, beginning: Awaitable[None], command: Command) -> Finished:
        self._running = running
        code: int | None = None
        try:
            await beginning
            code = await within(running.child, command)
        finally:
            if code is None:
                running.kill()
            finished = await uninterrupted(self._settle(running, code))
        return finished

    async def _settle(self, running: Namespace, code: int | None) -> Finished:
        try:
            await self._dismiss()
            return await running.end(code)
        finally:
            self._running = None
            running.over.set()

    async def _dismiss(self) -> None:
        """Wait for the end of a place that waited in vain."""
        dismissed, self._dismissed = self._dismissed, None
        if dismissed is not None:
            await dismissed.end(None)

    async def kill(self) -> None:
        if self._waiting is not None:
            self._dismissed, self._waiting = self._waiting, None
            self._dismissed.kill()
            await uninterrupted(self._dismiss())
        if self._running is not None:
            self._running.kill()
            await self._running.over.wait()

    async def _destroy(self) -> None:
        await self.kill()
        for cores in list(self._groups):
            await asyncio.to_thread(self._groups[cores].remove)
            del self._groups[cores]
        await super()._destroy()


@functools.cache
def sized_tmpfs() -> bool:
    """Whether this bubblewrap can bound a folder in memory; those before 0.7 cannot."""
    return "--size" in subprocess.run([program(), "--help"], capture_output=True, text=True, check=False).stdout


@functools.cache
def own_user_namespace() -> bool:
    """Whether a sandbox started by root can have a user namespace of its own, found by trying it."""
    become = ["setpriv", "--reuid", str(uid_of("probe")), "--clear-groups", "--", *_OWN_USERS, "/bin/true"]
    return subprocess.run(become, capture_output=True, check=False).returncode == 0


def missing() -> str:
    """Why bubblewrap cannot be used here, found by trying it; empty when it can."""
    root = os.geteuid() == 0
    try:
        arguments = [
            program(),
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--ro-bind",
            "/",
            "/",
        ]
        arguments += ["--proc", "/proc", "--dev", "/dev", *([] if root else ["--unshare-user"])]
        become = ["setpriv", "--reuid", str(uid_of("probe")), "--clear-groups"] if root else []
        done = subprocess.run([*arguments, "--", *become, "/bin/true"], capture_output=True, text=True, timeout=30)
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap could not be started: {error}. {INSTALL}"
    if done.returncode == 0:
        return ""
    return f"bubblewrap is there but does not work: {done.stderr.strip()[-300:]}"
