"""One-word tasks: put one word into a file. For policies that have no more than the form of a harness's calls.

The right word is the same in all of them, so that a policy too small to read a prompt of 20,000 tokens can still find
it by trying: what is learnt comes from the reward alone.
"""

from __future__ import annotations

from pathlib import Path

from envs.tasks import clawgym
from envs.tasks.task import Task

WORDS = ("amber", "coral", "ivory", "olive")
RIGHT = "olive"
ANSWER = "answer.txt"
_WORDINGS = (
    "Write the word {word} into the file {file}.",
    "The file {file} should hold the word {word} and nothing else.",
    "Make {file}; its only line is {word}.",
    "Please put {word} into {file}.",
    "I need a file {file} with the word {word} in it.",
    "Create {file} that says {word}.",
)
_GRADER = f'[ "$(cat {ANSWER} 2>/dev/null)" = {RIGHT} ] && echo 1.0 || echo 0.0\n'


def generate(folder: Path, count: int, first: int = 0) -> list[Task]:
    """Write ``count`` tasks under ``folder``, numbered from ``first``; wordings go round."""
    return [_write(folder, number) for number in range(first, first + count)]


def _write(folder: Path, number: int) -> Task:
    name = f"word-{number:04d}"
    instruction = _WORDINGS[number % len(_WORDINGS)].format(word=RIGHT, file=ANSWER)
    metadata: dict[str, str | int | float | bool] = {"wording": number % len(_WORDINGS)}
    return clawgym.write(folder / name, name, instruction, {}, {"reward.sh": _GRADER}, metadata)


def split(folder: Path, train: int, heldout: int) -> tuple[list[Task], list[Task]]:
    """Tasks to practise on and others to measure on."""
    return generate(folder / "train", train), generate(folder / "heldout", heldout, first=train)
