"""``Harness-v0`` as people use it: real sandboxes, real harnesses of a few lines, and the transparent loop."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gym_harness
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from needs import require
from scripted_api import Script, bash, say, serving

import envs
from configs.schema import SandboxConfig
from envs.gym import folders
from envs.gym.actions import ActionError, words
from envs.gym.env import EpisodeFailedError, HarnessEnv
from envs.sandbox.create import unavailable
from envs.tasks import clawgym
from envs.tasks.draft import Draft
from trees import forks

HERE = Path(__file__).parents[1]
EXAMPLES = HERE / "examples"
GRADER = "[ -e crash ] && exit 3; [ -e done.txt ] && echo 1 || echo 0\n"


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the environments of a test are, short enough for a socket; nothing may be left there."""
    with tempfile.TemporaryDirectory(prefix="reins-") as folder:
        yield Path(folder)
        gc.collect()
        assert left_in(Path(folder)) == []


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def make(root: Path, **settings: Any) -> HarnessEnv:
    sandbox = {"root": root, **settings.pop("sandbox", {})}
    env = gymnasium.make("Harness-v0", sandbox=sandbox, disable_env_checker=True, **settings)
    assert isinstance(env.unwrapped, HarnessEnv)
    return env.unwrapped


def acting(root: Path, folder: Path, part: str, grader: str = GRADER, **settings: Any) -> HarnessEnv:
    """An environment whose harness does a part of ``gym_harness``."""
    task = clawgym.write(folder / "task", "t", "Do it.", {"notes.txt": "n"}, {"reward.sh": grader}, {})
    harness = {
        "name": "command",
        "argv": ["{python}", "{mounts.parts}", part],
        "env": {"URL": "{base_url}", "KEY": "{key}"},
        "mounts": {"parts": gym_harness.__file__},
    }
    return make(root, harness=harness, task=task, **settings)


def asked(observation: dict[str, Any]) -> str:
    return observation["messages"][-1]["text"]


def test_importing_envs_registers_it_and_loads_none_of_it():
    code = """
import sys, envs, gymnasium
assert gymnasium.spec("Harness-v0").entry_point == "envs.gym.env:HarnessEnv"
gymnasium.make("envs:Harness-v0").close()
heavy = {"torch", "ray", "transformers", "renderers", "fastapi"} & sys.modules.keys()
assert not heavy, heavy
env = gymnasium.make("Harness-v0")
env.reset(seed=1)
env.close()
heavy = {"torch", "ray", "transformers", "renderers"} & sys.modules.keys()
assert not heavy, heavy
"""
    assert Path(envs.__file__).parts[-2:] == ("envs", "__init__.py")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_transparent_loop_passes_gymnasiums_own_checker(root):
    env = make(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    env.close()


def test_an_agent_of_one_s_own_in_fifteen_lines_earns_its_reward(capsys):
    runpy.run_path(str(EXAMPLES / "gym_agent.py"))
    assert capsys.readouterr().out == "1.0 final answer\n"


def test_the_openai_client_as_the_policy(capsys, monkeypatch):
    script = Script(bash("ls"), say("Done."))
    with serving(script) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        runpy.run_path(str(EXAMPLES / "gym_openai.py"))
    shown = capsys.readouterr().out
    assert "call 1 (main), 4 messages, 2 of them shown above" in shown
    assert shown.rstrip().endswith("completed: final answer; reward 0")
    assert {tool["function"]["name"] for tool in script.bodies[0]["tools"]} == {"execute_bash", "file_editor"}
    before = script.bodies[1]["messages"]
    assert before[2]["tool_calls"][0]["id"] == before[3]["tool_call_id"] == "call_1"


def test_the_same_seed_gives_the_same_tasks_and_a_task_can_be_named(root):
    env = make(root)
    first = [env.reset(seed=7)[1]["task"], *(env.reset()[1]["task"] for _ in range(3))]
    again = [env.reset(seed=7)[1]["task"], *(env.reset()[1]["task"] for _ in range(3))]
    assert first == again
    assert len(set(first)) > 1
    assert env.reset(options={"task": first[0]})[1]["task"] == first[0]
    with pytest.raises(ValueError, match="expected the id of one of the tasks, such as desk-"):
        env.reset(options={"task": "none"})
    for options in ({"tsak": "none"}, {"task": first[0], "more": 1}, ["task"], "task"):
        with pytest.raises(ValueError, match=r"options: got .*, expected \{'task': ID\} or nothing"):
            env.reset(options=options)
    env.close()


def test_the_end_has_the_record_and_the_tree(root):
    env = make(root, render_mode="ansi")
    env.reset(seed=1)
    env.step(words("I look.", [("execute_bash", {"command": "ls"})], reasoning="Where am I?"))
    observation, reward, terminated, truncated, info = env.step("Done.")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert observation in env.observation_space
    assert observation["messages"] == ()
    assert (info["record"]["status"], info["record"]["calls"]) == ("completed", 2)
    tree = info["tree"]
    assert [node.kind for node in tree.calls()] == ["main", "main"]
    assert (tree.counts().leaves, tree.counts().trained) == (1, 0)
    assert tree.meta["reward"] == 0.0
    assert None not in info["record"].values()
    assert "[answer, thinking] Where am I?" in env.render()
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step("More.")
    env.close()


def test_a_random_agent_does_no_harm_and_comes_to_an_end(root):
    env = make(root)
    env.action_space.seed(3)
    env.reset(seed=3)
    for _ in range(20):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert observation in env.observation_space
        if terminated or truncated:
            break
    assert (reward, terminated, truncated, info["record"]["reason"]) == (0.0, False, True, "max turns")
    env.close()


@pytest.mark.parametrize(
    "action",
    [
        None,
        7,
        {"txet": "a"},
        {"text": 7},
        {"text": "\ud800"},
        {"tool_calls": "ls"},
        {"tool_calls": [{"arguments": "{}"}]},
        {"tool_calls": [{"name": "x", "arguments": {"a": object()}}]},
        {"token_ids": [1, 2]},
        {"logprobs": [-1.0]},
    ],
)
def test_an_action_that_is_none_is_an_error_and_the_request_still_waits(root, action):
    env = make(root)
    env.reset(seed=1)
    with pytest.raises(ActionError, match="action"):
        env.step(action)
    *_, terminated, _, info = env.step("Done.")
    assert (terminated, info["record"]["calls"]) == (True, 1)
    env.close()


@pytest.mark.parametrize("arguments", ["{", "[1]", "", "NaN", '{"command": NaN}', '{"a":' * 5000, '{"command": "ls"}}'])
def test_malformed_tool_calls_go_to_the_harness_which_answers_them(root, arguments):
    env = make(root)
    env.reset(seed=1)
    observation, *_, truncated, _ = env.step({"tool_calls": [{"name": "execute_bash", "arguments": arguments}]})
    assert not truncated
    assert observation["messages"][-1]["role"] == "tool"
    assert "error" in asked(observation)
    env.close()


def test_without_isolation_it_is_the_same(root, tmp_path):
    env = make(root, sandbox={"backend": "process"})
    env.reset(seed=1)
    observation, *_ = env.step(words("", [("execute_bash", {"command": "echo seen"})]))
    assert asked(observation).startswith("seen")
    assert env.step("Done.")[2]
    env.close()


def test_requests_at_the_same_time_are_served_as_they_came(root, tmp_path):
    env = acting(root, tmp_path, "both")
    observation, info = env.reset()
    assert (asked(observation), info["kind"]) == ("main", "main")
    observation, *_, info = env.step("go")
    assert asked(observation) == "first"
    time.sleep(1.0)
    observation, *_, info = env.step("one")
    assert (asked(observation), info["call"], info["kind"], info["waiting"]) == ("second", 2, "side", 0)
    observation, *_, info = env.step("two")
    assert asked(observation) == "one two"
    *_, terminated, _, info = env.step("thanks")
    assert terminated
    tree = info["tree"]
    assert [node.kind for node in tree.calls()] == ["main", "side", "side", "main"]
    env.close()


def test_a_request_that_is_taken_back_is_answered_in_vain(root, tmp_path):
    env = acting(root, tmp_path, "impatient")
    observation, _ = env.reset()
    assert asked(observation) == "too slow"
    time.sleep(1.5)
    observation, *_, info = env.step("late")
    assert (asked(observation), info["answered"]) == ("again", False)
    *_, info = env.step("in time")
    assert info["record"]["status"] == "completed"
    assert [node.finish for node in info["tree"].calls()] == ["abort", "stop"]
    env.close()


def test_what_the_harness_asks_for_is_observed(root, tmp_path):
    env = acting(root, tmp_path, "endless")
    observation, _ = env.reset()
    assert observation["sampling"]["max_tokens"] == 7
    assert observation["sampling"]["stop"] == ("!",)
    assert observation["sampling"]["temperature"] == -1.0
    env.close()


@pytest.mark.parametrize(
    ("settings", "thinks_s", "reason", "earned"),
    [
        ({"limits": {"calls": 2}}, 0.0, "limit: proxy.limits.calls", 0.25),
        # The request that waits then has no answer, as one that was cut.
        ({"sandbox": {"wall_s": 6.0}}, 7.0, "limit: sandbox.wall_s", 0.0),
        ({"sandbox": {"wall_s": 6.0}, "reward": {"clean_end": False}}, 7.0, "limit: sandbox.wall_s", 0.25),
    ],
)
def test_a_limit_truncates_and_what_was_done_is_graded(root, tmp_path, settings, thinks_s, reason, earned):
    env = acting(root, tmp_path, "endless", grader="echo 0.25\n", **settings)
    env.reset()
    for _ in range(4):
        time.sleep(thinks_s)
        _, reward, terminated, truncated, info = env.step("and more")
        if terminated or truncated:
            break
    assert (reward, terminated, truncated) == (earned, False, True)
    assert (info["record"]["reason"], info["record"]["grade"]) == (reason, 0.25)
    env.close()


def test_a_harness_that_dies_has_ended_and_is_graded(root, tmp_path):
    env = acting(root, tmp_path, "dies")
    env.reset()
    _, reward, terminated, truncated, info = env.step("a")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["record"]["reason"].startswith("the harness broke off: error: exit code 3")
    env.close()


def test_a_harness_that_never_asks_is_an_error_of_reset(root):
    env = make(root, harness={"name": "command", "argv": ["/bin/echo", "sorry"]}, sandbox={"retries": 1})
    with pytest.raises(EpisodeFailedError, match=r"no request after 2 tries: .*made no call .*sorry"):
        env.reset()
    env.close()


def test_what_is_the_same_in_every_sandbox_is_not_tried_again(root):
    env = make(root, limits={"tokens": 1}, sandbox={"retries": 3})
    with pytest.raises(EpisodeFailedError, match=r"no request after 1 tries: .*limit"):
        env.reset()
    env.close()


def test_tasks_of_any_format_can_be_practised(root, tmp_path):
    rows = [{"id": f"row{i}", "instruction": f"Say {i}.", "grader": "echo 1"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = make(root, tasks=tmp_path / "rows.jsonl")
    observation, info = env.reset(options={"task": "row2"})
    assert (info["task"], asked(observation)) == ("row2", "Say 2.")
    assert env.step("Two.")[1] == 1.0
    env.close()
    # What was written for them goes with the environment, and is written anew.
    assert left_in(root) == []
    assert env.reset(options={"task": "row0"})[1]["task"] == "row0"
    env.close()


def test_a_task_with_a_rubric_needs_a_judge(tmp_path):
    draft = Draft("here", "t1", "Do it.", {}, rubric={"criteria": [{"id": "a", "text": "It is good."}]})
    clawgym.write_draft(draft, tmp_path / "t1")
    with pytest.raises(ValueError, match="judge"):
        HarnessEnv(task=tmp_path / "t1")
    HarnessEnv(task=tmp_path / "t1", judge={"url": "http://127.0.0.1:1/v1", "model": "none"})


def test_settings_of_a_sandbox_are_the_same_as_words_and_as_an_object():
    one = HarnessEnv(sandbox=SandboxConfig(backend="process"), limits={"wall_s": 7})._config.sandbox
    other = HarnessEnv(sandbox="process", limits={"wall_s": 7})._config.sandbox
    assert one == other
    assert (one.wall_s, one.pool) == (7, 0)
    assert HarnessEnv(sandbox=SandboxConfig(pool=2))._config.sandbox.pool == 2


def test_a_closed_environment_can_be_copied_and_a_running_one_says_why_not(root):
    env = make(root)
    for copied in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert copied.reset(seed=1)[1]["task"] == env.reset(seed=1)[1]["task"]
        with pytest.raises(TypeError, match="cannot be copied or pickled: close"):
            copy.deepcopy(env)
        copied.close()
        env.close()


def test_a_forked_copy_of_the_process_takes_nothing_down(root):
    env = make(root)
    env.reset(seed=1)
    child = os.fork()
    if child == 0:
        env.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert left_in(root) != []
    assert env.step("Done.")[2]
    env.close()


def test_an_environment_that_cannot_be_opened_leaves_nothing(root, monkeypatch):
    env = make(root)

    def refused(*_: object) -> None:
        raise OSError("no more")

    monkeypatch.setattr("envs.gym.env.open_stage", refused)
    with pytest.raises(OSError, match="no more"):
        env.reset()
    assert left_in(root) == []


def test_a_grader_that_fails_gives_no_number(root, tmp_path):
    env = acting(root, tmp_path, "dies", grader="exit 3\n")
    env.reset()
    _, reward, terminated, truncated, info = env.step("a")
    assert np.isnan(reward)
    assert (terminated, truncated, info["record"]["status"]) == (False, True, "failed")
    assert "grader failure" in info["record"]["reason"]
    assert env.reset()[0] in env.observation_space
    env.close()


def test_step_rewards_add_up_to_the_grade_and_cannot_be_earned_by_pretence(root, tmp_path):
    env = acting(root, tmp_path, "endless", grader="echo 0.5\n", limits={"calls": 4})
    reward = tmp_path / "task" / "reward"
    (reward / "step.sh").write_text('echo "0.$(grep -c progress "$REINS_TRANSCRIPT")"\n')
    env.reset()
    assert env.step("progress")[1] == pytest.approx(0.1)
    assert env.step("more progress")[1] == pytest.approx(0.1)
    (reward / "step.sh").write_text("exit 1\n")
    assert env.step("and more progress")[1] == 0.0
    _, last, _, truncated, info = env.step("the end")
    assert (last, truncated, info["record"]["reward"]) == (pytest.approx(0.3), True, 0.5)
    env.close()


def test_closing_in_the_middle_leaves_nothing_and_it_can_be_opened_again(root):
    env = make(root)
    env.reset(seed=1)
    env.step(words("", [("execute_bash", {"command": "sleep 100 & echo x"})]))
    assert left_in(root) != []
    env.close()
    env.close()
    assert left_in(root) == []
    with pytest.raises(ResetNeeded):
        env.step("Done.")
    env.reset(seed=1)
    env.close()


def test_an_environment_that_is_forgotten_in_its_own_thread_leaves_nothing(root):
    env = make(root)
    env.reset(seed=1)
    stage = env._stage
    assert stage is not None
    stage._loop.call_soon_threadsafe(env._closing)
    stage._thread.join(30)
    assert left_in(root) == []


def test_an_environment_that_is_forgotten_leaves_nothing(root):
    env = make(root)
    env.reset(seed=1)
    assert left_in(root) != []
    del env
    gc.collect()
    assert left_in(root) == []


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_process_that_ends_without_closing_leaves_nothing(root, end):
    code = f"""
import gymnasium, envs, sys
env = gymnasium.make("Harness-v0", sandbox={{"root": {str(root)!r}}})
env.reset(seed=1)
print("up", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert left_in(root) != []
    if end == "kill":
        os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while left_in(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_in(root) == []


def test_eight_copies_at_once(root):
    env = gymnasium.make_vec("Harness-v0", 8, sandbox={"root": root})
    observations, _ = env.reset(seed=5)
    assert len({messages[1]["text"] for messages in observations["messages"]}) > 4
    env.action_space.seed(5)
    ended = 0
    for _ in range(10):
        observations, _, terminated, truncated, _ = env.step(env.action_space.sample())
        ended += int((terminated | truncated).sum())
    assert ended == 8
    assert observations in env.observation_space
    env.close()


@pytest.mark.parametrize(
    ("settings", "words_"),
    [
        ({"harness": "no_such"}, "harness.name 'no_such': expected one of"),
        ({"harness": {"max_turn": 3}}, "max_turn"),
        ({"limits": {"call": 3}}, "call"),
        ({"sandbox": "no_such"}, "backend"),
        ({"tokenizer": "/no/such"}, "tokenizer: /no/such/tokenizer.json: no such file"),
        ({"task": "/no/such"}, "no such file; every task folder needs one"),
        ({"tasks": "/no/such"}, "/no/such"),
        ({"tasks": []}, "expected a folder or file of tasks, or a list of at least one Task"),
        ({"tasks": 7}, "tasks: got 7, expected a folder or file of tasks"),
        ({"task": 7}, "task: got 7, expected a task folder or a Task"),
        ({"render_mode": "human"}, "render_mode: got 'human', expected 'ansi' or None"),
        ({"task": "a", "tasks": "b"}, "got both"),
        ({"tasck": "a"}, "tasck"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_starts(settings, words_):
    with pytest.raises(ValueError, match=words_):
        HarnessEnv(**settings)


def test_another_users_folder_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"reins-envs-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(Exception, match=r"it is another user's; set sandbox.root"):
        folders.root(None)


def test_forks_of_the_history_are_in_the_tree(root, tmp_path):
    env = acting(root, tmp_path, "endless", limits={"calls": 2})
    env.reset()
    env.step("a")
    *_, info = env.step("b")
    assert [node.fork for node in info["tree"].calls()] == ["", forks.RETRY]
    env.close()
