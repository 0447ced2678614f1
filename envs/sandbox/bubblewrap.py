"""The bubblewrap backend: own namespaces, no network, a read-only system, an end that the kernel enforces.

Invariants:
- A command's processes live in one process namespace. ``run`` returns after the first process of that
  namespace is gone, which the kernel lets happen only when all others are dead.
- Inside, only /usr, a handful of files of /etc, the mounts of the command and four writable folders exist:
  workspace, home, /tmp and /dev/shm. No other path of the host can be named.

Started as root, bubblewrap mounts as root and the command then runs as a user id of its own for each sandbox
(derived from the label) without capabilities. Started by another user, a user namespace maps the command to
uid 1000.

What the limits hold: CPU seconds, file size, open files and memory (private writable memory, ``RLIMIT_DATA``,
since runtimes such as V8 reserve far more address space than they use) count per process. The number of
processes counts per sandbox: by its own user id when we are root, by its own user namespace otherwise
(kernels before 5.14 count all processes of the user there). The sum of memory and of disk over all processes
is not bounded. The kernel itself is shared: this keeps agents honest, it is no defence against an exploit of
the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from envs.sandbox.aio import readable, uninterrupted
from envs.sandbox.base import Command, Finished, Limits, Mount, SandboxError
from envs.sandbox.gc import end_processes, parent_of
from envs.sandbox.room import Room
from envs.sandbox.spawn import Child, within

HOME = "/root"
HOSTNAME = "sandbox"
RELAY_PORT = 8080
_INSTALL = "Install it with `apt-get install bubblewrap`, or use the backend `process`."
_START_S = 30.0
_ETC = ("alternatives", "ld.so.cache", "mime.types", "protocols", "services")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@functools.cache
def program() -> str:
    """Where bubblewrap lies on this machine."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(f"bubblewrap (bwrap) was not found on PATH. {_INSTALL}")
    return found


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


@functools.cache
def _first_uid() -> int:
    # Container engines often map only the first 65,536 ids; where all are there, stay away from people's ids.
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return 0x70000000 if any(int(start) == 0 and int(count) > 0x7F000000 for start, _, count in ranges) else 20000


def _uid(label: str) -> int | None:
    if os.geteuid() != 0:
        return None
    first = _first_uid()
    return first + zlib.crc32(label.encode()) % (1 << 24 if first > 65536 else 40000)


class _Running:
    """One command in its namespaces."""

    def __init__(self, base: Path, argv: list[str], arguments: list[str], command: Command) -> None:
        self._base = base
        options = os.memfd_create("bwrap-arguments")
        status, status_writer = os.pipe()
        block, self._release = os.pipe()
        self.status = status
        try:
            os.write(options, b"\0".join(os.fsencode(argument) for argument in arguments) + b"\0")
            os.lseek(options, 0, os.SEEK_SET)
            fds = [options, status_writer, block]
            # Passed by descriptor: the command line of the first process can be read inside.
            start = [program(), "--args", str(options), "--json-status-fd", str(status_writer)]
            start += ["--block-fd", str(block), "--", *argv]
            try:
                # The working directory tells garbage collection whose start this is.
                self.child = Child(start, command.env, command.limits.output_bytes, fds, os.fspath(base))
            except OSError as error:
                os.close(self._release)
                os.close(status)
                raise SandboxError(f"bubblewrap did not start: {error}. {_INSTALL}") from error
        finally:
            for fd in (options, status_writer, block):
                os.close(fd)
        os.set_blocking(status, False)
        self._text = b""
        self._init: int | None = None
        self._killed = False
        self.over = asyncio.Event()

    async def begin(self, limits: Limits) -> None:
        """Learn the namespace's first process, set its limits, and let it go on to the command."""
        try:
            while b"\n" not in self._text:
                await asyncio.wait_for(readable(self.status), _START_S)
                chunk = os.read(self.status, 4096)
                if not chunk:
                    return
                self._text += chunk
            # A start that failed is over by now, and its pid may be another's.
            with contextlib.suppress(ProcessLookupError):
                self._adopt(json.loads(self._text.split(b"\n")[0])["child-pid"], limits)
            if self._killed:
                self.kill()
        finally:
            if self._init is None:
                self.child.process.kill()
                end_processes(self._base)
            os.close(self._release)

    def _adopt(self, pid: int, limits: Limits) -> None:
        """Hold on to the namespace's first process and limit it. Raises ProcessLookupError if it is gone."""
        init = os.pidfd_open(pid)
        if parent_of(pid) != self.child.process.pid:
            os.close(init)
            raise ProcessLookupError(pid)
        self._init = init
        for what, value in rlimits(limits):
            resource.prlimit(pid, what, value)

    def kill(self) -> None:
        self._killed = True
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    async def end(self, code: int | None) -> Finished:
        """Wait until the namespace is empty. Raises SandboxError when the command never ran."""
        await self.child.gone()
        if self._init is not None:
            await readable(self._init)
            os.close(self._init)
            self._init = None
        finished = await self.child.collect(code)
        while chunk := os.read(self.status, 4096):
            self._text += chunk
        os.close(self.status)
        setup_failed = b"exit-code" not in self._text and code is not None and not self._killed
        if setup_failed or (code == 127 and finished.stderr.startswith(b"setpriv: failed to execute")):
            reason = finished.stderr.decode(errors="replace").strip()[-1000:]
            raise SandboxError(f"the sandbox could not start the command (exit code {code}): {reason}")
        return finished


def rlimits(limits: Limits) -> list[tuple[int, tuple[int, int]]]:
    """The kernel's resource limits for ``limits``, as arguments for setrlimit."""
    cpu = max(1, round(limits.cpu_s))
    return [
        (resource.RLIMIT_CORE, (0, 0)),
        # The soft limit sends SIGXCPU, the hard one SIGKILL.
        (resource.RLIMIT_CPU, (cpu, cpu + 5)),
        (resource.RLIMIT_DATA, (limits.memory_mb << 20, limits.memory_mb << 20)),
        (resource.RLIMIT_FSIZE, (limits.file_mb << 20, limits.file_mb << 20)),
        (resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files)),
        (resource.RLIMIT_NPROC, (limits.processes, limits.processes)),
    ]


class Bubblewrap(Room):
    """A sandbox in namespaces; see the module's text. Made by ``envs.sandbox.create``."""

    relay_port = RELAY_PORT
    inside_home = HOME

    def __init__(self, root: Path, label: str, mount_dir: str) -> None:
        super().__init__(root, label, mount_dir, _uid(label))
        self.python = interpreter()[0]
        self._running: _Running | None = None

    @property
    def inside_workspace(self) -> str:
        return self.mount_dir

    @property
    def busy(self) -> bool:
        return self._running is not None

    def inside(self, mount: Mount) -> str:
        return mount.inside

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
        uid = 1000 if self.uid is None else self.uid
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

    def _arguments(self, mounts: tuple[Mount, ...]) -> list[str]:
        base = os.fspath(self.base)
        arguments = [
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--die-with-parent", "--new-session", "--hostname", HOSTNAME),
            *("--dir", "/etc", "--dir", "/opt", "--dir", "/opt/bin", "--dir", "/run"),
            *_system_arguments(),
            *("--bind", f"{base}/shm", "/dev/shm", "--remount-ro", "/dev"),
            *("--bind", f"{base}/tmp", "/tmp", "--bind", f"{base}/home", HOME),
            *_folders_above([self.mount_dir]),
            *("--bind", f"{base}/workspace", self.mount_dir),
        ]
        arguments += _folders_above(mount.inside for mount in mounts)
        for name in ("passwd", "group", "hosts", "nsswitch.conf"):
            arguments += ["--ro-bind", f"{base}/etc/{name}", f"/etc/{name}"]
        for mount in mounts:
            arguments += ["--bind" if mount.writable else "--ro-bind", os.fspath(mount.host), mount.inside]
        if self.uid is None:
            arguments += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        return [*arguments, "--remount-ro", "/", "--chdir", self.mount_dir]

    def _argv(self, command: Command) -> list[str]:
        if self.uid is None:
            return list(command.argv)
        uid = str(self.uid)
        become = ["/usr/bin/setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--bounding-set=-all"]
        return [*become, "--inh-caps=-all", "--", *command.argv]

    async def run(self, command: Command) -> Finished:
        if self._running is not None:
            raise SandboxError(f"sandbox {self.label!r}: one command at a time; one is still running")
        running = self._running = _Running(self.base, self._argv(command), self._arguments(command.mounts), command)
        code: int | None = None
        try:
            await uninterrupted(running.begin(command.limits))
            code = await within(running.child, command)
        finally:
            if code is None:
                running.kill()
            finished = await uninterrupted(self._settle(running, code))
        return finished

    async def _settle(self, running: _Running, code: int | None) -> Finished:
        try:
            return await running.end(code)
        finally:
            self._running = None
            running.over.set()

    async def kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            await self._running.over.wait()


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
        become = ["setpriv", "--reuid", str(_uid("probe")), "--clear-groups"] if root else []
        done = subprocess.run([*arguments, "--", *become, "/bin/true"], capture_output=True, text=True, timeout=30)
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap could not be started: {error}. {_INSTALL}"
    if done.returncode == 0:
        return ""
    return f"bubblewrap is there but does not work: {done.stderr.strip()[-300:]}"
