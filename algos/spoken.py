"""The words of episodes, from the folder of a run or of an evaluation.

Invariant: an episode is read from its tree where that holds its calls, and else from its transcript; one with neither
is counted, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.rendering import Rendering
from algos.behaviour import MAIN, Call, Step, steps, steps_of_transcript
from algos.runlog import read_jsonl
from configs.loader import ConfigError
from trees.tree import Tree
from trees.viewer import wording
from trees.viewer.catalogue import Catalogue, PlaceError

_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spoken:
    """One episode."""

    row: Mapping[str, Any]
    """Its line in ``episodes.jsonl``."""
    opening: str
    """What the policy was told before its first answer."""
    steps: tuple[Step, ...]


class TemplateWords:
    """``algos.behaviour.Words`` by a policy's own tokenizer and renderer."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def said(self, ids: Sequence[int]) -> tuple[str, list[tuple[str, Any]]]:
        message, _ = self._rendering.parse(ids, [])
        return message.text, [(call.name, call.arguments) for call in message.tool_calls]

    def heard(self, ids: Sequence[int]) -> list[str]:
        """Between marks where the template sets results apart, else all that came as one result."""
        text = self.decode(ids)
        found = _RESULT.findall(text)
        return found or ([text] if text.strip() else [])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._rendering.tokenizer.decode(list(ids), skip_special_tokens=False))


class Place:
    """A folder with ``episodes.jsonl``, of a run or of an evaluation; of a run a range of steps may be named.

    ``name``: ``FOLDER``, or ``FOLDER@FIRST-LAST`` for the training episodes of these steps. Raises ConfigError.
    """

    def __init__(self, name: str, model: Path | None = None) -> None:
        folder, at, steps_named = name.rpartition("@")
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps_named) if at else None
        if match is None:
            folder = name
        self.folder = Path(folder)
        self.range = range(int(match[1]), int(match[2] or match[1]) + 1) if match else None
        self.name = self.folder.resolve().name + (f"@{steps_named}" if match else "")
        if not (self.folder / "episodes.jsonl").is_file():
            raise ConfigError(f"{self.folder}: no episodes.jsonl there; expected the folder of a run or an evaluation")
        self._model = model
        self._words: TemplateWords | None = None
        try:
            self._trees: Catalogue | None = Catalogue(self.folder)
        except PlaceError:
            self._trees = None
        self._kept = frozenset(self._trees.names() if self._trees is not None else ())

    def rows(self) -> list[dict[str, Any]]:
        """The lines of episodes that have a reward. Raises RunError for a damaged line."""
        rows = read_jsonl(self.folder / "episodes.jsonl", ("id", "reward", "split", "step", "task", "harness"))
        graded = [row for row in rows if row["reward"] is not None]
        if self.range is None:
            return graded
        return [row for row in graded if row["split"] == "train" and row["step"] in self.range]

    def spoken(self, row: Mapping[str, Any]) -> Spoken | None:
        """An episode of ``rows``; None where its words are not kept. Raises ConfigError without a tokenizer."""
        tree = self._tree(row["id"])
        if tree is not None and tree.calls():
            return self._of_tree(row, tree)
        return _of_transcript(row, self.folder / "transcripts" / f"{row['id']}.jsonl")

    def _tree(self, episode: str) -> Tree | None:
        if self._trees is None or episode not in self._kept:
            return None
        try:
            return self._trees.open(episode)
        except (OSError, ValueError):
            # A run that goes on moves and removes the trees of its old steps.
            return None

    def _of_tree(self, row: Mapping[str, Any], tree: Tree) -> Spoken:
        if self._words is None:
            self._words = TemplateWords(self._rendering())
        first = next((node for node in tree.calls() if node.kind in MAIN), tree.calls()[0])
        opening = self._words.decode(tree.ids(first.parent).tolist())
        return Spoken(row, opening, tuple(steps(tree, self._words)))

    def _rendering(self) -> Rendering:
        tokenizer = wording.find(self.folder)
        model = self._model or (tokenizer.parent if tokenizer is not None else None)
        if model is None:
            raise ConfigError(f"{self.folder}: no tokenizer found for its trees; name its folder with model=DIR")
        try:
            return Rendering(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {model}: {error}") from None


def text_of(spoken: Spoken, most: int) -> str:
    """An episode for a reader, in at most about ``most`` characters: long parts are cut in their middle."""
    calls = sum(len(step.calls) for step in spoken.steps)
    share = max(200, most // (2 * calls + len(spoken.steps) + 4))
    parts = [f"TOLD:\n{cut(spoken.opening, 4 * share)}"]
    for number, step in enumerate(spoken.steps, 1):
        if step.text:
            parts.append(f"ANSWER {number}:\n{cut(step.text, share)}")
        parts += [_told(number, call, share) for call in step.calls]
        if not step.clean:
            parts.append(f"(Answer {number} was cut, or holds a call that could not be read.)")
    return cut("\n\n".join(parts), most)


def cut(text: str, most: int) -> str:
    """``text``, or its ends around a note."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _told(number: int, call: Call, share: int) -> str:
    result = "(no result)" if call.result is None else cut(call.result, share)
    return f"CALL in answer {number}: {call.name} {cut(call.arguments, share)}\nRESULT:\n{result}"


def _of_transcript(row: Mapping[str, Any], path: Path) -> Spoken | None:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError):
        # One that is not there or damaged is counted by whoever asks.
        return None
    before = []
    for line in lines:
        if line.get("role") == "assistant" and line.get("kind") in MAIN:
            break
        if line.get("kind") in MAIN:
            before.append(f"[{line.get('role')}]\n{line.get('text', '')}")
    return Spoken(row, "\n\n".join(before), tuple(steps_of_transcript(lines)))
