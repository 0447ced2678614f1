"""What the proxy adds to a call, over bodies of Claude Code's size, with an engine that answers at once.

    python benchmarks/proxy.py [--smoke]

One process serves the proxy's app on a Unix socket, as a replica does for sandboxes; this one is the client. A
session is an Anthropic Messages conversation that begins at 75 kB and grows to 1 MB in 200 turns of a tool call
and its output. Compared in the same run with a plain FastAPI endpoint that parses the same bodies and tokenizes
the whole history anew with the same tokenizer.

``token work`` is what a call costs beyond reading the body (JSON, canonical turns, matching): putting the prompt
together and rendering the tail, timed inside the session.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bpe import save_bpe

from trees.record import CallRecord, VersionSpan

ANSWER = '<tool_call>\n{"name": "Bash", "arguments": {"command": "cat src/module.py"}}\n</tool_call><|im_end|>'
EARLY, LATE = 5, 200
TOOL_BYTES, SYSTEM_BYTES, TURN_BYTES = 63_000, 6_000, 4_500


def source_text(least: int) -> str:
    """Text like that which agents read: sources of the standard library."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= least:
            return text
    return text


class InstantEngine:
    """Always the same answer, at once."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, request: Any) -> Any:  # noqa: ARG002
        from actors.engines.base import Generated

        n = len(self._ids)
        return Generated(self._ids, [-1.0] * n, "stop", (VersionSpan(0, 0, n),))

    async def abort(self, request: str) -> None:
        pass


def serve(folder: Path, sessions: int, log: bool, ready: Any) -> None:
    """The process of the proxy: tells its socket, the keys and the plain endpoint's socket, then serves."""
    asyncio.run(_serve(folder, sessions, log, ready))


async def _serve(folder: Path, sessions: int, log: bool, ready: Any) -> None:
    from actors.api import build_app
    from actors.dispatch import Dispatcher
    from actors.journal import Journal
    from actors.rendering import Rendering
    from actors.session_contract import SessionSpec
    from actors.socket_server import SocketServer
    from configs.proxy import ProxyConfig, SessionLimits

    rendering = Rendering(folder)
    engine = InstantEngine(rendering.tokenizer.encode(ANSWER, add_special_tokens=False))
    work: dict[str, list[float]] = {}

    async def sink(records: Sequence[CallRecord]) -> None:
        for record in records:
            work.setdefault(record.session, []).append(float(record.extra["render_s"]))

    limits = SessionLimits(calls=10**6, tokens=10**12, concurrent=10**4)
    journal = Journal(folder / "calls") if log else None
    dispatcher = Dispatcher(ProxyConfig(limits=limits), rendering, engine, sink, 1 << 30, journal)
    proxy, plain = SocketServer(), SocketServer()
    socket_path, plain_path = await proxy.start(build_app(dispatcher)), await plain.start(plain_app(rendering))
    keys = [await dispatcher.open(SessionSpec(f"e{i}")) for i in range(sessions)]
    ready.send((str(socket_path), str(plain_path), keys))
    await asyncio.to_thread(ready.recv)
    ready.send(work)
    await proxy.stop()
    await plain.stop()


def plain_app(rendering: Any) -> Any:
    """The least that a proxy without held tokens does: parse the body, render and tokenize the whole history."""
    from fastapi import FastAPI, Request
    from starlette.responses import Response

    from envs.protocols import anthropic_messages

    app = FastAPI()

    async def messages(request: Request) -> Response:
        asked = anthropic_messages.parse(json.loads(await request.body()), {})
        ids = rendering.first(asked.messages, asked.tools)
        return Response(json.dumps({"tokens": len(ids)}), media_type="application/json")

    app.add_route("/v1/messages", messages, methods=["POST"])
    return app


@dataclass
class Conversation:
    """A session as the client holds it; bodies are put together from parts, so that the client costs little."""

    key: str
    text: str
    parts: list[str]

    @classmethod
    def begin(cls, key: str, text: str) -> Conversation:
        properties = {"command": {"type": "string", "description": text[:2200]}}
        schema = {"type": "object", "properties": properties}
        names = ["Bash", *(f"Tool{i}" for i in range(TOOL_BYTES // 2400 - 1))]
        tools = [{"name": name, "description": "A tool.", "input_schema": schema} for name in names]
        head = {"model": "policy", "max_tokens": 4096, "system": text[:SYSTEM_BYTES], "tools": tools}
        first = {"role": "user", "content": "Fix the failing test in src/module.py."}
        return cls(key, text, [json.dumps(head)[:-1] + ', "messages": [' + json.dumps(first)])

    def body(self) -> bytes:
        return (",".join(self.parts) + "]}").encode()

    def go_on(self, content: list[dict[str, Any]], turn: int) -> None:
        start = (turn * 977) % (len(self.text) - TURN_BYTES)
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        output = {"type": "tool_result", "tool_use_id": calls[0], "content": self.text[start : start + TURN_BYTES]}
        self.parts.append(json.dumps({"role": "assistant", "content": content}))
        self.parts.append(json.dumps({"role": "user", "content": [output]}))


def connection(path: str) -> http.client.HTTPConnection:
    made = http.client.HTTPConnection("proxy")
    made.sock = socket.socket(socket.AF_UNIX)
    made.sock.connect(path)
    return made


def ask(made: http.client.HTTPConnection, key: str, body: bytes) -> tuple[dict[str, Any], float]:
    """The answer and the wall seconds of a call."""
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "content-type": "application/json"}
    began = time.perf_counter()
    made.request("POST", "/v1/messages", body, headers)
    response = made.getresponse()
    answer = json.loads(response.read())
    seconds = time.perf_counter() - began
    if response.status != 200:
        raise RuntimeError(f"got status {response.status}: {answer}")
    return answer, seconds


def run_session(path: str, conversation: Conversation, turns: int) -> list[tuple[int, float]]:
    """Bytes and seconds of every call of one session."""
    made = connection(path)
    found = []
    for turn in range(turns):
        body = conversation.body()
        answer, seconds = ask(made, conversation.key, body)
        found.append((len(body), seconds))
        conversation.go_on(answer["content"], turn)
    made.close()
    return found


def side_by_side(proxy: str, plain: str, conversation: Conversation, turns: int) -> list[tuple[int, float, float]]:
    """Bytes, seconds of the proxy and of the plain endpoint, for the same bodies in turn."""
    mine, theirs = connection(proxy), connection(plain)
    found = []
    for turn in range(turns):
        body = conversation.body()
        answer, seconds = ask(mine, conversation.key, body)
        found.append((len(body), seconds, ask(theirs, conversation.key, body)[1]))
        conversation.go_on(answer["content"], turn)
    return found


def many(path: str, conversations: list[Conversation], turns: int) -> tuple[float, list[float]]:
    """Calls per second of sessions at the same time, and the seconds of each call."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(conversations)) as pool:
        found = list(pool.map(lambda conversation: run_session(path, conversation, turns), conversations))
    wall = time.perf_counter() - began
    return len(conversations) * turns / wall, [seconds for calls in found for _, seconds in calls]


def quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(np.asarray(values), q))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few turns, to see that it works")
    parser.add_argument("--no-log", action="store_true", help="without the logs of sessions on disk")
    args = parser.parse_args()
    late, crowd_turns, repeats = (20, 2, 1) if args.smoke else (LATE, 12, 3)
    crowds = (1, 8, 64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_bpe(folder, source_text(1_000_000).splitlines(), 8000)
        here, there = multiprocessing.Pipe()
        sessions = repeats + 1 + sum(crowds)
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, sessions, not args.no_log, there)
        )
        process.start()
        proxy, plain, keys = here.recv()
        text = source_text(1_000_000)
        made = iter([Conversation.begin(key, text) for key in keys])
        run_session(proxy, next(made), 3)
        pairs = [side_by_side(proxy, plain, next(made), late + 1) for _ in range(repeats)]
        rates = {n: many(proxy, [next(made) for _ in range(n)], crowd_turns) for n in crowds}
        here.send("stop")
        work = here.recv()
        process.join()
    report(pairs, rates, [work[f"e{i}"] for i in range(1, repeats + 1)], late, args.smoke)


def report(
    pairs: list[list[tuple[int, float, float]]],
    rates: dict[int, tuple[float, list[float]]],
    work: list[list[float]],
    late: int,
    smoke: bool,
) -> None:
    calls = [call for session in pairs for call in session]
    table = Table(title="one session, growing bodies (milliseconds)")
    for column in ("body kB", "proxy p50", "proxy p99", "plain p50", "token work p50"):
        table.add_column(column, justify="right")
    bands = ((0, 90_000), (90_000, 110_000), (110_000, 300_000), (300_000, 600_000), (600_000, 1 << 30))
    for low, high in bands:
        band = [call for call in calls if low <= call[0] < high]
        tokens = [
            w for s, ws in zip(pairs, work, strict=True) for c, w in zip(s, ws, strict=True) if low <= c[0] < high
        ]
        if band:
            mine, theirs = [c[1] for c in band], [c[2] for c in band]
            size = statistics.mean(c[0] for c in band) / 1000
            cells = (quantile(mine, 0.5), quantile(mine, 0.99), quantile(theirs, 0.5), quantile(tokens, 0.5))
            table.add_row(f"{size:.0f}", *(f"{1000 * cell:.2f}" for cell in cells))
    crowd = Table(title="sessions at once")
    for column in ("sessions", "calls per second", "p50 ms", "p99 ms"):
        crowd.add_column(column, justify="right")
    for n, (rate, seconds) in rates.items():
        crowd.add_row(
            str(n), f"{rate:.0f}", f"{1000 * quantile(seconds, 0.5):.1f}", f"{1000 * quantile(seconds, 0.99):.1f}"
        )
    console = Console()
    console.print(table)
    console.print(crowd)
    typical = [call for call in calls if call[0] < 110_000]
    at = {turn: statistics.median(w for ws in work for w in ws[turn - 2 : turn + 1]) for turn in (EARLY, late)}
    result = {
        "benchmark": "proxy",
        "smoke": smoke,
        "added_ms_p50": round(1000 * quantile([c[1] for c in typical], 0.5), 3),
        "added_ms_p99": round(1000 * quantile([c[1] for c in typical], 0.99), 3),
        "calls_per_s_1": round(rates[1][0], 1),
        "calls_per_s_8": round(rates[8][0], 1),
        "calls_per_s_64": round(rates[64][0], 1),
        f"turn{LATE if late == LATE else late}_over_turn{EARLY}": round(at[late] / at[EARLY], 3),
        "vs_plain": round(sum(c[2] for c in calls) / sum(c[1] for c in calls), 2),
        "vs_plain_100kb": round(quantile([c[2] for c in typical], 0.5) / quantile([c[1] for c in typical], 0.5), 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
