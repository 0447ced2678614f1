"""Indicators of behaviour, from trees alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import call, grow, relaxed, sessions

from algos.behaviour import Indicators, Turn, indicators, is_error, total, turns

FAILED, FINE = "[exit code 2]", "3 lines"


def episode(*pairs: tuple[str, str]) -> Indicators:
    return indicators([Turn(said, heard, clean=True) for said, heard in pairs])


def test_a_failing_call_that_is_made_again_is_repeated_and_one_that_is_mended_is_recovered():
    found = episode(("cat a", FAILED), ("cat a", FAILED), ("cat b", FINE), ("done", ""))
    assert (found.replies, found.answered, found.failing) == (4, 3, 2)
    assert (found.repeated, found.recovered, found.given_up) == (1, 1, 0)
    shares = {"malformed": 0, "failing": 2 / 3, "repeated": 0.5, "recovered": 0.5, "reread": 0, "given_up": 0}
    assert found.shares() == shares


def test_an_episode_that_ends_on_an_error_has_given_up():
    assert episode(("cat a", FAILED), ("done", "")).given_up == 1
    assert episode(("cat a", FAILED), ("cat b", FINE), ("done", "")).given_up == 0


def test_a_call_is_read_again_only_where_it_was_answered_alike():
    assert episode(("cat a", "1"), ("cat a", "1"), ("cat a", "2")).reread == 1


def test_what_there_was_none_of_has_no_share():
    assert Indicators().shares() == {}
    assert set(episode(("done", "")).shares()) == {"malformed", "given_up"}


@pytest.mark.parametrize(
    "heard",
    [
        *("x\n[exit code 1]", "Exit code 127", "<returncode>\nexit status 2", "Traceback (most recent call last):\n"),
        *("bash: foo: command not found", "sh: 1: foo: not found", "cat: a: No such file or directory"),
        *("<tool_use_error>x", "[timed out after 10 s]", "Error: nope", "fatal: not a git repository"),
    ],
)
def test_errors_of_common_shells_and_harnesses_are_known(heard: str):
    assert is_error(heard)


@pytest.mark.parametrize("heard", ["", "exit code 0", "[exit code 0]", "no errors", "0 errors found", "terror: 3"])
def test_what_only_speaks_of_errors_is_none(heard: str):
    assert not is_error(heard)


def test_the_turns_are_those_of_the_main_line_and_a_superseded_answer_is_none_of_them():
    tree = grow(
        call(0, None, [1], [2], finish="abort", clean=False),
        call(1, None, [1], [3]),
        call(2, 1, [4, 5], [6]),
        call(3, None, [9], [9], kind="side"),
        call(4, 2, [7], [8], clean=False),
    )
    found = turns(tree, lambda ids: " ".join(map(str, ids)))
    assert found == [Turn("3", "4 5", True), Turn("6", "7", True), Turn("8", "", False)]


@relaxed
@given(sessions(), st.data())
def test_counts_of_any_tree_fit_into_each_other(records, data):
    tree = grow(*records)
    words = data.draw(st.dictionaries(st.integers(0, 2), st.sampled_from(["a", FAILED])))
    found = indicators(turns(tree, lambda ids: " ".join(words.get(int(token), "b") for token in ids)))
    assert found.repeated <= found.failing <= found.answered <= found.replies <= len(tree.calls())
    assert found.recovered + found.given_up <= found.failing
    assert found.reread <= found.answered - found.failing
    assert all(0 <= share <= 1 for share in found.shares().values())
    assert total([found, found]).shares() == found.shares()
