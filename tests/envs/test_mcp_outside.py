"""Servers outside, through their sockets and the bridge: with the official client, with hostile ones, in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from needs import require

from envs.mcp import outside, program
from envs.mcp.outside import Servers
from envs.mcp.spec import McpServer, ServerFault, read_servers
from envs.sandbox.base import Command, Limits
from envs.sandbox.create import create, unavailable

TOY = Path(__file__).with_name("toy_mcp_server.py")
INSIDE = """
import json, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask(number, method, **params):
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    print(json.dumps(message), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())
ask(1, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"})
for number, (name, arguments) in enumerate(json.load(open("calls.json")), 2):
    print(json.dumps(ask(number, "tools/call", name=name, arguments=arguments)))
"""


def toy(name="toy", **env):
    return McpServer(name, (sys.executable, "-I", os.fspath(TOY)), env=env)


@contextlib.asynccontextmanager
async def room(root, *wanted, backend="process"):
    """A sandbox with its servers up."""
    sandbox = await create(backend, "room", None, "/root/workspace", root)
    servers = Servers(wanted, sandbox)
    try:
        await servers.open()
        yield sandbox, servers
    finally:
        await servers.close()
        await sandbox.destroy()


def bridged(servers, number=0):
    given = servers.given[number]
    return StdioServerParameters(command=given.argv[0], args=list(given.argv[1:]), env=dict(given.env))


def shorten(monkeypatch):
    """Messages of at most 64 KiB."""
    for module in (outside, program):
        monkeypatch.setattr(module, "LONGEST", 1 << 16)


def text(result):
    return result.content[0].text


async def until(condition):
    while not condition():  # noqa: ASYNC110 - no event tells of another process
        await asyncio.sleep(0.01)


def alive(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@contextlib.asynccontextmanager
async def raw(tmp_path, *wanted):
    """A connection to the first server's socket, with no bridge and no manners."""
    async with room(tmp_path, *(wanted or (toy(),))) as (sandbox, servers):
        path = sandbox.home.parent / "mcp" / servers.given[0].name
        reader, writer = await asyncio.open_unix_connection(path, limit=16 << 20)
        yield reader, writer, servers
        writer.close()


def request(ident, method="tools/call", **params):
    return json.dumps({"jsonrpc": "2.0", "id": ident, "method": method, "params": params}).encode() + b"\n"


async def test_the_official_client_through_bridge_and_socket(tmp_path):
    async with room(tmp_path, toy()) as (_, servers), Client(bridged(servers)) as client:
        assert "echo" in [tool.name for tool in (await client.list_tools()).tools]
        assert text(await client.call_tool("echo", {"word": "é"})) == '{"word": "\\u00e9"}'
        assert (await client.call_tool("fails", {})).is_error
        assert len(text(await client.call_tool("big", {"size": 2_000_000}))) == 2_000_000
        assert text(await client.call_tool("junk", {})) == "{}"
    rows = servers.log.rows
    assert [(row["tool"], row["is_error"]) for row in rows] == [
        ("echo", False),
        ("fails", True),
        ("big", False),
        ("junk", False),
    ]
    assert rows[0]["arguments"] == '{"word": "é"}'
    assert rows[2]["result_bytes"] > 2_000_000


async def test_a_server_that_crashes_gives_errors_and_no_broken_connection(tmp_path, caplog):
    async with room(tmp_path, toy()) as (_, servers), Client(bridged(servers)) as client:
        for name in ("crash", "echo"):
            with pytest.raises(Exception, match="MCP server toy: it ended with exit code 3"):
                await client.call_tool(name, {})
    assert [(row["tool"], row["reason"]) for row in servers.log.rows] == [
        ("crash", "it ended with exit code 3"),
        ("echo", "it ended with exit code 3"),
    ]
    assert "the toy server gives up" in caplog.text


async def test_a_server_that_cannot_start_says_so(tmp_path):
    async with raw(tmp_path, McpServer("toy", ("/no/such/program",))) as (reader, writer, _):
        writer.write(request(1, "initialize"))
        message = json.loads(await reader.readline())["error"]["message"]
    assert message == "MCP server toy: it ended with exit code 127"


async def test_a_harness_starts_only_when_its_servers_are_ready(tmp_path):
    slow = ("/bin/sh", "-c", f'sleep 0.5; touch {tmp_path}/up; exec "$@"', "sh", *toy().argv)
    async with room(tmp_path / "rooms", McpServer("toy", slow)) as (_, servers):
        assert (tmp_path / "up").exists()
        async with Client(bridged(servers)) as client:
            assert text(await client.call_tool("echo", {})) == "{}"
    assert [row["tool"] for row in servers.log.rows] == ["echo"]


async def test_a_server_that_answers_nothing_does_not_hold_an_episode_up_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_READY_S", 0.1)
    async with raw(tmp_path, McpServer("toy", ("/bin/sleep", "600"))) as (_, writer, servers):
        writer.write(request(1))
        await writer.drain()
    assert len(servers.log.rows) <= 1


async def test_a_message_too_long_from_a_server_ends_it(tmp_path, monkeypatch):
    shorten(monkeypatch)
    async with raw(tmp_path) as (reader, writer, _):
        writer.write(request(1, name="big", arguments={"size": 1 << 20}))
        assert "message of over 65536 bytes" in json.loads(await reader.readline())["error"]["message"]


async def test_a_client_that_sends_an_endless_line_is_hung_up_on(tmp_path, monkeypatch):
    shorten(monkeypatch)
    async with raw(tmp_path) as (reader, writer, servers):
        writer.write(b'{"a": "' + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert servers.log.rows == []


async def test_garbage_is_answered_and_the_connection_goes_on(tmp_path):
    async with raw(tmp_path) as (reader, writer, _):
        writer.write(b"\x00\xff{{{\n\n" + request(1, name="echo", arguments={}))
        answers = [json.loads(await reader.readline()) for _ in range(2)]
    assert answers[0]["error"]["code"] == -32700
    assert answers[1]["result"]["content"][0]["text"] == "{}"


async def test_a_client_that_leaves_takes_its_server_and_all_of_its_children_along(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "_GRACE_S", 0.1)
    async with raw(tmp_path) as (reader, writer, servers):
        writer.write(request(1, name="child", arguments={}))
        child = int(json.loads(await reader.readline())["result"]["content"][0]["text"])
        assert alive(child)
        writer.write(request(2, name="hang", arguments={}))
        await writer.drain()
        writer.transport.abort()
        await until(lambda: not alive(child))
    assert [row.get("reason") for row in servers.log.rows] == [None, "the connection ended before an answer came"]


async def test_closing_ends_a_server_that_hangs_and_a_client_that_does_not_read(tmp_path):
    async with raw(tmp_path) as (reader, writer, servers):
        writer.write(request(1, name="child", arguments={}))
        child = int(json.loads(await reader.readline())["result"]["content"][0]["text"])
        for ident in range(2, 30):
            writer.write(request(ident, name="big", arguments={"size": 1_000_000}))
        await until(lambda: len(servers.log.rows) > 1)
        await servers.close()
        assert not alive(child)
    # What waits for a reader is not made: the server is held up instead.
    assert sum(not row["is_error"] for row in servers.log.rows) < 20
    assert len(servers.log.rows) == 29


async def test_a_connection_at_the_very_moment_of_the_end_leaves_nothing(tmp_path):
    mark = os.fspath(tmp_path)
    server = replace(toy(), argv=(*toy().argv, mark))
    async with room(tmp_path, server):
        pass
    # What a process opens once and keeps is there from here on.
    before = open_files()
    async with room(tmp_path, server) as (sandbox, servers):
        path = os.fspath(sandbox.home.parent / "mcp" / "toy")
        clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for step, client in enumerate(clients):
            client.connect(path)
            for _ in range(step):
                await asyncio.sleep(0)
        await servers.close()
        for client in clients:
            client.close()
    await until(lambda: open_files() <= before)
    assert not [process for process in Path("/proc").glob("[0-9]*") if mark in arguments_of(process.name)]


def open_files():
    """Those of this process that are sockets or pipes, by their numbers."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        # The one that lists them is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found |= {entry.name} if entry.readlink().name.startswith(("socket:", "pipe:")) else set()
    return found


def arguments_of(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


async def test_the_last_word_of_a_client_is_answered(tmp_path):
    async with raw(tmp_path) as (reader, writer, _):
        writer.write(request(1, name="echo", arguments={"a": 1}))
        writer.write_eof()
        assert json.loads(await reader.readline())["id"] == 1
        assert await reader.read() == b""


async def test_connections_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "_MOST_CONNECTIONS", 1)
    async with raw(tmp_path) as (reader, writer, servers):
        writer.write(request(1, "initialize", protocolVersion="1"))
        await reader.readline()
        process = await asyncio.create_subprocess_exec(
            *servers.given[0].argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert await process.stdout.read() == b""
        assert await process.wait() == 0


async def test_the_bridge_says_that_nobody_listens(tmp_path):
    async with room(tmp_path, toy()) as (_, servers):
        await servers.close()
        await servers.close()
        process = await asyncio.create_subprocess_exec(*servers.given[0].argv, stderr=asyncio.subprocess.PIPE)
        assert b"bridge: MCP server toy" in (await process.communicate())[1]
        assert process.returncode == 1


async def test_a_room_with_a_long_path_has_sockets_too(tmp_path):
    root = tmp_path / ("long" * 30)
    async with room(root, toy()) as (_, servers), Client(bridged(servers)) as client:
        assert text(await client.call_tool("echo", {})) == "{}"


async def test_a_key_of_the_host_reaches_the_server_and_nothing_else_does(tmp_path, monkeypatch):
    monkeypatch.setenv("REINS_TEST_SECRET", "sesame")
    monkeypatch.setenv("REINS_TEST_OTHER", "other")
    async with room(tmp_path, toy(KEY="${REINS_TEST_SECRET}")) as (_, servers):
        async with Client(bridged(servers)) as client:
            variables = json.loads(text(await client.call_tool("variables", {})))
        assert (variables["KEY"], variables.get("REINS_TEST_OTHER")) == ("sesame", None)
        assert "sesame" not in str(servers.given)


async def test_a_key_that_is_not_set_is_named(tmp_path):
    with pytest.raises(ServerFault, match="'toy' needs the environment variable REINS_TEST_UNSET"):
        async with room(tmp_path, toy(KEY="${REINS_TEST_UNSET}")):
            pass


async def in_a_sandbox(sandbox, servers, calls):
    """The answers to ``calls`` that a program inside gets from the first server."""
    (sandbox.workspace / "calls.json").write_text(json.dumps(calls))
    argv = (sandbox.python, "-I", "-S", "-c", INSIDE, *servers.given[0].argv)
    env = {**sandbox.environment(), **servers.given[0].env}
    done = await sandbox.run(Command(argv, env, servers.mounts, Limits(wall_s=120)))
    assert done.code == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_from_inside_bubblewrap_to_a_server_outside(tmp_path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    async with room(tmp_path, toy(), backend="bubblewrap") as (sandbox, servers):
        echo, listing, crash = await in_a_sandbox(
            sandbox, servers, [("echo", {"a": 1}), ("listing", {"folder": os.fspath(TOY.parent)}), ("crash", {})]
        )
        assert echo["result"]["content"][0]["text"] == '{"a": 1}'
        assert TOY.name in listing["result"]["content"][0]["text"]
        assert "exit code 3" in crash["error"]["message"]
        seen = await sandbox.run(
            Command(
                ("/bin/bash", "-c", f"ls /run/mcp; ls {TOY}; rm /run/mcp/toy || touch /run/mcp/x; exit 0"),
                sandbox.environment(),
                servers.mounts,
            )
        )
        assert seen.stdout == b"toy\n"
        assert seen.stderr.count(b"Read-only file system") == 2
    assert [row["tool"] for row in servers.log.rows] == ["echo", "listing", "crash"]
    assert list(tmp_path.iterdir()) == []


async def test_a_server_inside_sees_its_own_files_and_not_the_reward(tmp_path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    task = tmp_path / "task"
    for name in ("tools", "reward", "tools/more"):
        (task / name).mkdir(parents=True)
    (task / "tools" / "server.py").write_text(TOY.read_text())
    (task / "reward" / "reward.sh").write_text("echo 1\n")
    wanted = read_servers(
        [{"name": "near", "where": "inside", "argv": ["python", "tools/server.py"], "env": {"A": "b"}}], task
    )
    async with room(tmp_path / "rooms", *wanted, backend="bubblewrap") as (sandbox, servers):
        assert servers.given[0].env["A"] == "b"
        names = {"paths": ["/opt/mcp/near/tools/server.py", os.fspath(task), "/opt/mcp/near/tools/../reward"]}
        beside, above, reach = await in_a_sandbox(
            sandbox,
            servers,
            [
                ("listing", {"folder": "/opt/mcp/near/tools"}),
                ("listing", {"folder": "/opt/mcp/near"}),
                ("reach", names),
            ],
        )
    assert json.loads(beside["result"]["content"][0]["text"]) == ["more", "server.py"]
    assert json.loads(above["result"]["content"][0]["text"]) == ["tools"]
    assert json.loads(reach["result"]["content"][0]["text"]) == [True, False, False]
