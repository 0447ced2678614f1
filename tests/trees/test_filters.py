import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import KINDS, call, dump, grow, relaxed, sessions

from trees import forks
from trees.filters import (
    ABORTED,
    OVER_BRANCHING,
    SUPERSEDED,
    Count,
    apply,
    auxiliary,
    dead_leaves,
    over_branching,
)


def kept(tree):
    return {node.call for node in tree.nodes if node.trained}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([call(0, None, [1], [2]), call(1, None, [1], [3])], {"c1"}, id="a tie keeps the newest"),
        pytest.param(
            [call(0, None, [1], [2]), call(1, None, [1], [3], fork=forks.RETRY), call(2, 0, [4], [5])],
            {"c0", "c2"},
            id="the one that continues furthest",
        ),
        pytest.param(
            [
                call(0, None, [1], [2]),
                call(1, 0, [3], [4]),
                call(2, None, [1, 9], [5]),
                call(3, 2, [6], [7]),
                call(4, 3, [6], [7]),
            ],
            {"c2", "c3", "c4"},
            id="an error text goes on without the reply",
        ),
        pytest.param(
            [
                call(0, None, [1], [2]),
                call(1, 0, [3], [4]),
                call(2, 0, [3], [5]),
                call(3, 2, [6], [7]),
                call(4, 2, [6], [8]),
            ],
            {"c0", "c2", "c4"},
            id="each segment by itself",
        ),
        pytest.param(
            [call(0, None, [1], [2]), call(1, 0, [3], [4], finish="abort"), call(2, 0, [3], [5])],
            {"c0", "c2"},
            id="an abandoned leaf and its retry",
        ),
        pytest.param(
            [call(0, None, [1], [2]), call(1, 0, [3], [4]), call(2, 0, [3], [5], finish="abort")],
            {"c0", "c1"},
            id="an aborted retry does not win though newest",
        ),
        pytest.param(
            [call(0, None, [1], [2], finish="abort"), call(1, 0, [3], [4])],
            {"c1"},
            id="goes on after an abort",
        ),
        pytest.param(
            [
                call(0, None, [1], [2]),
                call(1, None, [5, 1], [3], fork=forks.TOOLS_CHANGED),
                call(2, 1, [4], [5]),
            ],
            {"c0", "c1", "c2"},
            id="other tools are no retry",
        ),
        pytest.param(
            [
                call(0, None, [1], [2]),
                call(1, 0, [3], [4]),
                call(2, 0, [9], [5], fork=forks.HISTORY_EDITED),
                call(3, 2, [7], [8]),
                call(4, 0, [9], [6], fork=forks.RETRY),
            ],
            {"c0", "c1", "c2", "c3"},
            id="a retry after an edit competes with what it repeats, not with the line before the edit",
        ),
        pytest.param(
            [
                call(0, None, [1], [2]),
                call(1, 0, [3], [4]),
                call(2, 0, [9], [5], fork=forks.HISTORY_EDITED),
                call(3, 0, [3, 8], [6], fork=forks.REPLY_DROPPED),
            ],
            {"c0", "c2", "c3"},
            id="a dropped reply competes with what its prompt extends",
        ),
        pytest.param(
            [call(0, None, [1], [2]), call(1, 0, [3], [4]), call(2, 0, [9], [5], fork=forks.REPLY_DROPPED)],
            {"c0", "c2"},
            id="regenerated from another observation",
        ),
        pytest.param(
            [call(0, None, [1], [2]), call(1, 0, [3], [4], kind="compaction"), call(2, 0, [3], [5])],
            {"c0", "c1", "c2"},
            id="kinds do not compete",
        ),
    ],
)
def test_dead_leaves(records, expected):
    tree, report = dead_leaves(grow(*records))
    assert kept(tree) == expected
    assert report.kept == Count(len(expected), sum(len(node) for node in tree.nodes if node.trained))
    assert set(report.removed) <= {SUPERSEDED, ABORTED}


def test_parallel_subagents_are_not_retries_of_each_other_but_their_own_retries_are():
    tree = grow(
        call(0, None, [1], [2]),
        call(1, 0, [3], [4], kind="subagent"),
        call(2, 0, [3], [5], kind="subagent"),
        call(3, 1, [6], [7], kind="subagent"),
        call(4, 1, [6], [8], kind="subagent"),
        call(5, None, [9], [7], kind="subagent"),
        call(6, None, [9], [8], kind="subagent"),
    )
    assert kept(dead_leaves(tree)[0]) == {"c0", "c1", "c2", "c4", "c5", "c6"}


def test_auxiliary_counts_by_kind():
    tree = grow(*(call(i, None, [i], [1] * (i + 1), kind=kind) for i, kind in enumerate(KINDS)))
    marked, report = auxiliary(tree)
    assert kept(marked) == {"c0"}
    assert report.removed == {f"auxiliary: {kind}": Count(1, i + 1) for i, kind in enumerate(KINDS) if i}
    assert kept(auxiliary(tree, ("main", "subagent"))[0]) == {"c0", "c1"}
    with pytest.raises(ValueError, match=r"got \['mian'\], expected some of"):
        auxiliary(tree, ("mian",))


@pytest.mark.parametrize(("max_leaves", "dropped"), [(2, True), (3, False)])
def test_over_branching_drops_the_episode_whole(max_leaves, dropped):
    tree = grow(call(0, None, [1], [2]), *(call(i, 0, [i], [7], fork=forks.HISTORY_EDITED) for i in (1, 2, 3)))
    marked, report = over_branching(tree, max_leaves)
    assert bool(report.dropped) == dropped
    assert kept(marked) == (set() if dropped else {"c0", "c1", "c2", "c3"})
    assert report.removed == ({OVER_BRANCHING: Count(4, 4)} if dropped else {})
    if dropped:
        assert report.dropped == "over-branching: 3 leaves, at most 2"


def test_max_leaves_counts_what_is_left_to_train():
    retries = [call(i, 0, [3], [4]) for i in range(1, 9)]
    title = call(9, None, [8], [9], kind="side")
    tree, report = apply(grow(call(0, None, [1], [2]), *retries, title), max_leaves=1)
    assert kept(tree) == {"c0", "c8"}
    assert (report.leaves, report.dropped) == (1, "")
    assert report.removed == {SUPERSEDED: Count(7, 7), "auxiliary: side": Count(1, 1)}
    assert apply(grow(call(0, None, [1], [2]), *retries, title), max_leaves=1, drop_dead=False)[1].dropped


def test_max_leaves_must_be_positive():
    with pytest.raises(ValueError, match="got 0, expected at least 1"):
        over_branching(grow(), 0)


def test_a_filter_leaves_its_input_alone():
    tree = grow(call(0, None, [1], [2]), call(1, None, [1], [3]))
    before = dump(tree)
    dead_leaves(tree)
    apply(tree, 1, ())
    assert dump(tree) == before


@relaxed
@given(sessions(), st.integers(1, 4), st.sets(st.sampled_from(KINDS)), st.booleans())
def test_counts_add_up_and_only_training_changes(records, max_leaves, train_kinds, drop_dead):
    tree = grow(*records)
    marked, report = apply(tree, max_leaves, train_kinds, drop_dead=drop_dead)
    assert sum(report.removed.values(), report.kept) == report.total
    assert report.total == Count(len(records), sum(len(record.sampled_ids) for record in records))
    assert report.kept == Count(len(kept(marked)), marked.counts().trained)
    assert all(bool(node.reason) == (not node.trained) for node in marked.nodes if node.sampled)
    assert not any(node.trained or node.reason for node in marked.nodes if not node.sampled)
    again, second = apply(marked, max_leaves, train_kinds, drop_dead=drop_dead)
    assert dump(again) == dump(marked)
    assert (second.removed, second.kept) == (report.removed, report.kept)


@relaxed
@given(sessions())
def test_of_each_retried_request_at_most_one_answer_is_trained(records):
    tree, _ = dead_leaves(grow(*records))
    trained: dict[tuple, int] = {}
    for node in tree.calls():
        above = tree.call_parents[node.id]
        parallel = node.kind == "subagent" and (above < 0 or tree.nodes[above].kind != "subagent")
        if node.trained and not parallel:
            key = (node.parent, node.kind)
            trained[key] = trained.get(key, 0) + 1
    assert all(count == 1 for count in trained.values())


def test_another_agent_that_asks_the_same_is_no_retry():
    """Two agents of one kind with one task: both answers were acted on."""
    agents = grow(call(0, None, [1, 2], [3]), call(1, None, [1, 2], [4], fork=forks.OTHER_AGENT))
    assert {node.call for node in dead_leaves(agents)[0].calls() if node.trained} == {"c0", "c1"}
    retried = grow(call(0, None, [1, 2], [3]), call(1, None, [1, 2], [4], fork=forks.RETRY))
    assert {node.call for node in dead_leaves(retried)[0].calls() if node.trained} == {"c1"}
