"""How long a sandbox takes to start and to be destroyed, and how many of them a machine holds.

    python benchmarks/sandbox.py [--smoke] [--out FILE]

A start is the time from asking for a sandbox for a task (one input file) to the moment that its command, ``date``,
reads the clock: making the room, starting, and loading the program are in it. ``destroy`` is the time from the
command's end until nothing is left. ``pool`` is bubblewrap with a room ready for each (``envs/sandbox/pool.py``).
``+ relay`` has the relay to the model API in front of the command, as an episode has. In the same run ``docker run``
with the same workspace, read-only and without a network, from an image that holds nothing but the command; left out
where no engine answers.

``held`` is what the kernel's available memory loses with each of a few hundred sandboxes that hold a sleeping command:
the median over tens of them, so that what else happens on the machine counts little. How many fit into 16 GiB follows
from that by division. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from envs.sandbox.base import Command, Limits, Sandbox
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.pool import Pool
from envs.sandbox.relayed import through_relay

MOUNT_DIR = "/root/workspace"
LIMITS = Limits(wall_s=600.0)
DATE = ("/usr/bin/date", "+%s%N")
HELD_GIB = 16
HELD_STEP = 10


@dataclass
class Times:
    """Seconds of starts and of removals, in the order of their ends."""

    start: list[float] = field(default_factory=list)
    destroy: list[float] = field(default_factory=list)


Piece = Callable[[Times], Awaitable[None]]


@dataclass
class Bench:
    """A folder with a task's files and a socket, and the pieces that are measured."""

    root: Path
    files: Path
    socket: Path
    pool: Pool | None = None

    async def sandbox(self, backend: Backend) -> Sandbox:
        label = uuid.uuid4().hex
        if self.pool is not None:
            return await self.pool.create("bench", label, self.files, MOUNT_DIR)
        return await create(backend, label, self.files, MOUNT_DIR, self.root)

    def command(self, sandbox: Sandbox, argv: tuple[str, ...], relay: bool) -> Command:
        command = Command(argv, sandbox.environment(), limits=LIMITS)
        command = through_relay(sandbox, command, self.socket) if relay else command
        if self.pool is not None:
            self.pool.expect("bench", sandbox, command)
        return command

    def once(self, backend: Backend, relay: bool) -> Piece:
        async def piece(times: Times) -> None:
            asked = time.time()
            sandbox = await self.sandbox(backend)
            finished = await sandbox.run(self.command(sandbox, DATE, relay))
            ended = time.time()
            await sandbox.destroy()
            times.start.append(int(finished.stdout) / 1e9 - asked)
            times.destroy.append(time.time() - ended)

        return piece


async def repeated(piece: Piece, count: int, between: Callable[[], Awaitable[None]] | None = None) -> Times:
    times = Times()
    for number in range(count + 2):
        if number == 2:
            times = Times()
        if between is not None:
            await between()
        await piece(times)
    return times


async def at_once(piece: Piece, count: int) -> Times:
    times = Times()
    await asyncio.gather(*(piece(times) for _ in range(count)))
    return times


async def measure(bench: Bench, backend: Backend, relay: bool, pooled: bool, count: int, crowd: int) -> list[Times]:
    """Alone, and ``crowd`` at the same time."""
    piece = bench.once(backend, relay)
    if not pooled:
        return [await repeated(piece, count), await at_once(piece, crowd)]
    found = []
    for size, run in ((1, repeated), (crowd, at_once)):
        pool = bench.pool = Pool(backend, bench.root, size)
        for _ in range(2):
            # Two of a kind, and it knows what to keep ready.
            await piece(Times())
        await pool.filled()
        found.append(await (repeated(piece, count, pool.filled) if run is repeated else at_once(piece, crowd)))
        await pool.close()
        bench.pool = None
    return found


def available_kib() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1])


async def held_mib(bench: Bench, backend: Backend, relay: bool, count: int) -> float | None:
    """MiB of memory that one sandbox with a sleeping command takes; None where other programs made it unmeasurable."""
    sleep = ("/bin/bash", "-c", "touch held; exec sleep 600")
    sandboxes, running, steps = [], [], [available_kib()]
    for number in range(1, count + 1):
        sandboxes.append(sandbox := await bench.sandbox(backend))
        running.append(asyncio.create_task(sandbox.run(bench.command(sandbox, sleep, relay))))
        while not (sandbox.workspace / "held").exists():  # noqa: ASYNC110 - the other side is a file
            await asyncio.sleep(0.001)
        if number % HELD_STEP == 0:
            await asyncio.sleep(0.1)
            steps.append(available_kib())
    await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
    await asyncio.gather(*running)
    mib = float(np.median(-np.diff(steps))) / 1024 / HELD_STEP
    return mib if mib > 0 else None


class Docker:
    """``docker run`` through its own command line, with an image that holds one program and its libraries."""

    def __init__(self, files: Path) -> None:
        self._files = files
        self._image = f"reins-bench-{uuid.uuid4().hex[:8]}"
        self.missing = self._missing()

    def _missing(self) -> str:
        if shutil.which("docker") is None:
            return "there is no docker command on PATH"
        answer = self._docker("info", "--format", "{{.ServerVersion}}")
        return "" if answer.returncode == 0 and answer.stdout.strip() else "no engine answers the docker command"

    @staticmethod
    def _docker(*arguments: str, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["docker", *arguments], input=given, capture_output=True, check=False)

    def make_image(self) -> None:
        program = Path(DATE[0]).resolve()
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries = [word for word in linked.split() if word.startswith("/")]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(program, DATE[0])
            for library in libraries:
                archive.add(Path(library).resolve(), library)
        done = self._docker("import", "-", self._image, given=packed.getvalue())
        if done.returncode != 0:
            raise RuntimeError(f"docker import failed: {done.stderr.decode()}")

    def remove_image(self) -> None:
        self._docker("rmi", "-f", self._image)

    async def once(self, times: Times) -> None:
        name = f"{self._image}-{uuid.uuid4().hex[:8]}"
        asked = time.time()
        workspace = Path(tempfile.mkdtemp(dir=self._files.parent))
        shutil.copytree(self._files, workspace, dirs_exist_ok=True)
        arguments = ["run", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
        arguments += ["-v", f"{workspace}:{MOUNT_DIR}", "-w", MOUNT_DIR, self._image, *DATE]
        done = await asyncio.to_thread(self._docker, *arguments)
        ended = time.time()
        await asyncio.to_thread(self._docker, "rm", "-f", name)
        shutil.rmtree(workspace)
        if done.returncode != 0:
            raise RuntimeError(f"docker run failed: {done.stderr.decode()}")
        times.start.append(int(done.stdout) / 1e9 - asked)
        times.destroy.append(time.time() - ended)


def ms(values: Sequence[float], q: float) -> float:
    return round(1000 * float(np.quantile(np.asarray(values), q)), 2)


@dataclass
class Sizes:
    """How much is measured."""

    count: int
    crowd: int
    held: int
    docker: int
    docker_crowd: int


async def bench(folder: Path, sizes: Sizes) -> tuple[dict[str, list[Times]], dict[str, float | None], str]:
    """Times by what was measured, MiB of a held sandbox by its kind, and why there is no Docker."""
    files = folder / "files"
    files.mkdir()
    (files / "notes.txt").write_text("amber\n")
    (folder / "api").mkdir()
    server = await asyncio.start_unix_server(lambda _reader, writer: writer.close(), folder / "api" / "api.sock")
    made = Bench(folder / "rooms", files, folder / "api" / "api.sock")
    results: dict[str, list[Times]] = {}
    held: dict[str, float | None] = {}
    async with server:
        if not unavailable():
            for relay in (False, True):
                for pooled in (False, True):
                    name = ("pool" if pooled else "bubblewrap") + (" + relay" if relay else "")
                    results[name] = await measure(made, "bubblewrap", relay, pooled, sizes.count, sizes.crowd)
                held["bubblewrap + relay" if relay else "bubblewrap"] = await held_mib(
                    made, "bubblewrap", relay, sizes.held
                )
        results["process"] = await measure(made, "process", False, False, sizes.count, sizes.crowd)
    docker = Docker(files)
    if not docker.missing:
        docker.make_image()
        try:
            results["docker"] = [
                await repeated(docker.once, sizes.docker),
                await at_once(docker.once, sizes.docker_crowd),
            ]
        finally:
            docker.remove_image()
    return results, held, docker.missing


def report(results: dict[str, list[Times]], held: dict[str, float | None], sizes: Sizes, no_docker: str) -> None:
    table = Table(title=f"milliseconds: {sizes.count} one by one, {sizes.crowd} at once (docker: {sizes.docker_crowd})")
    table.add_column("", no_wrap=True)
    for column in ("start p50", "p99", "destroy p50", "p99", "at once p50", "p99"):
        table.add_column(column, justify="right")
    for name, (alone, crowd) in results.items():
        cells = [ms(alone.start, 0.5), ms(alone.start, 0.99), ms(alone.destroy, 0.5), ms(alone.destroy, 0.99)]
        cells += [ms(crowd.start, 0.5), ms(crowd.start, 0.99)]
        table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    console = Console()
    console.print(table)
    for name, mib in held.items():
        if mib is None:
            console.print(f"held, {name}: not measurable, other programs moved more memory", highlight=False)
        else:
            fit = f"{int(HELD_GIB * 1024 / mib)} fit into {HELD_GIB} GiB, extrapolated from {sizes.held}"
            console.print(f"held, {name}: {mib:.2f} MiB each; {fit}", highlight=False)
    if unavailable():
        console.print(f"bubblewrap is left out: {unavailable()}", highlight=False)
    if no_docker:
        console.print(f"docker is left out: {no_docker}; docker_start_ms_p50 is null", highlight=False)


def figures(results: dict[str, list[Times]], held: dict[str, float | None], sizes: Sizes) -> dict[str, object]:
    def start(name: str, q: float = 0.5, crowd: bool = False) -> float | None:
        return ms(results[name][crowd].start, q) if name in results else None

    def fit(name: str) -> int | None:
        mib = held.get(name)
        return int(HELD_GIB * 1024 / mib) if mib else None

    destroy = {name: ms(alone.destroy, 0.5) for name, (alone, _) in results.items()}
    return {
        "bwrap_start_ms_p50": start("bubblewrap"),
        "bwrap_start_ms_p99": start("bubblewrap", 0.99),
        "pool_ms_p50": start("pool"),
        "pool_ms_p99": start("pool", 0.99),
        "bwrap_relay_start_ms_p50": start("bubblewrap + relay"),
        "pool_relay_ms_p50": start("pool + relay"),
        "process_start_ms_p50": start("process"),
        "docker_start_ms_p50": start("docker"),
        f"concurrent_{sizes.crowd}_p99_ms": start("bubblewrap", 0.99, True),
        f"pool_concurrent_{sizes.crowd}_p99_ms": start("pool", 0.99, True),
        f"docker_concurrent_{sizes.docker_crowd}_p99_ms": start("docker", 0.99, True),
        "destroy_ms_p50": destroy,
        f"held_in_{HELD_GIB}_gib": fit("bubblewrap"),
        f"held_with_relay_in_{HELD_GIB}_gib": fit("bubblewrap + relay"),
        "held_measured": sizes.held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few of each: only whether it runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object there")
    arguments = parser.parse_args()
    sizes = Sizes(5, 64, 20, 2, 4) if arguments.smoke else Sizes(200, 64, 300, 30, 64)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="reins-bench-") as folder:
        results, held, no_docker = asyncio.run(bench(Path(folder), sizes))
    report(results, held, sizes, no_docker)
    line = {
        "benchmark": "sandbox",
        "command": " ".join(["python", "benchmarks/sandbox.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "kernel": platform.release()},
        "smoke": arguments.smoke,
        **figures(results, held, sizes),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
