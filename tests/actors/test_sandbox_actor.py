"""Whole episodes of the sandbox actor, real sandbox and all, against a scripted API in the place of the proxy."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_api import endpoint, graded
from needs import require
from scripted import ListSink, ScriptedEngine, make_tokenizer
from scripted_api import Script, bash, say, serving

from actors.api import build_app
from actors.dispatch import Dispatcher
from actors.rendering import Rendering
from actors.sandbox import SandboxActor
from actors.session_contract import SessionSpec, Summary
from actors.socket_server import SocketServer
from configs.proxy import ProxyConfig
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.sandbox.create import unavailable
from envs.tasks import clawgym
from envs.tasks.draft import Draft

SUMMARY = Summary("s", 2, 10, 5, "stop", True, True, "", "", 0, {}, 1.0)
DONE = say("All done.")
GRADER = "[ -e crash ] && exit 3; [ -e done.txt ] && echo 1 || echo 0\n"


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")


class Door:
    """The proxy as the actor sees it."""

    def __init__(self, socket: Path, summary: Summary, silent_s: float) -> None:
        self.socket = socket
        self.summary = summary
        self.silent_s = silent_s
        self.specs: list[SessionSpec] = []

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        self.specs.append(spec)
        return {"key": "k" * 32, "socket": str(self.socket)}

    async def close_session(self, key: str) -> Summary:
        return self.summary

    async def since_call(self, key: str) -> float:
        if self.silent_s < 0:
            raise ConnectionError("the proxy is away")
        return self.silent_s


async def episode(
    tmp_path: Path,
    *answers: Any,
    grader: str = GRADER,
    summary: Summary = SUMMARY,
    silent_s: float = 99.0,
    gets: tuple[str, ...] = (),
    transcript: bool = False,
    **settings: Any,
) -> EpisodeOutcome:
    inputs = {"notes.txt": "n"}
    task = clawgym.write(tmp_path / "task", "t", "Do it.", inputs, {"reward.sh": grader}, {}, grader_gets=gets)
    async with door(tmp_path, Script(*answers), summary, silent_s) as proxy:
        sandbox = {"backend": "bubblewrap", "wall_s": 60.0, **settings.pop("sandbox", {})}
        config = RunConfig.model_validate({"harness": {"command_s": 50.0}, **settings, "sandbox": sandbox})
        actor = SandboxActor(config, tmp_path / "rooms", proxy)
        spec = EpisodeSpec("e", task, config.harness.known_as, "g", 0, 0, transcript=transcript)
        outcome = await actor.run_episode(spec)
    assert proxy.specs[0].transcript == (transcript or "transcript" in gets)
    assert list((tmp_path / "rooms").iterdir()) == []
    return outcome


@asynccontextmanager
async def door(tmp_path: Path, script: Script, summary: Summary, silent_s: float) -> AsyncIterator[Door]:
    (tmp_path / "api").mkdir()
    with serving(script, tmp_path / "api" / "s.sock"):
        yield Door(tmp_path / "api" / "s.sock", summary, silent_s)


async def test_an_episode_is_graded_and_has_no_flags(tmp_path):
    outcome = await episode(tmp_path, bash("echo x > done.txt"), DONE)
    assert (outcome.status, outcome.reason, outcome.reward, outcome.flags) == ("completed", "final answer", 1.0, ())


async def test_an_agent_that_makes_the_grader_fail_gets_no_reward_and_is_not_trained(tmp_path):
    outcome = await episode(tmp_path, bash("touch crash done.txt"), DONE)
    assert (outcome.status, outcome.reward, outcome.grade) == ("failed", None, None)
    assert outcome.reason.startswith(
        "grader failure, twice on the same workspace; on the untouched input files it gives 0: what the agent left "
        "makes it fail: the grader ended with exit code 3"
    )
    assert outcome.calls == SUMMARY.calls


async def test_a_workspace_that_is_too_large_is_the_agents_own_fault(tmp_path):
    outcome = await episode(tmp_path, bash("for i in 1 2 3; do truncate -s 200M $i; done"), DONE)
    assert (outcome.status, outcome.reward) == ("completed", 0.0)
    assert "holds more than" in outcome.log


async def test_a_grader_is_told_what_the_proxy_heard_and_not_what_the_agent_says(tmp_path):
    grader = 'cmp -s "$REINS_FINAL_MESSAGE" - <<< "heard" && grep -q said "$REINS_TRANSCRIPT" && echo 1 || echo 0\n'
    heard = replace(SUMMARY, final_message="heard\n", transcript='{"role": "user", "text": "said"}\n')
    gets = ("final_message", "transcript")
    lie = bash("mkdir -p ~/.grading; echo no | tee ~/.grading/final_message.txt ~/.grading/transcript.jsonl")
    outcome = await episode(tmp_path, lie, DONE, grader=grader, summary=heard, gets=gets)
    assert outcome.reward == 1.0, outcome


@pytest.mark.parametrize("asked", [True, False])
async def test_what_was_said_is_handed_back_where_that_is_asked_for(tmp_path, asked):
    heard = replace(SUMMARY, transcript='{"role": "user", "text": "said"}\n')
    outcome = await episode(tmp_path, DONE, summary=heard, gets=() if asked else ("transcript",), transcript=asked)
    assert outcome.transcript == (heard.transcript if asked else None)


async def test_a_transcript_that_only_people_wanted_voids_nothing_when_it_is_lost(tmp_path):
    outcome = await episode(tmp_path, DONE, summary=replace(SUMMARY, transcript=None), transcript=True)
    assert (outcome.status, outcome.transcript) == ("completed", None)


async def test_a_lost_transcript_is_infrastructure(tmp_path):
    lost = replace(SUMMARY, transcript=None)
    outcome = await episode(tmp_path, DONE, summary=lost, gets=("transcript",))
    assert (outcome.status, outcome.reward) == ("failed", None)
    assert "transcript" in outcome.reason


@pytest.mark.parametrize(
    ("command", "sandbox", "reason"),
    [
        ("sleep 40", {"idle_s": 0.5}, "limit: sandbox.idle_s"),
        ("head -c 20M /dev/zero > ~/big; sleep 40", {"disk_mb": 8}, "limit: sandbox.disk_mb"),
        ("sleep 40", {"wall_s": 1.5}, "limit: sandbox.wall_s"),
    ],
)
async def test_every_limit_ends_an_episode_by_its_name_and_the_work_is_graded(tmp_path, command, sandbox, reason):
    outcome = await episode(tmp_path, bash(f"touch done.txt; {command}"), DONE, sandbox=sandbox)
    assert (outcome.status, outcome.reason, outcome.grade) == ("truncated", reason, 1.0)


async def test_a_harness_that_floods_its_output_is_ended(tmp_path):
    flood = ["/bin/bash", "-c", "touch done.txt; yes {instruction}"]
    harness = {"name": "command", "argv": flood}
    outcome = await episode(tmp_path, DONE, sandbox={"output_mb": 1}, harness=harness)
    assert (outcome.status, outcome.reason, outcome.grade) == ("truncated", "limit: sandbox.output_mb", 1.0)


@pytest.mark.parametrize("silent_s", [0.0, -1.0], ids=["it waits for the model", "the proxy does not answer"])
async def test_what_may_be_waiting_for_the_model_is_not_idle(tmp_path, silent_s):
    outcome = await episode(tmp_path, bash("sleep 1.5"), DONE, silent_s=silent_s, sandbox={"idle_s": 0.2})
    assert outcome.status == "completed"


@pytest.mark.parametrize("on", [True, False])
async def test_what_is_suspicious_is_noted_and_changes_no_reward(tmp_path, on):
    touched = replace(SUMMARY, touched=("reward/reward.sh",))
    odd = bash("touch done.txt ~/stray; mkdir reward; echo 'echo 1' > reward/reward.sh; setsid -f sleep 30 >&- 2>&-")
    outcome = await episode(tmp_path, odd, DONE, summary=touched, reward={"flags": on})
    assert (outcome.status, outcome.reward) == ("completed", 1.0)
    assert [flag.partition(":")[0] for flag in outcome.flags] == on * [
        "wrote outside the workspace",
        "left processes behind",
        "tool calls name what looks like a grader's",
        "made what looks like a grader's",
    ]


async def test_a_whole_episode_with_the_real_proxy_and_its_transcript(tmp_path):
    rendering = Rendering(make_tokenizer(tmp_path / "tokenizer"))
    call = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "echo seen; touch done.txt"}}\n</tool_call>'
    engine = ScriptedEngine(rendering.tokenizer, [f"looking {call}<|im_end|>", "the answer is ready<|im_end|>"])
    dispatcher = Dispatcher(ProxyConfig(), rendering, engine, ListSink(), 8192)
    with tempfile.TemporaryDirectory(prefix="reins-") as short:
        server = SocketServer(Path(short))
        proxy = RealDoor(dispatcher, await server.start(build_app(dispatcher)))
        grader = """
        [ "$(cat "$REINS_FINAL_MESSAGE")" = "the answer is ready" ] || exit 1
        grep -c . "$REINS_TRANSCRIPT"; grep '"role": "tool"' "$REINS_TRANSCRIPT" | grep -q seen && echo 0.5
        """
        gets = ("final_message", "transcript")
        task = clawgym.write(tmp_path / "task", "t", "Do it.", {}, {"reward.sh": grader}, {}, grader_gets=gets)
        config = RunConfig.model_validate({"sandbox": {"backend": "bubblewrap"}, "engine": {"max_len": 8192}})
        actor = SandboxActor(config, tmp_path / "rooms", proxy)
        outcome = await actor.run_episode(EpisodeSpec("e", task, config.harness.known_as, "g", 0, 0))
        assert proxy.silent > 0.0
        await server.stop()
    assert (outcome.status, outcome.reward, outcome.log) == ("completed", 0.5, "5\n0.5"), outcome


class RealDoor:
    """The proxy without Ray."""

    def __init__(self, dispatcher: Dispatcher, socket: Path) -> None:
        self.dispatcher = dispatcher
        self.socket = socket
        self.silent = -1.0

    async def open_session(self, spec: SessionSpec) -> dict[str, str]:
        return {"key": await self.dispatcher.open(spec), "socket": str(self.socket)}

    async def close_session(self, key: str) -> Summary:
        self.silent = await self.since_call(key)
        return await self.dispatcher.close(key)

    async def since_call(self, key: str) -> float:
        return self.dispatcher.since_call(key)


async def test_each_session_of_a_task_is_a_run_of_its_own_in_one_workspace(tmp_path):
    grader = '[ "$(cat said.txt)" = "$(printf "one\\ntwo")" ] && echo 1.0 || echo 0.0\n'
    draft = Draft("", "t", "Say one.", reward={"reward.sh": grader}, sessions=("Say two.", "Say nothing."))
    task = clawgym.write_draft(draft, tmp_path / "task")
    script = Script(bash("echo one >> said.txt"), DONE, bash("echo two >> said.txt"), DONE, DONE)
    async with door(tmp_path, script, SUMMARY, 99.0) as proxy:
        config = RunConfig.model_validate({"sandbox": {"backend": "bubblewrap"}})
        outcome = await SandboxActor(config, tmp_path / "rooms", proxy).run_episode(
            EpisodeSpec("e", task, config.harness.known_as, "g", 0, 0)
        )
    assert (outcome.status, outcome.reward) == ("completed", 1.0)
    asked = [[m["content"] for m in body["messages"] if m["role"] == "user"] for body in script.bodies]
    assert ["Say one." in "".join(said) for said in asked] == [True, True, False, False, False]
    assert "Say two." in "".join(asked[2])
    assert len(script.bodies) == 5
    assert len(proxy.specs) == 1


async def test_a_session_that_does_not_end_is_the_last(tmp_path):
    draft = Draft("", "t", "Say one.", reward={"reward.sh": "echo 1.0\n"}, sessions=("Say two.",))
    task = clawgym.write_draft(draft, tmp_path / "task")
    script = Script(bash("true"))
    async with door(tmp_path, script, SUMMARY, 99.0) as proxy:
        config = RunConfig.model_validate({"sandbox": {"backend": "bubblewrap"}, "harness": {"max_turns": 2}})
        outcome = await SandboxActor(config, tmp_path / "rooms", proxy).run_episode(
            EpisodeSpec("e", task, config.harness.known_as, "g", 0, 0)
        )
    assert (outcome.status, outcome.reason, len(script.bodies)) == ("truncated", "max turns", 2)


RUBRIC = {"criteria": [{"id": "total", "text": "Done."}, {"id": "style", "text": "Well.", "scale": "fraction"}]}


async def judged(tmp_path: Path, answer: Any, share: float, script: str = GRADER, judge: bool = True) -> Any:
    """An episode that makes done.txt, graded by a script and by a judge."""
    reward = {"reward.sh": script} if share < 1 else {}
    draft = Draft("", "t", "Do it.", reward=reward, rubric=RUBRIC | {"share": share}, grader_gets=("transcript",))
    task = clawgym.write_draft(draft, tmp_path / "task")
    summary = replace(SUMMARY, final_message="I am done.", transcript='{"role": "user"}\n')
    with endpoint(lambda *_: answer) as made:
        async with door(tmp_path, Script(bash("echo x > done.txt"), DONE), summary, 99.0) as proxy:
            settings = {"url": made.url, "model": "m", "cache": None, "votes": 1, "retries": 0, "tries": 1}
            config = RunConfig.model_validate(
                {"sandbox": {"backend": "bubblewrap"}, "judge": settings if judge else None}
            )
            outcome = await SandboxActor(config, tmp_path / "rooms", proxy).run_episode(
                EpisodeSpec("e", task, config.harness.known_as, "g", 0, 0)
            )
    assert proxy.specs[0].transcript
    return outcome, made


async def test_a_judge_and_a_script_share_the_grade(tmp_path):
    outcome, made = await judged(tmp_path, graded(1, 0.5), 0.25)
    assert outcome.grade == pytest.approx(0.75 * 1.0 + 0.25 * 0.75)
    assert outcome.judge["score"] == pytest.approx(0.75)
    said = made.asked[0]["messages"][1]["content"]
    for words in ("I am done.", '{"role": "user"}', "'done.txt', 2 bytes, new"):
        assert words in said


async def test_a_judge_alone_grades_without_a_script(tmp_path):
    outcome, _ = await judged(tmp_path, graded(0, 1.0), 1.0)
    assert (outcome.status, outcome.grade) == ("completed", 0.5)


async def test_a_judge_that_gives_no_grade_is_no_zero(tmp_path):
    outcome, _ = await judged(tmp_path, "well", 0.5)
    assert (outcome.status, outcome.reward, outcome.grade) == ("failed", None, None)
    assert "the judge m gave no grade" in outcome.reason


async def test_a_judge_that_is_not_set_is_no_zero(tmp_path):
    outcome, made = await judged(tmp_path, graded(), 0.5, judge=False)
    assert (outcome.status, outcome.reward, made.asked) == ("failed", None, [])
    assert outcome.reason == "task t needs a judge, and none is set; give judge.url and judge.model"
