"""The contract of a sandbox backend, checked for real, in sentences that say what fails and what it means."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.sandbox.create import Backend, create

_LIMITS = Limits(wall_s=20.0)
_FORKS = """
import os, time
made = 0
try:
    while made < 500:
        os.fork() or time.sleep(9)
        made += 1
except OSError:
    pass
print(made)
"""


async def _bash(sandbox: Sandbox, script: str, limits: Limits = _LIMITS) -> Finished:
    return await sandbox.run(Command(("/bin/bash", "-c", script), sandbox.environment(), limits=limits))


async def _runs(sandbox: Sandbox) -> str:
    done = await _bash(sandbox, "pwd; echo made > made; exit 3")
    if done.code != 3:
        return f"a script that ends with `exit 3` gave code {done.code}: {done.stderr.decode(errors='replace')}"
    if done.stdout.decode().strip() != sandbox.inside_workspace:
        return f"commands start in {done.stdout.decode().strip()}, expected {sandbox.inside_workspace}"
    made = (sandbox.workspace / "made").exists()
    return "" if made else "a file written to the workspace does not appear on the host"


async def _python(sandbox: Sandbox) -> str:
    command = Command((sandbox.python, "-I", "-S", "-c", "print(6 * 7)"), sandbox.environment(), limits=_LIMITS)
    done = await sandbox.run(command)
    if done.stdout.strip() == b"42":
        return ""
    return f"the interpreter {sandbox.python} does not run inside: {done.stderr.decode(errors='replace')[-300:]}"


async def _wall(sandbox: Sandbox) -> str:
    began = time.monotonic()
    done = await _bash(sandbox, "sleep 60 & sleep 60", Limits(wall_s=0.5))
    took = time.monotonic() - began
    return "" if done.code is None and took < 5 else f"a wall limit of 0.5 s gave code {done.code} after {took:.1f} s"


async def _nothing_left(sandbox: Sandbox) -> str:
    loop = "while :; do date +%N > tick; sleep 0.01; done"
    await _bash(sandbox, f"setsid -f bash -c '{loop}' >/dev/null 2>&1; sleep 0.2")
    before = (sandbox.workspace / "tick").stat().st_mtime_ns
    await asyncio.sleep(0.2)
    if (sandbox.workspace / "tick").stat().st_mtime_ns == before:
        return ""
    return "a background process went on writing after `run` returned: rewards could be changed after the end"


async def _files_hidden(sandbox: Sandbox) -> str:
    done = await _bash(sandbox, f"ls -d '{Path(__file__)}' '{sandbox.home.parent}' /etc/shadow 2>/dev/null")
    seen = ", ".join(done.stdout.decode().split())
    return f"the agent can see {seen}: graders and other episodes are within its reach" if seen else ""


async def _no_network(sandbox: Sandbox) -> str:
    done = await _bash(sandbox, "grep -c : /proc/net/dev")
    return "" if done.stdout.strip() == b"1" else "the agent sees more network interfaces than its own loopback"


async def _no_root(sandbox: Sandbox) -> str:
    done = await _bash(sandbox, "id -u; grep CapEff /proc/self/status; touch /usr/x 2>&1 && echo wrote")
    uid, capabilities = done.stdout.split()[0], done.stdout.split()[2]
    if uid == b"0" or int(capabilities, 16):
        return f"runs as user id {uid.decode()} with capabilities {capabilities.decode()}; expected none"
    return "the agent can write to /usr" if b"wrote" in done.stdout else ""


async def _processes(sandbox: Sandbox) -> str:
    command = Command((sandbox.python, "-I", "-S", "-c", _FORKS), sandbox.environment())
    done = await sandbox.run(replace(command, limits=Limits(wall_s=20.0, processes=32)))
    made = int(done.stdout or 0)
    return "" if made <= 32 else f"under a limit of 32 processes {made} were made: no bound for a fork bomb"


_CHECKS: dict[str, Callable[[Sandbox], Awaitable[str]]] = {
    "runs a script in the workspace": _runs,
    "runs Python": _python,
    "ends at the wall limit": _wall,
    "leaves no process": _nothing_left,
    "hides files of the host": _files_hidden,
    "has no network": _no_network,
    "gives no privileges": _no_root,
    "bounds the number of processes": _processes,
}


async def check_sandbox(backend: Backend, root: Path) -> list[tuple[str, str]]:
    """Each promise, and what is wrong with it (empty: kept). Raises SandboxError without the backend."""
    results = []
    for number, (name, one) in enumerate(_CHECKS.items()):
        sandbox = await create(backend, f"check-{os.getpid()}-{number}", None, "/root/workspace", root)
        try:
            results.append((name, await one(sandbox)))
        finally:
            await sandbox.destroy()
    left = [path.name for path in root.glob(f"check-{os.getpid()}-*")]
    results.append(("removes its directories", f"directories stay under {root}: {left}" if left else ""))
    return results
