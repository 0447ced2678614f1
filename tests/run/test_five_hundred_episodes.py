"""Many episodes in a row through the real sandbox actor, every fifth of them broken on purpose: nothing is left.

REINS_EPISODES=500 sets how many.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from left import descendants, left
from needs import require
from standin import Part, StandIn

from actors.sandbox import SandboxActor, session_id
from configs.schema import RunConfig
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.sandbox.create import unavailable
from envs.sandbox.gc import processes_of
from envs.tasks import clawgym
from envs.tasks.task import Task

pytestmark = pytest.mark.harness
EPISODES = int(os.environ.get("REINS_EPISODES", "100"))
LANES = 4
HASTY_S = 1.0
GRADER = "cmp -s answer.txt notes.txt && echo 1.0 || echo 0.0\n"


def starts_of(rooms: Path, session: str) -> list[int]:
    """The processes of a session's sandbox, bubblewrap's own outside of it first."""
    inner = [pid for base in rooms.glob(f"{session}-*") for pid in processes_of(base)]
    outer = [pid for pid in descendants(os.getpid()) if pid not in inner and set(descendants(pid)) & set(inner)]
    return outer + inner


@dataclass
class Scene:
    """The way in which an episode is broken, and how it must end; None: cancelled."""

    name: str
    part: Callable[[Stage, str], Part]
    ends: tuple[str, str] | None = None
    hasty: bool = False


class Stage:
    """Two actors over the same folder, one of them with little time, and the tasks that can be cancelled."""

    def __init__(self, folder: Path, proxy: StandIn) -> None:
        self.rooms = folder / "rooms"
        inputs = {"notes.txt": "amber\n"}
        self.task: Task = clawgym.write(folder / "task", "copy", "Copy the file.", inputs, {"reward.sh": GRADER}, {})
        self.proxy = proxy
        self.random = random.Random(7)
        self.running: dict[str, asyncio.Task[EpisodeOutcome]] = {}
        settings = {"patient": 300.0, "hasty": HASTY_S}
        self.actors = {
            name: SandboxActor(
                RunConfig.model_validate({"sandbox": {"wall_s": wall_s, "grade_s": 120.0}}), self.rooms, proxy
            )
            for name, wall_s in settings.items()
        }

    def cancel(self, session: str) -> None:
        """Soon, at some moment of what comes next."""
        delay = self.random.choice((0.0, 0.002, 0.01, 0.03))
        asyncio.get_running_loop().call_later(delay, self.running[session].cancel)

    def kill(self, session: str, first: bool) -> None:
        found = starts_of(self.rooms, session)
        os.kill(found[0] if first else found[-1], signal.SIGKILL)

    async def play(self, number: int, scene: Scene | None) -> str:
        """One episode; how it ended."""
        actor = self.actors["hasty" if scene is not None and scene.hasty else "patient"]
        spec = EpisodeSpec(f"e{number}", self.task, "agent_loop", "group", number, 0)
        session = session_id(spec)
        self.proxy.parts[session] = Part() if scene is None else scene.part(self, session)
        task = self.running[session] = asyncio.create_task(actor.run_episode(spec))
        try:
            outcome = await task
        except asyncio.CancelledError:
            if scene is None or scene.ends is not None:
                raise
            return "cancelled"
        finally:
            del self.running[session]
        if scene is None:
            assert (outcome.status, outcome.reward) == ("completed", 1.0), outcome
        elif scene.ends is not None:
            status, reason = scene.ends
            assert outcome.status == status, (scene.name, outcome)
            assert reason in outcome.reason, (scene.name, outcome)
        return outcome.status

    async def close(self) -> None:
        for actor in self.actors.values():
            await actor.close()


KILLED = "was killed"
SCENES = [
    Scene("bubblewrap is killed", lambda s, _: Part(called=lambda one: s.kill(one, True)), ("failed", KILLED)),
    Scene("one inside is killed", lambda s, _: Part(called=lambda one: s.kill(one, False)), ("truncated", KILLED)),
    Scene("the agent kills its harness", lambda *_: Part(("kill -9 $PPID; sleep 5",)), ("truncated", KILLED)),
    Scene("the agent kills all", lambda *_: Part(("setsid -f sleep 600; kill -9 -1",)), ("truncated", KILLED)),
    Scene("the command hangs", lambda *_: Part(("setsid -f sleep 600; sleep 600",)), ("truncated", "wall_s"), True),
    Scene("the model hangs", lambda *_: Part(hangs=True), ("truncated", "wall_s"), True),
    Scene("cancelled in create", lambda s, _: Part(opened=s.cancel)),
    Scene("cancelled in run", lambda s, _: Part(("sleep 600",), called=s.cancel)),
    Scene("cancelled in grade", lambda s, _: Part(closed=s.cancel)),
    Scene("it leaves processes", lambda *_: Part(("for i in 1 2 3; do setsid -f sleep 600; done; cp n* answer.txt",))),
]


@pytest.mark.timeout(1500)
async def test_after_many_episodes_nothing_is_left(tmp_path):
    require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    (tmp_path / "stage").mkdir()
    async with StandIn(tmp_path / "api") as proxy:
        stage = Stage(tmp_path / "stage", proxy)
        # What there is once per process (the warden's pipe, probes of the machine) is there after the first.
        await stage.play(-1, None)
        await stage.close()
        before = left(tmp_path)
        scenes = [SCENES[i // 5 % len(SCENES)] if i % 5 == 4 else None for i in range(EPISODES)]
        numbers = iter(range(EPISODES))
        ends: Counter[str] = Counter()

        async def lane() -> None:
            for number in numbers:
                ends[await stage.play(number, scenes[number])] += 1

        async with asyncio.TaskGroup() as lanes:
            for _ in range(LANES):
                lanes.create_task(lane())
        await stage.close()
        assert sum(ends.values()) == EPISODES
        assert ends["completed"] >= EPISODES * 0.8
        assert proxy.sessions == 0
        assert stage.actors["patient"]._pool.hits, "no room of a pool was used"
        deadline = asyncio.get_running_loop().time() + 30
        while (more := left(tmp_path) - before) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            # A process that has ended may not be gone yet.
            await asyncio.sleep(0.2)
        assert more == set(), (more, ends)
    print(f"\n{EPISODES} episodes: {dict(ends)}")
