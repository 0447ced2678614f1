"""Which episodes a step consists of: a pure function of the settings and the step's number.

Invariant: ``step(s)`` gives the same specs in every process and after every restart, so a resumed run
goes on with the same schedule, and within one epoch every task is taken once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from actors.assignment import Assignment
from actors.seeds import stable_seed
from envs.episode import EpisodeSpec
from envs.tasks.task import Task


class Schedule:
    """Tasks in shuffled epochs, balanced over the families that the tasks' metadata name.

    ``assignment`` says which task in which harness is a group.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        assignment: Assignment,
        groups: int,
        group_size: int,
        temperature: float,
        seed: int,
    ) -> None:
        if not tasks:
            raise ValueError("got no task, expected at least one to practise on")
        self._tasks = list(tasks)
        self._assignment = assignment
        self._groups = groups
        self._group_size = group_size
        self._temperature = temperature
        self._seed = seed
        self._epochs: dict[int, list[Task]] = {}

    def step(self, step: int) -> list[EpisodeSpec]:
        """The ``groups * group_size`` episodes of a step, group by group."""
        specs = []
        for g in range(self._groups):
            position, harness = self._assignment.place(step, g, self._groups)
            task = self._task(position)
            for member in range(self._group_size):
                name = f"s{step:05d}g{g:03d}m{member:03d}"
                specs.append(
                    EpisodeSpec(
                        id=name,
                        task=task,
                        harness=harness,
                        group=f"s{step:05d}g{g:03d}",
                        seed=stable_seed(self._seed, name),
                        step=step,
                        temperature=self._temperature,
                    )
                )
        return specs

    def balance(self, step: int) -> dict[str, int]:
        """How often the least and the most frequent anchor came up, as metrics; none where tasks have no anchor."""
        found = self._assignment.balance(step, self._groups)
        return dict(zip(("schedule/anchors_least", "schedule/anchors_most"), found or (), strict=False))

    def _task(self, position: int) -> Task:
        epoch, place = divmod(position, len(self._tasks))
        if epoch not in self._epochs:
            self._epochs[epoch] = self._order(epoch)
        return self._epochs[epoch][place]

    def _order(self, epoch: int) -> list[Task]:
        rng = random.Random(stable_seed(self._seed, f"epoch{epoch}"))
        families: dict[str, list[Task]] = {}
        for task in self._tasks:
            families.setdefault(str(task.metadata.get("family", "")), []).append(task)
        for family in families.values():
            rng.shuffle(family)
        order: list[Task] = []
        while families:
            names = sorted(families)
            rng.shuffle(names)
            for name in names:
                order.append(families[name].pop())
                if not families[name]:
                    del families[name]
        return order


def evaluation(
    name: str,
    tasks: Sequence[Task],
    *,
    harnesses: Sequence[str],
    temperature: float,
    step: int,
    seed: int,
    each: bool = True,
) -> list[EpisodeSpec]:
    """One episode for each task and harness; ids name the set, the step and whether it is greedy or sampled.

    ``each`` off: one for each task, in the harnesses in turn.
    """
    how = "greedy" if temperature == 0 else "sampled"
    specs = []
    product = ((harness, task) for harness in harnesses for task in tasks)
    in_turn = ((harnesses[i % len(harnesses)], task) for i, task in enumerate(tasks))
    for i, (harness, task) in enumerate(product if each else in_turn):
        episode = f"e{step:05d}{name}{how}{i:04d}"
        specs.append(
            EpisodeSpec(
                id=episode,
                task=task,
                harness=harness,
                group=episode,
                seed=stable_seed(seed, episode),
                step=step,
                split=f"{name}/{how}",
                temperature=temperature,
            )
        )
    return specs
