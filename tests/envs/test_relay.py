"""The relay: bytes both ways, ends passed on, and the command's exit code."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from envs.sandbox import relay

RELAY = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(Path(relay.__file__).parent)!r})\n"
    "import relay; relay._PATIENCE_S = 1.0; sys.exit(relay.main(sys.argv[1:]))",
]
"""With less patience than in production."""
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def relayed(tmp_path: Path, serve: Serve) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """The port of a relay to ``serve``, while its command reads its standard input to the end."""
    server = await asyncio.start_unix_server(serve, tmp_path / "api.sock")
    wait = "import sys; print(sys.argv[1], flush=True); sys.stdin.read(); sys.exit(7)"
    argv = [*RELAY, str(tmp_path), "api.sock", "0", sys.executable, "-c", wait, "{relay_port}"]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(await process.stdout.readline()), process
    finally:
        process.stdin.close()
        assert await process.wait() == 7
        server.close()
        await server.wait_closed()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(1 << 16):
        writer.write(chunk)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [("/no/such", 127, b"No such file or directory"), ("/", 126, b"Permission denied")],
)
async def test_a_command_that_cannot_start_is_named_in_one_line(tmp_path, program, code, words):
    process = await asyncio.create_subprocess_exec(
        *RELAY, str(tmp_path), "api.sock", "0", program, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert (process.returncode, said) == (code, b"cannot start %b: %b\n" % (program.encode(), words))


async def test_large_bodies_pass_both_ways_over_many_connections(tmp_path):
    """Case P7: a request of 30 MB."""
    async with relayed(tmp_path, echo) as (port, _):

        async def one(number: int, size: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = bytes([number]) * size

            async def send() -> None:
                writer.write(data)
                await writer.drain()
                writer.write_eof()

            _, back = await asyncio.gather(send(), reader.read(-1))
            assert back == data
            writer.close()

        await asyncio.gather(one(1, 30 << 20), *(one(number, 100_000) for number in range(2, 22)))


async def test_a_client_that_leaves_is_noticed_behind_the_relay(tmp_path):
    """Case P8: the server sees the end while it is still working on an answer."""
    noticed = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        assert await reader.read() == b""
        noticed.set()
        writer.close()

    async with relayed(tmp_path, slow) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"work")
        await writer.drain()
        await asyncio.sleep(0.1)
        assert not noticed.is_set()
        writer.close()
        await asyncio.wait_for(noticed.wait(), 5)


async def test_a_server_that_hangs_up_ends_the_connection(tmp_path):
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(b"part")
        writer.close()

    async with relayed(tmp_path, rude) as (port, process):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"work")
        assert await asyncio.wait_for(reader.read(), 5) == b"part"
        used = await cpu_ticks(process.pid)
        await asyncio.sleep(0.5)
        assert await cpu_ticks(process.pid) - used <= 5, "the relay spins on a side that hung up"
        writer.close()


async def cpu_ticks(pid: int) -> int:
    text = await asyncio.to_thread(Path(f"/proc/{pid}/stat").read_text)
    user, system = text.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


async def test_without_a_server_connections_wait_and_then_end(tmp_path):
    async with relayed(tmp_path, echo) as (port, process):
        (tmp_path / "api.sock").unlink()
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        assert time.monotonic() - began > 0.9
        writer.close()
        assert process.stderr is not None
        assert b"nobody listens" in await process.stderr.readline()


async def test_a_server_that_comes_late_is_waited_for(tmp_path):
    async with relayed(tmp_path, echo) as (port, _):
        (tmp_path / "api.sock").unlink()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"work")
        await asyncio.sleep(0.3)
        async with await asyncio.start_unix_server(echo, tmp_path / "other.sock"):
            assert await asyncio.wait_for(reader.readexactly(4), 5) == b"work"
            writer.close()


@pytest.mark.parametrize("size", [4, 3 << 20])
async def test_a_request_whose_server_dies_unanswered_goes_to_another(tmp_path, size):
    """On a connection that had an answer before."""
    deaths = []

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(2))
        await reader.readexactly(size)
        deaths.append(1)
        writer.transport.abort()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(size))
        await writer.drain()
        writer.close()

    async with relayed(tmp_path, dies) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hi")
        assert await reader.readexactly(2) == b"hi"
        async with await asyncio.start_unix_server(answers, tmp_path / "other.sock"):
            (tmp_path / "api.sock").unlink()
            writer.write(b"x" * size)
            assert await asyncio.wait_for(reader.read(-1), 10) == b"x" * size
            writer.close()
    assert deaths == [1]


async def test_an_answer_that_breaks_off_is_not_asked_for_again(tmp_path):
    asked = []

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(4))
        writer.write(b"part")
        await writer.drain()
        writer.transport.abort()

    async with relayed(tmp_path, breaks) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"work")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(-1), 5) == b"part"
        writer.close()
    assert asked == [b"work"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 9)", 137), ("pass", 0)],
)
async def test_it_ends_with_the_commands_exit_code(tmp_path, code, expected):
    argv = [*RELAY, str(tmp_path), "none", "0", sys.executable, "-c", code]
    process = await asyncio.create_subprocess_exec(*argv)
    assert await process.wait() == expected


async def test_the_port_is_filled_in_in_arguments_and_environment(tmp_path):
    script = 'echo "$URL $1"; yes | head -n 1'
    argv = [*RELAY, str(tmp_path), "none", "0", "/bin/bash", "-c", script, "x"]
    process = await asyncio.create_subprocess_exec(
        *argv,
        "http://[{relay_port}]",
        env={"URL": "http://127.0.0.1:{relay_port}", "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    url, argument, *rest = out.decode().split()
    port = url.rpartition(":")[2]
    assert int(port) > 0
    assert argument == f"http://[{port}]"
    assert rest == ["y"]


async def test_more_connections_than_descriptors_wait_for_their_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RELAY", ["bash", "-c", 'ulimit -n 40; exec "$@"', "x", *RELAY])
    async with relayed(tmp_path, echo) as (port, process):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        await asyncio.sleep(0.5)
        assert process.returncode is None
        for _, writer in crowd:
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hi")
        assert await asyncio.wait_for(reader.readexactly(2), 5) == b"hi"
        writer.close()
