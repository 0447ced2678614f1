"""The space of harnesses: names of its points, distances, and designed sets of them.

A point is a level for each factor, written ``S0T2O1C0W1``. A set has strength 2 when every level of a factor occurs
equally often and every pair of levels of two factors does: then no effect of a level, and of no pair, hides behind
another (Rao, Factorial experiments derivable from combinatorial arrangements of arrays, 1947).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Space:
    """Factors by their letters, and how many levels each has."""

    letters: str = "STOCW"
    levels: tuple[int, ...] = (3, 3, 3, 3, 3)

    def __post_init__(self) -> None:
        if len(self.letters) != len(self.levels) or len(set(self.letters)) < len(self.letters) or not self.letters:
            raise ValueError(f"got factors {self.letters!r} with levels {self.levels}, expected one number a letter")
        if min(self.levels) < 1 or not re.fullmatch("[A-Z]+", self.letters):
            raise ValueError(f"got {self.name(self.levels)}, expected capital letters with at least one level each")

    def name(self, point: Sequence[int]) -> str:
        """``S0T2O1C0W1``."""
        return "".join(f"{letter}{level}" for letter, level in zip(self.letters, point, strict=True))

    def point(self, name: str) -> Point:
        """The point of a name. Raises ValueError."""
        match = re.fullmatch("".join(rf"{letter}(\d+)" for letter in self.letters), name)
        if not match:
            raise ValueError(f"got harness {name!r}, expected a name such as {self.name([0] * len(self.letters))}")
        found = tuple(int(level) for level in match.groups())
        for letter, level, levels in zip(self.letters, found, self.levels, strict=True):
            if level >= levels:
                raise ValueError(
                    f"got harness {name!r}: there is no {letter}{level}, only {letter}0 to {letter}{levels - 1}"
                )
        return found

    def points(self) -> list[Point]:
        """All of them, in the order of their names."""
        return list(itertools.product(*(range(levels) for levels in self.levels)))

    def at(self, point: Point, far: int) -> list[Point]:
        """The points at this distance."""
        return [other for other in self.points() if distance(point, other) == far]


SPACE = Space()
"""That of the transparent loop: 243 harnesses."""

PAPER18 = (
    "S0T0O0C0W0", "S0T1O1C1W1", "S0T2O2C2W2", "S1T0O0C1W1", "S1T1O1C2W2", "S1T2O2C0W0",
    "S2T0O1C0W2", "S2T1O2C1W0", "S2T2O0C2W1", "S0T0O2C2W1", "S0T1O0C0W2", "S0T2O1C1W0",
    "S1T0O1C2W0", "S1T1O2C0W1", "S1T2O0C1W2", "S2T0O2C1W2", "S2T1O0C2W0", "S2T2O1C0W1",
)  # fmt: skip
"""The training set of the Harness Scaling paper, of strength 2."""


def distance(a: Sequence[object], b: Sequence[object]) -> int:
    """In how many factors two points differ (Hamming)."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def fault(points: Iterable[Point], levels: Sequence[int]) -> str:
    """What keeps these points from having strength 2, in words; empty where nothing does."""
    rows = list(points)
    for size in (1, 2):
        for factors in itertools.combinations(range(len(levels)), size):
            seen = Counter(tuple(row[i] for i in factors) for row in rows)
            cells = itertools.product(*(range(levels[i]) for i in factors))
            counts = {cell: seen[cell] for cell in cells}
            if len(set(counts.values())) > 1:
                least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
                return (
                    f"factors {factors}: levels {least} occur {counts[least]} times, levels {most} {counts[most]} times"
                )
    return ""


def rao_bound(levels: Sequence[int]) -> int:
    """Least number of points that a set of strength 2 can have: 1 + sum of (levels - 1) (Rao, 1947)."""
    return 1 + sum(level - 1 for level in levels)


def orthogonal(levels: Sequence[int], size: int) -> list[Point]:
    """A set of strength 2 of this size, from the tables of pyDOE3.

    Raises ValueError where it cannot be or is in no table; says the sizes that are.
    """
    if size < rao_bound(levels):
        raise ValueError(
            f"got {size} harnesses over factors with {tuple(levels)} levels, expected at least {rao_bound(levels)}: "
            "with fewer no set has every pair of levels equally often (Rao's bound)"
        )
    tables = _tables()
    for table in tables:
        if len(table) == size and (found := _columns(table, levels)):
            return found
    sizes = sorted({len(table) for table in tables if _columns(table, levels)})
    raise ValueError(
        f"got {size} harnesses over factors with {tuple(levels)} levels, expected one of {sizes}: the tables of pyDOE3 "
        "have no other set of strength 2 for them"
    )


def random_set(space: Space, size: int, seed: int) -> list[Point]:
    """Points drawn without putting back, in the order of their names. Raises ValueError."""
    points = space.points()
    if not 1 <= size <= len(points):
        raise ValueError(f"got a random set of {size} harnesses, expected 1 to {len(points)}")
    return sorted(random.Random(f"random set {seed}").sample(points, size))


def shifted(points: Iterable[Point], space: Space, by: Sequence[int]) -> list[Point]:
    """Every point with ``by`` added to its levels, each modulo how many there are: strength 2 stays."""
    return [tuple((x + d) % m for x, d, m in zip(point, by, space.levels, strict=True)) for point in points]


def heldout_near(points: Sequence[Point], space: Space = SPACE) -> list[Point]:
    """The set with its last factor shifted by one: as balanced as the set.

    For the paper's 18 each is at distance 1 from the set and none is in it. Raises ValueError where one is in it.
    """
    found = shifted(points, space, [0] * (len(space.letters) - 1) + [1])
    if set(found) & set(points):
        raise ValueError(
            f"got a set that holds its own points with {space.letters[-1]} shifted by one, expected a set that leaves "
            "some harnesses out for that; hold others out by name"
        )
    return found


def heldout_far(points: Sequence[Point], space: Space = SPACE) -> list[Point]:
    """The shift of the set that has most points at distance 2 or more from it, the first of equals.

    As balanced as the set; none of it is in the set. Raises ValueError where every shift meets the set.
    """
    apart = [other for by in space.points() if not set(other := shifted(points, space, by)) & set(points)]
    if not apart:
        raise ValueError("got a set that meets every shift of itself, expected one that leaves harnesses out")
    return max(apart, key=lambda other: sum(nearest(point, points) >= 2 for point in other))


def nearest(point: Point, points: Iterable[Point]) -> int:
    """The distance to the nearest of the points."""
    return min(distance(point, other) for other in points)


def _tables() -> list[list[Point]]:
    # Here alone: it brings scipy.
    from pyDOE3 import get_orthogonal_array, list_orthogonal_arrays

    return [[tuple(map(int, row)) for row in get_orthogonal_array(name)] for name in list_orthogonal_arrays()]


def _columns(table: list[Point], levels: Sequence[int]) -> list[Point] | None:
    """Columns of the table for the factors; one with a multiple of the levels is folded, which keeps the balance."""
    has = [max(column) + 1 for column in zip(*table, strict=True)]
    chosen: list[int] = []
    for level in levels:
        fits = [i for i, count in enumerate(has) if i not in chosen and count % level == 0]
        if not fits:
            return None
        chosen.append(min(fits, key=lambda i: has[i]))
    found = [tuple(row[i] % level for i, level in zip(chosen, levels, strict=True)) for row in table]
    return found if not fault(found, levels) else None
