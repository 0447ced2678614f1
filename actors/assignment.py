"""Which harnesses a task is practised in, and in which steps: a pure function of seed and place in the schedule.

Invariant: with K harnesses to a task, a block of K steps has the same tasks in each step, each task in one of its K
harnesses, in turn. Anchors come in shuffled rounds of all harnesses, so that after each round all were anchors equally
often; within a round their order is uniform.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from actors.seeds import stable_seed
from configs.schema import AssignmentConfig

Distance = Callable[[str, str], int]


class Assignment:
    """Harnesses of tasks, as the settings ask.

    ``neighbours`` gives the harnesses at distance 1 of one, members of the set or not; for ``one_factor``. ``distance``
    is between two names. Raises ValueError where there are too few harnesses for K.
    """

    def __init__(
        self,
        config: AssignmentConfig,
        names: Sequence[str],
        *,
        seed: int,
        distance: Distance = lambda a, b: int(a != b),
        neighbours: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self._config = config
        self._names = list(names)
        self._seed = seed
        self._distance = distance
        self._neighbours = neighbours
        most = config.k
        if config.kind in ("locality", "random"):
            most = len(self._names)
        elif config.kind == "one_factor":
            most = 1 + len(neighbours(self._names[0])) if neighbours else 1
        if config.k > most:
            raise ValueError(
                f"assignment.k: got {config.k} with kind={config.kind}, expected at most {most}: there are no more "
                "harnesses for a task"
            )

    def place(self, step: int, group: int, groups: int) -> tuple[int, str]:
        """Of a group in a step of ``groups``: the position of its task in the order of tasks, and its harness."""
        if self._config.kind == "all":
            position, which = divmod(step * groups + group, len(self._names))
            return position, self._names[which]
        block, turn = divmod(step, self._config.k)
        position = block * groups + group
        return position, self.of(position)[turn]

    def of(self, position: int) -> list[str]:
        """The K harnesses of the task at this position, its anchor first; those of ``all``: every one."""
        if self._config.kind == "all":
            return list(self._names)
        anchor, k = self.anchor(position), self._config.k
        if self._config.kind == "repeat":
            return [anchor] * k
        rng = random.Random(stable_seed(self._seed, f"partners {position}"))
        if self._config.kind == "one_factor":
            assert self._neighbours is not None
            return [anchor, *rng.sample(list(self._neighbours(anchor)), k - 1)]
        others = [name for name in self._names if name != anchor]
        if self._config.kind == "random":
            return [anchor, *rng.sample(others, k - 1)]
        # Of those equally near, an order that is fixed for the run and the anchor: the same partners every time.
        rank = {name: stable_seed(self._seed, f"tie {anchor} {name}") for name in others}
        return [anchor, *sorted(others, key=lambda name: (self._distance(anchor, name), rank[name]))[: k - 1]]

    def anchor(self, position: int) -> str:
        """The harness that the task at this position begins with."""
        round_, place = divmod(position, len(self._names))
        order = list(self._names)
        random.Random(stable_seed(self._seed, f"anchors {round_}")).shuffle(order)
        return order[place]

    def balance(self, step: int, groups: int) -> tuple[int, int] | None:
        """How often the least and the most frequent anchor came up, over the tasks to the end of a step.

        None where every task is done in every harness.
        """
        if self._config.kind == "all":
            return None
        rounds, more = divmod((step // self._config.k + 1) * groups, len(self._names))
        return rounds, rounds + (more > 0)
