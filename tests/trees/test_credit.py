import numpy as np
import pytest
from tree_sessions import KINDS, call, grow

from trees.credit import branches, credits_of
from trees.filters import apply
from trees.linearise import linearise


@pytest.fixture
def tree():
    """A main line that starts two sub-agents, one of two calls, and a title on the side."""
    return grow(
        call(0, None, [1], [2, 3]),
        call(1, None, [4], [5], kind="subagent"),
        call(2, 1, [6], [7], kind="subagent"),
        call(3, None, [4, 8], [9], kind="subagent"),
        call(4, None, [10], [11], kind="side"),
        call(5, 0, [12], [13]),
    )


def by_call(tree, rule):
    found = credits_of(tree, rule)
    return {tree.nodes[node].call: share for node, share in found.items()}


def test_outcome_gives_every_branch_the_whole_advantage(tree):
    tree, _ = apply(tree, 9, KINDS)
    assert set(by_call(tree, "outcome").values()) == {1.0}


def test_scaled_shares_it_among_the_auxiliary_branches(tree):
    tree, _ = apply(tree, 9, KINDS)
    assert branches(tree) == 3
    third = pytest.approx(1 / 3)
    expected = {"c0": 1.0, "c5": 1.0, "c1": third, "c2": third, "c3": third, "c4": third}
    assert by_call(tree, "scaled") == expected


def test_only_what_is_trained_counts_as_a_branch(tree):
    tree, _ = apply(tree, 9, ("main", "side"))
    assert by_call(tree, "scaled") == {"c0": 1.0, "c5": 1.0, "c4": 1.0}


def test_none_refuses_what_a_filter_should_have_taken_out(tree):
    with pytest.raises(ValueError, match=r"subagent.*aux_credit outcome or scaled"):
        credits_of(tree, "none")
    tree, _ = apply(tree, 9)
    assert by_call(tree, "none") == {"c0": 1.0, "c5": 1.0}


def test_paths_carry_the_share_of_every_trained_token(tree):
    tree, _ = apply(tree, 9, KINDS)
    for path in linearise(tree, "scaled"):
        assert path.credit.dtype == np.float32
        assert ((path.credit > 0) == path.loss_mask).all()
    total = sum(path.credit.sum() for path in linearise(tree, "scaled"))
    assert total == pytest.approx(3 + 4 / 3)
