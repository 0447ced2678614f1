import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import KINDS, call, grow, path_of, relaxed, sessions

from trees.filters import apply
from trees.linearise import linearise
from trees.packing import pack


def paths_of(sessions_):
    trees = [apply(grow(*records), 10_000, KINDS)[0] for records in sessions_]
    return [path.ids for tree in trees for path in linearise(tree)]


def sequence(*ids):
    return np.array(ids, np.int32)


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3), st.sampled_from([1, 7, 30, 10_000]))
def test_every_sequence_is_in_one_pack_and_sees_what_it_held(sessions_, max_tokens):
    paths = paths_of(sessions_)
    packs = pack(paths, max_tokens)
    assert sorted(member for packed in packs for member in packed.members) == list(range(len(paths)))
    for packed in packs:
        for member, places in zip(packed.members, packed.places, strict=True):
            assert packed.ids[places].tolist() == paths[member].tolist()
            assert path_of(packed, int(places[-1])) == places.tolist()
        mask = packed.mask()
        for token in range(len(packed)):
            places = path_of(packed, token)
            assert mask[token].nonzero()[0].tolist() == places
            assert packed.positions[places].tolist() == list(range(len(places)))


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3), st.integers(1, 60))
def test_the_budget_holds_but_for_sequences_that_are_longer(sessions_, max_tokens):
    paths = paths_of(sessions_)
    longest = max(map(len, paths), default=0)
    for packed in pack(paths, max_tokens):
        assert len(packed) <= max(max_tokens, longest)


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3))
def test_a_shared_beginning_is_there_once(sessions_):
    paths = paths_of(sessions_)
    beginnings = {tuple(ids[: end + 1].tolist()) for ids in paths for end in range(len(ids))}
    assert sum(map(len, pack(paths, 10**6))) == len(beginnings)


def test_episodes_of_a_group_share_their_prompt():
    prompt = list(range(100))
    (packed,) = pack([sequence(*prompt, 7, end) for end in (8, 8, 9)], 1000)
    assert len(packed) == 103
    assert packed.reach[0] == 103
    assert packed.members == (0, 1, 2)
    assert [places[-1] for places in packed.places] == [101, 101, 102]


def test_a_group_over_the_budget_repeats_its_prompt():
    packs = pack([sequence(*range(50), 100 + n, 7, 7) for n in range(6)], 60)
    assert [len(packed) for packed in packs] == [59, 59]
    assert [packed.members for packed in packs] == [(0, 1, 2), (3, 4, 5)]


def test_a_sequence_that_is_the_beginning_of_another():
    (packed,) = pack([sequence(1, 2, 3, 4), sequence(1, 2, 3)], 100)
    assert packed.ids.tolist() == [1, 2, 3, 4]
    assert {len(places) for places in packed.places} == {3, 4}
    assert [len(p) for p in pack([sequence(1, 2, 3), sequence(1, 2, 3, 4)], 3)] == [3, 4]


def test_nothing_to_pack():
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="at least 1"):
        pack([sequence(1)], 0)


def test_a_tree_gives_its_trained_paths():
    tree, _ = apply(grow(call(0, None, [1], [2], kind="side")), 4)
    assert pack([path.ids for path in linearise(tree)], 10) == []
    (packed,) = pack([path.ids for path in linearise(apply(grow(call(0, None, [1], [2])), 4)[0])], 10)
    assert {getattr(packed, name).dtype for name in ("ids", "positions", "before", "reach")} == {np.dtype(np.int32)}
