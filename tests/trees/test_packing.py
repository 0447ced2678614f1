from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import KINDS, call, grow, path_of, relaxed, sessions

from trees.filters import apply
from trees.linearise import linearise
from trees.packing import pack


def expected_targets(trees):
    """What each tree trains: (episode, tokens before and with it, log-probability, version) of each target."""
    found = Counter()
    for episode, tree in enumerate(trees):
        for path in linearise(tree):
            for at in path.loss_mask.nonzero()[0]:
                key = (episode, tuple(path.ids[: at + 1].tolist()), float(path.logprobs[at]), int(path.versions[at]))
                found[key] += 1
    return found


def packed_targets(packs):
    found = Counter()
    for packed in packs:
        for m, token in enumerate(packed.targets):
            ids = tuple(packed.ids[path_of(packed, int(token))].tolist())
            found[(int(packed.episodes[m]), ids, float(packed.logprobs[m]), int(packed.versions[m]))] += 1
    return found


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3), st.sampled_from([1, 7, 30, 10_000]))
def test_every_trained_token_is_a_target_once_behind_what_the_policy_saw(sessions_, max_tokens):
    trees = [apply(grow(*records), 10_000, KINDS)[0] for records in sessions_]
    packs = pack(trees, max_tokens)
    assert packed_targets(packs) == expected_targets(trees)
    for packed in packs:
        mask = packed.mask()
        for token in range(len(packed)):
            places = path_of(packed, token)
            assert mask[token].nonzero()[0].tolist() == places
            assert packed.positions[places].tolist() == list(range(len(places)))


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3), st.integers(1, 60))
def test_the_budget_holds_but_for_paths_that_are_longer(sessions_, max_tokens):
    trees = [apply(grow(*records), 10_000, KINDS)[0] for records in sessions_]
    longest = max((len(path.ids) for tree in trees for path in linearise(tree)), default=0)
    for packed in pack(trees, max_tokens):
        assert len(packed) <= max(max_tokens, longest)


def test_episodes_of_a_group_share_their_prompt_and_not_their_loss():
    prompt = list(range(100))
    same = grow(call(0, None, prompt, [7, 8]))
    other = grow(call(0, None, prompt, [7, 9]))
    trees = [apply(tree, 4)[0] for tree in (same, same, other)]
    (packed,) = pack(trees, 1000)
    assert len(packed) == 103
    assert Counter(packed.episodes.tolist()) == {0: 2, 1: 2, 2: 2}
    assert packed.ids[packed.targets].tolist() == [7, 8, 7, 8, 7, 9]
    assert len(set(packed.targets.tolist())) == 3
    assert packed.reach[0] == 103


def test_a_group_over_the_budget_repeats_its_prompt_and_no_target():
    prompt = list(range(50))
    trees = [apply(grow(call(0, None, prompt, [100 + n, 7, 7])), 4)[0] for n in range(6)]
    packs = pack(trees, 60)
    assert [len(packed) for packed in packs] == [59, 59]
    assert [packed.episodes.tolist() for packed in packs] == [[0, 0, 0, 1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4, 5, 5, 5]]


def test_a_path_that_is_the_beginning_of_another():
    long = apply(grow(call(0, None, [1], [2, 3, 4])), 4)[0]
    short = apply(grow(call(0, None, [1], [2, 3])), 4)[0]
    (packed,) = pack([long, short], 100)
    assert packed.ids.tolist() == [1, 2, 3, 4]
    assert packed_targets([packed]) == expected_targets([long, short])
    assert [len(p) for p in pack([short, long], 3)] == [3, 4]


def test_nothing_to_train_no_pack():
    tree, _ = apply(grow(call(0, None, [1], [2], kind="side")), 4)
    assert pack([tree], 10) == []
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="at least 1"):
        pack([tree], 0)


def test_dtypes():
    (packed,) = pack([apply(grow(call(0, None, [1], [2])), 4)[0]], 10)
    ints = ("ids", "positions", "before", "reach", "targets", "episodes", "versions")
    assert {getattr(packed, name).dtype for name in ints} == {np.dtype(np.int32)}
    assert {getattr(packed, name).dtype for name in ("logprobs", "temperature", "credit")} == {np.dtype(np.float32)}
