"""The stage for an attack: a whole episode on a real proxy, beside a neighbour's sandbox and a process of the host.

All that an attack could reach is there: files, environments, a server and a key that are somebody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack_prelude import PRELUDE, Attack
from bpe import save_bpe

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.engines.base import Generate, Generated
from actors.rendering import Rendering
from actors.sandbox import SandboxActor
from actors.session_contract import SessionSpec, Summary
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.sandbox.base import Command, Limits
from envs.sandbox.create import create
from envs.tasks import clawgym
from envs.tasks.task import Task
from trees.record import VersionSpan

_CONTEXT = 1 << 17
_PATIENCE_S = 8
_COMPARES = "cmp -s answer.txt reward/expected.txt && echo 1 || echo 0\n"
_CALL = {"name": "execute_bash", "arguments": {"command": "python3 attack.py 2>&1 || /opt/bin/python3 attack.py 2>&1"}}
_NEIGHBOUR = "import time; print(open('secret.txt').read(), flush=True); time.sleep(600)"


class _Engine:
    """Calls the tool at the first turn of an episode, and ends at the next one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._turns = 0
        self.quiet = False

    async def generate(self, request: Generate) -> Generated:
        self._turns += 1
        call = {"name": "execute_bash", "arguments": {"command": "true"}} if self.quiet else _CALL
        calls = f"I try. <tool_call>\n{json.dumps(call)}\n</tool_call>"
        text = (calls if self._turns % 2 else "that is all") + "<|im_end|>"
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return Generated(ids, [-0.5] * len(ids), "stop", (VersionSpan(3, 0, len(ids)),))

    async def abort(self, request: str) -> None: ...

    def start_over(self, quiet: bool) -> None:
        self._turns, self.quiet = 0, quiet


async def _forget(records: Any) -> None: ...


class _Proxy:
    """The proxy without Ray, which keeps what sessions came to."""

    def __init__(self, dispatcher: Dispatcher, path: Path) -> None:
        self.dispatcher = dispatcher
        self.path = path
        self.summaries: list[Summary] = []

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        return {"key": await self.dispatcher.open(spec), "socket": str(self.path)}

    async def close_session(self, key: str) -> Summary:
        self.summaries.append(await self.dispatcher.close(key))
        return self.summaries[-1]

    async def since_call(self, key: str) -> float:
        return self.dispatcher.since_call(key)


@dataclass
class Told:
    """What came of an attack."""

    outcome: EpisodeOutcome
    said: str
    """What the attack printed, as the policy saw it."""
    harm: list[str]
    """What happened to others."""
    hits: int
    """Rooms that came from the pool for it."""


async def play(attack: Attack, backend: str, warm: bool, folder: Path) -> Told:
    """Run the attack once. ``warm``: in a room that waited for it."""
    rendering = Rendering(save_bpe(folder / "tokenizer", ["You work on files. execute_bash"], 400))
    engine = _Engine(rendering.tokenizer)
    dispatcher = Dispatcher(ProxyConfig(), rendering, engine, _forget, _CONTEXT)
    with tempfile.TemporaryDirectory(prefix="reins-") as short:
        server = SocketServer(Path(short))
        proxy = _Proxy(dispatcher, await server.start(build_app(dispatcher)))
        async with _others(backend, folder, proxy) as (facts, harm):
            task = _task(attack, folder, {**facts, "backend": backend})
            config = RunConfig.model_validate(
                {
                    "sandbox": {"backend": backend, "wall_s": 120.0, "pool": int(warm), **attack.sandbox},
                    "harness": {"command_s": 110.0},
                    "engine": {"max_len": _CONTEXT},
                    "reward": {"flags": True},
                }
            )
            actor = SandboxActor(config, folder / "rooms", proxy)
            for number in range(2 * warm):
                engine.start_over(quiet=True)
                before = await actor.run_episode(EpisodeSpec(f"w{number}", task, "agent_loop", "g", 0, 0))
                assert before.status == "completed", before
                await asyncio.wait_for(actor._pool.filled(), 60)
            hits = actor._pool.hits
            engine.start_over(quiet=False)
            outcome = await actor.run_episode(EpisodeSpec("e", task, "agent_loop", "g", 0, 0))
            hits = actor._pool.hits - hits
            said = proxy.summaries[-1].transcript or ""
            await actor.close()
        left = [path.name for path in (folder / "rooms").iterdir()]
        harm += [f"left {left}"] if left else []
        await server.stop()
    return Told(outcome, said, harm, hits)


def _task(attack: Attack, folder: Path, facts: dict[str, Any]) -> Task:
    inputs: dict[str, str | bytes] = {
        "attack.py": f"{PRELUDE}\n{attack.program}\nprint('TRIED')\n",
        "facts.json": json.dumps(facts | {"reward": str(folder / "task" / "reward")}),
        **attack.files,
    }
    reward: dict[str, str | bytes] = {
        "reward.sh": attack.grader or _COMPARES,
        "expected.txt": f"EXPECTED-{secrets.token_hex(8)}\n",
    }
    return clawgym.write(folder / "task", "t", "Do it.", inputs, reward, {}, grader_gets=("transcript",))


@asynccontextmanager
async def _others(backend: str, folder: Path, proxy: _Proxy) -> AsyncIterator[tuple[dict[str, Any], list[str]]]:
    """Those who must not be harmed; at the end the list says what was done to them."""
    harm: list[str] = []
    secret = f"NEIGHBOUR-{secrets.token_hex(8)}"
    (folder / "neighbours").mkdir()
    (folder / "neighbours" / "secret.txt").write_text(secret)
    (folder / "host.txt").write_text(f"HOST-{secrets.token_hex(8)}")
    abstract = f"reins-{secrets.token_hex(4)}"
    canary = _canary()
    room = await create(backend, "neighbour", folder / "neighbours", "/root/workspace", folder / "rooms")  # type: ignore[arg-type]
    command = Command((room.python, "-c", _NEIGHBOUR), {**room.environment(), "S": secret}, limits=Limits(wall_s=600))
    running = asyncio.create_task(room.run(command))
    key = await proxy.dispatcher.open(SessionSpec("victim"))
    with socket.create_server(("", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        listening = [
            await asyncio.start_server(lambda *_: harm.append("the host's server was reached"), sock=tcp),
            await asyncio.start_unix_server(lambda *_: harm.append("the host's abstract socket"), sock=unix),
        ]
        facts = {
            "rooms": str(folder / "rooms"),
            "neighbour": str(room.workspace),
            "canary": canary.pid,
            "victim": os.getpid(),
            "port": tcp.getsockname()[1],
            "addresses": _addresses(),
            "abstract": abstract,
        }
        asking = asyncio.create_task(_asks(proxy.path, key, harm))
        try:
            yield facts, harm
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            harm += ["a process of the host was ended"] if canary.poll() is not None else []
            harm += ["the neighbour was ended"] if running.done() else []
            harm += ["the neighbour's file changed"] if (room.workspace / "secret.txt").read_text() != secret else []
            harm += ["the neighbour's session was used"] if (await proxy.dispatcher.close(key)).calls else []
        finally:
            asking.cancel()
            canary.kill()
            canary.wait()
            await room.destroy()
            await asyncio.gather(running, return_exceptions=True)
            for one in listening:
                one.close()


def _canary() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600) # canary"])


async def _asks(path: Path, key: str, harm: list[str]) -> None:
    """A neighbour who needs the proxy all the time, each time by a connection of its own."""
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
    while True:
        answer = await asyncio.to_thread(_ask, path, request.encode())
        if not answer.startswith(b"HTTP/1.1 200"):
            harm.append(f"the neighbour was not served: {answer!r:.200}")
            return
        await asyncio.sleep(0.2)


def _ask(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as one:
        # By the kernel: with a timeout of Python's own a socket does not wait where others wait as well.
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            one.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", _PATIENCE_S, 0))
        try:
            one.connect(os.fspath(path))
            one.sendall(request)
            return one.recv(100)
        except OSError as error:
            return repr(error).encode()


def _addresses() -> list[str]:
    """Of the host, besides the loopback."""
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(str(address) for address in found)
