"""Factor W, the order of work: free, a plan first, or a plan and a look at the progress now and then.

Invariant: what the workflow asks for is asked once and never enforced; an answer that goes on with tool calls is
carried out.
"""

from __future__ import annotations

from .parts import Part

EVERY = 3
"""Rounds of tool calls between two looks at the progress."""


class Free(Part):
    """W0."""


class Plan(Part):
    """W1: an explicit plan before anything is done."""

    asks: tuple[str, ...] = (
        "Before you use a tool, write a plan of a few words, without a tool call.",
        "Begin with a short plan and no tool call.",
    )
    goes_on: tuple[str, ...] = ("Now carry out the plan.", "Good. Carry it out.")

    def __init__(self, seed: int = 0, home: str = "") -> None:
        super().__init__(seed, home)
        self._planned = False

    def instruction(self, text: str) -> str:
        return f"{text}\n\n{self.pick(self.asks)}"

    def reply(self, message: dict, rounds: int) -> str | None:
        if rounds or self._planned:
            return None
        self._planned = True
        return self.pick(self.goes_on)


class PlanAndChecks(Plan):
    """W2: a plan, and every three rounds a sentence on what is done and what is left."""

    asks = (
        "Before you use a tool, write a plan of a few words, without a tool call. You will be asked how far you are.",
        "Begin with a short plan and no tool call. Your progress is looked at now and then.",
    )
    looks = (
        "Check: say in one sentence what is done and what is left, then go on.",
        "Progress? One sentence on what is done and what is left, then go on.",
    )
    after = ("Go on, or say that the task is done.", "Continue, or say that it is done.")

    def __init__(self, seed: int = 0, home: str = "") -> None:
        super().__init__(seed, home)
        self._asked_at = 0
        self._answered_at = 0

    def remark(self, rounds: int) -> str | None:
        if rounds % EVERY:
            return None
        self._asked_at = rounds
        return self.pick(self.looks)

    def reply(self, message: dict, rounds: int) -> str | None:
        if rounds and rounds == self._asked_at != self._answered_at:
            self._answered_at = rounds
            return self.pick(self.after)
        return super().reply(message, rounds)


FACTOR = "W"
LEVELS = [Free, Plan, PlanAndChecks]
