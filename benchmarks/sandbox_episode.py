"""CPU milliseconds of an episode without the model: sandbox, relay, agent loop, two tool calls, grading.

    python benchmarks/sandbox_episode.py [--smoke] [--backend bubblewrap|process] [--episodes N]
    [--concurrency N]

A scripted model answers over a Unix socket: two shell commands, then a final answer. CPU seconds of children
are read from the kernel's accounting of ended processes, those of this process from its own clock. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from envs.harnesses.agent_loop_adapter import AgentLoop
from envs.harnesses.base import Endpoint
from envs.sandbox.base import Command, Limits, Sandbox
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.grading import grade
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.tasks import clawgym
from envs.tasks.task import Task

PR_SET_CHILD_SUBREAPER = 36
COMMANDS = ("cat notes/in.txt", "cp notes/in.txt out.txt")
GRADER = "cmp -s out.txt notes/in.txt && echo 1.0 || echo 0.0\n"


def _answer(turn: int) -> dict[str, Any]:
    if turn >= len(COMMANDS):
        return {"role": "assistant", "content": "Done."}
    function = {"name": "execute_bash", "arguments": json.dumps({"command": COMMANDS[turn]})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c{turn}", "type": "function", "function": function}],
    }


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        messages = json.loads(await reader.readexactly(length))["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": _answer(turn)}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if turn == len(COMMANDS):
            break
    writer.close()


def adopt_orphans() -> None:
    """Have the kernel hand orphans to this process, so that the CPU of whole namespaces is counted here."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _cpu_ms() -> tuple[float, float]:
    """CPU of this process and of its ended children so far, in ms."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return (own.ru_utime + own.ru_stime) * 1e3, (children.ru_utime + children.ru_stime) * 1e3


@dataclass(slots=True)
class Bench:
    """One task, one scripted model, and what a piece of an episode costs."""

    backend: Backend
    root: Path
    task: Task
    socket: Path
    count: int = 0
    harness: AgentLoop = field(default_factory=AgentLoop)

    async def sandbox(self) -> Sandbox:
        self.count += 1
        return await create(self.backend, f"b{self.count}", self.task.input_files, self.task.mount_dir, self.root)

    async def room(self) -> None:
        await (await self.sandbox()).destroy()

    async def run(self, *argv: str, relay: bool = False) -> None:
        """A room in which one command runs; Python's switches are filled in where argv is empty."""
        sandbox = await self.sandbox()
        command = Command(argv or (sandbox.python, "-I", "-S", "-c", "pass"), sandbox.environment())
        finished = await sandbox.run(through_relay(sandbox, command, self.socket) if relay else command)
        assert finished.code == 0, finished
        await sandbox.destroy()

    async def agent(self, graded: bool) -> None:
        sandbox = await self.sandbox()
        command = self.harness.command(sandbox, self.task, Endpoint(RELAY_BASE_URL, "key"), Limits())
        finished = await sandbox.run(through_relay(sandbox, command, self.socket))
        assert self.harness.ended(finished) == (True, "final answer"), finished
        if graded:
            verdict = await grade(self.task, await sandbox.freeze(), self.backend, self.root)
            assert verdict.score == 1.0, verdict
        await sandbox.destroy()


async def measure(piece: Callable[[], Awaitable[None]], episodes: int, concurrency: int) -> dict[str, float]:
    """Mean CPU of one ``piece`` in this process and in its children; wall time of all over their number."""
    gate = asyncio.Semaphore(concurrency)

    async def once() -> None:
        async with gate:
            await piece()

    own, children = _cpu_ms()
    began = time.monotonic()
    await asyncio.gather(*(once() for _ in range(episodes)))
    wall = (time.monotonic() - began) * 1e3
    own_after, children_after = _cpu_ms()
    return {
        "own_cpu_ms": round((own_after - own) / episodes, 2),
        "children_cpu_ms": round((children_after - children) / episodes, 2),
        "cpu_ms": round((own_after + children_after - own - children) / episodes, 2),
        "wall_ms": round(wall / episodes, 2),
    }


async def bench(backend: Backend, episodes: int, concurrency: int, folder: Path) -> dict[str, dict[str, float]]:
    task = clawgym.write(
        folder / "task",
        task_id="copy",
        instruction="Copy notes/in.txt to out.txt.",
        inputs={"notes/in.txt": "amber\n", "notes/other.txt": "birch\n"},
        reward={"reward.sh": GRADER},
        metadata={},
    )
    server = await asyncio.start_unix_server(_serve, folder / "api.sock")
    made = Bench(backend, folder / "rooms", task, folder / "api.sock")
    pieces: dict[str, Callable[[], Awaitable[None]]] = {
        "room": made.room,
        "room + true": lambda: made.run("/bin/true"),
        "room + python": made.run,
        "room + relay + true": lambda: made.run("/bin/true", relay=True),
        "room + relay + agent loop": lambda: made.agent(graded=False),
        "episode": lambda: made.agent(graded=True),
    }
    results = {}
    async with server:
        await made.agent(graded=True)
        for name, piece in pieces.items():
            results[name] = await measure(piece, episodes, concurrency)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="four episodes: only whether it runs")
    parser.add_argument("--backend", choices=("bubblewrap", "process"), help="default: bubblewrap where it works")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=2)
    arguments = parser.parse_args()
    backend: Backend = arguments.backend or ("process" if unavailable() else "bubblewrap")
    episodes = 4 if arguments.smoke else arguments.episodes
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="reins-bench-") as folder:
        results = asyncio.run(bench(backend, episodes, arguments.concurrency, Path(folder)))
    table = Table("piece", "this process", "children", "CPU ms", "wall ms", title=f"per episode, {backend}")
    for name, values in results.items():
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    Console().print(table)
    episode = results["episode"]
    line = {
        "benchmark": "sandbox_episode",
        "backend": backend,
        "episodes": episodes,
        **episode,
        "pieces": results,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
