"""What a cold start is asked for and what it reports. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REPORT = "coldstart.json"


class ColdstartError(RuntimeError):
    """No policy of the asked quality came out; the message says what was measured."""


@dataclass(frozen=True, slots=True)
class SpaceRecipe:
    """What the cold start of the space of harnesses has besides: habits that depend on the harness (algos.habits)."""

    level_chance: float = 0.35
    """Chance of the habit of each level that is not the base's."""
    pairs: int = 0
    """Pairs of levels, of 90, with a habit of their own."""
    pair_chance: float = 0.8
    pair_seed: int = 0
    """Which pairs, and which habits."""
    outside: tuple[str, ...] = ()
    """Outside harnesses whose form is imitated too, with the habits of all levels but those of names of tools."""
    outside_share: float = 0.15
    """Share of transcripts in each of these."""
    base_share: float = 0.15
    """Share of transcripts in the base harness besides those in turn: of too few it is learnt as flawless."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the tiny policy is made. Steps are optimiser steps of ``batch`` transcripts, families in turn."""

    batch: int = 16
    transcripts: int = 4800
    habit: float = 0.64
    """Share of transcripts with the family's bad habit, spread evenly so that no batch leans."""
    habits: dict[str, float] = field(default_factory=lambda: {"sum": 0.57, "count": 0.61, "write": 0.6})
    """Other shares for families whose right way is also missed for other reasons (the column, the name)."""
    drills: int = 12
    """Copying drills beside the transcripts of each batch, in the first ``drill_steps`` steps."""
    drill_words: int = 24
    drill_steps: int = 120
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup_steps: int = 10
    prompt_weight: float = 0.1
    probes: int = 16
    """Fresh tasks of each family in a look; a look costs one forward pass."""
    first_look: int = 150
    look_every: int = 25
    goal: float = 0.06
    """Least chance of the right way by family, mean of two looks, before the learning rates decay."""
    full_steps: int = 250
    """At most so many steps before the decay; a round after a failed measurement has ``more_steps``."""
    decay_steps: int = 50
    more_steps: int = 50
    rounds: int = 3
    attempts: int = 3
    """Initialisations that are tried: at this size copying sometimes fails to emerge."""
    measured: int = 40
    """Held-out tasks of each family in the final measurement; each is sampled twice."""
    least_sampled: float = 0.12
    """Least sampled success of every family that a kept policy has."""
    most_greedy: float = 0.25
    """Most greedy success over all families that a kept policy has."""
    max_turns: int = 4
    max_tokens: int = 24
    """Answers of an episode, and tokens of an answer, in a measurement."""
    threads: int = 2
    space: SpaceRecipe | None = None
    """Transcripts and measurements in all harnesses of the space; none: in the base harness."""


@dataclass(frozen=True, slots=True)
class ColdstartReport:
    """What was made and measured; saved as ``coldstart.json``. Successes are on held-out tasks, by family."""

    seed: int
    attempt: int
    steps: int
    seconds: float
    parameters: int
    vocabulary: int
    loss: float
    """Mean cross-entropy of the policy's own tokens over the last 20 steps, nats."""
    greedy: dict[str, float]
    sampled: dict[str, float]
    """At temperature 1."""
    recipe: dict[str, Any]
    base: dict[str, float] = field(default_factory=dict)
    """With ``recipe.space``: ``greedy`` and ``sampled`` success in the base harness alone."""

    @property
    def greedy_mean(self) -> float:
        return sum(self.greedy.values()) / len(self.greedy)

    @property
    def sampled_mean(self) -> float:
        return sum(self.sampled.values()) / len(self.sampled)

    def fault(self, recipe: Recipe) -> str:
        """Why reinforcement learning should not begin here; empty when it can."""
        weakest = min(self.sampled, key=lambda family: self.sampled[family])
        if self.sampled[weakest] < recipe.least_sampled:
            return (
                f"sampled success in {weakest} is {self.sampled[weakest]:.2f}, "
                f"expected at least {recipe.least_sampled:g}"
            )
        if self.greedy_mean > recipe.most_greedy:
            return f"greedy success is {self.greedy_mean:.2f}, expected at most {recipe.most_greedy:g}"
        return ""


def space_recipe(space: SpaceRecipe) -> Recipe:
    """That of the whole space of harnesses: more to learn, and fewer ways that come out right."""
    return Recipe(
        batch=24,
        transcripts=9600,
        first_look=300,
        full_steps=500,
        decay_steps=80,
        more_steps=80,
        goal=0.04,
        least_sampled=0.04,
        most_greedy=0.5,
        max_turns=7,
        max_tokens=32,
        space=space,
    )
