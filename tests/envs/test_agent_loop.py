"""The agent loop as a program of its own, against an API that answers from a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from needs import require
from scripted_api import Script, bash, say, serving

from configs.harness import HarnessConfig
from envs.harnesses.agent_loop import lean, observations, prompts, schemas
from envs.harnesses.base import Endpoint
from envs.harnesses.registry import harness
from envs.sandbox.base import Finished, Limits
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.tasks.task import Task

HARNESSES = Path(prompts.__file__).parents[1]
DONE = say("Done.")


def run(tmp_path: Path, script: Script, **settings: Any) -> tuple[dict[str, Any], int, str]:
    """Start the program in ``tmp_path/work``; its last line, its exit code, its error output."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    (tmp_path / "instruction").write_text("Write it: ü.")
    with serving(script) as url:
        given = {"base_url": url, "key": "k1", "instruction_file": tmp_path / "instruction"} | settings
        env = {f"AGENT_LOOP_{name.upper()}": str(value) for name, value in given.items() if value is not None}
        done = subprocess.run(
            [sys.executable, "-S", "-m", "agent_loop"],
            env=env | {"PATH": os.environ["PATH"], "PYTHONPATH": str(HARNESSES)},
            cwd=work,
            capture_output=True,
            text=True,
            timeout=60,
        )
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {}, done.returncode, done.stderr


def test_a_task_from_start_to_final_answer(tmp_path):
    script = Script(bash("echo hello > out.txt; cat out.txt"), bash("ls"), DONE)
    result, code, _ = run(tmp_path, script)
    assert result == {"end": "final_answer", "turns": 3, "message": "Done."}
    assert code == 0
    assert (tmp_path / "work" / "out.txt").read_text() == "hello\n"
    assert script.paths == ["/v1/chat/completions"] * 3
    assert script.connections == 1
    assert {headers["authorization"] for headers in script.headers} == {"Bearer k1"}
    first, second, third = (body["messages"] for body in script.bodies)
    assert first == [
        {"role": "system", "content": prompts.SYSTEM},
        {"role": "user", "content": "Write it: ü."},
    ]
    assert all(body["tools"] == schemas.TOOLS and body["model"] == "policy" for body in script.bodies)
    assert second == [
        *first,
        bash("echo hello > out.txt; cat out.txt")["choices"][0]["message"],
        {"role": "tool", "tool_call_id": "call0", "content": "hello\n"},
    ]
    assert third[: len(second)] == second
    assert third[-1]["content"] == "out.txt\n"


def test_an_assistant_message_is_replayed_as_it_came(tmp_path):
    answer = bash("true")
    answer["choices"][0]["message"] |= {"reasoning_content": " why \n", "extra": [1.0, 1e30, None]}
    script = Script(answer, DONE)
    run(tmp_path, script)
    assert script.bodies[1]["messages"][2] == answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("echo out; echo err >&2", "out\nerr\n"),
        ("printf x; exit 3", "x\n[exit code 3]"),
        ("exit 3", "[exit code 3]"),
        ("kill -9 $$", "[exit code 137]"),
        ("cat nothing", "cat: nothing: No such file or directory\n[exit code 1]"),
        ("printf '\\xff'", "\ufffd"),
        ("true", ""),
        ("yes | head -n 1", "y\n"),
        ("cat", ""),
        ("echo start; sleep 60", "start\n[timed out after 0.7 s]"),
        ("sleep 5 & echo quick", "quick\n"),
        ("env | grep -c AGENT_LOOP_", "0\n[exit code 1]"),
        ("head -c 100000 /dev/zero | tr '\\0' z; echo end", None),
    ],
)
def test_what_the_model_sees_of_a_command(tmp_path, command, shown):
    script = Script(bash(command), DONE)
    began = time.monotonic()
    run(tmp_path, script, command_timeout_s=0.7, observation_chars=1000)
    assert time.monotonic() - began < 20
    (result,) = script.results
    if shown is None:
        assert len(result) < 1100
        assert result.startswith("zzz")
        assert "\n[... 99004 characters left out ...]\n" in result
        assert result.endswith("zend\n")
    else:
        assert result == shown


def test_a_timed_out_command_leaves_no_process(tmp_path):
    script = Script(bash("sleep 61.0203 & sleep 61.0203"), DONE)
    run(tmp_path, script, command_timeout_s=0.3)
    assert b"61.0203" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True).stdout


def test_an_endless_printer_is_bounded(tmp_path):
    script = Script(bash("yes"), bash("yes & sleep 0.2"), DONE)
    result, _, _ = run(tmp_path, script, command_timeout_s=1, observation_chars=500)
    assert result["end"] == "final_answer"
    assert all(len(text) < 600 for text in script.results)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("rm", {"a": 1}), "unknown tool 'rm'"),
        (("execute_bash", '{"command": '), "not valid JSON"),
        (("execute_bash", "[1]"), "must be a JSON object, got list"),
        (("execute_bash", {}), "missing argument 'command'"),
        (("execute_bash", ""), "missing argument 'command'"),
        (("execute_bash", {"command": 3}), "must be a string, got int"),
        (("execute_bash", {"command": "a\0b"}), "NUL"),
        (("file_editor", {"command": "view"}), "missing argument 'path'"),
        (("file_editor", {"command": "undo", "path": "x"}), "unknown command 'undo'"),
        (("file_editor", {"command": "view", "path": "gone"}), "no such file: gone"),
        (("file_editor", {"command": "create", "path": ".", "file_text": ""}), ". is a folder"),
        (("file_editor", {"command": "create", "path": "/proc/x/y", "file_text": ""}), "cannot write /proc/x/y"),
        (("file_editor", {"command": "create", "path": "a\0", "file_text": ""}), "cannot write"),
        (("file_editor", {"command": "str_replace", "path": "given", "old_str": "q"}), "does not occur in given"),
        (("file_editor", {"command": "str_replace", "path": "given", "old_str": "a"}), "occurs 2 times"),
        (("file_editor", {"command": "str_replace", "path": "given", "old_str": ""}), "old_str is empty"),
        (("file_editor", {"command": "insert", "path": "given", "new_str": "x"}), "'insert_line' must be an integer"),
        (("file_editor", {"command": "insert", "path": "given", "insert_line": 9, "new_str": ""}), "expected 0 to 2"),
        (("file_editor", {"command": "view", "path": "binary"}), "not a text file"),
    ],
)
def test_a_bad_call_is_told_and_the_run_goes_on(tmp_path, call, words):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "given").write_text("a\na\n")
    (tmp_path / "work" / "binary").write_bytes(b"\xff\xfe")
    script = Script(say(None, call), DONE)
    result, code, _ = run(tmp_path, script)
    assert (result["end"], code) == ("final_answer", 0)
    (shown,) = script.results
    assert words in shown
    assert (tmp_path / "work" / "given").read_text() == "a\na\n"


def test_the_editor(tmp_path):
    def edit(command: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
        return "file_editor", {"command": command, "path": "new/f.txt", **arguments}

    script = Script(
        say(None, edit("create", file_text="one\r\ntwo")),
        say(
            None,
            edit("insert", insert_line=2, new_str="three"),
            edit("insert", insert_line=0, new_str="zero\n"),
            edit("str_replace", old_str="two", new_str="2"),
            edit("view"),
            ("file_editor", {"command": "view", "path": "."}),
        ),
        DONE,
    )
    run(tmp_path, script)
    assert (tmp_path / "work" / "new" / "f.txt").read_bytes() == b"zero\none\r\n2\nthree\n"
    assert script.results[-2:] == ["zero\none\r\n2\nthree\n", "new/\n"]
    assert [message["tool_call_id"] for message in script.bodies[-1]["messages"] if message["role"] == "tool"] == [
        "call0",
        *(f"call{number}" for number in range(5)),
    ]


def test_it_stops_at_the_turn_limit(tmp_path):
    result, code, _ = run(tmp_path, Script(bash("true")), max_turns=3)
    assert (result["end"], result["turns"], code) == ("max_turns", 3, 1)


def test_an_answer_cut_at_the_token_limit_is_an_answer(tmp_path):
    result, code, _ = run(tmp_path, Script(say("I will", finish="length")))
    assert (result["end"], code) == ("final_answer", 0)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PART = json.dumps(DONE).encode()


@pytest.mark.parametrize(
    ("trouble", "tries"),
    [
        (500, 2),
        (503, 2),
        (None, 2),
        (b"garbage\r\n\r\n", 2),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nshort", 2),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 2),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{"a', 2),
        (CHUNKED + b"zz\r\n", 2),
        (
            CHUNKED + b"%x;ext=1\r\n%b\r\n%x\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (5, PART[:5], len(PART) - 5, PART[5:]),
            1,
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PART) + PART, 1),
    ],
)
def test_trouble_of_the_api_is_retried(tmp_path, trouble, tries):
    script = Script(trouble, DONE)
    result, code, _ = run(tmp_path, script, read_timeout_s=1)
    assert (result["end"], code) == ("final_answer", 0), result
    assert len(script.bodies) == tries
    assert all(body == script.bodies[0] for body in script.bodies)


def test_a_refusal_is_not_retried(tmp_path):
    script = Script(400)
    result, code, _ = run(tmp_path, script)
    assert (result["end"], code) == ("error", 1)
    assert "HTTP 400" in result["message"]
    assert len(script.bodies) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key": None}, "no key: set AGENT_LOOP_KEY"),
        ({"base_url": "https://x"}, "expected http://HOST:PORT"),
        ({"instruction_file": "/no/such"}, "/no/such"),
        ({"max_turns": "many"}, "many"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, settings, words):
    _, code, errors = run(tmp_path, Script(DONE), **settings)
    assert code == 2
    assert words in errors


def test_settings_from_a_file(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model": "other", "max_turns": 1}))
    script = Script(bash("true"))
    result, _, _ = run(tmp_path, script, config=config)
    assert (result["end"], result["turns"]) == ("max_turns", 1)
    assert script.bodies[0]["model"] == "other"
    config.write_text(json.dumps({"modle": "other"}))
    assert "unknown settings ['modle']" in run(tmp_path, script, config=config)[2]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1.5,
        1e300,
        12345678901234567890,
        "",
        'ü"\\\n\u2028\U0001f600',
        [],
        {},
        {"a": [{"b": None}, 1, "x"]},
    ],
)
def test_lean_json_is_json(value):
    assert lean.dumps(value) == json.dumps(value)
    assert lean.loads(f" \n{json.dumps(value)}\t ") == value


@pytest.mark.parametrize("text", ["", " ", "{", '{"a"', "[1,]", "1 2", "nope", '"\x01"', "{'a': 1}"])
def test_lean_json_refuses_what_json_refuses(text):
    with pytest.raises(ValueError, match=r"\S"):
        json.loads(text)
    with pytest.raises(ValueError, match=r"\S"):
        lean.loads(text)


@pytest.mark.parametrize("size", [0, 9, 10, 11, 1000])
def test_cut(size):
    text = "".join(chr(97 + number % 26) for number in range(size))
    shown = observations.cut(text, 10)
    assert (shown == text) == (size <= 10)
    assert shown.startswith(text[:5])
    assert shown.endswith(text[-5:] if size else "")


@pytest.fixture(params=["bubblewrap", "process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    return request.param


async def test_the_adapter_runs_the_loop_in_a_sandbox(backend, tmp_path):
    adapter = harness(HarnessConfig(max_turns=4, command_s=5.0))
    task = Task("t", "Do it.", tmp_path / "task", "/root/.openclaw/workspace")
    (task.input_files).mkdir(parents=True)
    (task.input_files / "json.py").write_text("raise SystemExit('the workspace shadows the standard library')")
    script = Script(bash("pwd; echo made > made.txt"), bash("env; cat ~/.agent_loop/*; ls /opt"), DONE)
    socket = tmp_path / "api.sock"
    with serving(script, socket):
        sandbox = await create(backend, "one", task.input_files, task.mount_dir, tmp_path / "rooms")
        command = adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "secret-key"), Limits(wall_s=30.0))
        finished = await sandbox.run(through_relay(sandbox, command, socket))
        assert adapter.ended(finished) == (True, "final answer"), finished
        assert script.results[0] == f"{sandbox.inside_workspace}\n"
        assert "secret-key" not in script.results[1]
        assert (sandbox.workspace / "made.txt").exists()
        assert {headers["authorization"] for headers in script.headers} == {"Bearer secret-key"}
        await sandbox.destroy()


@pytest.mark.parametrize(
    ("code", "stdout", "ended"),
    [
        (0, b'{"end": "final_answer", "turns": 1, "message": "x"}\n', (True, "final answer")),
        (1, b'noise\n{"end": "max_turns", "turns": 9, "message": "x"}\n', (False, "max turns")),
        (1, b'{"end": "error", "turns": 0, "message": "HTTP 400"}\n', (False, "error: HTTP 400")),
        (None, b"", (False, "time limit")),
        (2, b"", (False, "no result (exit code 2)")),
        (0, b"[]\n", (False, "no result (exit code 0)")),
        (137, b'{"end": "final_answer", "turns": 1, "message": "x"}\n', (False, "final answer")),
    ],
)
def test_how_an_end_is_read(code, stdout, ended):
    assert harness(HarnessConfig()).ended(Finished(code, stdout, b"", 0.1)) == ended


def test_an_unknown_harness_is_named():
    with pytest.raises(ValueError, match=r"harness.name 'none': expected one of \['agent_loop', "):
        harness(HarnessConfig(name="none"))
