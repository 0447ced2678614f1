"""The docker backend, with a real engine: the cases of every backend, and what only containers have."""

# The shared cases are collected where they are imported, with the fixtures of this file.
# ruff: noqa: F401
from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from needs import require_docker
from scripted_api import Script, say, serving
from scripted_api import bash as calls_bash
from test_grading import test_the_agent_cannot_prepare_the_graders_room, test_the_verdict_does_not_change
from test_sandbox import (
    MOUNT_DIR,
    QUICK,
    alive,
    bash,
    room,
    test_a_command_sees_its_workspace_and_its_environment_only,
    test_a_fork_bomb_is_bounded,
    test_a_killed_owner_leaves_nothing,
    test_cancellation_leaves_nothing,
    test_descriptors_do_not_leak,
    test_endless_output_is_read_and_cut,
    test_gc_takes_what_is_orphaned,
    test_hostile_trees_are_removed,
    test_input_files_are_copied_faithfully,
    test_kill_ends_a_run,
    test_limits_hold,
    test_mount_dirs,
    test_mounts_are_shown_read_only_or_writable,
    test_nothing_outlives_a_run,
    test_one_command_at_a_time,
    test_wall_limit_leaves_no_process,
    test_what_cannot_start_is_an_infrastructure_error,
)

from configs.harness import HarnessConfig
from envs.harnesses.base import Endpoint
from envs.harnesses.registry import harness
from envs.sandbox import engine
from envs.sandbox.base import Command, DockerOptions, Limits, Meter, Mount, SandboxError
from envs.sandbox.check import check_sandbox
from envs.sandbox.create import Backend, create
from envs.sandbox.grading import grade
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.tasks import clawgym

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True)
def _engine(tmp_path):
    require_docker()
    yield
    assert containers(tmp_path) == [], "a test left containers"


@pytest.fixture
def backend() -> Backend:
    return "docker"


@pytest.fixture
def bubblewrap() -> Backend:
    """The shared cases that ask for isolation name it after the backend that they were written for."""
    return "docker"


def containers(folder: Path) -> list[str]:
    """The names of the containers of sandboxes under ``folder``, running or not."""
    with contextlib.closing(engine.connect()) as client:
        found = client.containers(all=True, filters={"label": engine.LABEL})
    return [one["Names"][0] for one in found if Path(one["Labels"][engine.ROOT]).is_relative_to(folder)]


async def test_the_contract_holds(tmp_path):
    faults = {name: fault for name, fault in await check_sandbox("docker", tmp_path) if fault}
    assert faults == {}


async def test_the_host_is_hidden(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    neighbour = await room("docker", tmp_path / "rooms", label="neighbour")
    sandbox = await room("docker", tmp_path / "rooms")
    for path in (secret, neighbour.base, Path(__file__), Path("/etc/shadow"), Path("/sys/kernel"), Path("/sys/block")):
        assert path.exists()
        assert (await bash(sandbox, f"ls -d '{path}'")).code != 0, path
    done = await bash(sandbox, "tr '\\0' '\\n' < /proc/1/cmdline; ls -A /tmp ~; env; ls /proc | grep -c '^[0-9]'")
    assert str(tmp_path) not in done.stdout.decode()
    assert int(done.stdout.split()[-1]) < 8
    for target in ("/usr/x", "/etc/x", "/x", "/opt/x", "/run/x", "/dev/x", "/var/x", "/proc/sys/kernel/hostname"):
        assert (await bash(sandbox, f"echo x > {target}")).code != 0, target
    await neighbour.destroy()
    await sandbox.destroy()


async def test_there_are_no_privileges_and_no_network(tmp_path):
    sandbox = await room("docker", tmp_path)
    done = await bash(sandbox, "grep -E 'Cap(Eff|Prm|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status; hostname; id -un")
    *status, hostname, user = done.stdout.decode().splitlines()
    values = dict(line.split(":\t") for line in status)
    assert (values.pop("NoNewPrivs"), values.pop("Seccomp")) == ("1", "2")
    assert {int(value, 16) for value in values.values()} == {0}
    assert (hostname, user) == ("sandbox", "user")
    done = await bash(sandbox, "grep -c : /proc/net/dev; id -u; id -G")
    interfaces, uid, groups = map(int, done.stdout.split())
    assert interfaces == 1
    assert uid == groups != 0
    await sandbox.destroy()


async def test_the_home_lasts_and_tmp_does_not(tmp_path):
    sandbox = await room("docker", tmp_path)
    assert sandbox.put_home(".config/app/settings", "a = 1") == "/root/.config/app/settings"
    await bash(sandbox, "echo more >> ~/.config/app/settings; echo t > /tmp/kept; echo t > /dev/shm/kept; echo w > w")
    done = await bash(sandbox, "cat ~/.config/app/settings w; ls -A /tmp /dev/shm")
    assert done.stdout == b"a = 1more\nw\n/dev/shm:\n\n/tmp:\n"
    await sandbox.destroy()


HOLD = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20)) * int(sys.argv[2])
        print(len(held), flush=True)
        time.sleep(60)
for _ in range(int(sys.argv[1])):
    print(os.wait()[1], flush=True)
"""


async def test_memory_is_bounded_over_all_processes(tmp_path):
    """Three processes of 60 MiB each are within the limit of one, and together above the limit of all."""
    sandbox = await room("docker", tmp_path)
    command = Command((sandbox.python, "-I", "-S", "-c", HOLD, "3", "60"), sandbox.environment())
    done = await sandbox.run(replace(command, limits=Limits(wall_s=8.0, memory_mb=128)))
    assert b"\n9\n" in b"\n" + done.stdout or done.code == 137, done
    roomy = await sandbox.run(replace(command, limits=Limits(wall_s=8.0, memory_mb=512)))
    assert (roomy.code, roomy.stdout) == (None, b"62914560\n" * 3)
    await sandbox.destroy()


@pytest.mark.parametrize(("folder", "most"), [("/dev/shm", 64), ("/tmp", 90)])
async def test_what_lies_in_memory_is_bounded(tmp_path, folder, most):
    sandbox = await room("docker", tmp_path)
    script = f"for i in 1 2 3 4; do head -c 60M /dev/zero > {folder}/$i; done; du -sm {folder}"
    done = await bash(sandbox, script, replace(QUICK, file_mb=90))
    assert 50 < int(done.stdout.split()[0]) <= most, done
    await sandbox.destroy()


async def test_the_event_loop_stays_free(tmp_path):
    gaps = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.ensure_future(tick())
    sandbox = await room("docker", tmp_path)
    began = time.monotonic()
    await bash(sandbox, "sleep 0.3")
    took = time.monotonic() - began
    await sandbox.destroy()
    ticking.cancel()
    # A call that blocks the loop would make one gap of the whole start.
    assert max(gaps) < took / 2
    assert len(gaps) > 20


async def test_many_at_a_time(tmp_path):
    async def one(number: int) -> bytes:
        sandbox = await room("docker", tmp_path, label=f"r{number}")
        done = await bash(sandbox, f"echo {number} > own; cat own", Limits(wall_s=60.0))
        await sandbox.destroy()
        return done.stdout

    assert await asyncio.gather(*(one(number) for number in range(8))) == [b"%d\n" % number for number in range(8)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delay", [0.02, 0.06, 0.1, 0.15, 0.25, 0.4, 0.7])
async def test_a_cancelled_start_leaves_no_container(tmp_path, delay):
    """Case S3, with an engine that is asked for a container."""
    sandbox = await room("docker", tmp_path)
    running = asyncio.ensure_future(bash(sandbox, "sleep 994.0107"))
    await asyncio.sleep(delay)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert containers(tmp_path) == []
    assert not alive("994.0107")
    assert (await bash(sandbox, "echo next")).stdout == b"next\n"
    await sandbox.destroy()
    mounted = Path("/proc/self/mountinfo").read_text()
    assert str(tmp_path) not in mounted


async def test_a_container_that_somebody_else_removes_is_an_infrastructure_error(tmp_path):
    sandbox = await room("docker", tmp_path)
    running = asyncio.ensure_future(bash(sandbox, "echo up > up; sleep 60"))
    while not (sandbox.workspace / "up").exists():  # noqa: ASYNC110 - nobody tells us
        await asyncio.sleep(0.02)
    (name,) = containers(tmp_path)
    with contextlib.closing(engine.connect()) as client:
        client.remove_container(name, force=True)
    with pytest.raises(SandboxError, match="somebody else"):
        await running
    await sandbox.destroy()


async def test_a_meter_counts_what_is_printed(tmp_path):
    sandbox = await room("docker", tmp_path)
    meter = Meter()
    command = Command(("/bin/bash", "-c", "head -c 3M /dev/zero; echo x >&2"), sandbox.environment(), limits=QUICK)
    began = meter.last
    done = await sandbox.run(replace(command, meter=meter))
    assert done.code == 0
    assert meter.output_bytes == (3 << 20) + 2
    assert meter.last > began
    await sandbox.destroy()


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("kill -9 1; kill -STOP 1; exit 5", 5)],
)
async def test_exit_codes(tmp_path, script, code):
    sandbox = await room("docker", tmp_path)
    assert (await bash(sandbox, script)).code == code
    await sandbox.destroy()


async def test_the_environment_is_the_commands_own(tmp_path):
    sandbox = await room("docker", tmp_path)
    done = await sandbox.run(Command(("/usr/bin/env",), {"A": "1 = 2\n3", "HOME": "/root"}, limits=QUICK))
    assert sorted(done.stdout.decode().splitlines()) == ["3", "A=1 = 2", "HOME=/root", "PATH=" + default_path(done)]
    await sandbox.destroy()


def default_path(done) -> str:
    """The engine gives a PATH to who has none."""
    return next(line for line in done.stdout.decode().splitlines() if line.startswith("PATH="))[5:]


ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from envs.sandbox.base import Command
from envs.sandbox.create import create
import envs.sandbox.gc
envs.sandbox.gc._tell_warden = lambda root, owner: None
async def main():
    sandbox = await create("docker", "orphan", None, "/root/workspace", Path(sys.argv[1]))
    running = asyncio.ensure_future(sandbox.run(Command(("/bin/bash", "-c", "touch up; sleep 992.0107"), {})))
    while not (sandbox.workspace / "up").exists():
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_the_command_line_removes_what_a_killed_run_left(tmp_path):
    """Without a warden, which is what a machine that was switched off has had."""
    done = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -9
    assert len(containers(tmp_path)) == 1
    assert alive("sleep 992.0107")
    argv = [sys.executable, "-m", "envs.sandbox", "gc"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert "orphan" in said.stdout
    assert containers(tmp_path) == []
    assert not alive("sleep 992.0107")
    said = subprocess.run([*argv, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (DockerOptions(image="reins-none:x"), r"python -m envs\.sandbox image --name reins-none:x"),
        (DockerOptions(runtime="none"), r"sandbox\.docker\.runtime: got 'none', expected one .*runc"),
    ],
    ids=["image", "runtime"],
)
async def test_what_is_missing_is_said_with_what_to_do(tmp_path, options, remedy):
    with pytest.raises(SandboxError, match=remedy):
        await create(options, "x", None, MOUNT_DIR, tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_an_episode_of_the_agent_loop_is_graded(tmp_path):
    """The relay, the mounts of a harness, and the grader, all in containers."""
    script = Script(calls_bash("cat notes.txt | tr a-z A-Z > answer.txt"), calls_bash("cat answer.txt"), say("Done."))
    grader = {"reward.sh": "test ! -e /run/model-api && grep -qx BETA answer.txt && echo 1.0 || echo 0.0\n"}
    task = clawgym.write(tmp_path / "task", "t", "Write BETA.", {"notes.txt": "beta\n"}, grader, {}, MOUNT_DIR)
    adapter = harness(HarnessConfig(max_turns=4, command_s=5.0))
    socket = tmp_path / "doors" / "api.sock"
    socket.parent.mkdir()
    with serving(script, socket):
        sandbox = await create("docker", "one", task.input_files, task.mount_dir, tmp_path / "rooms")
        command = adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "secret-key"), Limits(wall_s=60.0))
        finished = await sandbox.run(through_relay(sandbox, command, socket))
    assert adapter.ended(finished) == (True, "final answer"), finished
    assert script.results[1] == "BETA\n"
    assert {headers["authorization"] for headers in script.headers} == {"Bearer secret-key"}
    frozen = await sandbox.freeze()
    verdict = await grade(task, frozen, "docker", tmp_path / "rooms", Limits(wall_s=30.0))
    await sandbox.destroy()
    assert verdict.score == 1.0, verdict.log
    assert list((tmp_path / "rooms").iterdir()) == []


async def test_a_harness_folder_cannot_be_written_to(tmp_path):
    (tmp_path / "program").mkdir(mode=0o777)
    (tmp_path / "program").chmod(0o777)
    sandbox = await room("docker", tmp_path / "rooms")
    mount = Mount(tmp_path / "program", "/opt/harness/x")
    command = Command(("/bin/bash", "-c", "touch /opt/harness/x/y || touch /opt/harness/y"), {}, (mount,), QUICK)
    assert (await sandbox.run(command)).code != 0
    assert list((tmp_path / "program").iterdir()) == []
    await sandbox.destroy()
