"""Factor C, what of the history a model call sees: all of it, a summary and the last rounds, or a file and the last.

Invariant: the history itself is never altered. A round is an answer of the model with all that follows up to the next;
rounds leave the view together, and only when some have gathered, so that most calls extend the one before.
"""

from __future__ import annotations

import os

from .parts import Part

SUMMARY_REQUEST = "CONTEXT SUMMARY. The oldest steps above will leave your view."
SUMMARY_TITLE = "Summary of the earlier steps:"
_SLACK = 3
"""Rounds beyond those that are kept that stay until the next summary."""


class Full(Part):
    """C0."""


class _Shortened(Part):
    """The model sums up what leaves its view. ``kept`` rounds stay."""

    kept: int
    notice: tuple[str, ...]

    def __init__(self, seed: int = 0, home: str = "") -> None:
        super().__init__(seed, home)
        self._gone = 0
        """Rounds that have left the view."""
        self._summary = ""

    def instruction(self, text: str) -> str:
        return f"{text}\n\n{self.pick(self.notice)}"

    def view(self, messages: list[dict], complete) -> list[dict]:
        starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(starts) - self._gone > self.kept + _SLACK:
            leaving = len(starts) - self.kept
            told = [*self._seen(messages, starts), {"role": "user", "content": self.request()}]
            self._summary = complete(told).get("content") or "(nothing was said)"
            self._gone = leaving
            self.written(self._summary)
        return self._seen(messages, starts)

    def _seen(self, messages: list[dict], starts: list[int]) -> list[dict]:
        if not self._gone:
            return messages
        head = messages[: starts[0]]
        last = {**head[-1], "content": f"{head[-1]['content']}\n\n{self.reminder(self._summary)}"}
        return [*head[:-1], last, *messages[starts[self._gone] :]]

    def request(self) -> str:
        return (
            f"{SUMMARY_REQUEST} Without a tool call, sum up in a few lines what was found, what was changed and what "
            "is left to do."
        )

    def reminder(self, summary: str) -> str:
        """What stands in place of the rounds that left."""
        return f"{SUMMARY_TITLE}\n{summary}"

    def written(self, summary: str) -> None:
        """Keep the summary where the level keeps it."""


class Summary(_Shortened):
    """C1: a summary by the model, and the last five rounds."""

    kept = 5
    notice = (
        "(Only the latest steps stay in view; a summary that you write stands for the earlier ones.)",
        "(In a long task the oldest steps are replaced by your own summary of them.)",
    )


class File(_Shortened):
    """C2: the last three rounds; the summary moves to a file that the agent can read."""

    kept = 3
    notice = (
        "(Only the last few steps stay in view; your summary of the earlier ones is kept in a file for you to read.)",
        "(In a long task the oldest steps move to a file of notes, which you can read.)",
    )

    @property
    def path(self) -> str:
        return os.path.join(self.home, "notes.md")  # noqa: PTH118 - pathlib is slow to import

    def reminder(self, summary: str) -> str:
        return f"{SUMMARY_TITLE} it is in {self.path}"

    def written(self, summary: str) -> None:
        os.makedirs(self.home or ".", exist_ok=True)  # noqa: PTH103
        with open(self.path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(summary + "\n")


FACTOR = "C"
LEVELS = [Full, Summary, File]
