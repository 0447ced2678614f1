"""Tries the servers that tasks name, in sentences for whoever writes a task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from mcp import Client, StdioServerParameters

from envs.mcp.outside import Servers
from envs.mcp.spec import McpServer
from envs.sandbox.create import create
from envs.tasks import clawgym

_START_S = 60.0


async def check(folders: Sequence[Path]) -> int:
    """Start each server as an episode would and print its tools; 1 where one fails, else 0."""
    failed = without = 0
    for folder in folders:
        try:
            task = clawgym.read(folder.resolve())
        except clawgym.TaskError as error:
            print(f"{folder}: FAILS: {'; '.join(error.faults)}")
            failed += 1
            continue
        without += not task.mcp
        for server in task.mcp:
            with _quiet():
                words = await _tools(server)
            failed += words.startswith("FAILS")
            print(f"{folder}: {server.name} ({server.where}): {words}")
    if without:
        print(f"{without} of {len(folders)} tasks name no MCP servers")
    return 1 if failed else 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that no agent is shut in: none is here."""
    logger = logging.getLogger("envs.sandbox")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _tools(server: McpServer) -> str:
    if server.where == "inside":
        return "not tried: it starts inside a sandbox"
    try:
        async with asyncio.timeout(_START_S), _client(server) as client:
            tools = (await client.list_tools()).tools
            return ", ".join(tool.name for tool in tools) or "FAILS: it has no tools"
    except TimeoutError:
        return f"FAILS: it did not answer within {_START_S:g} s as a server over standard input and output does"
    except Exception as error:  # whatever a server of somebody's does is what is looked for here
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return f"FAILS: {str(error) or type(error).__name__}"


@contextlib.asynccontextmanager
async def _client(server: McpServer) -> AsyncIterator[Client]:
    with tempfile.TemporaryDirectory(prefix="reins-check-") as root:
        sandbox = await create("process", "check", None, "/root/workspace", Path(root))
        servers = None
        try:
            servers = Servers((server,), sandbox)
            await servers.open()
            program, *arguments = servers.given[0].argv
            async with Client(StdioServerParameters(command=program, args=arguments)) as client:
                yield client
        finally:
            if servers is not None:
                await servers.close()
            await sandbox.destroy()
