"""Long sessions of a coding agent, for measurements: a group of them, as eight rollouts of one task give.

The repository is the standard library, the tokenizer a byte-level BPE learned on it, and every file that an agent
reads, greps and edits is really there. Sampled text is text of the library too: edits repeat lines that were read
before, the rest is taken from anywhere. Log-probabilities are float32 log-softmax values of made-up logits, so that
their bits are as those of an engine.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from bpe import save_bpe
from tokenizers import Tokenizer

from trees import forks
from trees.record import CallRecord, Kind, VersionSpan

Message = dict[str, Any]
TOOLS = ("Read", "Grep", "Bash", "Edit")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A model call: its record, and what a harness and a logger see of it, which is everything from the start."""

    record: CallRecord
    prompt: tuple[np.ndarray, ...]
    """The whole prompt in pieces, int32."""
    messages: tuple[Message, ...]
    """The whole history, without the reply."""
    reply: Message

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [T]."""
        return np.concatenate(self.prompt)


@dataclass(frozen=True, slots=True)
class Habits:
    """What one session does besides going on turn by turn; turns are counted from 0."""

    retry: float = 0.03
    """Share of calls that the harness asks again, dropping the first answer."""
    subagents: tuple[int, ...] = ()
    """Turns whose tool is a sub-agent."""
    cleared: tuple[int, ...] = ()
    """Turns before which the harness clears old tool outputs, an edit of history."""
    compacted: tuple[int, ...] = ()
    """Turns before which the harness has the history summarised and goes on from the summary."""


def habits(sessions: int, turns: int) -> list[Habits]:
    """Of four sessions one only goes on, one asks sub-agents, one clears old outputs, one compacts and asks one."""
    fourth = max(1, turns // 4)
    kinds = [
        Habits(),
        Habits(subagents=(fourth, 2 * fourth)),
        Habits(cleared=(3 * fourth,)),
        Habits(subagents=(fourth,), compacted=(2 * fourth,)),
    ]
    return [kinds[i % 4] for i in range(sessions)]


class Library:
    """Files of the standard library, cut into lines, and a tokenizer that knows them."""

    def __init__(self, vocabulary: int, most: int) -> None:
        """Takes about ``most`` characters of sources."""
        root = Path(sysconfig.get_paths()["stdlib"])
        self.files: dict[str, list[str]] = {}
        size = 0
        for path in sorted(root.rglob("*.py"), key=lambda path: (len(path.relative_to(root).parts), path)):
            text = "" if "site-packages" in path.parts else path.read_text(encoding="utf-8", errors="ignore")
            if size < most and len(text) > 2000:
                self.files[str(path.relative_to(root))] = text.splitlines()
                size += len(text)
        self.names = list(self.files)
        with tempfile.TemporaryDirectory() as folder:
            learned = ("\n".join(lines) for lines in list(self.files.values()))
            save_bpe(Path(folder), learned, vocabulary)
            self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def lines(self, random: Random, names: Sequence[str], most: int) -> tuple[str, int, list[str]]:
        """A file, a line number from 0, and up to ``most`` of its lines from there."""
        name = random.choice(names)
        start = random.randrange(max(1, len(self.files[name]) - most))
        return name, start, self.files[name][start : start + most]

    def opening(self, tokens: int, seed: int) -> tuple[list[Message], np.ndarray]:
        """System prompt with tools, and the task, of exactly ``tokens`` tokens with the answer's opening."""
        random = Random(seed)
        name, start, task = self.lines(random, self.names, 12)
        user = f"Fix {name} near line {start}:\n" + "\n".join(task)
        tail = self.encode(f"<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        head, ids = "<|im_start|>system\n", np.zeros(0, np.int32)
        while len(ids) < tokens:
            _, _, said = self.lines(random, self.names, 40)
            head += "\n".join(said) + "\n"
            ids = self.encode(head)
        messages = [{"role": "system", "content": head.removeprefix("<|im_start|>system\n")}]
        messages.append({"role": "user", "content": user})
        return messages, np.concatenate([ids[: tokens - len(tail)], tail])


def logprobs(length: int, random: np.random.Generator) -> np.ndarray:
    """Log-probabilities of sampled tokens, float32 [n]: three quarters all but certain, the mean about -0.3."""
    certain = random.random(length) < 0.75
    gap = np.where(certain, random.normal(11, 3, length), random.exponential(2, length))
    spacing = random.exponential(0.5, (length, 48)).cumsum(1)
    logits = np.concatenate([np.zeros((length, 1)), -np.abs(gap)[:, None] - spacing + spacing[:, :1]], 1)
    logits = logits.astype(np.float32)
    every = logits - np.log(np.exp(logits).sum(1, keepdims=True, dtype=np.float32))
    drawn = (np.exp(every).cumsum(1) > random.random((length, 1))).argmax(1)
    return every[np.arange(length), drawn]


@dataclass(eq=False)
class Session:
    """Plays one session; ``calls`` is what came of it."""

    name: str
    sources: Library
    files: Sequence[str]
    """What the agent works on."""
    seed: int
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._numbers = np.random.default_rng(self.seed)
        self._read: list[str] = []

    def play(self, opening: tuple[list[Message], np.ndarray], turns: int, habits: Habits) -> list[Call]:
        """``turns`` turns of the main line, and what else the habits bring."""
        messages, fresh = opening
        line = _Line([*messages], [], None, "main")
        for turn in range(turns):
            if turn in habits.compacted:
                fresh = self._compact(line, fresh, opening)
            if turn in habits.cleared:
                fresh = self._clear(line, fresh)
            if self._random.random() < habits.retry:
                self._ask(line, fresh, *self._act(), held=False)
            tool, text = self._act()
            self._ask(line, fresh, tool, text)
            output = self._delegate(opening[1]) if turn in habits.subagents else self._output(tool, text)
            fresh = self._answer(line, output)
        return self.calls

    def _ask(self, line: _Line, fresh: np.ndarray, tool: str, text: str, *, held: bool = True) -> None:
        """One call; not ``held``: its reply is dropped by the harness, which asks again."""
        sampled = self.sources.encode(text + "<|im_end|>")
        number = len(self.calls)
        record = CallRecord(
            session=self.name,
            call=f"c{self._random.getrandbits(72):018x}",
            parent=line.parent,
            ordinal=number,
            prompt_ids=fresh,
            sampled_ids=sampled,
            logprobs=logprobs(len(sampled), self._numbers),
            versions=(VersionSpan(3 + number // 90, 0, len(sampled)),),
            temperature=1.0,
            finish="stop",
            kind=line.kind,
            fork=line.fork,
        )
        reply = {"role": "assistant", "content": text, "tool": tool, "id": record.call}
        self.calls.append(Call(record, (*line.prompt, fresh), tuple(line.messages), reply))
        line.fork = "" if held else forks.RETRY
        if held:
            line.parent = record.call
            line.prompt += [fresh, sampled]
            line.messages.append(reply)

    def _answer(self, line: _Line, output: str) -> np.ndarray:
        """What a tool's output adds to the prompt."""
        line.messages.append({"role": "tool", "content": output, "id": line.parent})
        return self.sources.encode(_tool_turn(output))

    def _act(self) -> tuple[str, str]:
        """A tool and the whole sampled text: a few words or lines of thought, then the call."""
        random = self._random
        _, _, thought = self.sources.lines(random, self.sources.names, max(1, int(random.lognormvariate(1.2, 0.7))))
        tool = random.choices(TOOLS, (4, 2, 3, 3))[0]
        name, start, lines = self.sources.lines(random, self.files, 6)
        arguments: dict[str, Any] = {"path": name}
        if tool == "Read":
            arguments |= {"offset": start // 50 * 50, "limit": 50}
        elif tool == "Grep":
            arguments |= {"pattern": random.choice(lines or ["def "]).strip()[:24] or "def "}
        elif tool == "Bash":
            arguments = {"command": f"python -m unittest -v test.test_{Path(name).stem}"}
        else:
            old = "\n".join(random.choice(self._read).splitlines()[:6]) if self._read else "\n".join(lines)
            _, _, new = self.sources.lines(random, self.sources.names, 6)
            arguments |= {"old": old, "new": "\n".join(new)}
        call = json.dumps({"name": tool, "arguments": arguments})
        return tool, "\n".join(thought) + f"\n<tool_call>\n{call}\n</tool_call>"

    def _output(self, tool: str, text: str) -> str:
        arguments = json.loads(text.split("<tool_call>\n")[1].removesuffix("\n</tool_call>"))["arguments"]
        if tool == "Read":
            start = arguments["offset"]
            lines = self.sources.files[arguments["path"]][start : start + 50]
            self._read.append("\n".join(lines[self._random.randrange(max(1, len(lines) - 6)) :]))
            return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, start + 1))
        if tool == "Grep":
            found = [
                f"{name}:{number}:{line}"
                for name in self.files
                for number, line in enumerate(self.sources.files[name], 1)
                if arguments["pattern"] in line
            ]
            return "\n".join(found[:25]) or "No matches found"
        if tool == "Edit":
            return f"The file {arguments['path']} has been updated."
        return self._test_run(arguments["command"])

    def _test_run(self, command: str) -> str:
        random = self._random
        module = command.rsplit(".", 1)[1]
        _, start, lines = self.sources.lines(random, self.files, 30)
        names = [line.strip()[:30] for line in lines if line.strip()]
        said = [
            f"test_{i} ({module}) [{name}] ... {random.choice(('ok', 'ok', 'ok', 'FAIL'))}"
            for i, name in enumerate(names)
        ]
        return "\n".join([*said, f"Ran {len(said)} tests in {random.random():.3f}s", f"FAILED (failures={start % 5})"])

    def _delegate(self, prompt: np.ndarray) -> str:
        """A sub-agent of some turns, with a prompt of its own; its last words are the tool's output."""
        _, start, lines = self.sources.lines(self._random, self.files, 8)
        task = f"You are a search agent.\nLook at line {start}:\n" + "\n".join(lines)
        own = self.sources.encode(f"<|im_start|>system\n{task}<|im_end|>\n<|im_start|>assistant\n")
        fresh = np.concatenate([own[:20], prompt[: len(prompt) // 4], own[20:]])
        line = _Line([{"role": "system", "content": task}], [], None, "subagent")
        for _ in range(self._random.randint(6, 14)):
            tool, text = self._act()
            self._ask(line, fresh, tool, text)
            fresh = self._answer(line, self._output(tool, text))
        words = "\n".join(self.sources.lines(self._random, self.sources.names, 10)[2])
        self._ask(line, fresh, "", words)
        return words

    def _compact(self, line: _Line, fresh: np.ndarray, opening: tuple[list[Message], np.ndarray]) -> np.ndarray:
        """Has the history summarised; the line starts anew from the opening and the summary."""
        asked = "Summarise what was done and what is left to do."
        aside = _Line([*line.messages], [*line.prompt], line.parent, "compaction")
        aside.messages.append({"role": "user", "content": asked})
        tail = self.sources.encode(f"\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        summary = "\n".join(self.sources.lines(self._random, self.sources.names, 90)[2])
        self._ask(aside, np.concatenate([fresh, tail]), "", summary)
        line.messages, line.prompt, line.parent = [*opening[0]], [], None
        line.messages.append({"role": "user", "content": summary})
        line.kind, line.fork = "after-compaction", forks.NEW_CONVERSATION
        turn = self.sources.encode(f"<|im_end|>\n<|im_start|>user\n{summary}<|im_end|>\n<|im_start|>assistant\n")
        return np.concatenate([opening[1], turn])

    def _clear(self, line: _Line, fresh: np.ndarray) -> np.ndarray:
        """Takes the older half of the outputs out of the history; the line goes on from the first call."""
        outputs = [i for i, message in enumerate(line.messages) if message["role"] == "tool"]
        for i in outputs[: len(outputs) // 2]:
            line.messages[i] = {**line.messages[i], "content": "[cleared]"}
        first = next(call for call in self.calls if call.record.call == line.messages[2]["id"])
        rest = [self._again(message) for message in line.messages[3:]]
        line.prompt, line.parent = [*first.prompt, first.record.sampled_ids], first.record.call
        line.fork = forks.HISTORY_EDITED
        return np.concatenate(rest)

    def _again(self, message: Message) -> np.ndarray:
        if message["role"] == "tool":
            return self.sources.encode(_tool_turn(message["content"]))
        return next(call.record.sampled_ids for call in self.calls if call.record.call == message["id"])


@dataclass(eq=False)
class _Line:
    """A conversation that grows: its messages, the ids that stand for them, and the call that it extends."""

    messages: list[Message]
    prompt: list[np.ndarray]
    parent: str | None
    kind: Kind
    fork: str = ""


def _tool_turn(output: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def play_group(library: Library, sessions: int, turns: int, prompt: int, seed: int = 0) -> list[list[Call]]:
    """The calls of each session of a group: one task with a prompt of ``prompt`` tokens, one harness."""
    opening = library.opening(prompt, seed)
    files = Random(seed).sample(library.names, 12)
    return [
        Session(f"s{i}", library, files, seed=1000 * seed + i).play(opening, turns, habit)
        for i, habit in enumerate(habits(sessions, turns))
    ]
