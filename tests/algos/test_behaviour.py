import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import call, grow, relaxed, sessions

from algos.behaviour import (
    MEANINGS,
    WORKFLOW,
    Call,
    Rate,
    Stage,
    Step,
    failed,
    indicators,
    pooled,
    skipped_stages,
    steps,
    steps_of_transcript,
)
from trees import filters

OK, BAD = "fine\n", "cat: x: No such file or directory\n[exit code 1]"


class Table:
    """Words by token: an answer is (text, calls) under its first id, a result is a text under its own."""

    def __init__(self, said=(), heard=()):
        self._said, self._heard = dict(said), dict(heard)

    def said(self, ids):
        return self._said.get(ids[0] if ids else None, ("", ()))

    def heard(self, ids):
        return [self._heard[token] for token in ids if token in self._heard]


def bash(command, result=OK):
    return Step("", (Call("bash", json.dumps({"command": command}), result),), True)


def rates(*episode):
    return {name: (rate.count, rate.of) for name, rate in indicators(episode).items()}


DONE = Step("Done.", (), True)


def test_a_clean_episode_has_nothing_against_it():
    found = rates(bash("cat a"), bash("echo x > b"), DONE)
    assert found["malformed"] == (0, 3)
    assert found["failing"] == (0, 2)
    assert found["repeated_failing"] == (0, 0)
    assert found["recovered"] == (0, 0)
    assert found["reread"] == (0, 2)
    assert found["skipped_steps"] == (0, 3)


def test_a_failing_call_that_is_made_again_and_one_that_is_changed():
    assert rates(bash("cat x", BAD), bash("cat x", BAD), bash("cat x", BAD))["repeated_failing"] == (2, 3)
    assert rates(bash("cat x", BAD), bash("cat y", BAD))["repeated_failing"] == (0, 2)
    # Between the two something changed, so that trying again is sensible.
    assert rates(bash("cat x", BAD), bash("echo 1 > x"), bash("cat x", BAD))["repeated_failing"] == (0, 2)
    assert rates(bash("cat x", BAD), bash("cat y", BAD), bash("cat x", BAD))["repeated_failing"] == (1, 3)


def test_recovery_is_told_for_each_run_of_failures():
    assert rates(bash("a", BAD), bash("b", BAD), bash("c"), bash("d", BAD))["recovered"] == (1, 2)
    assert rates(bash("a"), bash("b"))["recovered"] == (0, 0)


def test_reading_again_what_says_the_same_and_what_does_not():
    assert rates(bash("cat a", "1"), bash("cat a", "1"))["reread"] == (1, 2)
    assert rates(bash("cat a", "1"), bash("cat a", "2"))["reread"] == (0, 2)
    # A command that prints nothing tells nothing.
    assert rates(bash("mkdir -p a", ""), bash("mkdir -p a", ""))["reread"] == (0, 2)


LETTERS = (*(Stage(name, name) for name in "abc"), Stage("answer", None), Stage("b again", "b"))


def slow_skipped(episode, workflow):
    """Every choice of stages, the largest first, of equal ones that which skips the earliest."""
    acts = [act for step in episode for act in ([f"{c.name} {c.arguments}" for c in step.calls] or [None])]
    for size in range(len(workflow), -1, -1):
        for chosen in sorted(itertools.combinations(range(len(workflow)), size), reverse=True):
            places = itertools.combinations_with_replacement(range(len(acts)), size)
            if any(all(_is(acts[at], workflow[s]) for at, s in zip(p, chosen, strict=True)) for p in places):
                return [stage for number, stage in enumerate(workflow) if number not in chosen]
    return None


def _is(act, stage):
    return act is None if stage.pattern is None else act is not None and stage.pattern in act


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "c", "ab", "x"]), max_size=2), max_size=4), st.permutations(LETTERS)
)
def test_skipped_stages_are_those_of_the_slow_reference(drawn, workflow):
    episode = [Step("", tuple(Call(name, "") for name in names), True) for names in drawn]
    assert skipped_stages(episode, workflow) == slow_skipped(episode, workflow)


def test_a_workflow_of_many_stages_takes_no_time():
    workflow = [Stage(str(number), f"tool{number}x") for number in range(40)]
    episode = [Step("", (Call(f"tool{number}x", ""),), True) for number in range(0, 40, 2)]
    assert [stage.name for stage in skipped_stages(episode, workflow)] == [str(n) for n in range(1, 40, 2)]


@pytest.mark.parametrize(
    ("episode", "skipped"),
    [
        ([bash("cat a"), bash("mv a b"), DONE], []),
        ([bash("mv a b"), DONE], ["look"]),
        ([bash("mv a b"), bash("cat b"), DONE], ["look"]),
        ([bash("cat a > b"), DONE], []),
        ([bash("cat a"), DONE], ["act"]),
        ([DONE], ["look", "act"]),
        ([bash("cat a"), bash("mv a b")], ["answer"]),
        ([], ["look", "act", "answer"]),
    ],
)
def test_stages_of_the_workflow_that_were_skipped(episode, skipped):
    assert [stage.name for stage in skipped_stages(episode, WORKFLOW)] == skipped


def test_ones_own_workflow_takes_the_place_of_the_usual_one():
    plan = (Stage("plan", "todo"), Stage("answer", None))
    found = indicators([bash("cat a"), DONE], plan)
    assert (found["skipped: plan"], found["skipped: answer"]) == (Rate(1, 1), Rate(0, 1))
    assert "skipped: look" not in found


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=12))
def test_every_rate_is_a_share(drawn):
    for rate in indicators([bash(name, BAD if bad else OK) for name, bad in drawn]).values():
        assert 0 <= rate.count <= rate.of


def test_rates_are_pooled_by_their_chances_and_of_no_chance_there_is_none():
    total = pooled([{"x": Rate(1, 1)}, {"x": Rate(0, 9)}, {"y": Rate(0, 0)}])
    assert total["x"].value == 0.1
    assert total["y"].value is None
    assert indicators([])["malformed"].value is None


def test_every_indicator_is_told_in_words():
    assert MEANINGS.keys() == {name for name in indicators([DONE]) if not name.startswith("skipped: ")}


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("[exit code 1]", True),
        ("[timed out after 10 s]", True),
        ("Traceback (most recent call last):", True),
        ("<tool_use_error>no such tool</tool_use_error>", True),
        ("bash: foo: command not found", True),
        ("Error: the file is not there", True),
        ("ValueError: no", True),
        ("Exit code 2\nls: cannot access", True),
        ("no errors were found", False),
        ("exit code 0", False),
        ("willow\n", False),
        ("", False),
    ],
)
def test_what_reads_like_a_failure(text, bad):
    assert failed(text) is bad


def tree_of(*records):
    tree = grow(*records)
    return filters.apply(tree, max_leaves=16)[0]


def test_steps_of_a_tree_have_their_results_and_neither_retries_nor_other_lines():
    records = [
        call(0, None, [1], [50]),
        call(1, 0, [90, 7], [51]),
        call(2, 0, [90, 7], [59], finish="abort"),
        call(3, None, [2], [58], kind="side"),
        call(4, 1, [91], [52], clean=False),
    ]
    said = {
        50: ("", [("bash", {"command": "cat a"})]),
        51: ("", [("bash", '{"command": "cat  b"}'), ("bash", {"command": "ls"})]),
        52: ("Done.", ()),
        58: ("title", ()),
        59: ("lost", ()),
    }
    found = steps(tree_of(*records), Table(said, {90: "A", 91: "B"}))
    assert [step.text for step in found] == ["", "", "Done."]
    assert [[c.result for c in step.calls] for step in found] == [["A"], ["B", None], []]
    assert [step.clean for step in found] == [True, True, False]


def test_steps_do_not_depend_on_what_a_filter_took_out():
    records = [call(i, i - 1 if i else None, [1], [50 + i]) for i in range(3)]
    dropped = filters.apply(grow(*records), max_leaves=1, train_kinds=["side"])[0]
    assert len(steps(dropped, Table())) == 3


@relaxed
@given(sessions())
def test_any_tree_has_steps_and_rates(records):
    found = steps(grow(*records), Table())
    main = [record for record in records if record.kind in ("main", "after-compaction") and record.finish != "abort"]
    assert len(found) <= len(main)
    assert all(rate.count <= rate.of for rate in indicators(found).values())


def test_a_transcript_gives_the_steps_that_its_tree_gives():
    lines = [
        {"call": 0, "kind": "main", "role": "user", "text": "do it"},
        {"call": 0, "kind": "main", "role": "assistant", "tool_calls": [asked("1", {"command": "cat a"})]},
        {"call": 1, "kind": "side", "role": "assistant", "text": "a title"},
        {"call": 2, "kind": "main", "role": "tool", "text": "A", "tool_call_id": "1"},
        {"call": 2, "kind": "main", "role": "assistant", "tool_calls": [asked("2", '{"comm')]},
        {"call": 3, "kind": "main", "role": "tool", "tool_call_id": "2"},
        {"call": 3, "kind": "main", "role": "assistant", "text": "Done."},
        {"left_out": 3},
    ]
    found = steps_of_transcript(lines)
    assert [step.calls for step in found] == [
        (Call("bash", '{"command":"cat a"}', "A"),),
        (Call("bash", '{"comm', ""),),
        (),
    ]
    assert [step.clean for step in found] == [True, False, True]
    assert list(itertools.chain(*(step.text for step in found))) == list("Done.")


def asked(name, arguments):
    return {"id": name, "name": "bash", "arguments": arguments}
