"""One session of one harness in one scenario: the sandbox actor, the proxy's dispatcher and app, no Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bpe import save_bpe
from dialects import DIALECTS, WORKSPACE
from fault_hop import FaultHop, Seen
from scenarios import LONG, NOTES, TASK, Scenario
from script_engine import Asked, ScriptEngine, part_of

from actors.api import build_app
from actors.dispatch import Dispatcher, Hosted, Running
from actors.engines.base import Engine
from actors.rendering import Rendering
from actors.sandbox import SandboxActor
from actors.session import Prepared
from actors.session_contract import SessionSpec, Summary
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.protocols.canonical import Request
from envs.tasks import clawgym
from envs.tasks.task import Task
from trees.record import CallRecord

_GRADER = "grep -q BETA answer.txt && echo 1.0 || echo 0.0\n"


@dataclass
class Performance:
    """All that a session left behind."""

    harness: str
    scenario: Scenario
    outcome: EpisodeOutcome
    summary: Summary
    records: list[CallRecord]
    asked: list[Asked]
    requests: dict[str, Request]
    """By call."""
    seen: list[Seen]


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of a few thousand tokens, learned from this project's own text, with Qwen3's tokens."""
    here = Path(__file__).parents[2]
    sources = sorted(path for part in ("actors", "envs", "trees") for path in (here / part).rglob("*.py"))
    return save_bpe(folder, (path.read_text(encoding="utf-8") for path in sources), 4000)


def make_task(folder: Path) -> Task:
    """The task of all scenarios: ``answer.txt`` must hold BETA."""
    files = {"notes.txt": NOTES, "long.txt": LONG}
    return clawgym.write(folder, folder.name, TASK, files, {"reward.sh": _GRADER}, {}, WORKSPACE)


class _Watched(Dispatcher):
    """Keeps the canonical request of every call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: dict[str, Request] = {}

    def _set_going(self, hosted: Hosted, prepared: Prepared, queue_s: float) -> Running:
        self.requests[prepared.call] = prepared.plan.request
        return super()._set_going(hosted, prepared, queue_s)


@dataclass
class _Door:
    """The proxy as a sandbox actor sees it; the harness's socket is that of the hop."""

    dispatcher: Dispatcher
    socket: Path
    summaries: list[Summary] = field(default_factory=list)

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        return {"key": await self.dispatcher.open(spec), "socket": str(self.socket)}

    async def close_session(self, key: str) -> Summary:
        self.summaries.append(await self.dispatcher.close(key))
        return self.summaries[-1]

    async def since_call(self, key: str) -> float:
        return self.dispatcher.since_call(key)


async def perform(
    harness: str,
    scenario: Scenario,
    rendering: Rendering,
    folder: Path,
    wall_s: float = 400.0,
    seed: int = 0,
    policy: Engine | None = None,
    task: Callable[[Path], Task] = make_task,
    backend: str = "auto",
    speaker: Callable[[str], str] = part_of,
) -> Performance:
    """Run the session under ``folder``, which is made; its path must be short enough for sockets.

    ``policy``: an engine of its own mind; None plays the scenario's lines. ``task`` makes another task than all have;
    ``speaker`` tells from a prompt whose lines are asked for.
    """
    folder.mkdir(parents=True)
    records: list[CallRecord] = []

    async def sink(batch: Sequence[CallRecord]) -> None:
        records.extend(batch)

    script = ScriptEngine(rendering.tokenizer, scenario.lines(DIALECTS[harness]), speaker, seed)
    config = ProxyConfig(max_tokens=None if policy is None else 64)
    dispatcher = _Watched(config, rendering, policy or script, sink, scenario.context)
    server = SocketServer(folder)
    try:
        behind = await server.start(build_app(dispatcher))
        async with FaultHop(folder / "hop.sock", behind, scenario.faults) as hop:
            config = RunConfig.model_validate(
                {
                    "harness": {"name": harness},
                    "sandbox": {"backend": backend, "wall_s": wall_s, "memory_mb": 4096},
                    "engine": {"max_len": scenario.context},
                }
            )
            door = _Door(dispatcher, folder / "hop.sock")
            actor = SandboxActor(config, folder / "rooms", door)
            made = task(folder / "task")
            spec = EpisodeSpec(f"{harness}-{scenario.name}", made, harness, "group", seed, 0)
            outcome = await actor.run_episode(spec)
            await actor.close()
    finally:
        await server.stop()
    return Performance(
        harness,
        scenario,
        outcome,
        door.summaries[-1],
        sorted(records, key=lambda record: record.ordinal),
        script.log,
        dispatcher.requests,
        hop.seen,
    )


def quiet() -> None:
    """Leave warnings of the proxy out: the faults here are meant."""
    logging.getLogger("actors").setLevel(logging.ERROR)
