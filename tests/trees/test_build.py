from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import call, dump, full_prompts, grow, relaxed, sessions

from trees.build import UNTOLD, RecordedRequest, RecordError, TreeBuilder, from_requests
from trees.filters import apply
from trees.record import VersionSpan
from trees.tree import Tree


def shape(tree: Tree) -> dict:
    """call or observed ids -> the same of the parent."""
    name = {node.id: node.call if node.sampled else "".join(map(str, node.ids.tolist())) for node in tree.nodes}
    return {name[node.id]: name[node.parent] for node in tree.nodes[1:]}


def test_a_chain_is_what_the_model_saw():
    tree = grow(call(0, None, [1, 2], [3]), call(1, 0, [4], [5, 6]), call(2, 1, [7, 8], [9]))
    assert tree.ids(tree.by_call["c2"]).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tree.prompt_ids("c1").tolist() == [1, 2, 3, 4]
    assert [leaf.call for leaf in tree.leaves()] == ["c2"]
    counts = tree.counts()
    assert (counts.calls, counts.tokens, counts.sampled, counts.observed, counts.paths) == (3, 9, 4, 5, 9)


def test_the_same_first_request_twice_gives_two_sibling_leaves_under_one_prompt():
    tree = grow(call(0, None, [1, 2, 3], [4, 5]), call(1, None, [1, 2, 3], [4, 5]))
    assert shape(tree) == {"123": "", "c0": "123", "c1": "123"}
    assert tree.counts().tokens == 3 + 2 + 2
    assert tree.counts().paths == 5 + 5


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1, 2, 9], {"12": "", "3": "12", "c0": "3", "9": "12", "c1": "9"}),
        ([1, 2], {"12": "", "3": "12", "c0": "3", "c1": "12"}),
        ([1, 2, 3, 9], {"123": "", "c0": "123", "9": "123", "c1": "9"}),
        ([9], {"123": "", "c0": "123", "9": "", "c1": "9"}),
        ([], {"123": "", "c0": "123", "c1": ""}),
    ],
)
def test_a_prompt_that_diverges_splits_the_observation(second, expected):
    tree = grow(call(0, None, [1, 2, 3], [4]), call(1, None, second, [5]))
    assert shape(tree) == expected


def test_a_sampled_run_is_not_entered_by_a_prompt_that_names_another_parent():
    tree = grow(call(0, None, [1], [2, 3]), call(1, None, [1, 2, 3, 4], [5]))
    assert shape(tree) == {"1": "", "c0": "1", "234": "1", "c1": "234"}


def test_a_split_deep_below_keeps_earlier_branches_whole():
    records = [call(0, None, [1, 2, 3, 4], [5]), call(1, 0, [6], [7]), call(2, None, [1, 2], [8])]
    tree = grow(*records, call(3, None, [1, 2, 3], [9]))
    assert tree.ids(tree.by_call["c1"]).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert shape(tree)["4"] == "3"


def test_a_record_waits_for_its_parent():
    builder = TreeBuilder("s")
    builder.add(call(2, 1, [5], [6]))
    builder.add(call(1, 0, [3], [4]))
    assert builder.waiting() == ["c1", "c2"]
    assert builder.missing(4) == [0, 3]
    assert builder.tree().counts().calls == 0
    builder.add(call(0, None, [1], [2]))
    assert builder.waiting() == []
    assert builder.tree().ids(builder.tree().by_call["c2"]).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_record_sent_again_changes_nothing():
    builder = TreeBuilder("s")
    assert builder.add(call(0, None, [1], [2]))
    assert builder.add(call(2, 1, [1], [2]))
    before = dump(builder.tree())
    assert not builder.add(call(0, None, [1], [2]))
    assert not builder.add(call(2, 1, [1], [2]))
    assert dump(builder.tree()) == before
    assert builder.waiting() == ["c2"]


GOOD = call(1, 0, [3], [4, 5])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            replace(GOOD, logprobs=np.zeros(0, np.float32)),
            r"got log-probabilities of shape \(0,\), expected \(2,\)",
        ),
        (
            replace(GOOD, logprobs=np.zeros(3, np.float32)),
            r"got log-probabilities of shape \(3,\), expected \(2,\)",
        ),
        (
            replace(GOOD, logprobs=np.array([0, np.nan], np.float32)),
            "got log-probability nan at sampled token 1",
        ),
        (replace(GOOD, versions=()), r"got version spans none, expected .* \[0, 2\)"),
        (replace(GOOD, versions=(VersionSpan(1, 0, 1),)), r"got version spans \[0, 1\)"),
        (replace(GOOD, versions=(VersionSpan(1, 0, 2), VersionSpan(1, 1, 2))), "version spans"),
        (replace(GOOD, prompt_ids=np.array([-1])), "got ids from -1 to -1"),
        (replace(GOOD, prompt_ids=np.array([2**31])), "expected 0 to"),
        (
            replace(GOOD, sampled_ids=np.zeros((2, 1), np.int32)),
            r"got shape \(2, 1\), expected one dimension",
        ),
        (replace(GOOD, session="other"), "got session 'other', expected 's'"),
        (replace(GOOD, ordinal=0), "ordinal 0 is already that of call c0"),
        (replace(GOOD, ordinal=-1), "got ordinal -1"),
        (replace(GOOD, parent="c1"), "names itself"),
        (replace(GOOD, call=""), "without a call id"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_and_leaves_no_trace(bad, message):
    builder = TreeBuilder("s")
    builder.add(call(0, None, [1], [2]))
    with pytest.raises(RecordError, match=message):
        builder.add(bad)
    assert builder.missing(2) == [1]
    assert builder.add(GOOD)
    assert dump(builder.tree()) == dump(grow(call(0, None, [1], [2]), GOOD))


def test_arrays_of_the_caller_can_change_afterwards():
    ids = np.array([1, 2], np.int32)
    record = replace(call(0, None, [], [7]), prompt_ids=ids)
    tree = grow(record)
    ids[:] = 9
    assert tree.nodes[1].ids.tolist() == [1, 2]


def test_a_call_that_sampled_nothing_still_has_its_node():
    tree = grow(call(0, None, [1], [], finish="abort"), call(1, 0, [2], [3]), call(2, None, [1], [4]))
    assert shape(tree) == {"1": "", "c0": "1", "2": "c0", "c1": "2", "c2": "1"}
    assert tree.ids(tree.by_call["c1"]).tolist() == [1, 2, 3]


@relaxed
@given(sessions(), st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_tree_and_true_paths(records, random):
    tree = grow(*records)
    for record in records:
        node = tree.nodes[tree.by_call[record.call]]
        assert tree.prompt_ids(record.call).tolist() == full_prompts(records)[record.call]
        assert node.ids.tolist() == record.sampled_ids.tolist()
        assert node.logprobs.tobytes() == record.logprobs.tobytes()
    arrival = records + random.sample(records, len(records) // 2)
    random.shuffle(arrival)
    assert dump(grow(*arrival)) == dump(tree)


@relaxed
@given(sessions())
def test_observed_tokens_are_stored_once(records):
    tree = grow(*records)
    for siblings in tree.children:
        first = [int(tree.nodes[child].ids[0]) for child in siblings if not tree.nodes[child].sampled]
        assert len(first) == len(set(first))
    for node in tree.nodes[1:]:
        observed_children = [child for child in tree.children[node.id] if not tree.nodes[child].sampled]
        ends_a_prompt = any(tree.nodes[child].sampled for child in tree.children[node.id])
        assert node.sampled or (len(node) and (ends_a_prompt or len(observed_children) > 1))


@relaxed
@given(sessions(max_calls=12), st.integers(0, 12))
def test_missing_ordinals(records, left_out):
    builder = TreeBuilder("s")
    for record in records:
        if record.ordinal != left_out:
            builder.add(record)
    expected = {left_out} if left_out < len(records) else set()
    assert set(builder.missing(len(records))) == expected
    below = {f"c{left_out}"}
    for record in records:
        if record.parent in below:
            below.add(record.call)
    assert set(builder.waiting()) == below - {f"c{left_out}"}


def request(prompt, sampled, **fields):
    logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    return RecordedRequest(np.array(prompt, np.int32), np.array(sampled, np.int32), logprobs, **fields)


def test_recorded_requests_find_their_parents_by_tokens():
    tree = from_requests(
        [
            request([1, 2], [3]),
            request([1, 2], [3, 4]),
            request([1, 2, 3, 4, 5], [6]),
            request([1, 2, 3, 4, 5, 6], [7]),
            request([1, 2, 3, 9], [8]),
        ],
        meta={"task": "t"},
    )
    above = {node.call: tree.call_parents[node.id] for node in tree.calls()}
    parents = {name: tree.nodes[parent].call if parent >= 0 else None for name, parent in above.items()}
    assert parents == {"r0": None, "r1": None, "r2": "r1", "r3": "r2", "r4": "r0"}
    assert tree.meta["task"] == "t"


def test_of_recorded_requests_that_sampled_the_same_the_newest_is_the_parent():
    tree = from_requests([request([1], [2]), request([1], [2]), request([1, 2, 3], [4])])
    assert tree.nodes[tree.call_parents[tree.by_call["r2"]]].call == "r1"


def test_a_retry_of_a_request_that_sampled_nothing_is_its_sibling():
    tree = from_requests([request([1], [], finish="abort"), request([1], [2])])
    assert shape(tree) == {"1": "", "r0": "1", "r1": "1"}


def test_ids_that_decode_alike_stay_apart():
    tree = from_requests([request([1], [393, 30002]), request([1, 220, 47, 30002, 5], [6])])
    assert tree.prompt_ids("r1").tolist() == [1, 220, 47, 30002, 5]
    assert tree.nodes[tree.by_call["r0"]].ids.tolist() == [393, 30002]
    assert tree.call_parents[tree.by_call["r1"]] == -1


@relaxed
@given(sessions())
def test_recorded_requests_keep_every_prompt(records):
    prompts = full_prompts(records)
    tree = from_requests(
        [RecordedRequest(np.array(prompts[r.call], np.int32), r.sampled_ids, r.logprobs) for r in records]
    )
    for record in records:
        name = f"r{record.ordinal}"
        assert tree.prompt_ids(name).tolist() == prompts[record.call]
        assert tree.nodes[tree.by_call[name]].ids.tolist() == record.sampled_ids.tolist()
    assert tree.counts().calls == len(records)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [((), "at least its root"), ((0, 2), "expected id 1"), ((0, 1), "expected id 1 and a parent before it")],
)
def test_nodes_that_are_no_tree_are_refused(nodes, message):
    made = [replace(grow(call(0, None, [1], [])).nodes[0], id=number, parent=-1) for number in nodes]
    with pytest.raises(ValueError, match=message):
        Tree(tuple(made))


def test_an_answer_without_log_probabilities_is_in_the_tree_and_not_trained():
    """As an endpoint gives it: what was said can be looked at, and nobody can train on it."""
    untold = call(1, 0, [3], [4, 5], logprobs=np.full(2, np.nan, np.float32))
    tree = grow(call(0, None, [1], [2]), untold, call(2, 1, [6], [7]))
    marks = {node.call: (node.trained, node.reason) for node in tree.calls()}
    assert marks == {"c0": (True, ""), "c1": (False, UNTOLD), "c2": (True, "")}
    _, report = apply(tree, 4)
    assert report.removed[UNTOLD].tokens == 2
