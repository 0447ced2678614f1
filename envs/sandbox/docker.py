"""The docker backend: every command in a container of its own, through a real Docker engine.

Invariants:
- A command's processes live in one container, whose first process is the engine's init. ``run`` returns after the
  engine has said that this is gone, which the kernel lets happen only when all others are dead, and after the container
  has been removed.
- A container is named after its sandbox and asked for by that name, so that one which the engine made although we did
  not hear of it is removed as well.

Inside there are the image, read-only; what bubblewrap shows too (workspace, home, the mounts of the command), at the
same paths and for a user id of the sandbox's own; and no network but the loopback. Workspace and home lie on the host
and last as long as the sandbox; /tmp and /dev/shm are in memory, bounded, and new for every command.

What the limits hold: memory (without swap, with what lies in /tmp and /dev/shm), processes and cores count for all of a
container together, CPU seconds, private memory, file size and open files for each process. What workspace and home
take of the disk is not bounded here. What keeps the kernel from the agent is the engine's ``runtime``: with gVisor
(``runsc``, started with ``--host-uds=open`` so that the relay's socket can be reached) or Kata it is another kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker.types
from docker.errors import APIError, NotFound

from envs.sandbox import seccomp
from envs.sandbox.aio import Kept, uninterrupted
from envs.sandbox.base import Command, DockerOptions, Finished, Limits, Meter, Mount, NotStartedError, SandboxError
from envs.sandbox.enclosed import ETC, HOME, HOSTNAME, SHM_MB, Enclosed
from envs.sandbox.engine import Image, asking, connect, labels, look_at, remove

T = TypeVar("T")
_CPUS = 2.0
"""Cores of a container where the limits name none."""
_PRLIMIT = "/usr/bin/prlimit"
_FILTERED = """
import ctypes, os, signal, sys
held = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
if held and ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(Program(len(held) // 8, held)), 0, 0):
    sys.exit(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
# Not os.environ, to which Python may have added a locale.
given = open("/proc/self/environ", "rb").read().split(b"\\0")
os.execve(sys.argv[2], sys.argv[2:], dict(item.split(b"=", 1) for item in given if b"=" in item))
"""
"""Adds our filter to the engine's own, whose strictness depends on its version."""
_END_S = 60.0
"""How long the engine may take to tell the end of a container that was killed."""
_KILLED = -9
# The engine's own list, which ours replaces, and all of /sys: it describes the host, and nothing inside needs it.
_HIDDEN = [f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats")]
_HIDDEN += [f"/proc/{name}" for name in ("sched_debug", "scsi", "timer_list", "timer_stats")]
_HIDDEN += ["/sys"]
# The client blocks. A pool of our own: asyncio's has few threads, and copies files.
_CALLS = ThreadPoolExecutor(64, thread_name_prefix="docker")


async def _call(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_CALLS, function, *arguments)


class _Output:
    """What a container writes, read from the engine's connection until that closes: frames of either stream."""

    def __init__(self, connection: Any, bound: int, meter: Meter | None = None) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        self._streams = {1: Kept(bound // 2), 2: Kept(bound - bound // 2)}
        for kept in self._streams.values():
            kept.meter = meter
        self._header = b""
        self._stream, self._left = 1, 0
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._take)

    def _take(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self.close()
        while chunk:
            if self._left:
                self._streams[self._stream].add(chunk[: self._left])
                taken = min(self._left, len(chunk))
                self._left -= taken
            else:
                taken = 8 - len(self._header)
                self._header += chunk[:taken]
                if len(self._header) == 8:
                    self._stream, self._left = struct.unpack(">BxxxL", self._header)
                    self._header = b""
            chunk = chunk[taken:]

    def close(self) -> None:
        if not self._ended.done():
            self._loop.remove_reader(self._fd)
            self._ended.set_result(None)
            # The client hides the connection's other owner there; it closes both.
            self._connection._response.close()

    async def end(self, within_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        done, _ = await asyncio.wait([self._ended], timeout=within_s)
        return bool(done)

    def values(self) -> tuple[bytes, bytes, bool]:
        """Both streams, and whether something of them was left out."""
        (stdout, cut_out), (stderr, cut_err) = self._streams[1].value(), self._streams[2].value()
        return stdout, stderr, cut_out or cut_err


class _Running:
    """One command in its container."""

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self._command = command
        self._client: Any = None
        self._output: _Output | None = None
        self._started = 0.0
        self._killed = False
        self.over = asyncio.Event()

    async def begin(self, ask: Callable[[Any], dict[str, Any]]) -> None:
        """Make the container, listen to it, start it. ``ask`` gives the engine's description of it."""
        self._output = _Output(await _call(self._make, ask), self._command.limits.output_bytes, self._command.meter)
        if self._killed:
            return
        await _call(self._start)
        self._started = time.monotonic()
        if self._killed:
            await _call(self._kill)

    def _make(self, ask: Callable[[Any], dict[str, Any]]) -> Any:
        self._client = connect()
        with asking("make a container"):
            self._client.create_container_from_config(ask(self._client), name=self.name)
            return self._client.attach_socket(self.name)

    def _start(self) -> None:
        with asking("start a container"):
            self._client.start(self.name)

    async def kill(self) -> None:
        self._killed = True
        if self._started:
            await _call(self._kill)

    def _kill(self) -> None:
        with asking("kill a container"):
            try:
                self._client.kill(self.name)
            except APIError as error:
                # Over already, or removed by somebody else.
                if error.status_code not in (404, 409):
                    raise

    async def within(self, wall_s: float) -> bool:
        """Whether the command ended before ``wall_s`` had passed since its start."""
        if self._output is None or not self._started:
            return True
        return await self._output.end(max(0.0, self._started + wall_s - time.monotonic()))

    async def end(self, in_time: bool) -> Finished:
        """Kill what still runs, and leave no container. Raises SandboxError when there is nothing to tell."""
        try:
            if not in_time:
                await self.kill()
            code = await self._code()
        finally:
            try:
                await _call(self._remove)
            finally:
                if self._output is not None:
                    self._output.close()
        stdout, stderr, cut = self._output.values() if self._output is not None else (b"", b"", False)
        seconds = time.monotonic() - self._started if self._started else 0.0
        return Finished(code if in_time else None, stdout, stderr, seconds, cut)

    async def _code(self) -> int:
        if self._output is None or not self._started:
            return _KILLED
        if not await self._output.end(_END_S):
            raise SandboxError(f"the Docker engine did not tell the end of the container {self.name}")
        code = await _call(self._exit_code)
        return _KILLED if self._killed else code

    def _exit_code(self) -> int:
        with asking("tell how a container ended"):
            try:
                return int(self._client.wait(self.name, timeout=_END_S)["StatusCode"])
            except NotFound:
                raise SandboxError(f"somebody else removed the container {self.name} while it ran") from None

    def _remove(self) -> None:
        if self._client is not None:
            self._client.close()
        # A client of its own: the other may be what failed.
        with contextlib.closing(connect()) as client:
            remove(client, self.name)


def _ulimits(limits: Limits) -> list[docker.types.Ulimit]:
    cpu = max(1, round(limits.cpu_s))
    hard = {
        "core": 0,
        "fsize": limits.file_mb << 20,
        "nofile": limits.open_files,
    }
    # The soft limit sends SIGXCPU, the hard one SIGKILL.
    cpu_limit = docker.types.Ulimit(name="cpu", soft=cpu, hard=cpu + 5)
    return [cpu_limit, *(docker.types.Ulimit(name=name, soft=value, hard=value) for name, value in hard.items())]


class Docker(Enclosed):
    """A sandbox in containers; see the module's text. Made by ``envs.sandbox.create``."""

    def __init__(self, root: Path, label: str, mount_dir: str, options: DockerOptions) -> None:
        super().__init__(root, label, mount_dir)
        self._options = options
        self._image = Image("", "", ())
        self.python = ""
        self._running: _Running | None = None
        self._left_behind: list[str] = []

    @property
    def busy(self) -> bool:
        return self._running is not None

    def environment(self) -> dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "LANG": "C.UTF-8", "USER": "user"}

    def build(self, input_files: Path | None) -> None:
        self._image = look_at(self._options)
        self.python = self._image.python
        super().build(input_files)
        self.make_etc(*self._ids())
        self.make_mount_point([(HOME, self.home)])

    def _ids(self) -> tuple[int, int]:
        """User and group inside: the sandbox's own, or ours where we may not give files away."""
        return (self.uid, self.uid) if self.uid is not None else (os.geteuid(), os.getegid())

    def _mounts(self, command: Command) -> list[docker.types.Mount]:
        shown = [Mount(self.base / "home", HOME, True), Mount(self.base / "workspace", self.mount_dir, True)]
        shown += [Mount(self.base / "etc" / name, f"/etc/{name}") for name in ETC]
        return [
            docker.types.Mount(mount.inside, os.fspath(mount.host), type="bind", read_only=not mount.writable)
            for mount in (*shown, *command.mounts)
        ]

    def _container(self, client: Any, command: Command) -> dict[str, Any]:
        """The engine's description of the container for ``command``."""
        limits = command.limits
        host = client.create_host_config(
            network_mode="none",
            ipc_mode="private",
            # Files belong to ids of this machine, not of a namespace that the engine may map users to.
            userns_mode="host",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            # The engine's init is counted too.
            pids_limit=limits.processes + 1,
            mem_limit=limits.memory_mb << 20,
            memswap_limit=limits.memory_mb << 20,
            nano_cpus=int(min(limits.cpus or _CPUS, os.cpu_count() or 1) * 1e9),
            shm_size=min(SHM_MB, limits.file_mb) << 20,
            tmpfs={"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={limits.file_mb}m"},
            ulimits=_ulimits(limits),
            init=True,
            # Output is read as it comes; a log would grow on the disk.
            log_config=docker.types.LogConfig(type="none"),
            mounts=self._mounts(command),
            runtime=self._options.runtime or None,
        )
        host["MaskedPaths"] = _HIDDEN
        filtered = (self.python, "-I", "-S", "-c", _FILTERED, seccomp.program().hex())
        # A name alone takes out what the image or the engine would set.
        absent = {"HOSTNAME", *self._image.variables} - set(command.env)
        return client.create_container_config(
            self._image.id,
            # The engine would hold its own start to this limit too, which then fails.
            [*filtered, _PRLIMIT, f"--data={limits.memory_mb << 20}", "--", *command.argv],
            hostname=HOSTNAME,
            user="{}:{}".format(*self._ids()),
            environment=[*(f"{name}={value}" for name, value in command.env.items()), *sorted(absent)],
            working_dir=self.mount_dir,
            entrypoint=[],
            labels=labels(self.base),
            host_config=host,
        )

    async def run(self, command: Command) -> Finished:
        if self._running is not None:
            raise SandboxError(f"sandbox {self.label!r}: one command at a time; one is still running")
        name = f"reins-{self.label[:80]}-{uuid.uuid4().hex[:12]}"
        running = self._running = _Running(name, command)
        try:
            await uninterrupted(running.begin(lambda client: self._container(client, command)))
            in_time = await running.within(command.limits.wall_s)
        except BaseException:
            await uninterrupted(self._settle(running, in_time=False))
            raise
        finished = await uninterrupted(self._settle(running, in_time))
        if finished.code == 127 and finished.stderr.startswith((b"prlimit: failed to exec", b"[FATAL tini")):
            raise NotStartedError(finished)
        return finished

    async def _settle(self, running: _Running, in_time: bool) -> Finished:
        self._left_behind.append(running.name)
        try:
            finished = await running.end(in_time)
            self._left_behind.remove(running.name)
        finally:
            self._running = None
            running.over.set()
        return finished

    async def kill(self) -> None:
        if self._running is not None:
            running = self._running
            await running.kill()
            await running.over.wait()

    async def _destroy(self) -> None:
        await self.kill()
        if self._left_behind:
            await _call(self._remove_left)
        await super()._destroy()

    def _remove_left(self) -> None:
        with contextlib.closing(connect()) as client:
            while self._left_behind:
                remove(client, self._left_behind[-1])
                self._left_behind.pop()


def missing(options: DockerOptions) -> str:
    """Why the backend cannot be used here, with what to do; empty when it can."""
    try:
        look_at(options)
    except SandboxError as error:
        return str(error)
    return ""
