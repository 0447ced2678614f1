"""A small real tokenizer with Qwen3's special tokens, and an engine that says what a test wants."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpe import save_bpe

from actors.engines.base import EngineStats, Generate, Generated
from trees.record import CallRecord, VersionSpan

PAGE = "a page of text, one token\n" * 400
"""So that a body of tens of megabytes is a few thousand tokens."""
CORPUS = [
    "You work on files through tools. system user assistant",
    '{"name": "execute_bash", "arguments": {"command": "cat notes.txt"}}',
    "hello world the answer is ready, thank you",
] * 3

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def make_tokenizer(folder: Path, chat_template: str | None = None, more: tuple[str, ...] = ()) -> Path:
    return save_bpe(folder, CORPUS, 420, [PAGE, *more], chat_template)


class ScriptedEngine:
    """Answers with the next line of its script, as text to encode or as ids; keeps every request.

    A line may be an exception to raise, or ``hang``: then two tokens come when the request is aborted.
    """

    HANG = object()

    def __init__(self, tokenizer: Any, script: list[Any]) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.requests: list[Generate] = []
        self.aborted: list[str] = []
        self.hanging: dict[str, asyncio.Event] = {}

    async def generate(self, request: Generate) -> Generated:
        self.requests.append(replace(request, ids=list(map(int, request.ids))))
        line = self.script.pop(0) if self.script else "done<|im_end|>"
        if isinstance(line, Exception):
            raise line
        if line is self.HANG:
            self.hanging[request.request] = asyncio.Event()
            await self.hanging[request.request].wait()
            return self._generated(self.encode("hello world")[:2], "abort")
        ids = self.encode(line) if isinstance(line, str) else list(line)
        finish = "stop" if ids and ids[-1] in request.stop_ids else "length"
        return self._generated(ids, finish)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _generated(self, ids: list[int], finish: Any) -> Generated:
        return Generated(ids, [-0.5] * len(ids), finish, (VersionSpan(3, 0, len(ids)),), cached_tokens=1)

    async def abort(self, request: str) -> None:
        self.aborted.append(request)
        if request in self.hanging:
            self.hanging[request].set()

    async def load_weights(self, version: int, path: Path) -> None:
        raise AssertionError(f"nobody loads weights here: got version {version} from {path}")

    async def stats(self) -> EngineStats:
        raise AssertionError("nobody asks for statistics here")


class ListSink:
    """Keeps what it is given; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.records: list[CallRecord] = []
        self.failures = failures

    async def __call__(self, records: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the tree builder is restarting")
        self.records += records


def full_ids(records: list[CallRecord], call: str) -> list[int]:
    """All ids up to the end of a call, put together along its parents."""
    by_call = {record.call: record for record in records}
    record = by_call[call]
    before = full_ids(records, record.parent) if record.parent else []
    return before + record.prompt_ids.tolist() + record.sampled_ids.tolist()
