"""A harness that is given as a template in the settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import require
from scripted_api import Script, say, serving

from configs.harness import HarnessConfig
from configs.loader import ConfigError, load
from envs.harnesses.base import Endpoint
from envs.harnesses.registry import harness
from envs.sandbox.base import Finished, Limits, SandboxError
from envs.sandbox.create import Backend, create, unavailable
from envs.sandbox.relayed import RELAY_BASE_URL, through_relay
from envs.tasks.task import Task

ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[3]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["KEY"]}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
print(open(os.path.expanduser("~/.config/x.json")).read(), os.environ["LIMITS"], open(sys.argv[4]).read(), flush=True)
sys.exit(int(answer))
"""
SETTINGS = {
    "name": "command",
    "argv": ["{python}", "{mounts.tool}/ask.py", "{base_url}", "{model}", "{instruction}", "{mounts.note}"],
    "env": {"KEY": "{key}", "LIMITS": "{context} {max_turns} {{literal}} {workspace} {home}"},
    "files": {".config/x.json": '{{"model": "{model}"}}'},
    "done_codes": [0, 7],
    "max_turns_codes": [9],
}


@pytest.fixture(params=["bubblewrap", "process"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    return request.param


def settings(folder: Path, **more: object) -> HarnessConfig:
    tool = folder / "tool"
    tool.mkdir(exist_ok=True)
    (tool / "ask.py").write_text(ASK)
    (folder / "note").write_text("noted")
    mounts = {"mounts": {"tool": str(tool), "note": str(folder / "note")}}
    return HarnessConfig.model_validate(SETTINGS | mounts | more)


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        ("0", (True, "exit code 0")),
        ("7", (True, "exit code 7")),
        ("9", (False, "max turns")),
        ("3", (False, "error: exit code 3")),
    ],
)
async def test_a_program_of_ones_own_is_a_harness(backend, tmp_path, answer, ended):
    adapter = harness(settings(tmp_path))
    task = Task("t", "Say {\"it\"} 'well'.", tmp_path / "task", "/root/workspace")
    script = Script(say(answer))
    (tmp_path / "api").mkdir()
    with serving(script, tmp_path / "api" / "s.sock"):
        sandbox = await create(backend, "one", None, task.mount_dir, tmp_path / "rooms")
        command = adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "k" * 32, context=99), Limits(wall_s=60.0))
        finished = await sandbox.run(through_relay(sandbox, command, tmp_path / "api" / "s.sock"))
    assert adapter.ended(finished) == ended, finished
    assert script.headers[0]["authorization"] == "Bearer " + "k" * 32
    assert script.bodies[0]["messages"] == [{"role": "user", "content": task.instruction}]
    seen = f'{{"model": "policy"}} 99 8 {{literal}} {sandbox.inside_workspace} {sandbox.inside_home} noted\n'
    assert finished.stdout.decode() == seen
    assert (sandbox.workspace / "answer.txt").read_text() == answer
    await sandbox.destroy()


async def test_a_file_may_name_the_base_url_where_its_port_is_known(backend, tmp_path):
    adapter = harness(settings(tmp_path, files={"conf": "{base_url} {instruction}"}))
    task = Task("t", "literal {relay_port}", tmp_path / "task", "/root/workspace")
    sandbox = await create(backend, "one", None, task.mount_dir, tmp_path / "rooms")
    if backend == "process":
        with pytest.raises(SandboxError, match=r"harness.files\['conf'\] names {base_url}.*put it into harness.env"):
            adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "k"), Limits())
    else:
        adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, "k"), Limits())
        assert (sandbox.home / "conf").read_text() == "http://127.0.0.1:8080 literal {relay_port}"
    await sandbox.destroy()


def test_the_end_at_the_wall_limit():
    adapter = harness(HarnessConfig.model_validate(SETTINGS | {"argv": ["x"], "mounts": {}}))
    assert adapter.ended(Finished(None, b"", b"", 1.0)) == (False, "time limit")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"argv": ["x", "{instrucion}"]}, r"harness.argv\[1\]: got {instrucion}, expected one of base_url, .*doubled"),
        ({"argv": ["x", "{}"]}, r"harness.argv\[1\]: got {}, expected"),
        ({"argv": ["x", "{key!r}"]}, r"got {key!r}, expected"),
        ({"argv": ["x", "{key:>9}"]}, r"got {key:>9}, expected"),
        ({"argv": ["x", '{"a": 1}']}, r"harness.argv\[1\]: got {\"a\": 1}, expected .*doubled"),
        ({"argv": ["x", "}"]}, r"harness.argv\[1\]: Single '}'.*doubled"),
        ({"argv": ["{mounts.other}/x"]}, r"got {mounts.other}, expected .*mounts.tool"),
        ({"env": {"K": "{kee}"}}, r"harness.env.K: got {kee}"),
        ({"env": {"a-b": "c"}}, r"harness.env: got the name 'a-b'"),
        ({"files": {"/etc/x": ""}}, r"harness.files: got '/etc/x', expected a path below the home"),
        ({"files": {"../x": ""}}, r"harness.files: got '../x'"),
        ({"files": {"x": "{home"}}, r"harness.files\['x'\]: expected '}'"),
        ({"mounts": {"tool": "/no/such", "note": "/usr"}}, r"harness.mounts.tool: /no/such: no such file"),
        ({"mounts": {"a/b": "/usr"}, "argv": ["x", ""]}, r"harness.mounts: got the name 'a/b'"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_named_before_anything_starts(tmp_path, more, words):
    with pytest.raises(ValueError, match=words):
        harness(settings(tmp_path, **more))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["harness.name=command"], "argv: got none, expected the program"),
        (["harness.argv=[x]"], "argv: got a setting that only name=command has, and name=agent_loop"),
        (["harness.name=command", "harness.argv=[x]", "harness.max_turns_codes=[0]"], "got 0 in both"),
    ],
)
def test_settings_that_do_not_fit_together(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(None, overrides)


def test_it_can_be_given_on_the_command_line():
    config = load(None, ["harness.name=command", "harness.argv=[x, '{key}']", "harness.env.KEY=abc"])
    assert json.loads(json.dumps(config.harness.env)) == {"KEY": "abc"}
