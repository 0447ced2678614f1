"""A session goes on from its log, on another replica, as if nothing had happened."""

import itertools
import json
import os

import numpy as np
import pytest
from scripted import LOOK, ListSink, ScriptedEngine, full_ids, make_tokenizer

from actors.dispatch import Dispatcher
from actors.journal import Journal, _pack
from actors.rendering import Rendering
from actors.session_contract import SessionSpec
from actors.session_key import new_key, route
from configs.proxy import ProxyConfig, SessionLimits
from envs.protocols.canonical import Message, Request, ToolCall
from envs.protocols.errors import WireError
from trees.build import TreeBuilder

ASK = Message("user", "hello world")
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def rendering(tmp_path_factory):
    return Rendering(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def replica(rendering, tmp_path):
    def make(*script, **config):
        engine = ScriptedEngine(rendering.tokenizer, list(script))
        made = Dispatcher(
            ProxyConfig(abort_wait_s=1, **config), rendering, engine, ListSink(), 4096, Journal(tmp_path / "calls")
        )
        made.engine = engine
        return made

    return make


async def ask(replica, key, *messages, **more):
    running = await replica.start(replica.find(key), Request("policy", messages, (LOOK,), **more))
    return await running.task


def goes_on(reply):
    return reply.message, Message("tool", "out", tool_call_id=reply.message.tool_calls[0].id)


async def test_another_replica_extends_the_very_ids(replica):
    first, second = replica(CALL), replica("looks good<|im_end|>")
    key = await first.open(SessionSpec("e1", temperature=0.7, seed=3))
    reply = await ask(first, key, ASK)
    await ask(second, key, ASK, *goes_on(reply))
    summary = await second.close(key)
    records = second._by_id["e1"].session.records
    assert [record.ordinal for record in records] == [0, 1]
    assert (records[1].parent, records[1].fork) == (records[0].call, "")
    assert second.engine.requests[0].ids == full_ids(records, records[1].call)[: -len(records[1].sampled_ids)]
    assert second.engine.requests[0].temperature == 0.7
    assert (summary.calls, summary.final_answer, summary.forks) == (2, True, {})
    assert second.stats()["sessions_restored"] == 1


async def test_two_replicas_take_turns(replica):
    """A copy that another replica has gone on with is read anew."""
    replicas = [replica(CALL, CALL, "done<|im_end|>"), replica(CALL, CALL)]
    key = await replicas[0].open(SessionSpec("e1"))
    history = [ASK]
    for turn in range(5):
        reply = await ask(replicas[turn % 2], key, *history)
        history += goes_on(reply) if reply.message.tool_calls else ()
    records = replicas[0]._by_id["e1"].session.records
    assert [record.parent for record in records] == [None, *(record.call for record in records[:-1])]
    asked = [
        request
        for pair in zip(replicas[0].engine.requests, replicas[1].engine.requests, strict=False)
        for request in pair
    ]
    for before, after in itertools.pairwise(asked):
        assert after.ids[: len(before.ids)] == before.ids


async def test_a_call_under_way_is_lost_and_nothing_else(replica):
    first, second = replica(CALL, ScriptedEngine.HANG, CALL), replica("done<|im_end|>")
    key = await first.open(SessionSpec("e1"))
    reply = await ask(first, key, ASK)
    hanging = await first.start(first.find(key), Request("policy", (Message("user", "side"),)))
    again = await ask(first, key, ASK, *goes_on(reply))
    await ask(second, key, ASK, *goes_on(reply), *goes_on(again))
    summary = await second.close(key)
    records = second._by_id["e1"].session.records
    assert [record.ordinal for record in records] == [0, 1, 2, 3]
    assert (records[1].finish, len(records[1].sampled_ids)) == ("abort", 0)
    assert summary.calls == 4
    builder = TreeBuilder("e1")
    for record in records:
        builder.add(record)
    assert builder.missing(4) == builder.waiting() == []
    first.abort(hanging)
    with pytest.raises(WireError):
        await hanging.task


async def test_a_log_cut_short_loses_its_last_call_only(replica, tmp_path):
    first, second = replica(CALL, CALL), replica()
    key = await first.open(SessionSpec("e1"))
    reply = await ask(first, key, ASK)
    await ask(first, key, ASK, *goes_on(reply))
    (path,) = (tmp_path / "calls").iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    assert len(second.find(key).session.records) == 1
    await ask(second, key, ASK, *goes_on(reply))
    assert second._by_id["e1"].session.records[1].parent == second._by_id["e1"].session.records[0].call


async def test_no_key_is_ever_written(replica, tmp_path):
    first = replica(CALL)
    key = await first.open(SessionSpec("e1"))
    await ask(first, key, ASK)
    assert not any(
        key[8:].encode() in path.read_bytes() or key[8:] in path.name for path in (tmp_path / "calls").iterdir()
    )
    assert key.startswith(route("e1"))
    assert len({new_key("e1") for _ in range(100)}) == 100
    for wrong in ("", "x", "../../etc", key[:-1], "\ud800", route("e1") + "0" * 48):
        with pytest.raises(WireError, match="unknown key"):
            first.find(wrong)


async def test_limits_and_kept_answers_hold_on_another_replica(replica):
    first = replica("one<|im_end|>", limits=SessionLimits(calls=3))
    second = replica("two<|im_end|>", "three<|im_end|>", limits=SessionLimits(calls=3))
    key = await first.open(SessionSpec("e1", limits=SessionLimits(calls=3)))
    reply = await ask(first, key, ASK, keep=True)
    more = Message("user", "more")
    await ask(second, key, more, previous=reply.id)
    records = second._by_id["e1"].session.records
    assert records[1].parent == records[0].call
    await ask(second, key, more, previous=reply.id)
    with pytest.raises(WireError, match="limit"):
        await ask(second, key, ASK)


@pytest.mark.parametrize("what", ["limit", "failed"])
async def test_what_ended_a_session_is_told_alike_by_another_replica(replica, what):
    """A truncated episode must not become a completed one because its replica died after the limit was told."""
    first = replica("one<|im_end|>", *[ConnectionError("gone")] * 9, engine_wait_s=0.1)
    second = replica("late<|im_end|>")
    key = await first.open(SessionSpec("e1", limits=SessionLimits(calls=1 if what == "limit" else 9)))
    await ask(first, key, ASK)
    with pytest.raises(WireError):
        await ask(first, key, ASK, Message("user", "more"))
    summary = await second.close(key)
    told = await first.close(key)
    assert (summary.limit, summary.failed) == (told.limit, told.failed)
    assert getattr(summary, what)


async def test_a_limit_that_was_got_past_is_none_on_another_replica(replica):
    first, second = replica(ScriptedEngine.HANG, "two<|im_end|>"), replica()
    key = await first.open(SessionSpec("e1", limits=SessionLimits(concurrent=1)))
    hanging = await first.start(first.find(key), Request("policy", (ASK,)))
    with pytest.raises(WireError, match="concurrent"):
        await ask(first, key, ASK)
    first.abort(hanging)
    with pytest.raises(WireError):
        await hanging.task
    await ask(first, key, ASK)
    assert (await second.close(key)).limit == ""


async def test_records_can_be_told_again_and_a_log_is_removed(replica, tmp_path):
    first, second = replica(CALL), replica()
    key = await first.open(SessionSpec("e1"))
    await ask(first, key, ASK)
    assert await second.resend("e1") == 1
    np.testing.assert_array_equal(
        second._sink.records[0].sampled_ids, first._by_id["e1"].session.records[0].sampled_ids
    )
    await second.discard("e1")
    assert not list((tmp_path / "calls").iterdir())
    with pytest.raises(KeyError):
        await second.resend("e1")


def test_everything_comes_back_as_it_was(tmp_path):
    journal = Journal(tmp_path)
    spec = SessionSpec("e1", 0.5, 0.9, 7, SessionLimits(calls=5))
    journal.open(spec, "k" * 56, 12.5)
    assert journal.read("k" * 56) == (spec, 12.5, [], False, "", "")
    journal.mark("k" * 56, "calls", "engine: gone", True)
    assert journal.read("k" * 56) == (spec, 12.5, [], True, "calls", "engine: gone")
    assert journal.read("q" * 56) is None


async def test_numbers_and_depths_of_any_size_are_logged(replica):
    first, second = replica(), replica()
    key = await first.open(SessionSpec("e1"))
    arguments = {"n": 10**30, "x": float("inf"), "deep": json.loads("[" * 400 + "]" * 400)}
    history = ASK, Message("assistant", tool_calls=(ToolCall("x", "f", arguments),)), ASK
    reply = await ask(first, key, *history, keep=True)
    assert len(first._sink.records) == 1
    await ask(second, key, Message("user", "more"), previous=reply.id)
    assert second._by_id["e1"].session._prompts._kept[reply.id][: len(history)] == history


async def test_what_follows_a_cut_entry_is_read(replica, tmp_path):
    first, second, third = replica(CALL, CALL), replica(CALL), replica()
    key = await first.open(SessionSpec("e1"))
    reply = await ask(first, key, ASK)
    await ask(first, key, ASK, *goes_on(reply))
    (path,) = (tmp_path / "calls").iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    await ask(second, key, ASK, *goes_on(reply))
    assert len(third.find(key).session.records) == 2


async def test_a_session_that_was_closed_is_closed_everywhere(replica):
    first, second = replica(CALL), replica()
    key = await first.open(SessionSpec("e1"))
    await ask(first, key, ASK)
    summary = await first.close(key)
    with pytest.raises(WireError, match="is closed"):
        second.find(key)
    assert (await second.close(key)).calls == summary.calls == 1
    assert second.stats()["sessions_open"] == 0


@pytest.mark.parametrize("trouble", ["gone", "full"])
async def test_a_log_that_takes_nothing_is_no_trouble_of_the_harness(replica, tmp_path, monkeypatch, caplog, trouble):
    first, second = replica(CALL, CALL), replica()
    key = await first.open(SessionSpec("e1"))
    (_path,) = (tmp_path / "calls").iterdir()
    away = tmp_path / "away"
    write = os.write
    if trouble == "gone":
        (tmp_path / "calls").rename(away)
    else:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))
    reply = await ask(first, key, ASK)
    assert "takes no calls" in caplog.text
    assert key not in caplog.text
    if trouble == "gone":
        away.rename(tmp_path / "calls")
    monkeypatch.undo()
    await ask(first, key, ASK, *goes_on(reply))
    assert [record.ordinal for record in second.find(key).session.records] == [0, 1]
    summary = await first.close(key)
    assert (summary.calls, len(first._sink.records)) == (2, 2)


@pytest.mark.parametrize("data", [b"", b"x" * 5, _pack({"format": 0}), _pack({"record": {}}) + _pack({})])
async def test_a_log_that_cannot_be_read_is_none(replica, tmp_path, data):
    first, second = replica(), replica()
    key = await first.open(SessionSpec("e1"))
    (path,) = (tmp_path / "calls").iterdir()
    path.write_bytes(data)
    with pytest.raises(WireError, match="unknown key"):
        second.find(key)
    with pytest.raises(KeyError):
        await second.resend("e1")
    assert await ask(second, await second.open(SessionSpec("e1")), ASK)
