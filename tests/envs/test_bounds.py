"""Bounds over a whole sandbox, and what one sandbox can learn of another and of the host's processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from needs import require
from test_sandbox import bash

from envs.sandbox import cgroups
from envs.sandbox.base import Command, Limits, SandboxError
from envs.sandbox.bubblewrap import own_user_namespace, sized_tmpfs
from envs.sandbox.create import create, unavailable
from envs.sandbox.gc import gc
from envs.sandbox.relayed import through_relay

MOUNT_DIR = "/root/workspace"
QUICK = Limits(wall_s=30.0)
EATERS = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20)) * 50
        time.sleep(9)
        os._exit(0)
print(sum(os.wait()[1] != 0 for _ in range(4)))
"""


OWNER = """
import time
from envs.sandbox.cgroups import Group
Group("x")
print("made", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


def bounded(controller: str) -> bool:
    """Whether groups can be made here; what a machine without them promises is checked too."""
    return any(controller in parent.controllers for parent in cgroups.parents())


async def room(root: Path, label: str = "one"):
    return await create("bubblewrap", label, None, MOUNT_DIR, root)


async def test_memory_counts_over_all_processes_together(tmp_path):
    sandbox = await room(tmp_path)
    command = Command((sandbox.python, "-I", "-S", "-c", EATERS), limits=replace(QUICK, memory_mb=128))
    done = await sandbox.run(command)
    assert done.code == 0
    killed = int(done.stdout)
    assert killed >= 1 if bounded("memory") else killed == 0
    # The next command of the same sandbox has bounds of its own.
    done = await sandbox.run(replace(command, limits=replace(QUICK, memory_mb=1024)))
    assert int(done.stdout) == 0
    await sandbox.destroy()


async def test_what_lies_in_memory_folders_is_bounded_and_counts(tmp_path):
    require(sized_tmpfs(), "bubblewrap 0.7 or newer")
    sandbox = await room(tmp_path)
    for folder in ("/tmp", "/dev/shm"):
        done = await bash(sandbox, f"for i in 1 2 3; do head -c 3M /dev/zero > {folder}/$i; done", Limits(file_mb=8))
        assert b"No space left" in done.stderr, folder
    fill = "head -c 90M /dev/zero > /tmp/a; head -c 90M /dev/zero > /tmp/b; echo survived"
    done = await bash(sandbox, fill, replace(QUICK, memory_mb=100))
    assert (b"survived" not in done.stdout or b"Killed" in done.stderr) == bounded("memory")
    await sandbox.destroy()


async def test_processes_count_over_two_sandboxes_apart(tmp_path):
    one, two = await room(tmp_path, "one"), await room(tmp_path, "two")
    limits = replace(QUICK, processes=20)
    holding = asyncio.create_task(bash(one, "for i in {1..15}; do sleep 3 & done; touch ready; wait", limits))
    async with asyncio.timeout(20):
        while not (one.workspace / "ready").exists():  # noqa: ASYNC110 - the other side is a file
            await asyncio.sleep(0.01)
    assert (await bash(two, "for i in {1..15}; do sleep 0.1 & done; wait; echo all", limits)).stdout == b"all\n"
    await holding
    done = await bash(one, "for i in {1..40}; do sleep 1 & done; wait", limits)
    assert b"Resource temporarily unavailable" in done.stderr
    await one.destroy()
    await two.destroy()


async def test_groups_go_with_their_sandbox_and_with_a_killed_owner(tmp_path):
    def groups(pid: int) -> list[Path]:
        return [found for parent in cgroups.parents() for found in parent.folder.glob(f"reins-*.{pid}.*")]

    sandbox = await room(tmp_path)
    await bash(sandbox, "true")
    made = groups(os.getpid())
    assert len(made) == len([parent for parent in cgroups.parents() if parent.controllers != {"cpu"}])
    gc(tmp_path)
    assert groups(os.getpid()) == made, "those of the living stay"
    await bash(sandbox, "true", replace(QUICK, cpus=0.5))
    assert {path.parent for path in groups(os.getpid())} == {parent.folder for parent in cgroups.parents()}
    await sandbox.destroy()
    assert groups(os.getpid()) == []
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"made\n"
    assert len(groups(owner.pid)) == len(made)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    gc(tmp_path)
    assert groups(owner.pid) == []


def test_bounds_can_be_changed_in_both_directions():
    group = cgroups.Group("changing", cpu=True)
    try:
        for memory_mb, cpus in ((64, 0.5), (2048, 4.0), (32, 2.0)):
            group.limit(Limits(memory_mb=memory_mb, cpus=cpus))
            for parent, folder in zip(cgroups.parents(), group._folders, strict=True):
                if parent.version == 1 and "memory" in parent.controllers:
                    assert int((folder / "memory.limit_in_bytes").read_text()) == memory_mb << 20
                if parent.version == 1 and "cpu" in parent.controllers:
                    assert int((folder / "cpu.cfs_quota_us").read_text()) == cpus * 100_000
                if parent.version == 2 and "memory" in parent.controllers:
                    assert int((folder / "memory.max").read_text()) == memory_mb << 20
    finally:
        group.remove()


async def test_every_namespace_is_a_sandboxs_own(tmp_path):
    names = ["cgroup", "ipc", "mnt", "net", "pid", "uts"]
    if os.geteuid() != 0 or own_user_namespace():
        names.append("user")
    rooms = [await room(tmp_path, label) for label in ("one", "two")]
    look = f"cd /proc/self/ns; stat -Lc%i {' '.join(names)}; id -u; touch ~/seen; until [ -e ~/go ]; do sleep 0.1; done"
    runs = [asyncio.create_task(bash(sandbox, look)) for sandbox in rooms]
    async with asyncio.timeout(20):
        while not all((sandbox.home / "seen").exists() for sandbox in rooms):  # noqa: ASYNC110 - files
            await asyncio.sleep(0.01)
    for sandbox in rooms:
        (sandbox.home / "go").touch()
    seen = []
    for sandbox, run in zip(rooms, runs, strict=True):
        *inodes, uid = map(int, (await run).stdout.split())
        seen.append(inodes)
        assert uid == (1000 if "user" in names else sandbox.uid)
        await sandbox.destroy()
    host = [os.stat(f"/proc/self/ns/{name}").st_ino for name in names]  # noqa: PTH116
    for name, one, two, ours in zip(names, *seen, host, strict=True):
        assert len({one, two, ours}) == 3, name


SNOOP = """
for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ; tr '\\0' '\\n' < $p/cmdline; done 2>/dev/null
cat /proc/keys /proc/key-users 2>/dev/null; ls /proc | grep -c '^[0-9]'
for i in $(seq 1 400); do kill -9 $i 2>/dev/null; done; kill -9 -1
"""


async def test_a_key_is_seen_by_its_own_sandbox_only(tmp_path):
    owner, thief = await room(tmp_path, "owner"), await room(tmp_path, "thief")
    held = asyncio.create_task(bash(owner, "touch ready; sleep 2; echo done", SESSION_KEY="k3y-0f-0wner"))
    async with asyncio.timeout(20):
        while not (owner.workspace / "ready").exists():  # noqa: ASYNC110 - the other side is a file
            await asyncio.sleep(0.01)
    done = await bash(thief, SNOOP, SESSION_KEY="k3y-0f-thief")
    assert b"k3y-0f-thief" in done.stdout
    assert b"k3y-0f-0wner" not in done.stdout
    assert int(done.stdout.split()[-1]) < 10, "processes of others in /proc"
    assert (await held).stdout == b"done\n", "a signal of another sandbox arrived"
    await owner.destroy()
    await thief.destroy()


@pytest.mark.parametrize("number", ["KILL", "TERM", "STOP", "SEGV"])
async def test_signals_to_the_relay_end_or_stall_only_their_own_run(tmp_path, number):
    (tmp_path / "doors").mkdir()
    socket = tmp_path / "doors" / "a.sock"
    async with await asyncio.start_unix_server(lambda _reader, writer: writer.close(), socket):
        sandbox = await room(tmp_path / "rooms")
        text = f"kill -{number} $PPID; sleep 0.2; kill -{number} 1 2>/dev/null; echo alive; sleep 30"
        command = Command(("/bin/bash", "-c", text), sandbox.environment(), limits=Limits(wall_s=2.0))
        done = await sandbox.run(through_relay(sandbox, command, socket))
        # 128 and above: what is inside has done that (``actors.sandbox.status_of``); None: the wall limit.
        assert done.code is None if number == "STOP" else (done.code or 0) > 128
        assert (await bash(sandbox, "ls /proc | grep -c '^[0-9]'")).stdout.strip() < b"6"
        await sandbox.destroy()


async def test_what_a_container_or_an_old_machine_mounts_is_understood(tmp_path):
    lines = [
        f"30 25 0:26 /docker/ab {tmp_path}/memory rw - cgroup cgroup rw,memory",
        f"31 25 0:27 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
        f"32 25 0:28 / {tmp_path}/united rw - cgroup2 cgroup2 rw,nsdelegate",
        f"33 25 0:29 / {tmp_path}/data rw - ext4 /dev/x rw,memory",
    ]
    for folder in ("memory/inner", "cpu/slice", "united/user.slice/one.scope"):
        (tmp_path / folder).mkdir(parents=True)
    cgroup = "5:memory:/docker/ab/inner\n4:cpu,cpuacct:/slice\n3:pids:/gone\n0::/user.slice/one.scope\n"
    assert cgroups._mounted("\n".join(lines), cgroup) == {
        "memory": tmp_path / "memory/inner",
        "cpu": tmp_path / "cpu/slice",
        "": tmp_path / "united/user.slice/one.scope",
    }


async def test_a_machine_without_control_groups_says_so_and_works(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "parents", lambda: ())
    assert "no control groups" in cgroups.holding()
    sandbox = await room(tmp_path)
    assert (await bash(sandbox, "echo fine")).stdout == b"fine\n"
    await sandbox.destroy()


async def test_a_group_that_cannot_be_bounded_is_an_infrastructure_error(tmp_path, monkeypatch):
    broken = cgroups.Parent(tmp_path / "missing", 2, frozenset({"memory"}))
    monkeypatch.setattr(cgroups, "parents", lambda: (broken,))
    sandbox = await room(tmp_path / "rooms")
    with pytest.raises(SandboxError, match="control group"):
        await bash(sandbox, "true")
    await sandbox.destroy()
