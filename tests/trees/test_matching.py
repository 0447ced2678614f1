import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import relaxed

from trees import forks
from trees.build import TreeBuilder
from trees.filters import dead_leaves
from trees.matching import Match, PrefixKey, SessionIndex, Turn
from trees.record import CallRecord, VersionSpan

MAIN = PrefixKey("system", "tools")
ARGUMENTS = {"path": "été.txt", "content": "x = 1"}


def user(text):
    return Turn.of("user", text)


def tool(text):
    return Turn.of("tool", text)


def said(text="", reasoning="", arguments=None, ids=()):
    calls = [] if arguments is None else [("edit", arguments)]
    return Turn.of("assistant", text, reasoning, calls, ids)


@dataclass
class Proxy:
    """What the proxy does with the index, with one token for each turn that is rendered."""

    index: SessionIndex = field(default_factory=SessionIndex)
    builder: TreeBuilder = field(default_factory=lambda: TreeBuilder("s"))
    turns: dict[str, Turn] = field(default_factory=dict)
    sampled: dict[str, list[int]] = field(default_factory=dict)

    def ask(self, turns, reply, prefix=MAIN, **fields) -> tuple[str, Match]:
        """A call with its answer; ``reply`` is told the id of its call."""
        match = self.index.match(turns, prefix)
        n = len(self.sampled)
        call = f"c{n:03d}x"
        answer = reply(call) if callable(reply) else reply
        self.index.add(call, match.parent, turns, answer, prefix)
        ids = [] if answer is None else [1000 + n, 2000 + n]
        self.sampled[call] = ids
        rendered = [int(turn.key[:6], 16) for turn in turns[match.n_matched_turns :]]
        record = CallRecord(
            session="s",
            call=call,
            parent=match.parent,
            ordinal=n,
            prompt_ids=np.array(rendered, np.int32),
            sampled_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=(VersionSpan(0, 0, len(ids)),) if ids else (),
            temperature=1.0,
            finish="stop" if ids else "abort",
            fork=match.reason,
            **fields,
        )
        self.builder.add(record)
        return call, match

    def path(self, call) -> list[int]:
        tree = self.builder.tree()
        return tree.ids(tree.by_call[call]).tolist()

    def trained(self) -> set[str]:
        return {node.call for node in dead_leaves(self.builder.tree())[0].nodes if node.trained}


def minted(text="", reasoning="", arguments=ARGUMENTS):
    return lambda call: said(text, reasoning, arguments, [f"{call}t0"])


def test_a_conversation_that_only_grows_is_one_chain():
    proxy = Proxy()
    history = [user("task")]
    parent = None
    for turn in range(5):
        call, match = proxy.ask(history, minted(f"step {turn}"))
        assert match == Match(parent, 2 * turn if parent else 0, "", 0)
        history = [*history, said(f"step {turn}", "", ARGUMENTS, [f"{call}t0"]), tool(f"result {turn}")]
        parent = call
    assert proxy.builder.tree().counts().leaves == 1


def test_m1_reasoning_left_out_of_the_history_is_one_chain_without_drift():
    proxy = Proxy()
    first, _ = proxy.ask([user("U1")], said("A1", "R1 is long"))
    for replay in (said("A1"), said("A1", "R1 is long"), said("A1 ", " R1 is long\n")):
        assert proxy.index.match([user("U1"), replay, user("U2")], MAIN) == Match(first, 2, "", 0)


def test_reasoning_left_out_of_the_history_matches_by_meaning_whatever_comes_after():
    proxy = Proxy()
    first, _ = proxy.ask([user("U1")], said("A1", "R1"))
    proxy.ask([user("U1"), said("A1", "R1"), user("U2")], said("A2", "R2"))
    match = proxy.index.match([user("U1"), said("A1"), user("another U2")], MAIN)
    assert (match.parent, match.drift) == (first, 0)


def test_reasoning_left_out_is_not_counted_as_drift_of_an_altered_reply():
    proxy = Proxy()
    call, _ = proxy.ask([user("task")], minted("abc", "R" * 50))
    for reasoning, drift in (("", 1), ("R" * 48, 3)):
        replay = said("ab", reasoning, ARGUMENTS, [f"{call}t0"])
        assert proxy.index.match([user("task"), replay, tool("r")], MAIN) == Match(call, 2, "", drift)


def test_m2_the_same_first_request_twice():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], said("a"))
    second, match = proxy.ask([user("task")], said("b"))
    assert match == Match(None, 0, forks.RETRY, 0)
    tree = proxy.builder.tree()
    leaves = {leaf.call: leaf.parent for leaf in tree.leaves()}
    assert set(leaves) == {first, second}
    assert len(set(leaves.values())) == 1
    assert proxy.trained() == {second}


def test_m2_a_retry_deep_in_a_line_and_after_an_abort():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], minted("a"))
    history = [user("task"), said("a", "", ARGUMENTS, [f"{first}t0"]), tool("r")]
    proxy.ask(history, None)
    third, match = proxy.ask(history, said("done"))
    assert (match.parent, match.reason) == (first, forks.RETRY)
    assert proxy.trained() == {first, third}


def test_a_retry_while_the_first_is_still_under_way():
    index = SessionIndex()
    index.add("a", None, [user("task")], None, MAIN)
    assert index.match([user("task")], MAIN) == Match(None, 0, forks.RETRY, 0)
    assert index.match([user("task"), said("x"), tool("r")], MAIN).parent is None
    index.answer("a", said("x"))
    assert index.match([user("task"), said("x"), tool("r")], MAIN) == Match("a", 2, "", 0)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (PrefixKey("system", "other"), forks.TOOLS_CHANGED),
        (PrefixKey("other", "tools"), forks.SYSTEM_CHANGED),
        (PrefixKey("other", "other"), forks.SYSTEM_AND_TOOLS_CHANGED),
    ],
)
def test_m3_another_prefix_is_a_new_root_with_its_reason(prefix, reason):
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], said("a"))
    history = [user("task"), said("a"), user("more")]
    second, match = proxy.ask(history, said("b"), prefix)
    assert match == Match(None, 0, reason, 0)
    third, match = proxy.ask([*history, said("b"), user("still more")], said("c"), prefix)
    assert match == Match(second, 4, "", 0)
    assert proxy.trained() == {first, second, third}
    assert proxy.index.match([user("other")], PrefixKey("x", "y")).reason == forks.NEW_CONVERSATION


@pytest.mark.parametrize(
    "arguments",
    [
        '{"content":"x = 1","path":"\\u00e9t\\u00e9.txt"}',
        '{ "path" : "été.txt",  "content": "x = 1" }',
        dict(reversed(ARGUMENTS.items())),
    ],
)
@pytest.mark.parametrize("ids", ["kept", "renamed", "none"])
def test_m5_a_turn_replayed_in_other_clothes_is_one_chain_without_drift(arguments, ids):
    proxy = Proxy()
    call, _ = proxy.ask([user("task")], minted("I write.  \n", "R"))
    replay = said("I write.", "R", arguments, {"kept": [f"{call}t0"], "renamed": ["edit_17_0"], "none": []}[ids])
    assert proxy.index.match([user("task"), replay, tool("ok")], MAIN) == Match(call, 2, "", 0)


def test_m6_parallel_subagents_are_not_retries_of_each_other():
    proxy = Proxy()
    parent, _ = proxy.ask([user("task")], minted("delegate"))
    sub = PrefixKey("sub system", "sub tools")
    one, match_one = proxy.ask([user("count a")], minted("a"), sub, kind="subagent")
    two, match_two = proxy.ask([user("count b")], minted("b"), sub, kind="subagent")
    assert (match_one.reason, match_two.reason) == (forks.NEW_CONVERSATION,) * 2
    twin, match_twin = proxy.ask([user("count b")], minted("b"), sub, kind="subagent")
    assert match_twin.parent is None
    own, match = proxy.ask(
        [user("count a"), said("a", "", ARGUMENTS, [f"{one}t0"]), tool("3")], said("3"), sub, kind="subagent"
    )
    assert (match.parent, match.reason) == (one, "")
    assert proxy.trained() == {parent, one, two, twin, own}


def test_identity_outranks_meaning_among_equal_replies():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], minted("same"))
    second, _ = proxy.ask([user("task")], minted("same"))
    for call in (first, second):
        replay = said("same", "", ARGUMENTS, [f"{call}t0"])
        assert proxy.index.match([user("task"), replay, tool("r")], MAIN).parent == call
    anonymous = proxy.index.match([user("task"), said("same", "", ARGUMENTS), tool("r")], MAIN)
    assert anonymous.parent == second


def test_of_equal_replies_the_one_whose_line_goes_on_is_taken():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], said("same"))
    history = [user("task"), said("same"), user("more")]
    proxy.ask(history, said("b"))
    proxy.ask([user("task")], said("same"))
    assert proxy.index.match(history, MAIN) == Match(first, 2, forks.RETRY, 0)


def test_an_altered_reply_with_our_id_keeps_the_held_tokens_and_is_measured():
    proxy = Proxy()
    call, _ = proxy.ask([user("task")], minted("", "", {"command": "cd /w && ls"}))
    history = [user("task"), said("", "", {"command": "ls"}, [f"{call}t0"]), tool("a.txt")]
    second, match = proxy.ask(history, minted("b"))
    assert match == Match(call, 2, "", len("cd /w && "))
    history = [*history, said("b", "", ARGUMENTS, [f"{second}t0"]), tool("ok")]
    assert proxy.index.match(history, MAIN) == Match(second, 4, "", len("cd /w && "))
    assert proxy.path(second)[1:3] == proxy.sampled[call]


@pytest.mark.parametrize(("max_drift", "parent"), [(9, "c000x"), (8, None)])
def test_beyond_max_drift_it_is_an_edit_of_history(max_drift, parent):
    proxy = Proxy(SessionIndex(max_drift=max_drift))
    call, _ = proxy.ask([user("task")], minted("", "", {"command": "cd /w && ls"}))
    history = [user("task"), said("", "", {"command": "ls"}, [f"{call}t0"]), tool("a.txt")]
    second, match = proxy.ask(history, said("done"))
    assert match.parent == parent
    if parent is None:
        assert match.reason == forks.HISTORY_EDITED
        assert match.detail == "turn 1 (assistant) differs by 9 characters; at most 8 are taken"
        third, match = proxy.ask([*history, said("done"), user("more")], said("ok"))
        assert match == Match(second, 4, "", 0)
        assert proxy.trained() == {call, second, third}


def test_a_reply_without_ids_is_recognised_by_its_place():
    proxy = Proxy()
    call, _ = proxy.ask([user("task")], said("I will now list the files."))
    history = [user("task"), said("I will list the files."), user("go on")]
    second, match = proxy.ask(history, said("b"))
    assert match == Match(call, 2, "", len("now "))
    assert proxy.index.match([*history, said("b"), user("x")], MAIN).parent == second


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ([user("task"), said("I will list the files."), user("other")], "the turn after it changed as well"),
        ([user("Task"), said("I will list the files."), user("go on")], "the turn before it changed as well"),
        ([user("task"), said("Something else entirely"), user("go on")], "it has little in common"),
        ([user("task"), tool("I will now list the files."), user("go on")], "it is not an assistant's"),
    ],
)
def test_place_needs_unchanged_neighbours_and_likeness(turns, why):
    proxy = Proxy()
    proxy.ask([user("task")], said("I will now list the files."))
    proxy.ask([user("task"), said("I will now list the files."), user("go on")], said("b"))
    assert proxy.index.match(turns, MAIN).parent is None, why


def test_a_reply_that_names_another_call_is_not_recognised_by_its_place():
    proxy = Proxy()
    proxy.ask([user("task")], said("I will now list the files."))
    other, _ = proxy.ask([user("something else")], minted("I will list the files.", arguments=None))
    replay = said("I will list the files.")
    assert proxy.index.match([user("task"), replay], MAIN).parent == "c000x"
    assert proxy.index.match([user("task"), replace(replay, call_ids=(f"{other}t0",))], MAIN).parent is None


def test_short_answers_are_not_taken_for_each_other():
    proxy = Proxy()
    proxy.ask([user("task")], said("yes"))
    assert proxy.index.match([user("task"), said("no"), user("why?")], MAIN).parent is None


def test_a_deleted_turn_with_an_error_text_goes_on_from_before_it():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], minted("ok"))
    history = [user("task"), said("ok", "", ARGUMENTS, [f"{first}t0"]), tool("r")]
    proxy.ask(history, said("no tool call"))
    third, match = proxy.ask([*history, user("format error")], minted("better"))
    assert (match.parent, match.reason) == (first, forks.REPLY_DROPPED)
    assert proxy.trained() == {first, third}


def test_a_deleted_first_turn():
    proxy = Proxy()
    proxy.ask([user("task")], said("no tool call"))
    second, match = proxy.ask([user("task"), user("format error")], said("better"))
    assert (match.parent, match.reason) == (None, forks.REPLY_DROPPED)
    assert proxy.trained() == {second}


def test_a_message_that_wanders_to_the_end_forks_every_turn_and_kills_none():
    proxy = Proxy()
    calls = []
    history = [user("task")]
    for turn in range(3):
        call, match = proxy.ask([*history, user("context")], minted(str(turn)))
        calls.append(call)
        assert match.reason == ("" if turn == 0 else forks.HISTORY_EDITED)
        history = [*history, said(str(turn), "", ARGUMENTS, [f"{call}t0"]), tool(f"r{turn}")]
    assert proxy.trained() == set(calls)


def test_a_truncated_observation_forks_and_the_line_goes_on_from_the_fork():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], minted("a"))
    long = [user("task"), said("a", "", ARGUMENTS, [f"{first}t0"]), tool("long " * 99)]
    second, _ = proxy.ask(long, minted("b"))
    short = [*long[:2], tool("(cut)"), said("b", "", ARGUMENTS, [f"{second}t0"]), tool("r")]
    third, match = proxy.ask(short, minted("c"))
    assert (match.parent, match.n_matched_turns, match.reason) == (first, 2, forks.HISTORY_EDITED)
    assert match.detail == "turn 2 (tool) is not the one held"
    fourth, match = proxy.ask([*short, said("c", "", ARGUMENTS, [f"{third}t0"]), tool("r")], said("d"))
    assert (match.parent, match.reason) == (third, "")
    assert proxy.trained() == {first, second, third, fourth}


def test_another_task_under_the_same_prefix_is_a_new_conversation():
    proxy = Proxy()
    first, _ = proxy.ask([user("environment"), user("task")], said("a"))
    second, match = proxy.ask([user("environment"), user("title?")], said("b"))
    assert match == Match(None, 0, forks.NEW_CONVERSATION, 0, "turn 1 (user) is not the one held")
    assert proxy.trained() == {first, second}


def test_a_compaction_prompt_extends_the_main_line():
    proxy = Proxy()
    first, _ = proxy.ask([user("task")], said("a"))
    assert proxy.index.match([user("task"), said("a"), user("Summarise.")], MAIN) == Match(first, 2, "", 0)


def test_what_the_index_refuses():
    index = SessionIndex()
    index.add("a", None, [user("t")], said("x", "", {}, ["at0"]), MAIN)
    with pytest.raises(ValueError, match="call a is already held"):
        index.add("a", None, [user("t")], None, MAIN)
    with pytest.raises(ValueError, match="parent b is not held"):
        index.add("c", "b", [user("t")], None, MAIN)
    with pytest.raises(ValueError, match="got 1 turns, expected at least the 2 of parent a"):
        index.add("c", "a", [user("t")], None, MAIN)
    with pytest.raises(ValueError, match="tool-call id at0 of call d already names call a"):
        index.add("d", None, [user("t")], said("x", "", {}, ["at0"]), MAIN)


WORDS = st.sampled_from(["ls", "cat a", "é", ""])


@relaxed
@given(st.data())
def test_whatever_a_harness_does_the_prompt_is_held_ids_and_new_turns(data):
    """A harness that goes on from, rewinds to and disguises any earlier state of its history."""
    proxy = Proxy()
    states: list[tuple[list[Turn], str | None]] = [([], None)]
    expected: dict[str, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 10))):
        history, parent = data.draw(st.sampled_from(states))
        turns = [*history, user(data.draw(WORDS)), *([tool(data.draw(WORDS))] * data.draw(st.integers(0, 1)))]
        text, arguments = data.draw(WORDS), {"b": data.draw(WORDS), "a": 1}
        call, match = proxy.ask(turns, minted(text, "thought", arguments))
        assert match.parent == parent
        assert match.n_matched_turns == len(history)
        assert match.drift == 0
        held = expected[parent] if parent else []
        rendered = [int(turn.key[:6], 16) for turn in turns[len(history) :]]
        expected[call] = held + rendered + proxy.sampled[call]
        thought = data.draw(st.sampled_from(["", "thought", " thought\n"]))
        replay = data.draw(st.sampled_from([arguments, f'{{"a": 1.0, "b": "{arguments["b"]}" }}']))
        states.append(([*turns, said(text + " ", thought, replay, [f"{call}t0"])], call))
    for call, ids in expected.items():
        assert proxy.path(call) == ids


def test_long_sessions_stay_quick_to_match():
    proxy = Proxy()
    history = [user("task")]
    for turn in range(300):
        call, match = proxy.ask(history, minted(f"{turn}", "", {"content": "x" * 2000 + "  "}))
        assert match.reason == ""
        replay = said(f"{turn}", "", {"content": "x" * 2000}, [f"{call}t0"])
        history = [*history, replay, tool("r" * 2000)]
    assert proxy.index.match(history, MAIN).drift == 600
    assert proxy.index.match([replace(turn) for turn in history], MAIN).n_matched_turns == 600


def test_lines_that_repeat_without_end_are_not_compared_pair_by_pair():
    index = SessionIndex()
    index.add("a", None, [user("u")], said("x" + "\nz" * 20_000 + "\nx"), MAIN)
    began = time.process_time()
    for altered in ("y" + "\nz" * 20_000 + "\ny", "y" + "\nz" * 400_000):
        assert index.match([user("u"), said(altered), user("v")], MAIN).reason == forks.REPLY_DROPPED
    assert time.process_time() - began < 2
