"""Which harnesses tasks come to."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.assignment import Assignment
from actors.coordinator import assignment_of
from configs.harness import AssignmentConfig, HarnessConfig
from configs.schema import RunConfig
from envs.harnesses.sets import apart, harnesses, settings_of
from envs.space import PAPER18

SET = {"set": "paper18"}


def assignment(kind, k=1, seed=0, **space):
    return assignment_of(RunConfig(space=SET | space, assignment={"kind": kind, "k": k}, seed=seed))


@given(st.sampled_from(["locality", "random", "repeat", "one_factor"]), st.integers(1, 4), st.integers(0, 40))
def test_a_tasks_harnesses_come_in_consecutive_steps(kind, k, position):
    one, groups = assignment(kind, k), 4
    block, group = divmod(position, groups)
    places = [one.place(block * k + turn, group, groups) for turn in range(k)]
    assert places == [(position, name) for name in one.of(position)]
    assert one.of(position)[0] == one.anchor(position)


def test_anchors_are_uniform_and_counted():
    one = assignment("locality", 2)
    counts = Counter(one.anchor(position) for position in range(18 * 5))
    assert counts == dict.fromkeys(PAPER18, 5)
    orders = {tuple(one.anchor(18 * round_ + i) for i in range(18)) for round_ in range(5)}
    assert len(orders) == 5
    assert one.balance(0, 18) == one.balance(1, 18) == (1, 1)
    for step, groups in ((2, 10), (0, 5), (7, 64)):
        counts = Counter(one.anchor(position) for position in range((step // 2 + 1) * groups))
        assert one.balance(step, groups) == (min(counts[name] for name in PAPER18), max(counts.values()))


def test_inside_the_papers_set_the_nearest_is_at_distance_two_and_mostly_one():
    """Of S0 and S1 there are six fixed pairs; the six harnesses of S2 make a ring, in which each has two nearest."""
    one = assignment("locality", 2)
    found = [one.of(position) for position in range(36)]
    assert {apart(*pair) for pair in found} == {2}
    assert len({frozenset(pair) for pair in found if not pair[0].startswith("S2")}) == 6
    for name in PAPER18:
        nearest = [other for other in PAPER18 if apart(name, other) == 2]
        assert len(nearest) == (2 if name.startswith("S2") else 1)


def test_ties_are_broken_by_the_seed_and_the_same_way_every_time():
    def partners(seed):
        found = {}
        for position in range(54):
            anchor, *others = assignment("locality", 4, seed).of(position)
            found.setdefault(anchor, set()).add(tuple(others))
        assert all(len(sets) == 1 for sets in found.values())
        return found

    first = partners(0)
    assert first == partners(0) != partners(1)
    for anchor, (others,) in ((a, tuple(s)) for a, s in first.items()):
        distances = sorted(apart(anchor, other) for other in PAPER18 if other != anchor)
        assert [apart(anchor, other) for other in others] == distances[:3]


def test_other_kinds():
    assert assignment("single").of(3) == [assignment("single").anchor(3)]
    assert len(set(assignment("repeat", 3).of(5))) == 1
    partners = [assignment("random", 4).of(position) for position in range(40)]
    assert all(len(set(found)) == 4 and set(found) <= set(PAPER18) for found in partners)
    assert len({frozenset(found) for found in partners}) > 30
    factors = [assignment("one_factor", 2).of(position) for position in range(40)]
    assert all(apart(*found) == 1 for found in factors)
    assert any(found[1] not in PAPER18 for found in factors)


def test_without_an_assignment_every_task_is_done_in_all():
    one = assignment("all")
    assert [one.place(0, group, 36)[1] for group in range(36)] == [*PAPER18] * 2
    assert [one.place(0, group, 36)[0] for group in range(36)] == [0] * 18 + [1] * 18
    assert one.of(7) == [*PAPER18]


def test_outside_harnesses_are_assigned_too():
    config = RunConfig(
        mix=[{"name": "claude_code"}, {"name": "codex"}, {"name": "agent_loop"}],
        assignment={"kind": "locality", "k": 2},
    )
    one = assignment_of(config)
    assert {apart(*one.of(position)) for position in range(20)} == {1}


def test_more_harnesses_than_there_are_is_an_error():
    with pytest.raises(ValueError, match=r"assignment.k: got 3 with kind=locality, expected at most 2"):
        Assignment(AssignmentConfig(kind="locality", k=3), ["a", "b"], seed=0)
    assert len(assignment("one_factor", 11).of(0)) == 11
    with pytest.raises(ValueError, match=r"got 12 with kind=one_factor, expected at most 11"):
        assignment("one_factor", 12)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"assignment": {"kind": "single", "k": 2}}, "k: got 2 with kind=single"),
        ({"assignment": {"kind": "one_factor"}}, "one_factor without a space"),
        ({"space": {"set": "names"}}, "names go with set=names alone"),
        ({"space": {"set": "names", "names": ["S0T0O0C0W0"] * 2}}, "each harness once"),
        ({"space": SET, "harness": {"name": "codex"}}, "space: got one beside"),
        ({"harness": {"name": "codex", "levels": "S1T0O0C0W0"}}, "levels: got a setting that only name=agent_loop"),
        ({"harness": {"levels": "S0-T1"}}, "levels"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, fault):
    with pytest.raises(ValueError, match=fault):
        RunConfig(**settings)


def test_harnesses_of_a_space_are_the_harness_with_other_levels():
    config = RunConfig(space=SET, harness={"max_turns": 5, "wordings": 3})
    found = harnesses(config)
    assert list(found) == list(PAPER18)
    assert found["S2T1O0C2W0"] == HarnessConfig(max_turns=5, wordings=3, levels="S2T1O0C2W0", label="S2T1O0C2W0")
    assert settings_of(config, "S0T0O0C0W1").levels == "S0T0O0C0W1"
    assert len(harnesses(RunConfig(space={"set": "all"}))) == 243
    assert len(harnesses(RunConfig(space={"set": "random", "size": 7}))) == 7
    assert len(harnesses(RunConfig(space={"set": "orthogonal", "size": 27}))) == 27
