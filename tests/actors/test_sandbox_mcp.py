"""The sandbox actor and MCP servers: up before the harness, gone after it, and written down. No Ray, no proxy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors.sandbox import SandboxActor
from actors.session_contract import Summary
from configs.schema import RunConfig
from envs.episode import EpisodeSpec
from envs.harnesses.registry import HARNESSES
from envs.sandbox.base import Command
from envs.tasks import clawgym

TOY = Path(__file__).parents[1] / "envs" / "toy_mcp_server.py"
PLAYED = """
import json, subprocess, sys
server = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"a": "b"}}}
print(json.dumps(message), file=server.stdin, flush=True)
open("answer.txt", "w").write(server.stdout.readline())
sys.exit(int(sys.argv[1]))
"""


class Stub:
    """A harness that calls its first server and leaves without a word to it."""

    name = "stub"
    takes_mcp = True
    code = 0

    def command(self, sandbox, task, endpoint, limits, servers=()):
        argv = (sandbox.python, "-I", "-S", "-c", PLAYED, str(self.code), *servers[0].argv)
        return Command(argv, sandbox.environment(), limits=limits)

    def ended(self, finished):
        return finished.code == 0, f"exit code {finished.code}"


class Door:
    """A proxy that counts one call per session."""

    def __init__(self, socket):
        self.socket = socket
        self.open = set()

    async def open_session(self, spec):
        self.open.add(spec.id)
        return {"key": spec.id, "socket": os.fspath(self.socket)}

    async def close_session(self, key):
        self.open.discard(key)
        return Summary(key, 1, 1, 1, "stop", True, True, "", "", 0, {}, 1.0)


@pytest.fixture
async def door(short_path):
    socket = short_path / "sockets" / "door.sock"
    socket.parent.mkdir()
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), socket)
    yield Door(socket)
    server.close()


@pytest.fixture
def short_path(tmp_path_factory):
    return tmp_path_factory.mktemp("m")


@pytest.fixture
def spec(tmp_path):
    task = tmp_path / "task"
    clawgym.write(task, "one", "Do it.", {}, {"reward.sh": "grep -q result answer.txt && echo 1.0 || echo 0.0\n"}, {})
    path = task / "data_entry.json"
    entry = json.loads(path.read_text()) | {
        "mcp": [{"name": "toy", "argv": [sys.executable, "-I", os.fspath(TOY), os.fspath(tmp_path)]}]
    }
    path.write_text(json.dumps(entry))
    return EpisodeSpec("e1", clawgym.read(task), "stub", "group", 0, 0)


def actor(door, root, name="stub"):
    config = {"harness": {"name": name}, "sandbox": {"backend": "process", "wall_s": 60.0}}
    return SandboxActor(RunConfig.model_validate(config), root, door)


@pytest.mark.parametrize(("code", "status"), [(0, "completed"), (1, "truncated")])
async def test_calls_are_kept_with_the_episode_and_nothing_is_left(code, status, door, spec, tmp_path, monkeypatch):
    stub = Stub()
    stub.code = code
    monkeypatch.setitem(HARNESSES, "stub", lambda _: stub)
    outcome = await actor(door, tmp_path / "rooms").run_episode(spec)
    assert (outcome.status, outcome.reward) == (status, 1.0), outcome
    assert [(row["server"], row["tool"], row["is_error"]) for row in outcome.mcp] == [("toy", "echo", False)]
    assert list((tmp_path / "rooms").iterdir()) == []
    assert door.open == set()
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if os.fspath(spec.task.folder.parent) in command_line(pid)]


def command_line(process):
    try:
        return (process / "cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


async def test_a_cancelled_episode_leaves_no_server(door, spec, tmp_path, monkeypatch):
    class Waiting(Stub):
        def command(self, *arguments):
            return Command(("/bin/sleep", "60"), limits=arguments[3])

    monkeypatch.setitem(HARNESSES, "stub", lambda _: Waiting())
    running = asyncio.create_task(actor(door, tmp_path / "rooms").run_episode(spec))
    sockets = tmp_path / "rooms"
    while not list(sockets.glob("*/mcp/toy")):  # noqa: ASYNC110 - no event tells of a socket
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while list(sockets.iterdir()) or door.open:  # noqa: ASYNC110 - what is shielded goes on
        await asyncio.sleep(0.01)


async def test_a_harness_without_mcp_is_no_way_around_a_task_that_needs_it(door, spec, tmp_path):
    outcome = await actor(door, tmp_path / "rooms", "agent_loop").run_episode(replace(spec, harness="agent_loop"))
    assert outcome.status == "failed"
    assert "'one'" in outcome.reason
    assert "(toy)" in outcome.reason
