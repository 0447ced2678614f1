import numpy as np
import pytest
from hypothesis import given
from tree_sessions import call, grow, relaxed, sessions

from trees.filters import apply
from trees.linearise import linearise
from trees.record import VersionSpan


def test_a_chain_is_one_path():
    spans = (VersionSpan(7, 0, 1), VersionSpan(8, 1, 2))
    logprobs = np.array([-0.1, -0.2], np.float32)
    tree = grow(
        call(0, None, [1, 2], [3, 4], versions=spans, logprobs=logprobs, temperature=0.6),
        call(1, 0, [5], [6], temperature=0.6),
    )
    (path,) = linearise(tree)
    assert path.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert path.loss_mask.tolist() == [False, False, True, True, False, True]
    assert path.versions.tolist() == [-1, -1, 7, 8, -1, 1]
    assert path.logprobs.tolist() == [0, 0, *logprobs.tolist(), 0, -0.25]
    assert path.temperature.tolist() == np.float32([1, 1, 0.6, 0.6, 1, 0.6]).tolist()
    dtypes = [getattr(path, name).dtype for name in ("ids", "loss_mask", "logprobs", "versions", "temperature")]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32, np.float32]


def test_a_shared_answer_is_trained_on_its_first_path_only():
    tree = grow(
        call(0, None, [1], [2]),
        call(1, 0, [3], [4]),
        call(2, 0, [5], [6]),
        call(3, None, [9], [8], kind="side"),
    )
    tree, _ = apply(tree, 4, drop_dead=False)
    first, second = linearise(tree)
    assert (first.ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 3, 4], [False, True, False, True])
    assert (second.ids.tolist(), second.loss_mask.tolist()) == ([1, 2, 5, 6], [False, False, False, True])
    assert second.logprobs[1] == first.logprobs[1] != 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_log_probabilities_are_those_at_temperature_one(temperature):
    (path,) = linearise(grow(call(0, None, [1], [2], temperature=temperature)))
    assert path.temperature.tolist() == [1.0, 1.0]


def test_an_empty_leaf_carries_the_answers_above_it_only_if_no_other_does():
    alone = grow(call(0, None, [1], [2]), call(1, 0, [3], []))
    assert [path.ids.tolist() for path in linearise(alone)] == [[1, 2, 3]]
    beside = grow(call(0, None, [1], [2]), call(1, 0, [3], [4]), call(2, 0, [5], []))
    assert [path.ids.tolist() for path in linearise(beside)] == [[1, 2, 3, 4]]


def test_nothing_trained_no_path():
    tree, _ = apply(grow(call(0, None, [1], [2], kind="side")), 4)
    assert linearise(tree) == []
    assert linearise(grow()) == []


@relaxed
@given(sessions())
def test_each_trained_token_is_masked_in_exactly_once(records):
    for tree in (grow(*records), apply(grow(*records), 3, ("main", "side"))[0]):
        seen: dict[tuple[int, int], int] = {}
        for path in linearise(tree):
            nodes = tree.path(path.leaf)
            places = [(node.id, at) for node in nodes for at in range(len(node))]
            assert path.ids.tolist() == tree.ids(path.leaf).tolist()
            assert path.loss_mask.any()
            for (node, at), masked in zip(places, path.loss_mask, strict=True):
                seen[node, at] = seen.get((node, at), 0) + bool(masked)
            for (node, at), logprob, version in zip(places, path.logprobs, path.versions, strict=True):
                origin = tree.nodes[node]
                covering = [span.version for span in origin.versions if span.start <= at < span.end]
                assert version == (covering[0] if origin.sampled else -1)
                assert logprob == (origin.logprobs[at] if origin.sampled else 0)
        wanted = {(node.id, at) for node in tree.nodes if node.trained for at in range(len(node))}
        assert {place for place, times in seen.items() if times} == wanted
        assert all(times == 1 for place, times in seen.items() if place in wanted)
