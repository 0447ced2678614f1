"""Rooms that wait for their task: the same inside as any other, used once, and nothing left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from needs import require
from test_sandbox import descriptors

from envs.sandbox import cgroups
from envs.sandbox.base import Command, Finished, Limits, Mount, Sandbox, SandboxError
from envs.sandbox.bubblewrap import Bubblewrap
from envs.sandbox.create import create, unavailable
from envs.sandbox.gc import processes_of
from envs.sandbox.pool import Pool
from envs.sandbox.relayed import through_relay

MOUNT_DIR = "/root/workspace"
QUICK = Limits(wall_s=20.0)
VIEW = r"""
env | sort; ulimit -a; id; umask; pwd; hostname
grep -E '^(Cap|NoNewPrivs|Seccomp|SigIgn|SigBlk|Groups)' /proc/self/status
ls -la / /dev /etc /opt/bin ~ | grep -v ' \.\.\?$' | awk '{ print $1, $3, $4, $9, $10, $11 }'
ls /proc/self/fd | wc -l; set -- /proc/[0-9]*; echo $#; cut -d' ' -f5- /proc/self/mountinfo | grep -v waiting | sort
df --output=size,target /tmp /dev/shm; readlink /proc/self/fd/0; cat /proc/net/dev | wc -l
"""


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    made = Pool("bubblewrap", tmp_path / "rooms", 2)
    yield made
    await made.close()
    assert left(tmp_path / "rooms") == []


def left(root: Path, owner: int | None = None) -> list[str]:
    """What is there of a process's sandboxes: folders, control groups and processes."""
    rooms = list(root.iterdir()) if root.is_dir() else []
    names = f"reins-*.{owner or os.getpid()}.*"
    groups = [folder for parent in cgroups.parents() for folder in parent.folder.glob(names)]
    processes = [pid for room in rooms if (room / "workspace").exists() for pid in processes_of(room)]
    return [*map(str, rooms), *map(str, groups), *map(str, processes)]


def script(sandbox: Sandbox, text: str, limits: Limits = QUICK, **env: str) -> Command:
    return Command(("/bin/bash", "-c", text), sandbox.environment() | env, limits=limits)


async def warmed(pool: Pool, like: Command, kind: str = "k") -> None:
    """Have a room ready for commands like ``like``."""
    seen = Bubblewrap(pool._root, "seen", MOUNT_DIR)
    for _ in range(2):
        pool.expect(kind, seen, like)
    await asyncio.wait_for(pool.filled(), 60)
    assert waits(pool, kind)


def waits(pool: Pool, kind: str = "k") -> int:
    return len(pool._kinds[(kind, MOUNT_DIR)].rooms)


async def taken(pool: Pool, label: str = "one", files: Path | None = None, kind: str = "k") -> Bubblewrap:
    hits = pool.hits
    sandbox = await pool.create(kind, label, files, MOUNT_DIR)
    assert pool.hits == hits + 1
    assert isinstance(sandbox, Bubblewrap)
    return sandbox


LIKE = Command(("/bin/true",), {}, limits=QUICK)


async def test_a_room_that_waited_looks_as_any_other(pool, tmp_path):
    limits = replace(QUICK, open_files=99, processes=77, cpu_s=7)
    files = tmp_path / "input"
    files.mkdir()
    (files / "a").write_text("a\n")
    cold = await create("bubblewrap", "cold", files, MOUNT_DIR, tmp_path / "rooms")
    expected = await cold.run(script(cold, VIEW, limits, ODD="a'b\nc=ü", EMPTY=""))
    await cold.destroy()
    await warmed(pool, LIKE)
    warm = await taken(pool, files=files)
    found = await warm.run(script(warm, VIEW, limits, ODD="a'b\nc=ü", EMPTY=""))
    assert expected.code == found.code == 0, (expected, found)
    text = found.stdout.decode().replace(str(warm.uid), str(cold.uid))  # type: ignore[attr-defined]
    assert text.splitlines() == expected.stdout.decode().splitlines()
    assert found.stderr == expected.stderr
    assert (warm.label, warm.base) == ("one", (tmp_path / "rooms" / "one").resolve())
    assert (warm.workspace / "a").read_text() == "a\n"
    assert (warm.workspace / "a").stat().st_uid == (warm.uid or os.geteuid())
    await warm.destroy()


async def test_a_room_serves_one_sandbox_only(pool):
    for label in ("one", "two", "three"):
        await warmed(pool, LIKE)
        sandbox = await taken(pool, label)
        done = await sandbox.run(script(sandbox, "ls -A ~ . /tmp /dev/shm; touch ~/x x /tmp/x /dev/shm/x"))
        assert b"x" not in done.stdout.split()
        again = await sandbox.run(script(sandbox, "ls ~"))
        assert again.stdout.split()[-1:] == [b"x"], "a second command runs as in any sandbox"
        await sandbox.destroy()


async def test_what_does_not_fit_starts_as_without_a_pool(pool, tmp_path):
    await warmed(pool, LIKE)
    (tmp_path / "given").write_text("g")
    sandbox = await taken(pool)
    command = replace(script(sandbox, "cat /opt/given"), mounts=(Mount(tmp_path / "given", "/opt/given"),))
    assert (await sandbox.run(command)).stdout == b"g"
    assert len(processes_of(sandbox.base)) == 0
    await sandbox.destroy()
    hits = pool.hits
    for kind, mount_dir in (("other", MOUNT_DIR), ("k", "/root/elsewhere")):
        other = await pool.create(kind, "other", None, mount_dir)
        assert (await other.run(script(other, "pwd"))).stdout.decode().strip() == mount_dir
        await other.destroy()
    assert pool.hits == hits


async def test_a_folder_of_the_rooms_own_can_be_mounted(pool):
    def command(sandbox: Sandbox) -> Command:
        doors = sandbox.home.parent / "doors"
        return replace(script(sandbox, "cat /run/doors/told"), mounts=(Mount(doors, "/run/doors"),))

    await warmed(pool, command(Bubblewrap(pool._root, "seen", MOUNT_DIR)))
    sandbox = await taken(pool)
    (sandbox.base / "doors" / "told").write_text(sandbox.label)
    waiting = sandbox._waiting
    assert (await sandbox.run(command(sandbox))).stdout == b"one"
    assert waiting is not None
    assert not waiting.killed, "it fits"
    await sandbox.destroy()


async def test_rooms_are_kept_only_for_what_comes_twice_and_within_the_size(pool, tmp_path):
    seen = Bubblewrap(tmp_path / "rooms", "seen", MOUNT_DIR)
    for number in range(4):
        pool.expect("k", seen, replace(LIKE, mounts=(Mount(tmp_path, f"/opt/{number}"),)))
        await asyncio.sleep(0.05)
        assert waits(pool) == 0
    await warmed(pool, LIKE, "a")
    await warmed(pool, LIKE, "b")
    assert [waits(pool, kind) for kind in ("a", "b", "k")] == [1, 1, 0]


@pytest.mark.parametrize("victim", ["bwrap", "everything"])
async def test_a_room_that_died_is_no_trouble(pool, victim):
    await warmed(pool, LIKE)
    room = pool._kinds[("k", MOUNT_DIR)].rooms[0]
    waiting = room._waiting
    assert waiting is not None
    if victim == "bwrap":
        waiting.child.process.send_signal(signal.SIGKILL)
        await waiting.child.gone()
        sandbox = await pool.create("k", "one", None, MOUNT_DIR)
    else:
        # It dies after it was taken: its command starts anew.
        sandbox = await taken(pool)
        for pid in processes_of(sandbox.base):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert (await sandbox.run(script(sandbox, "echo fine"))).stdout == b"fine\n"
    await sandbox.destroy()


async def test_what_cannot_be_executed_is_an_infrastructure_error(pool):
    await warmed(pool, LIKE)
    sandbox = await taken(pool)
    with pytest.raises(SandboxError, match="no/such"):
        await sandbox.run(replace(LIKE, argv=("/no/such/program",)))
    await sandbox.destroy()


async def test_limits_and_kills_hold_as_elsewhere(pool):
    async def run(text: str, limits: Limits) -> Finished:
        await warmed(pool, replace(LIKE, limits=limits))
        sandbox = await taken(pool)
        try:
            return await sandbox.run(script(sandbox, text, limits))
        finally:
            assert processes_of(sandbox.base) == []
            await sandbox.destroy()

    done = await run("setsid -f sleep 99; sleep 99", replace(QUICK, wall_s=0.5))
    assert done.code is None
    assert 0.4 < done.seconds < 10
    assert (await run("head -c 3M /dev/zero > big || exit 9", replace(QUICK, file_mb=1))).code == 9
    assert len((await run("head -c 1M /dev/zero", replace(QUICK, output_bytes=1 << 12))).stdout) < 5000


async def test_a_relay_that_waited_carries_as_one_that_is_started(pool, tmp_path):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    (tmp_path / "doors").mkdir()
    socket = tmp_path / "doors" / "a.sock"
    async with await asyncio.start_unix_server(serve, socket):
        text = "exec 3<>/dev/tcp/127.0.0.1/${BASE##*:}; echo hello >&3; cat <&3; exit 5"
        sandbox = await create("bubblewrap", "cold", None, MOUNT_DIR, tmp_path / "rooms")
        command = through_relay(sandbox, script(sandbox, text, BASE="http://127.0.0.1:{relay_port}"), socket)
        await sandbox.destroy()
        await warmed(pool, command)
        warm = await taken(pool)
        done = await warm.run(command)
        assert (done.code, done.stdout) == (5, b"heard hello\n")
        await warm.destroy()


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01, 0.05, 0.2])
async def test_cancellation_leaves_nothing(tmp_path, delay):
    """Case S3, while rooms are made ready, taken and used."""
    pool = Pool("bubblewrap", tmp_path / "rooms", 2)
    before = descriptors()
    await warmed(pool, LIKE)

    async def episode() -> None:
        sandbox = await pool.create("k", "cancelled", None, MOUNT_DIR)
        try:
            pool.expect("k", sandbox, LIKE)
            await sandbox.run(script(sandbox, "setsid -f sleep 994.0107; sleep 994.0107"))
        finally:
            await sandbox.destroy()

    task = asyncio.ensure_future(episode())
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pool.close()
    assert left(tmp_path / "rooms") == []
    assert descriptors() - before == set()


OWNER = """
import asyncio, sys
from pathlib import Path
from envs.sandbox.base import Command
from envs.sandbox.bubblewrap import Bubblewrap
from envs.sandbox.pool import Pool
async def main():
    root = Path(sys.argv[1])
    pool = Pool("bubblewrap", root, 2)
    for _ in range(2):
        pool.expect("k", Bubblewrap(root, "seen", "/root/workspace"), Command(("/bin/true",)))
    if sys.argv[2] == "filled":
        await pool.filled()
    print("there", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["filled", "filling"])
async def test_a_killed_owner_leaves_no_room(tmp_path, state):
    root = tmp_path / "rooms"
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(root), state, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"there\n"
    await asyncio.sleep(0 if state == "filled" else 0.1)
    owner.kill()
    await owner.wait()
    for _ in range(300):
        if not left(root, owner.pid):
            break
        await asyncio.sleep(0.1)
    assert left(root, owner.pid) == []


async def test_without_a_size_there_is_no_room(tmp_path):
    for backend, size in (("bubblewrap", 0), ("process", 3)):
        pool = Pool(backend, tmp_path / "rooms", size)  # type: ignore[arg-type]
        sandbox = await pool.create("k", "one", None, MOUNT_DIR)
        pool.expect("k", sandbox, LIKE)
        pool.expect("k", sandbox, LIKE)
        assert pool._filling is None
        assert (await sandbox.run(script(sandbox, "echo fine"))).stdout == b"fine\n"
        await sandbox.destroy()
        await pool.close()
