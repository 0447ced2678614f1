"""What the tap passes on, refuses and writes down. No process, no socket."""

import json

import pytest

from envs.mcp import tap
from envs.mcp.tap import CallLog, Tap


def line(**message):
    return json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n"


def a_call(ident=1, name="echo", **arguments):
    return line(id=ident, method="tools/call", params={"name": name, "arguments": arguments})


@pytest.fixture
def tapped():
    times = iter(range(1000))
    return Tap("docs", CallLog(), clock=lambda: float(next(times)))


def error_of(answer):
    message = json.loads(answer)
    return message["id"], message["error"]["message"]


def test_a_call_and_its_result_are_one_row(tapped):
    sent, result = a_call(word="hi"), line(id=1, result={"content": [], "isError": False})
    assert tapped.to_server(sent) == (sent, b"")
    assert tapped.log.rows == []
    assert tapped.to_client(result) == result
    (row,) = tapped.log.rows
    assert row == {
        "server": "docs",
        "tool": "echo",
        "arguments": '{"word": "hi"}',
        "result_bytes": len(result),
        "is_error": False,
        "seconds": 1.0,
    }


@pytest.mark.parametrize("answer", [{"error": {"code": 1, "message": "x"}}, {"result": {"isError": True}}])
def test_an_error_of_either_kind_is_written_down_as_one(tapped, answer):
    tapped.to_server(a_call())
    tapped.to_client(line(id=1, **answer))
    assert [row["is_error"] for row in tapped.log.rows] == [True]


def test_other_requests_and_notifications_pass_without_a_row(tapped):
    for sent in (line(id=1, method="tools/list"), line(method="notifications/initialized"), line(id=9, result={})):
        assert tapped.to_server(sent) == (sent, b"")
    asked = line(id=1, method="roots/list")
    assert tapped.to_client(asked) == asked
    assert tapped.to_client(line(id=1, result={})) == line(id=1, result={})
    assert tapped.log.rows == []


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b'[{"id": 1}]\n', "expected a JSON object, got list"),
        (line(id={"a": 1}, method="tools/list"), "expected an id"),
        (line(id="x" * 1000, method="tools/list"), "expected an id"),
        (line(id=True, method="tools/list"), "expected an id"),
    ],
)
def test_what_is_no_message_never_reaches_the_server(tapped, sent, words):
    forward, answer = tapped.to_server(sent)
    ident, message = error_of(answer)
    assert (forward, ident) == (b"", None)
    assert words in message


def test_an_answer_that_nobody_waits_for_is_left_out(tapped):
    assert tapped.to_client(line(id="reins-ready", result={})) == b""
    assert tapped.log.rows == []


def test_empty_lines_and_stray_prints_are_left_out(tapped):
    assert tapped.to_server(b"\r\n") == (b"", b"")
    assert tapped.to_client(b"listening on port 80\n") == b""


def test_a_last_line_without_its_end_gets_one(tapped):
    sent = line(id=1, method="ping")
    assert tapped.to_server(sent[:-1])[0] == sent


def test_whatever_waits_is_answered_once_when_the_server_ends(tapped):
    tapped.to_server(a_call(1))
    tapped.to_server(line(id="two", method="tools/list"))
    answers = tapped.end("it ended with exit code 3").splitlines()
    assert [error_of(answer) for answer in answers] == [
        (1, "MCP server docs: it ended with exit code 3"),
        ("two", "MCP server docs: it ended with exit code 3"),
    ]
    forward, answer = tapped.to_server(a_call(3))
    assert forward == b""
    assert error_of(answer)[0] == 3
    assert tapped.to_server(line(method="notifications/cancelled")) == (b"", b"")
    assert tapped.end("again") == b""
    assert [(row["is_error"], row["reason"]) for row in tapped.log.rows] == [(True, "it ended with exit code 3")] * 2


def test_the_id_of_a_request_that_waits_is_not_taken_twice(tapped):
    tapped.to_server(a_call(1))
    forward, answer = tapped.to_server(a_call(1))
    assert (forward, error_of(answer)[0]) == (b"", 1)


def test_requests_that_wait_and_calls_are_bounded(tapped, monkeypatch):
    monkeypatch.setattr(tap, "_MOST_PENDING", 2)
    monkeypatch.setattr(tap, "MOST_CALLS", 3)
    for ident in (1, 2):
        assert tapped.to_server(a_call(ident))[0]
    assert "wait for an answer" in error_of(tapped.to_server(a_call(3))[1])[1]
    tapped.to_client(line(id=1, result={}))
    assert tapped.to_server(a_call(4))[0]
    tapped.to_client(line(id=4, result={}))
    assert "more than 3 calls" in error_of(tapped.to_server(a_call(5))[1])[1]
    assert tapped.log.calls == {"docs": 4}


def test_rows_are_few_short_and_can_be_written_to_a_file(tapped, monkeypatch):
    monkeypatch.setattr(tap, "_MOST_ROWS", 3)
    for ident in range(5):
        tapped.to_server(a_call(ident, "\ud800" * 9000, text="\udc00é" * 9000))
        tapped.to_client(line(id=ident, result={}))
    assert len(tapped.log.rows) == 3
    written = json.dumps(tapped.log.rows, ensure_ascii=False).encode()
    assert len(written) < 6000
    assert "é".encode() in written
