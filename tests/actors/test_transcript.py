"""What a session tells of what was said in it."""

import json

import pytest
from scripted import LOOK, make_tokenizer
from test_session import ASK, SYSTEM, Client, tool

from actors import transcript
from actors.journal import Journal
from actors.rendering import Rendering
from actors.session import Session
from actors.session_contract import SessionSpec
from actors.transcript import Transcript
from configs.proxy import ProxyConfig
from envs.protocols.canonical import Message, ToolCall

CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "reward/reward.sh"}}\n</tool_call>'


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lines(summary):
    return [json.loads(line) for line in summary.transcript.splitlines()]


def test_every_message_is_told_once_and_the_last_answer_is_the_final_message(rendering):
    client = Client(rendering, SessionSpec("e1", transcript=True))
    message, _, _ = client.call([SYSTEM, ASK], "<think>hm</think>looking" + CALL + "<|im_end|>")
    assert client.session.summary().final_message == ""
    client.call([SYSTEM, ASK, message, tool(message, "out")], " all done <|im_end|>")
    summary = client.session.summary()
    assert summary.final_message == "all done"
    assert summary.touched == ("reward/reward.sh",)
    told = lines(summary)
    assert [(line["call"], line["kind"], line["role"]) for line in told] == [
        (0, "main", "system"),
        (0, "main", "user"),
        (0, "main", "assistant"),
        (1, "main", "tool"),
        (1, "main", "assistant"),
    ]
    assert [line.get("text") for line in told] == [SYSTEM["content"], ASK["content"], "looking", "out", "all done"]
    assert told[2]["reasoning"] == "hm"
    (call,) = told[2]["tool_calls"]
    assert (call["name"], call["arguments"]) == ("look", {"path": "reward/reward.sh"})
    assert told[3]["tool_call_id"] == call["id"]


def test_an_answer_of_another_kind_is_no_final_message(rendering):
    client = Client(rendering, SessionSpec("e1", transcript=True))
    client.call([SYSTEM, ASK], "the answer<|im_end|>")
    title = [{"role": "system", "content": "Make a title."}, {"role": "user", "content": "Of what?"}]
    client.call(title, "a title<|im_end|>", tools=())
    summary = client.session.summary()
    assert summary.final_message == "the answer"
    assert [line["kind"] for line in lines(summary)] == ["main"] * 3 + ["side"] * 3


def test_no_transcript_is_kept_unless_it_was_asked_for(rendering):
    client = Client(rendering)
    client.call([SYSTEM, ASK], "done<|im_end|>")
    assert client.session.summary().transcript == ""


def test_a_session_that_another_replica_goes_on_with_says_that_the_words_are_lost(rendering, tmp_path):
    client = Client(rendering, SessionSpec("e1", transcript=True))
    _, _, prepared = client.call([SYSTEM, ASK], "done<|im_end|>")
    journal = Journal(tmp_path)
    journal.open(client.session.spec, client.session.key, 0.0)
    journal.append(client.session.key, client.session.entry(prepared))
    logged = journal.read(client.session.key)
    assert logged.spec == client.session.spec
    other = Session(logged.spec, rendering, ProxyConfig(), 4096, key=client.session.key)
    other.restore(logged, 1.0)
    assert (other.summary().transcript, other.summary().final_message) == (None, "done")


def test_silence_counts_from_the_end_of_the_last_call(rendering):
    now = [0.0]
    client = Client(rendering, clock=lambda: now[0])
    now[0] = 5.0
    assert client.session.since_call() == 5.0
    prepared = client.prepare([ASK], (LOOK,))
    now[0] = 50.0
    assert client.session.since_call() == 0.0
    client.answer(prepared, "done<|im_end|>")
    now[0] = 57.0
    assert client.session.since_call() == 7.0


def test_the_transcript_is_bounded_whatever_is_said(monkeypatch):
    monkeypatch.setattr(transcript, "MESSAGE_CHARACTERS", 100)
    told = Transcript(most=2000)
    huge = ToolCall("c", "look", {"path": "y" * 1000})
    for ordinal in range(50):
        told.add(ordinal, "main", [Message("user", "x" * 10_000), Message("assistant", "", "", (huge,))])
    text = told.text()
    assert len(text) < 2200
    left_out, *kept = map(json.loads, text.splitlines())
    assert left_out == {"left_out": 100 - len(kept)}
    assert kept[-1]["call"] == 49
    assert "characters left out" in kept[-1]["tool_calls"][0]["arguments"]
    assert kept[-2]["text"].startswith("x" * 50 + "\n[... 9900 characters left out")
