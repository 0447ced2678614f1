"""Sandboxes: isolation, limits, and that nothing is left. Cases S1, S2 and S3."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from needs import require

from envs.sandbox.base import Command, Finished, Limits, Mount, Sandbox, SandboxError, WorkspaceTooLarge
from envs.sandbox.create import Backend, create, mount_dir_fault, unavailable
from envs.sandbox.files import Bounds, copy_tree, remove_tree
from envs.sandbox.gc import gc

MOUNT_DIR = "/root/.openclaw/workspace"
QUICK = Limits(wall_s=20.0)


@pytest.fixture(params=["bubblewrap", "process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    return request.param


@pytest.fixture
def bubblewrap() -> Backend:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    return "bubblewrap"


async def room(backend: Backend, root: Path, files: Path | None = None, label: str = "one") -> Sandbox:
    return await create(backend, label, files, MOUNT_DIR, root)


async def bash(sandbox: Sandbox, script: str, limits: Limits = QUICK, **env: str) -> Finished:
    return await sandbox.run(Command(("/bin/bash", "-c", script), sandbox.environment() | env, limits=limits))


def alive(marker: str) -> list[str]:
    """Processes of this machine whose command line holds ``marker``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text:
            found.append(text)
    return found


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


async def test_a_command_sees_its_workspace_and_its_environment_only(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    done = await bash(sandbox, "pwd; env | sort; echo oops >&2; echo made > made.txt; exit 3", ONLY="this")
    assert done.code == 3
    lines = done.stdout.decode().splitlines()
    assert lines[0] == sandbox.inside_workspace
    names = {line.split("=")[0] for line in lines[1:]}
    assert {"ONLY", "HOME", "PATH"} <= names
    assert not names & {name for name in os.environ if name.startswith(("PYTEST", "SSL", "PIP"))}
    assert done.stderr == b"oops\n"
    assert (sandbox.workspace / "made.txt").read_text() == "made\n"
    await sandbox.destroy()
    assert list(tmp_path.iterdir()) == []


async def test_input_files_are_copied_faithfully(backend, tmp_path):
    files = tmp_path / "input"
    (files / "ünï cödé").mkdir(parents=True)
    (files / "empty").mkdir()
    (files / "ünï cödé" / "a b'c.txt").write_bytes(b"\0\xff")
    (files / "read only").write_text("r")
    (files / "read only").chmod(0o444)
    (files / "run.sh").write_text("#!/bin/sh\n")
    (files / "run.sh").chmod(0o755)
    (files / "link").symlink_to("/etc/hostname")
    (files / "broken").symlink_to("nowhere")
    os.utime(files / "read only", (1_000_000, 2_000_000))
    sandbox = await room(backend, tmp_path / "rooms", files)
    copy = sandbox.workspace
    assert (copy / "ünï cödé" / "a b'c.txt").read_bytes() == b"\0\xff"
    assert list((copy / "empty").iterdir()) == []
    assert (copy / "read only").stat().st_mode & 0o777 == 0o444
    assert (copy / "read only").stat().st_mtime == 2_000_000
    assert os.access(copy / "run.sh", os.X_OK)
    assert (copy / "link").readlink() == Path("/etc/hostname")
    assert (copy / "broken").readlink() == Path("nowhere")
    done = await bash(sandbox, "cat 'ünï cödé'/*; ./run.sh; touch empty/x")
    assert (done.code, done.stdout) == (0, b"\0\xff")
    await sandbox.destroy()


async def test_missing_input_files_give_an_empty_workspace(backend, tmp_path):
    sandbox = await room(backend, tmp_path / "rooms", tmp_path / "none")
    assert list(sandbox.workspace.iterdir()) == []
    await sandbox.destroy()


async def test_wall_limit_leaves_no_process(backend, tmp_path):
    """Case S1."""
    sandbox = await room(backend, tmp_path)
    began = time.monotonic()
    done = await bash(sandbox, "echo before; sleep 999.125 & sleep 999.125", Limits(wall_s=1.0))
    assert done.code is None
    assert done.stdout == b"before\n"
    assert 0.9 < time.monotonic() - began < 5
    assert not alive("sleep 999.125")
    await sandbox.destroy()


ESCAPES = {
    "background": "while :; do echo bad > answer; sleep 0.01; done & ",
    "nohup": "nohup bash -c 'while :; do echo bad > answer; sleep 0.0107; done' >/dev/null 2>&1 &",
    "setsid": "setsid -f bash -c 'while :; do echo bad > answer; sleep 0.0107; done'",
    "double fork": "(setsid bash -c '(while :; do echo bad > answer; sleep 0.0107; done) & exit' &)",
    "holds the pipe": "setsid -f bash -c 'exec sleep 998.0107' ; echo started",
    "ignores signals": "setsid -f bash -c 'trap \"\" TERM INT HUP; while :; do sleep 0.0107; done'",
    "stopped": "setsid -f bash -c 'kill -STOP $$; sleep 0.0107'",
}


@pytest.mark.parametrize("how", ESCAPES)
async def test_nothing_outlives_a_run(backend, tmp_path, how):
    """Case S2, first half: whoever rewrites answers is gone before they are frozen."""
    sandbox = await room(backend, tmp_path)
    began = time.monotonic()
    done = await bash(sandbox, f"echo good > answer; {ESCAPES[how]}\nexit 0")
    assert done.code == 0
    assert time.monotonic() - began < 10
    assert not alive("0.0107")
    (sandbox.workspace / "answer").write_text("good")
    frozen = await sandbox.freeze()
    await asyncio.sleep(0.1)
    assert (frozen / "answer").read_text() == (sandbox.workspace / "answer").read_text() == "good"
    await sandbox.destroy()


async def test_endless_output_is_read_and_cut(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    done = await bash(
        sandbox,
        "echo first; head -c 300M /dev/zero; echo last; echo err >&2",
        replace(QUICK, output_bytes=1 << 16),
    )
    assert done.code == 0
    assert done.truncated_output
    assert done.stdout.startswith(b"first\n")
    assert done.stdout.endswith(b"last\n")
    assert len(done.stdout) < (1 << 16) + 100
    assert done.stderr == b"err\n"
    await sandbox.destroy()


FORKS = """
import os, time
made = 0
while made < 1000:
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        break
    made += 1
print(made)
"""


async def test_a_fork_bomb_is_bounded(bubblewrap, tmp_path):
    sandbox = await room(bubblewrap, tmp_path)
    script = f"python3 -I -S -c '{FORKS}'"
    counted = await bash(sandbox, script, replace(QUICK, processes=40))
    assert 20 < int(counted.stdout) <= 40
    bomb = await bash(sandbox, "f() { f | f & }; f; sleep 5", Limits(wall_s=2.0, processes=40))
    assert bomb.code is None or bomb.code != 0 or b"unavailable" in bomb.stderr
    assert (await bash(sandbox, "echo fine")).stdout == b"fine\n"
    await sandbox.destroy()


@pytest.mark.parametrize(
    ("script", "limits"),
    [
        ("head -c 3M /dev/zero > big; test $(stat -c %s big) -le 1048576 && exit 9", Limits(file_mb=1)),
        ("python3 -I -S -c 'b = bytearray(1 << 28)' || exit 9", Limits(memory_mb=64)),
        (
            "python3 -I -S -c 'fds = [open(\"/dev/null\") for _ in range(99)]' || exit 9",
            Limits(open_files=32),
        ),
        ("(while :; do :; done) || exit 9", Limits(cpu_s=1.0)),
    ],
)
async def test_limits_hold(backend, tmp_path, script, limits):
    sandbox = await room(backend, tmp_path)
    done = await bash(sandbox, script, replace(limits, wall_s=20.0))
    assert done.code == 9, done
    await sandbox.destroy()


async def test_bubblewrap_hides_the_host(bubblewrap, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    neighbour = await room(bubblewrap, tmp_path / "rooms", label="neighbour")
    sandbox = await room(bubblewrap, tmp_path / "rooms")
    hidden = [
        secret,
        neighbour.base,
        Path(__file__),
        Path("/etc/shadow"),
        Path("/sys/kernel"),
        Path("/var/log"),
    ]
    for path in hidden:
        assert path.exists()
        assert (await bash(sandbox, f"ls -d '{path}'")).code != 0, path
    done = await bash(sandbox, "tr '\\0' '\\n' < /proc/1/cmdline; ls -A /tmp ~ ; ls /proc | grep -c '^[0-9]'")
    assert str(tmp_path) not in done.stdout.decode()
    assert int(done.stdout.split()[-1]) < 8
    for target in ("/usr/x", "/etc/x", "/x", "/opt/x", "/run/x", "/dev/x", "/proc/sys/kernel/hostname"):
        assert (await bash(sandbox, f"echo x > {target}")).code != 0, target
    await neighbour.destroy()
    await sandbox.destroy()


async def test_bubblewrap_drops_privileges_and_the_network(bubblewrap, tmp_path):
    sandbox = await room(bubblewrap, tmp_path)
    done = await bash(sandbox, "grep -E 'Cap(Eff|Prm|Bnd|Amb)|NoNewPrivs' /proc/self/status; hostname; id -un")
    *status, hostname, user = done.stdout.decode().split("\n")[:-1]
    values = dict(line.split(":\t") for line in status)
    assert values.pop("NoNewPrivs") == "1"
    assert {int(values[name], 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
    assert (hostname, user) == ("sandbox", "user")
    done = await bash(sandbox, "cat /proc/net/dev | grep -c : ; id -u")
    interfaces, uid = map(int, done.stdout.split())
    assert interfaces == 1
    assert uid != 0
    await sandbox.destroy()


async def test_the_home_lasts_from_run_to_run(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    seen = sandbox.put_home(".config/app/settings", "a = 1")
    assert seen == f"{sandbox.inside_home}/.config/app/settings"
    await bash(sandbox, "echo more >> ~/.config/app/settings; echo t > ${TMPDIR:-/tmp}/kept")
    done = await bash(sandbox, "cat ~/.config/app/settings")
    assert done.stdout == b"a = 1more\n"
    await sandbox.destroy()


async def test_mounts_are_shown_read_only_or_writable(bubblewrap, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "file").write_text("g")
    (tmp_path / "given").chmod(0o777)
    sandbox = await room(bubblewrap, tmp_path / "rooms")
    for writable in (False, True):
        mount = Mount(tmp_path / "given", "/opt/a/b", writable)
        command = Command(("/bin/bash", "-c", "cat /opt/a/b/file; echo x > /opt/a/b/new"), {}, (mount,), QUICK)
        done = await sandbox.run(command)
        assert done.stdout == b"g"
        assert (done.code == 0) == writable
        assert sandbox.inside(mount) == "/opt/a/b"
    await sandbox.destroy()


@pytest.mark.parametrize(
    "command",
    [Command(("/no/such/program",)), Command(("/bin/true",), {}, (Mount(Path("/no/such"), "/opt/x"),))],
    ids=["program", "mount"],
)
async def test_what_cannot_start_is_an_infrastructure_error(bubblewrap, tmp_path, command):
    sandbox = await room(bubblewrap, tmp_path)
    with pytest.raises(SandboxError, match="no/such"):
        await sandbox.run(command)
    assert (await bash(sandbox, "echo next")).stdout == b"next\n"
    await sandbox.destroy()


async def test_kill_ends_a_run(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    await sandbox.kill()
    for wait in (0.0, 0.3):
        running = asyncio.ensure_future(bash(sandbox, "setsid -f sleep 997.0107; sleep 997.0107"))
        await asyncio.sleep(wait)
        await sandbox.kill()
        assert not alive("997.0107")
        assert (await running).code != 0
    await sandbox.destroy()
    await sandbox.destroy()


async def test_one_command_at_a_time(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    running = asyncio.ensure_future(bash(sandbox, "sleep 1"))
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxError, match="one command at a time"):
        await bash(sandbox, "true")
    with pytest.raises(SandboxError, match="kill it first"):
        await sandbox.freeze()
    assert (await running).code == 0
    await sandbox.destroy()


@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.002, 0.01, 0.05, 0.2])
async def test_cancellation_leaves_nothing(backend, tmp_path, delay):
    """Case S3, at many moments of creation and run."""
    files = tmp_path / "input"
    (files / "sub").mkdir(parents=True)
    for number in range(50):
        (files / "sub" / str(number)).write_text("x")

    async def episode() -> None:
        sandbox = await create(backend, "cancelled", files, MOUNT_DIR, tmp_path / "rooms")
        try:
            await bash(sandbox, "setsid -f sleep 996.0107; sleep 996.0107")
        finally:
            await sandbox.destroy()

    before = descriptors()
    task = asyncio.ensure_future(episode())
    await asyncio.sleep(delay)
    task.cancel()
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "rooms").glob("*")) == []
    assert not alive("996.0107")
    assert descriptors() - before == set()


async def test_descriptors_do_not_leak(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    await bash(sandbox, "true")
    before = len(descriptors())
    for _ in range(3):
        await bash(sandbox, "true")
        await bash(sandbox, "sleep 9", Limits(wall_s=0.1))
    assert len(descriptors()) == before
    await sandbox.destroy()


async def test_labels_and_mount_dirs_are_checked(backend, tmp_path):
    for label in ("", "../x", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="label"):
            await create(backend, label, None, MOUNT_DIR, tmp_path)
    with pytest.raises(ValueError, match="mount_dir"):
        await create(backend, "x", None, "relative", tmp_path)
    sandbox = await room(backend, tmp_path)
    with pytest.raises(SandboxError, match="already there"):
        await room(backend, tmp_path)
    assert sandbox.workspace.is_dir()
    await sandbox.destroy()


@pytest.mark.parametrize(
    ("mount_dir", "fine"),
    [("/root/.openclaw/workspace", True), ("/workspace", True), ("/home/u/w", True), ("/tmp/w", True)]
    + [(bad, False) for bad in ("", "w", "/", "/root", "/tmp", "/usr/w", "/etc", "/a/../b", "/a//b", "/a/")],
)
async def test_mount_dirs(bubblewrap, tmp_path, mount_dir, fine):
    assert (mount_dir_fault(mount_dir) == "") == fine
    if fine:
        sandbox = await create(bubblewrap, "m", None, mount_dir, tmp_path)
        done = await bash(sandbox, "pwd; echo x > x; mkdir -p ~/a; touch /tmp/x")
        assert (done.code, done.stdout.decode().strip()) == (0, mount_dir)
        await sandbox.destroy()


async def test_hostile_trees_are_removed(backend, tmp_path):
    sandbox = await room(backend, tmp_path)
    script = """
    mkdir -p locked/in && touch locked/in/f && chmod 000 locked/in locked
    python3 -I -S -c 'import os
for _ in range(1200): os.mkdir("d"); os.chdir("d")'
    ln -s / root_link; mkfifo pipe; printf x > $'new\\nline'
    """
    assert (await bash(sandbox, script)).code == 0
    await sandbox.destroy()
    assert list(tmp_path.iterdir()) == []
    assert (await asyncio.to_thread(os.listdir, "/usr/bin")) != []


async def test_freezing_is_bounded_and_follows_no_link(backend, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    sandbox = await room(backend, tmp_path / "rooms")
    await bash(sandbox, f"ln -s {outside} link; mkfifo pipe; echo v > v; python3 -I -S -c 'import socket' ")
    frozen = await sandbox.freeze()
    assert sorted(path.name for path in frozen.iterdir()) == ["link", "v"]
    assert (frozen / "link").readlink() == outside
    await bash(sandbox, "for i in 1 2 3 4 5; do truncate -s 250M big$i; done")
    with pytest.raises(WorkspaceTooLarge, match="bytes"):
        await sandbox.freeze()
    await sandbox.destroy()


def test_copies_are_bounded_in_entries_and_depth(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        (source / str(number)).touch()
    with pytest.raises(WorkspaceTooLarge, match="files"):
        copy_tree(source, tmp_path / "a", bounds=Bounds(entries=4))
    with pytest.raises(WorkspaceTooLarge, match="path"):
        copy_tree(source, tmp_path / "b", bounds=Bounds(path_bytes=0))
    copy_tree(source, tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 5


def test_a_workspace_that_became_a_link_is_frozen_empty(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    copy_tree(tmp_path / "link", tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    remove_tree(tmp_path / "link")
    assert (tmp_path / "real" / "f").exists()


OWNER = """
import asyncio, sys
from pathlib import Path
from envs.sandbox.base import Command
from envs.sandbox.create import create
async def main():
    sandbox = await create(sys.argv[1], sys.argv[3], None, "/root/workspace", Path(sys.argv[2]))
    print("made", flush=True)
    script = "setsid -f sleep 995.0107; sleep 995.0107"
    await sandbox.run(Command(("/bin/bash", "-c", script), {"PATH": "/bin"}))
asyncio.run(main())
"""


async def test_a_killed_owner_leaves_nothing(backend, tmp_path):
    """At any moment of a sandbox's start: its processes die, its directories go, those of others stay."""
    mine = await room(backend, tmp_path, label="mine")

    async def killed_after(delay: float) -> None:
        argv = [sys.executable, "-c", OWNER, backend, str(tmp_path), f"orphan{delay}"]
        owner = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"made\n"
        assert (tmp_path / f"orphan{delay}").is_dir()
        await asyncio.sleep(delay)
        owner.send_signal(signal.SIGKILL)
        await owner.wait()

    await asyncio.gather(*(killed_after(delay) for delay in (0.0, 0.01, 0.03, 0.5)))
    for _ in range(150):
        if not alive("995.0107") and len(list(tmp_path.iterdir())) == 1:
            break
        await asyncio.sleep(0.1)
    assert not alive("995.0107")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    await mine.destroy()


async def test_gc_takes_what_is_orphaned(backend, tmp_path):
    mine = await room(backend, tmp_path, label="mine")
    orphan = await room(backend, tmp_path, label="orphan")
    (orphan.base / "owner").write_text(f"{os.getpid()} 1\n")
    running = asyncio.ensure_future(bash(orphan, "sleep 993.0107"))
    await asyncio.sleep(0.5)
    assert gc(tmp_path) == ["orphan"]
    if backend != "process":
        with pytest.raises(SandboxError):
            await running
    await orphan.destroy()
    await asyncio.gather(running, return_exceptions=True)
    assert not alive("993.0107")
    assert mine.workspace.is_dir()
    await mine.destroy()


async def test_gc_spares_a_directory_that_is_being_made(tmp_path):
    for name in ("young", "old"):
        (tmp_path / name).mkdir(mode=0o700)
    os.utime(tmp_path / "old", (0, 0))
    (tmp_path / "file").touch()
    assert gc(tmp_path, shared=True) == []
    assert gc(tmp_path) == ["old"]
    assert gc(tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        ({"notes.txt": "mine"}, 0o700),
        ({}, 0o755),
        ({"owner": "Jane"}, 0o700),
        ({"owner": "12 bottles"}, 0o700),
        ({"owner/a": "x"}, 0o700),
    ],
)
def test_gc_spares_folders_that_are_no_sandboxes(tmp_path, files, mode):
    """Whoever says `gc /tmp` keeps everything else that lies there."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    folder.chmod(mode)
    os.utime(folder, (0, 0))
    assert gc(tmp_path) == []
    assert folder.is_dir()
    assert all((folder / name).read_text() == text for name, text in files.items())


async def test_the_process_backend_says_so_once(tmp_path, caplog):
    from envs.sandbox import process

    process._warned = False
    for label in ("a", "b"):
        await (await room("process", tmp_path, label=label)).destroy()
    assert [record.levelname for record in caplog.records if "NO ISOLATION" in record.message] == ["WARNING"]
