"""Sessions: exact tokens from call to call, whatever the harness does to the history."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scripted import LOOK, OTHER, full_ids, make_tokenizer

from actors.engines.base import Generated
from actors.rendering import Rendering
from actors.session import Session
from actors.session_contract import SessionSpec
from configs.proxy import ProxyConfig, SessionLimits
from envs.protocols import openai_chat
from envs.protocols.errors import WireError
from trees import forks
from trees.build import TreeBuilder
from trees.record import VersionSpan

SYSTEM = {"role": "system", "content": "You work on files through tools."}
ASK = {"role": "user", "content": "hello world"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "é",  "n": 1.0}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "look", "arguments": {"path": "b"}}\n</tool_call>'


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Client:
    """Speaks wire messages with a session whose engine says what the test gives."""

    def __init__(self, rendering, spec=None, config=None, context=4096, clock=None):
        self.rendering = rendering
        more = {"clock": clock} if clock else {}
        self.session = Session(spec or SessionSpec("e1"), rendering, config or ProxyConfig(), context, **more)

    def prepare(self, messages, tools=(LOOK,), **body):
        return self.session.prepare(openai_chat.parse({"messages": messages, "tools": list(tools), **body}, {}))

    def answer(self, prepared, text, finish="stop"):
        ids = self.rendering.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        logprobs = [-0.25] * len(ids)
        generated = Generated(ids, logprobs, finish, (VersionSpan(1, 0, len(ids)),), 2)
        reply, record = self.session.complete(prepared, generated)
        return openai_chat.dump(reply, prepared.plan.request)["choices"][0]["message"], record

    def call(self, messages, text, tools=(LOOK,), **body):
        prepared = self.prepare(messages, tools, **body)
        return *self.answer(prepared, text), prepared


@pytest.fixture
def client(rendering):
    return Client(rendering)


def tool(message, output, which=0):
    return {"role": "tool", "tool_call_id": message["tool_calls"][which]["id"], "content": output}


def untouched(message):
    return message


def white_space_cut(message):
    return {**message, "content": (message["content"] or "").strip()}


def reserialised(message):
    changed = json.loads(json.dumps(message))
    for call in changed["tool_calls"]:
        parsed = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(parsed.items())), separators=(",", ":"))
    return changed


def ids_renamed(message):
    changed = json.loads(json.dumps(message))
    for i, call in enumerate(changed["tool_calls"]):
        call["id"] = f"look_17{i}"
    return changed


def reasoning_dropped(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def all_of_it(message):
    return ids_renamed(reserialised(white_space_cut(reasoning_dropped(message))))


@pytest.mark.parametrize(
    "change", [untouched, white_space_cut, reserialised, ids_renamed, reasoning_dropped, all_of_it]
)
def test_history_changed_on_the_way_keeps_the_held_tokens(client, change):
    """Case M5, and M1 with the reasoning dropped."""
    message, first, asked = client.call([SYSTEM, ASK], "<think>\nhm \n</think>\n\nlooking \n" + CALL + "<|im_end|>")
    assert message["reasoning_content"]
    back = change(message)
    _, second, again = client.call([SYSTEM, ASK, back, tool(back, "out")], "done<|im_end|>")
    held = asked.generate.ids.tolist() + first.sampled_ids.tolist()
    assert again.generate.ids.tolist()[: len(held)] == held
    assert again.generate.ids.tolist() == held + second.prompt_ids.tolist()
    tail = "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert client.rendering.tokenizer.decode(again.plan.new) == tail
    assert (second.parent, second.fork, second.drift) == (first.call, "", 0)


def test_reasoning_then_user_is_one_chain(client):
    """Case M1: the template would drop the reasoning once a user speaks."""
    message, first, asked = client.call([ASK], "<think>R1</think>A1<|im_end|>")
    _, second, again = client.call([ASK, message, {"role": "user", "content": "more"}], "A2<|im_end|>")
    held = asked.generate.ids.tolist() + first.sampled_ids.tolist()
    assert again.generate.ids.tolist()[: len(held)] == held
    assert second.parent == first.call


def test_the_same_request_twice_gives_siblings(client):
    """Case M2: both under way at the same time."""
    one, two = client.prepare([SYSTEM, ASK]), client.prepare([SYSTEM, ASK])
    _, first = client.answer(one, "a<|im_end|>")
    _, second = client.answer(two, "b<|im_end|>")
    assert (first.parent, second.parent) == (None, None)
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    assert (first.fork, second.fork) == ("", forks.RETRY)
    assert len({first.call, second.call}) == 2


@pytest.mark.parametrize("change", [untouched, reserialised, "ids inside others", reasoning_dropped])
def test_answers_that_a_compaction_keeps_stay_as_they_were_sampled(client, change):
    """A history that is cut at its head extends nothing held; no answer of ours in it is encoded again."""
    odd = "<think>\nhm \n</think>\n\nlooking \n" + CALL.replace("é", "e") + "<|im_end|>"
    kept, first, _ = client.call([SYSTEM, ASK], odd)
    _, second, _ = client.call([SYSTEM, ASK, kept, tool(kept, "out")], "so  much \n<|im_end|>")
    if change == "ids inside others":
        back = ids_renamed(kept)
        back["tool_calls"][0]["id"] = f"call_{kept['tool_calls'][0]['id']}_fc_x"
    else:
        back = change(kept)
    summary = {"role": "user", "content": "Summary: nothing yet."}
    said = {"role": "assistant", "content": "so  much"}
    history = [SYSTEM, summary, back, tool(back, "out"), said, {"role": "user", "content": "go on"}]
    _, third, asked = client.call(history, "x<|im_end|>")
    assert third.parent is None
    ids = asked.generate.ids.tolist()
    for record in (first, second):
        sampled = record.sampled_ids.tolist()
        assert any(ids[i : i + len(sampled)] == sampled for i in range(len(ids)))
    whole = client.rendering.first(asked.plan.request.messages, asked.plan.request.tools)
    assert client.rendering.decode(whole) != client.rendering.decode(ids)


def test_results_are_read_in_the_order_of_the_calls(client):
    """As harnesses send them: in order of completion."""
    message, first, _ = client.call([SYSTEM, ASK], TWO + "<|im_end|>")
    late = [tool(message, "second", 1), tool(message, "first", 0)]
    _, second, asked = client.call([SYSTEM, ASK, message, *late], CALL + "<|im_end|>")
    text = client.rendering.tokenizer.decode(asked.plan.new)
    assert text.index("first") < text.index("second")
    foreign = [{**late[0], "tool_call_id": "x"}, late[1]]
    _, third, asked = client.call([SYSTEM, ASK, message, *foreign], "x<|im_end|>")
    assert "second" in client.rendering.tokenizer.decode(asked.plan.new).split("first")[0]
    assert (second.parent, third.parent) == (first.call, first.call)


def test_a_first_answer_that_was_dropped_leaves_the_main_line_main(client):
    """Claude Code writes into the task when the answer was empty: another conversation, the same agent."""
    client.call([SYSTEM, ASK], "<|im_end|>")
    _, second, _ = client.call([SYSTEM, {**ASK, "content": "hello world\n\n[no visible output]"}], "x<|im_end|>")
    assert (second.kind, second.fork) == ("main", forks.NEW_CONVERSATION)


def test_the_remnant_of_a_broken_answer_is_no_turn(client):
    """As OpenCode leaves it, when a stream breaks before anything was said: before the answer of its next try."""
    said = "looking \n" + CALL + "<|im_end|>"
    client.call([SYSTEM, ASK], said)
    message, second, _ = client.call([SYSTEM, ASK], said)
    remnant = {"role": "assistant", "content": " "}
    history = [SYSTEM, ASK, remnant, message, tool(message, "out")]
    message, third, _ = client.call(history, CALL + "<|im_end|>")
    _, fourth, _ = client.call([*history, message, tool(message, "out")], "x<|im_end|>")
    assert (third.parent, third.fork, fourth.parent, fourth.fork) == (second.call, "", third.call, "")


def test_an_empty_answer_of_ours_is_a_turn(client):
    """Where a harness asks again after an answer that said nothing."""
    message, first, _ = client.call([SYSTEM, ASK], "<|im_end|>")
    again, second, _ = client.call([SYSTEM, ASK, message], "more<|im_end|>")
    _, third, _ = client.call([SYSTEM, ASK, message, again, ASK], "x<|im_end|>")
    assert (second.parent, third.parent, third.fork) == (first.call, second.call, "")


def test_a_request_of_nothing_but_a_volatile_line_is_refused(client):
    with pytest.raises(WireError, match="expected a message"):
        client.prepare([{"role": "system", "content": "x-anthropic-billing-header: cc_version=1.67c;"}])


@pytest.mark.parametrize("tasks", [("one", "two"), ("one", "one")])
def test_parallel_sub_agents_are_no_retries_of_each_other(client, tasks):
    """Case M6: two sub-agents of one parent, also with the same task."""
    client.call([SYSTEM, ASK], TWO + "<|im_end|>")
    sub = {"role": "system", "content": "You are a sub-agent."}
    asked = []
    for i, task in enumerate(tasks):
        request = openai_chat.parse({"messages": [sub, {"role": "user", "content": task}], "tools": [LOOK]}, {})
        asked.append(client.session.prepare(replace(request, headers={"x-claude-code-agent-id": f"a{i}"})))
    records = [client.answer(prepared, "done<|im_end|>")[1] for prepared in asked]
    assert [record.kind for record in records] == ["subagent"] * 2
    assert not {record.fork for record in records} & {forks.RETRY, forks.REPLY_DROPPED}
    assert [record.parent for record in records] == [None, None]


def test_ambiguous_tokens_stay_as_they_were_sampled(client):
    """Case M7: two spellings of one text in ids; the next prompt holds the one that was sampled."""
    encode = client.rendering.tokenizer.encode
    whole = encode("hello world", add_special_tokens=False)
    apart = [i for letter in "hello world" for i in encode(letter, add_special_tokens=False)]
    assert client.rendering.decode(whole) == client.rendering.decode(apart)
    assert whole != apart
    stop = client.rendering.stop_ids[0]
    for ids in (whole, apart):
        fresh = Client(client.rendering)
        message, first, _ = fresh.call([ASK], [*ids, stop])
        _, _, again = fresh.call([ASK, message, {"role": "user", "content": "more"}], "x<|im_end|>")
        held = [*first.prompt_ids.tolist(), *ids, stop]
        assert again.generate.ids.tolist()[: len(held)] == held


def test_stop_sequences_end_the_tokens_where_an_engine_would(client):
    message, record, _ = client.call([ASK], "hello END world<|im_end|>", stop=["END"])
    assert message["content"].strip() == "hello"
    assert client.rendering.decode(record.sampled_ids.tolist()).endswith("END")
    assert (record.finish, len(record.logprobs)) == ("stop", len(record.sampled_ids))
    assert record.versions[-1].end == len(record.sampled_ids)
    _, second, _ = client.call([ASK, message, {"role": "user", "content": "more"}], "x<|im_end|>")
    assert (second.parent, second.fork, second.drift) == (record.call, "", 0)


def test_counting_changes_nothing_and_agrees_with_the_prompt(client):
    """Case P5, in every place of a conversation."""
    message, _, _ = client.call([SYSTEM, ASK], CALL + "<|im_end|>")
    history = [SYSTEM, ASK, message, tool(message, "out")]
    request = openai_chat.parse({"messages": history, "tools": [LOOK]}, {})
    counted = client.session.count(request)
    _, record, asked = client.call(history, "x<|im_end|>")
    assert counted == len(asked.generate.ids)
    assert (record.fork, record.ordinal) == ("", 1)


def test_rendered_histories_fork_where_the_template_differs(rendering):
    config = ProxyConfig(history="rendered")
    plain = Client(rendering, config=config)
    message, first, _ = plain.call([ASK], "fine<|im_end|>")
    _, second, again = plain.call([ASK, message, {"role": "user", "content": "more"}], "x<|im_end|>")
    assert (second.parent, second.fork) == (first.call, "")
    assert again.generate.ids.tolist() == rendering.first(again.plan.request.messages, again.plan.request.tools)
    odd = Client(rendering, config=config)
    message, _, _ = odd.call([ASK], " fine \n<|im_end|>")
    message["content"] = message["content"].strip()
    _, second, again = odd.call([ASK, message, {"role": "user", "content": "more"}], "x<|im_end|>")
    assert (second.parent, second.fork) == (None, forks.RENDERED_DIFFERENTLY)
    assert again.generate.ids.tolist() == rendering.first(again.plan.request.messages, again.plan.request.tools)


def test_changed_tools_begin_anew(client):
    """Case M3."""
    message, _, _ = client.call([SYSTEM, ASK], CALL + "<|im_end|>")
    _, second, again = client.call([SYSTEM, ASK, message, tool(message, "out")], "x<|im_end|>", [LOOK, OTHER])
    assert (second.parent, second.fork) == (None, forks.TOOLS_CHANGED)
    assert again.plan.new == again.generate.ids.tolist()
    assert client.session.summary().forks == {forks.TOOLS_CHANGED: 1}


def test_parallel_tool_calls_equal_a_whole_rendering(client):
    """Case M4: the sampled text is in the form that the template gives it, so the ids must be the same."""
    text = TWO.replace("é", "a").replace(",  ", ", ")
    message, _, _ = client.call([SYSTEM, ASK], text + "<|im_end|>")
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    history = [SYSTEM, ASK, message, tool(message, "A", 0), tool(message, "B", 1)]
    _, second, again = client.call(history, "done<|im_end|>")
    request = openai_chat.parse({"messages": history, "tools": [LOOK]}, {})
    assert second.parent is not None
    assert again.generate.ids.tolist() == client.rendering.first(request.messages, request.tools)


def test_tokens_that_are_not_the_canonical_encoding_are_kept(client):
    """Case M7: the same text as other tokens."""
    canonical = client.rendering.tokenizer.encode("hello<|im_end|>", add_special_tokens=False)
    bytewise = [client.rendering.tokenizer.convert_tokens_to_ids(c) for c in "hello"] + canonical[-1:]
    assert bytewise != canonical
    message, first, _ = client.call([ASK], bytewise)
    assert message["content"] == "hello"
    _, _, again = client.call([ASK, message, ASK], "x<|im_end|>")
    assert again.generate.ids.tolist()[: len(first.prompt_ids) + len(bytewise)] == first.prompt_ids.tolist() + bytewise


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{bad}\n</tool_call><|im_end|>",
        '<tool_call>\n{"name": "look", "arguments": {"path": "unterminated<|im_end|>',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call><|im_end|>',
        "<parameter=x>1</parameter><|im_end|>",
        "<think>never closed<|im_end|>",
    ],
)
def test_malformed_calls_stay_as_sampled_and_the_session_lives_on(client, text):
    """Case T1."""
    message, first, asked = client.call([SYSTEM, ASK], text)
    assert first.sampled_ids.tolist() == client.rendering.tokenizer.encode(text, add_special_tokens=False)
    tail = tool(message, "no such tool") if message.get("tool_calls") else {"role": "user", "content": "again"}
    assert "nobody" in text or not message.get("tool_calls")
    _, second, again = client.call([SYSTEM, ASK, message, tail], "ok<|im_end|>")
    assert second.parent == first.call
    held = asked.generate.ids.tolist() + first.sampled_ids.tolist()
    assert again.generate.ids.tolist()[: len(held)] == held


def test_a_cut_answer_is_continued_from_its_tokens(client):
    prepared = client.prepare([ASK], max_tokens=3)
    assert prepared.generate.max_tokens == 3
    message, first = client.answer(prepared, "hello wor", "length")
    assert (first.finish, first.clean) == ("length", False)
    _, second, again = client.call([ASK, message, ASK], "x<|im_end|>")
    assert second.parent == first.call
    assert again.plan.new[0] == client.rendering.stop_ids[0]


@pytest.mark.parametrize("rest", [[], [ASK, {"role": "assistant", "content": "ghost"}]])
def test_a_history_that_ends_with_an_answer_is_gone_on_with(client, rest):
    message, first, _ = client.call([ASK], "a<|im_end|>")
    _, second, asked = client.call([ASK, message, *rest], "x<|im_end|>")
    assert (second.parent, second.fork) == (first.call, "")
    assert client.rendering.tokenizer.decode(asked.plan.new).endswith(
        "<|im_end|>\n<|im_start|>assistant\n" if rest else "assistant\n"
    )


def test_records_make_the_tree_and_nothing_is_lost(client):
    message, _, _ = client.call([SYSTEM, ASK], CALL + "<|im_end|>")
    history = [SYSTEM, ASK, message, tool(message, "out")]
    client.call(history, "a<|im_end|>")
    _, last, asked = client.call(history, "b<|im_end|>")
    client.session.abandon(client.prepare(history))
    records = client.session.records
    assert [record.ordinal for record in records] == [0, 1, 2, 3]
    assert full_ids(records, last.call) == asked.generate.ids.tolist() + last.sampled_ids.tolist()
    builder = TreeBuilder("e1")
    for record in reversed(records):
        assert record.session == "e1"
        builder.add(record)
    assert not builder.missing(4)
    assert sum(len(node.ids) for node in builder.tree().nodes if node.sampled) == sum(
        len(record.sampled_ids) for record in records
    )


def test_what_an_abort_left_is_a_leaf_and_the_retry_its_sibling(client):
    """Case P8, also for the very first call."""
    prepared = client.prepare([SYSTEM, ASK])
    _, first = client.answer(prepared, "hello wor", "abort")
    _, second, _ = client.call([SYSTEM, ASK], "ok<|im_end|>")
    assert (first.finish, len(first.sampled_ids) > 0, first.clean) == ("abort", True, False)
    assert (second.parent, second.fork) == (None, forks.RETRY)


def test_the_training_setting_overrides_the_harness(rendering):
    client = Client(rendering, SessionSpec("e1", temperature=0.7, top_p=0.9, seed=5), ProxyConfig(max_tokens=50))
    _, record, asked = client.call([ASK], "x<|im_end|>", temperature=0.1, top_p=0.5, max_tokens=900)
    assert (asked.generate.temperature, asked.generate.top_p, asked.generate.max_tokens) == (0.7, 0.9, 50)
    assert record.temperature == 0.7
    assert (record.extra["harness_temperature"], record.extra["harness_top_p"]) == (0.1, 0.5)


def test_seeds_are_fixed_by_episode_and_ordinal(rendering):
    def seeds(seed):
        client = Client(rendering, SessionSpec("e1", seed=seed))
        return [client.prepare([ASK]).generate.seed for _ in range(3)]

    assert seeds(4) == seeds(4)
    assert len({*seeds(4), *seeds(5)}) == 6
    assert seeds(None) == [None] * 3


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (SessionLimits(calls=1), "calls"),
        (SessionLimits(tokens=100), "tokens"),
        (SessionLimits(wall_s=5), "wall_s"),
    ],
)
def test_limits_end_a_session(rendering, limits, name):
    now = [0.0]
    client = Client(rendering, SessionSpec("e1", limits=limits), clock=lambda: now[0])
    client.call([ASK], "x<|im_end|>", tools=())
    now[0] = 6.0
    long = {"role": "user", "content": "word " * 100}
    with pytest.raises(WireError) as caught:
        client.prepare([long], tools=())
    assert (caught.value.status, caught.value.code, caught.value.param) == (429, "limit_reached", name)
    assert client.session.summary().limit == name
    assert client.session.summary().calls == 1


def test_the_answer_is_bounded_by_the_tokens_left(rendering):
    client = Client(rendering, SessionSpec("e1", limits=SessionLimits(tokens=40)))
    prepared = client.prepare([ASK], tools=())
    assert prepared.generate.max_tokens == 40 - len(prepared.plan.new)


def test_concurrent_calls_are_bounded_and_forgiven(rendering):
    client = Client(rendering, SessionSpec("e1", limits=SessionLimits(concurrent=1)))
    first = client.prepare([ASK])
    with pytest.raises(WireError) as caught:
        client.prepare([ASK])
    assert (caught.value.param, caught.value.retry_after) == ("concurrent", 1.0)
    assert client.session.summary().limit == "concurrent"
    client.answer(first, "ok<|im_end|>")
    assert client.session.summary().limit == ""


def test_too_long_a_context_is_told_as_openai_does(rendering):
    client = Client(rendering, context=64)
    with pytest.raises(WireError, match="maximum context length is 64 tokens") as caught:
        client.prepare([{"role": "user", "content": "word " * 200}])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert client.session.summary().limit == "context"
    _, _, asked = client.call([ASK], "ok<|im_end|>", tools=())
    assert asked.generate.max_tokens == 64 - len(asked.generate.ids.tolist())
    assert client.session.summary().limit == ""


@pytest.mark.parametrize(
    ("text", "finish", "final", "clean"),
    [
        ("all done<|im_end|>", "stop", True, True),
        (CALL + "<|im_end|>", "stop", False, True),
        ("all do", "length", False, False),
        ("<tool_call>{bad}</tool_call><|im_end|>", "stop", False, False),
        ("<|im_end|>", "stop", False, True),
    ],
)
def test_the_summary_says_how_the_last_call_ended(client, text, finish, final, clean):
    client.answer(client.prepare([ASK]), text, finish)
    summary = client.session.summary()
    assert (summary.last_finish, summary.final_answer, summary.last_clean) == (finish, final, clean)
    assert summary.sampled_tokens == len(client.session.records[0].sampled_ids)
    assert summary.prompt_tokens == len(client.session.records[0].prompt_ids)


def test_records_have_the_declared_types(client):
    _, record, _ = client.call([ASK], "x<|im_end|>")
    types = (record.prompt_ids.dtype, record.sampled_ids.dtype, record.logprobs.dtype)
    assert types == (np.int32, np.int32, np.float32)
    assert record.versions == (VersionSpan(1, 0, len(record.sampled_ids)),)
    assert record.call.isalnum()
    assert len(record.call) <= 38
