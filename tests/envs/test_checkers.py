"""The checkers of harnesses, tasks and sandboxes: what is sound passes, and each fault is told in a sentence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from needs import require

from configs.harness import HarnessConfig
from envs.finding import Finding
from envs.harnesses import check
from envs.harnesses.base import Endpoint
from envs.harnesses.check import check_harness
from envs.harnesses.registry import harness
from envs.sandbox.base import Command, Finished, Limits, Sandbox
from envs.sandbox.check import check_sandbox
from envs.sandbox.create import unavailable
from envs.tasks import clawgym
from envs.tasks.check import check_task
from envs.tasks.task import Task

QUICK = Limits(wall_s=20.0)
CALL = """
import json, sys, time, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}]}).encode()
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, {"Authorization": "Bearer " + sys.argv[2]})
try:
    urllib.request.urlopen(request).read()
    print("final answer")
except Exception as error:
    print(error)
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def _bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    monkeypatch.setattr(check, "_START_S", 0.5)


class Adapter:
    """A harness of a few lines of Python. ``script`` is run with the base URL and the key."""

    name = "mine"

    def __init__(self, script: str = CALL, reads: bool | None = None, words: bool = True) -> None:
        self.script = script
        self.reads = reads
        self.words = words

    def command(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, limits: Limits) -> Command:
        argv = (sandbox.python, "-I", "-c", self.script, endpoint.base_url, endpoint.key)
        return Command(argv, sandbox.environment(), limits=limits)

    def ended(self, finished: Finished) -> tuple[bool, str]:
        done = finished.code == 0 if self.reads is None else self.reads
        return done, "" if not self.words else "final answer" if done else f"exit code {finished.code}"


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {finding.promise: finding.wrong for finding in findings if finding.wrong}


@pytest.mark.parametrize("adapter", [Adapter(), harness(HarnessConfig())], ids=["mine", "agent_loop"])
async def test_a_sound_adapter_keeps_every_promise(tmp_path, adapter):
    findings = await check_harness(adapter, tmp_path, "bubblewrap", QUICK)
    assert wrong(findings) == {}
    assert len(findings) > 12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("adapter", "promise", "words"),
    [
        (
            Adapter("print('hello')"),
            "calls the model API at the base URL",
            "the base URL (final answer; hello)",
        ),
        (Adapter(CALL.replace("sys.argv[2]", "'other'")), "puts the key on every call", "(beginning other)"),
        (Adapter(CALL.replace('"messages"', '"massages"')), "sends what the proxy can read", "messages: got None"),
        (Adapter(CALL + "open('left.txt', 'w')\n"), "leaves the workspace to the agent", "changed left.txt"),
        (Adapter(reads=False), "`ended` reads its own end", "every episode would count as failed"),
        (Adapter(words=False), "says in words why it ended", "gives no reason"),
    ],
)
async def test_a_broken_promise_is_named_with_what_it_means(tmp_path, adapter, promise, words):
    findings = await check_harness(adapter, tmp_path, "bubblewrap", QUICK)
    assert words in wrong(findings)[promise]
    assert any(finding.broken for finding in findings)


async def test_of_an_adapter_that_never_calls_nothing_is_said_that_was_not_seen(tmp_path):
    findings = await check_harness(Adapter("print('hello')"), tmp_path, "bubblewrap", QUICK)
    assert "puts the key on every call" not in {finding.promise for finding in findings}


async def test_an_adapter_that_never_ends(tmp_path):
    adapter = Adapter(CALL + "time.sleep(60)\n")
    findings = await check_harness(adapter, tmp_path, "bubblewrap", replace(QUICK, wall_s=1.0))
    assert "still ran after 1 s" in wrong(findings)["ends by itself after an answer without tool calls"]


async def test_what_is_odd_but_works_is_a_warning(tmp_path):
    odd = """
import os, socket, subprocess
open("/tmp/scratch", "w")
subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    socket.create_connection(("192.0.2.1", 80), 5)
except OSError:
    pass
"""
    findings = await check_harness(Adapter(odd + CALL), tmp_path, "bubblewrap", QUICK)
    assert wrong(findings).keys() == {
        "writes only to hidden places of the home",
        "leaves no process",
        "tries no other network",
    }
    assert not any(finding.broken for finding in findings)


async def test_an_adapter_that_takes_every_end_for_its_own(tmp_path):
    findings = wrong(await check_harness(Adapter(reads=True), tmp_path, "bubblewrap", QUICK))
    assert findings.keys() == {"takes no limit for its own end", "takes the wall limit for no end of its own"}


def make_task(folder: Path, script: str, inputs: dict[str, str | bytes] | None = None) -> Path:
    given = {"in.txt": "x"} if inputs is None else inputs
    return clawgym.write(folder / "task", "t", "Do it.", given, {"reward.sh": script}, {}).folder


async def test_a_sound_task_keeps_every_promise(tmp_path):
    folder = make_task(tmp_path, "[ -e done ] && echo 1 || echo 0.1\n")
    findings = await check_task(folder, tmp_path / "rooms", "bubblewrap")
    assert wrong(findings) == {}
    assert len(findings) == 8
    assert list((tmp_path / "rooms").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "promise", "words"),
    [
        ("echo 2", "scores the untouched workspace", "'2', expected a number in [0, 1]"),
        ("cat in.txt || exit 4; echo 0", "scores an empty workspace", "exit code 4"),
        ("od -An -N4 -tu4 /dev/urandom | sed 's/ */0./'", "gives the same score again", "the reward would be noise"),
        ("(exec 3<>/dev/tcp/192.0.2.1/80); echo 0", "is graded without a network", "sent 2 times to where no network"),
        ("sleep 1.2; echo 0", "is graded well within the time", "of 2 s: on a busy machine"),
        ("[ ! -e in.txt ] || sleep 9; echo 0", "scores the untouched workspace", "did not end within its 2 s"),
        ("echo 1", "leaves something to do", "the full score already"),
    ],
)
async def test_a_broken_task_is_told_in_a_sentence(tmp_path, script, promise, words):
    folder = make_task(tmp_path, script)
    findings = await check_task(folder, tmp_path / "rooms", "bubblewrap", Limits(wall_s=2.0))
    assert words in wrong(findings)[promise]


@pytest.mark.parametrize(
    ("script", "words"), [("echo 0", ""), ("echo 2", "'2', expected a number"), ("exit 3", "code 3")]
)
async def test_what_tells_the_progress_of_an_episode_is_run_too(tmp_path, script, words):
    folder = make_task(tmp_path, "echo 0\n")
    (folder / "reward" / "step.sh").write_text(f'cat "$REINS_TRANSCRIPT" || exit 9\n{script}\n')
    findings = {finding.promise: finding for finding in await check_task(folder, tmp_path / "rooms", "bubblewrap")}
    found = findings["tells the progress of an episode that begins"]
    assert (found.broken, words in found.wrong) == (bool(words), True)


async def test_an_entry_that_begins_with_a_byte_order_mark_is_checked(tmp_path):
    folder = make_task(tmp_path, "echo 0\n")
    entry = folder / "data_entry.json"
    entry.write_bytes(b"\xef\xbb\xbf" + entry.read_bytes())
    assert wrong(await check_task(folder, tmp_path / "rooms", "process")) == {}


async def test_a_field_that_nothing_reads_is_a_warning(tmp_path):
    folder = make_task(tmp_path, "echo 0\n")
    entry = folder / "data_entry.json"
    entry.write_text(entry.read_text().replace('"metadata"', '"grader_get": ["transcript"], "metadata"'))
    findings = await check_task(folder, tmp_path / "rooms", "bubblewrap")
    assert not any(finding.broken for finding in findings)
    assert list(wrong(findings).values()) == [
        "nothing reads grader_get; "
        "what is read is grader_gets, input_mount_dir, mcp, metadata, sessions, task_id, user_query"
    ]


async def test_a_task_that_does_not_load_is_checked_no_further(tmp_path):
    folder = make_task(tmp_path, "echo 0")
    (folder / "data_entry.json").write_text('{"task_id": "t"}')
    (finding,) = await check_task(folder, tmp_path / "rooms")
    assert finding.broken
    assert "'user_query' is missing" in finding.wrong


async def test_bubblewrap_keeps_what_a_sandbox_promises(tmp_path):
    assert [fault for _, fault in await check_sandbox("bubblewrap", tmp_path) if fault] == []


def run(*argv: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_command_lines(tmp_path):
    make_task(tmp_path, "echo 7")
    code, said = run("envs.tasks", "check", "--backend", "auto", str(tmp_path))
    assert code == 1
    assert "FAILS  scores the untouched workspace: the last line" in said
    assert "1 task checked, 1 broken" in said
    code, said = run("envs.harnesses", "check", "agent_loop", "--episode", "--wall-s", "20")
    assert code == 0, said
    assert "holds  puts the key on every call" in said
    config = tmp_path / "mine.yaml"
    config.write_text("harness: {name: command, argv: ['{python}', -c, 'print(1)']}\n")
    code, said = run("envs.harnesses", "check", "command", "--episode", "--config", str(config))
    assert code == 1
    assert "FAILS  calls the model API at the base URL" in said
    code, said = run("envs.harnesses", "check", "command", "--episode")
    assert code == 1
    assert "FAILS  command cannot be started: got no --config, expected --config FILE with harness.name=command" in said
    config.write_text("mix: [{name: agent_loop}, {name: command, argv: ['/no/such']}]\n")
    flags = ["--config", str(config), "--backend", "bubblewrap"]
    code, said = run("envs.harnesses", "check", "command", "--episode", *flags)
    assert code == 1
    assert "cannot start /no/such: No such file or directory" in said
    code, said = run("envs.harnesses", "check", "agent_loop")
    assert code == 2
    assert "nothing to install; to try it: check agent_loop --episode" in said
