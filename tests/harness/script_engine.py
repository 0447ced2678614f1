"""An engine that plays a part in a scenario: it answers by what the prompt shows, and logs every id.

It samples tokens as a policy may and an encoder never does: a part of its tokens is spelt by smaller ones. So
an id that was encoded anew anywhere on the way differs from the one that was sampled.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.engines.base import EngineStats, Generate, Generated
from trees.record import VersionSpan

Call = tuple[str, dict[str, Any]]
TURN = "<|im_start|>assistant"
END = "<|im_end|>"
_RESPELT = 0.1


@dataclass(frozen=True)
class Step:
    """One answer. ``once``: the harness may throw it away and ask again; it is then not given a second time."""

    text: str = ""
    calls: tuple[Call | Callable[[str], Call], ...] = ()
    """A function makes the call from the text of the prompt."""
    reasoning: str = ""
    once: bool = False
    write: Callable[[Call], str] | None = None
    """How a tool call is spelt; None: as Qwen3 does."""
    raw: str = ""
    """Stands after the text in place of calls."""

    def spelt(self, prompt: str) -> str:
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        made = [call(prompt) if callable(call) else call for call in self.calls]
        calls = "\n".join(f"<tool_call>\n{(self.write or plain)(call)}\n</tool_call>" for call in made)
        between = "\n" if self.text and (calls or self.raw) else ""
        return f"{thought}{self.text}{between}{calls}{self.raw}{END}"


def plain(call: Call) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False)


def odd(call: Call) -> str:
    """The same call in a spelling that no encoder of JSON would choose."""
    arguments = json.dumps(call[1], indent=1, separators=(" ,", " :"), ensure_ascii=True)
    return f'{{  "arguments":{arguments},\n"name" :"{call[0]}" }}'


@dataclass(frozen=True)
class Asked:
    """One request to the engine, exactly."""

    call: str
    part: str
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    text: str


@dataclass
class _Part:
    """Where one speaker is in its lines."""

    at: int = -1
    turns: int = -1


@dataclass
class ScriptEngine:
    """Plays ``lines`` by part: ``main``, ``title``, ``compaction``, ``side``, or the mark of a sub-agent.

    ``part_of`` tells from the text of a prompt which part is asked. A part without lines says "done".
    """

    tokenizer: Any
    lines: Mapping[str, Sequence[Step]]
    part_of: Callable[[str], str]
    seed: int = 0
    log: list[Asked] = field(default_factory=list)
    _parts: dict[str, _Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())

    async def generate(self, request: Generate) -> Generated:
        text = self.tokenizer.decode(request.ids, skip_special_tokens=False)
        part = self.part_of(text)
        said = self._next(part, text.count(TURN)).spelt(text)
        ids = self._respelt(self.tokenizer.encode(said, add_special_tokens=False))
        ids = ids[: request.max_tokens]
        call = request.request.rpartition("r")[0]
        self.log.append(Asked(call, part, tuple(request.ids), tuple(ids), said))
        finish = "stop" if ids[-1] in request.stop_ids else "length"
        return Generated(ids, [-0.5] * len(ids), finish, (VersionSpan(1, 0, len(ids)),))

    def _next(self, part: str, turns: int) -> Step:
        """The next line, or the last one again where the prompt shows that it was lost on the way."""
        lines = self.lines.get(part, ())
        here = self._parts.setdefault(part, _Part())
        lost = 0 <= here.at < len(lines) and turns <= here.turns and not lines[here.at].once
        here.at += not lost
        here.turns = turns
        if part == "compaction" and "main" in self._parts:
            # The history starts anew: fewer turns do not mean that an answer was lost.
            self._parts["main"].turns = -1
        return lines[here.at] if here.at < len(lines) else Step("done")

    def _respelt(self, ids: list[int]) -> list[int]:
        spelt: list[int] = []
        for token in ids:
            if token in self._special or self._random.random() >= _RESPELT:
                spelt.append(token)
            else:
                spelt += self.tokenizer.convert_tokens_to_ids(list(self.tokenizer.convert_ids_to_tokens(token)))
        return spelt

    async def abort(self, request: str) -> None:
        """Nothing runs long enough here to be ended early."""

    async def load_weights(self, version: int, path: Path) -> None:
        raise AssertionError(f"nobody loads weights here: got version {version} from {path}")

    async def stats(self) -> EngineStats:
        raise AssertionError("nobody asks for statistics here")


_TITLE = ("You are a title generator", "Generate a concise, sentence-case title")
_COMPACTION_ASKED = ("CRITICAL: Respond with TEXT ONLY", "You are performing a CONTEXT CHECKPOINT COMPACTION")
_COMPACTION_SYSTEM = ("context summarization", "summarizes internal chat history")
_SIDE = ("managed memory extraction",)
_MARK = re.compile(r"MAIN-TASK|SUB-TASK-[A-Z]")


def part_of(text: str) -> str:
    """Which part a harness asks, by words of ours in the tasks and by what harnesses are known to say.

    Independent of ``envs/harnesses/kinds.py``, which it is a check on.
    """
    system, _, said = text.partition("<|im_start|>user")
    last = text[text.rfind("<|im_start|>user") :]
    if any(words in last for words in _COMPACTION_ASKED) or any(words in system for words in _COMPACTION_SYSTEM):
        return "compaction"
    if any(words in system for words in _TITLE):
        return "title"
    if any(words in system for words in _SIDE):
        return "side"
    mark = _MARK.search(said)
    if mark is None:
        return "side"
    return "main" if mark[0] == "MAIN-TASK" else mark[0]
