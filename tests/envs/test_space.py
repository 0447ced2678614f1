"""The harness space: names, distances, and sets that are what they are said to be."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.space import (
    PAPER18,
    SPACE,
    Space,
    distance,
    fault,
    heldout_far,
    heldout_near,
    nearest,
    orthogonal,
    random_set,
    rao_bound,
    shifted,
)

POINTS = st.tuples(*[st.integers(0, 2)] * 5)
TRAINED = [SPACE.point(name) for name in PAPER18]


@given(POINTS)
def test_names_are_read_as_they_are_written(point):
    assert SPACE.point(SPACE.name(point)) == point


@pytest.mark.parametrize("name", ["", "S0", "S0T0O0C0W3", "s0T0O0C0W0", "S0T0O0C0W0 ", "S0O0T0C0W0", "S0T0O0C0W0X1"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="got harness"):
        SPACE.point(name)


@given(POINTS, POINTS, POINTS)
def test_the_distance_is_one(a, b, c):
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, b) == distance(b, a) <= distance(a, c) + distance(c, b)


def test_points_around_a_point():
    assert [len(SPACE.at((0, 1, 2, 0, 1), far)) for far in range(6)] == [1, 10, 40, 80, 80, 32]


def test_the_papers_set_has_strength_two():
    """Counted here once more, by hand."""
    assert len(set(TRAINED)) == 18
    for factor, level in product(range(5), range(3)):
        assert sum(point[factor] == level for point in TRAINED) == 6
    for a, b in combinations(range(5), 2):
        assert set(Counter((point[a], point[b]) for point in TRAINED).values()) == {2}
    assert fault(TRAINED, SPACE.levels) == ""


def test_what_is_not_balanced_is_told():
    assert "factors (0,)" in fault(TRAINED[1:], SPACE.levels)
    swapped = [(*point[:4], point[3]) for point in TRAINED]
    assert "factors (3, 4)" in fault(swapped, SPACE.levels)


def test_held_out_sets_are_balanced_and_apart():
    near, far = heldout_near(TRAINED), heldout_far(TRAINED)
    assert {nearest(point, TRAINED) for point in near} == {1}
    assert Counter(nearest(point, TRAINED) for point in far) == {2: 15, 1: 3}
    for points in (near, far):
        assert len(set(points)) == 18
        assert fault(points, SPACE.levels) == ""
    assert not set(near) & set(far)


def test_no_balanced_shift_is_further_away():
    best = max(sum(nearest(point, TRAINED) >= 2 for point in shifted(TRAINED, SPACE, by)) for by in SPACE.points())
    assert best == 15


@given(POINTS)
def test_a_shift_keeps_the_strength(by):
    assert fault(shifted(TRAINED, SPACE, by), SPACE.levels) == ""


def test_a_set_of_all_holds_nothing_out():
    for heldout in (heldout_near, heldout_far):
        with pytest.raises(ValueError, match="leave"):
            heldout(SPACE.points())


@pytest.mark.parametrize(
    ("levels", "size"),
    [((3,) * 5, 18), ((3,) * 6, 18), ((2, 3, 3, 3), 18), ((2,) * 7, 8), ((4,) * 5, 16), ((3,) * 8, 27)],
)
def test_sets_out_of_tables_have_strength_two(levels, size):
    points = orthogonal(levels, size)
    assert len(points) == size
    assert fault(points, levels) == ""


def test_sizes_that_cannot_be_are_refused_with_those_that_can():
    assert rao_bound((3,) * 5) == 11
    with pytest.raises(ValueError, match="at least 11: with fewer no set"):
        orthogonal((3,) * 5, 9)
    with pytest.raises(ValueError, match=r"expected one of \[18, 27"):
        orthogonal((3,) * 5, 20)


def test_random_sets_are_those_of_their_seed():
    assert random_set(SPACE, 18, 1) == random_set(SPACE, 18, 1) != random_set(SPACE, 18, 2)
    assert len(set(random_set(SPACE, 243, 0))) == 243
    for size in (0, 244):
        with pytest.raises(ValueError, match="expected 1 to 243"):
            random_set(SPACE, size, 0)


@pytest.mark.parametrize(("letters", "levels"), [("ST", (3,)), ("SS", (3, 3)), ("", ()), ("s", (3,)), ("S", (0,))])
def test_spaces_that_cannot_be(letters, levels):
    with pytest.raises(ValueError, match="expected"):
        Space(letters, levels)
