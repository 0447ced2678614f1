"""Measured success of a policy in memory: its own completions, real bash, the tasks' own graders.

Invariant: prompts are made of held ids exactly as the proxy makes them (``Rendering``), completions come
from the same batched engine, commands run in a sandbox, and an episode counts only when it ends by itself
on a readable turn without a tool call. What is simplified: the episodes of one measurement share a sandbox,
each in a folder of its own, a call of the file editor ends an episode, and nothing leaves a short episode's view.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engines.base import Generate, Generated
from actors.engines.batch import Batch, Running
from actors.rendering import Rendering
from algos.tiny import NOTES
from envs.harnesses.agent_loop import observations
from envs.harnesses.agent_loop.parts import BASE, Part, Seen, assembled
from envs.harnesses.agent_loop.prompts import SYSTEM
from envs.harnesses.agent_loop.schemas import TOOLS
from envs.protocols.canonical import Message, ToolCall
from envs.sandbox.base import Command, Limits, Mount, Sandbox
from envs.sandbox.create import Backend, create
from envs.tasks.desk import DeskTask, write

COMMAND_S = 5
OBSERVATION_CHARS = 2000
CONTEXT = 512
"""Tokens of one episode at most; a longer one is not a success."""

# Runs `at FOLDER NAME COMMAND` lines: each command in its folder, output and exit code under $out.
_RUN = r"""
at() {
  (cd "$workspace/$1" && exec timeout -k 1 %d bash -c "$3") < /dev/null > "$out/$2" 2>&1
  echo $? > "$out/$2.code"
}
"""
_GRADE = r"""
grade() {
  (cd "$workspace/$1" && bash "$tasks/$2/reward/reward.sh") < /dev/null > "$out/$1" 2> /dev/null
  echo $? > "$out/$1.code"
}
"""


@dataclass(slots=True)
class Episode:
    """One task, tried once. ``ids`` is the path so far, ``reward`` the grade, 0 without a clean end."""

    task: DeskTask
    parts: Part
    tools: list[dict[str, Any]]
    ids: list[int]
    commands: list[str] = field(default_factory=list)
    calls: int = 0
    rounds: int = 0
    clean: bool = False
    reward: float = 0.0


def rehearse(
    model: PreTrainedModel,
    rendering: Rendering,
    tasks: Sequence[DeskTask],
    *,
    temperature: float,
    seed: int,
    max_turns: int = 4,
    max_tokens: int = 24,
    backend: Backend = "auto",
    harnesses: Sequence[str] = (BASE,),
) -> list[Episode]:
    """One episode for each of ``tasks`` (repeat a task to try it again), in ``harnesses`` in turn.

    ``temperature`` 0 is greedy. Draws are a function of ``seed`` and the place of the task. Starts its own
    event loop, so call it from a thread without one.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        stage = _Stage(model, rendering, temperature, seed, max_tokens, Path(folder))
        return asyncio.run(stage.play(tasks, list(harnesses), max_turns, backend))


def success(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward by family."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        rewards.setdefault(episode.task.family, []).append(episode.reward)
    return {family: sum(each) / len(each) for family, each in rewards.items()}


@dataclass(slots=True)
class _Stage:
    model: PreTrainedModel
    rendering: Rendering
    temperature: float
    seed: int
    max_tokens: int
    folder: Path

    async def play(
        self, tasks: Sequence[DeskTask], harnesses: Sequence[str], max_turns: int, backend: Backend
    ) -> list[Episode]:
        write({task.id: task for task in tasks}.values(), self.folder / "tasks")
        for index, task in enumerate(tasks):
            for path, text in task.inputs.items():
                place = self.folder / "inputs" / str(index) / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            (self.folder / "inputs" / str(index)).mkdir(parents=True, exist_ok=True)
        episodes = [self._begun(task, harnesses[i % len(harnesses)]) for i, task in enumerate(tasks)]
        root = self.folder / "rooms"
        root.mkdir()
        sandbox = await create(backend, "rehearsal", self.folder / "inputs", "/workspace", root)
        try:
            live = list(range(len(episodes)))
            for turn in range(max_turns):
                if not live:
                    break
                live = await self._turn(sandbox, episodes, live, turn)
            await self._grade(sandbox, episodes)
        finally:
            await sandbox.destroy()
        return episodes

    def _begun(self, task: DeskTask, harness: str) -> Episode:
        parts = assembled(harness, [], 0, NOTES)
        tools = parts.tools(TOOLS)
        opening = [Message("system", parts.system(SYSTEM)), Message("user", parts.instruction(task.instruction))]
        return Episode(task, parts, tools, self.rendering.first(opening, tools))

    async def _turn(self, sandbox: Sandbox, episodes: list[Episode], live: list[int], turn: int) -> list[int]:
        """One completion for each live episode and what its calls give; those that go on."""
        answers = self._complete([episodes[i].ids for i in live], [(i, turn) for i in live])
        called: dict[int, list[ToolCall]] = {}
        prompts = {i: episodes[i].ids for i in live}
        new: dict[int, list[Message]] = {}
        for i, answer in zip(live, answers, strict=True):
            episode = episodes[i]
            episode.ids = prompts[i] + answer.ids
            message, readable = self.rendering.parse(answer.ids, prompts[i], episode.tools)
            if answer.finish != "stop" or not readable:
                continue
            if message.tool_calls:
                called[i] = list(message.tool_calls)
            elif said := episode.parts.reply({}, episode.rounds):
                new[i] = [Message("user", said)]
            else:
                episode.clean = True
        new |= await self._observations(sandbox, episodes, called)
        going_on = []
        for i in sorted(new):
            episode, prompt = episodes[i], prompts[i]
            tail = self.rendering.extend(prompt, episode.ids[len(prompt) :], new[i], episode.tools)
            if tail is not None and len(episode.ids) + len(tail) + self.max_tokens <= CONTEXT:
                episode.ids = episode.ids + tail
                going_on.append(i)
        return going_on

    async def _observations(
        self, sandbox: Sandbox, episodes: list[Episode], called: dict[int, list[ToolCall]]
    ) -> dict[int, list[Message]]:
        """What each episode is told of its calls; those with a call that cannot be made here are left out."""
        given = {i: [_given(episodes[i].parts, call) for call in calls] for i, calls in called.items()}
        given = {i: answers for i, answers in given.items() if None not in answers}
        commands = {
            i: [each.command for each in answers if each and each.command is not None] for i, answers in given.items()
        }
        printed = await self._run(sandbox, {i: these for i, these in commands.items() if these})
        told = {}
        for i, answers in given.items():
            episode, outputs = episodes[i], iter(printed.get(i, ()))
            episode.commands += commands[i]
            episode.rounds += 1
            messages = []
            for call, answer in zip(called[i], answers, strict=True):
                assert answer is not None
                text, code = next(outputs) if answer.command is not None else (answer.text, None)
                shown = episode.parts.observation(Seen(call.name, text, code, episode.calls))
                messages.append(Message("tool", shown, tool_call_id=f"call{episode.calls}"))
                episode.calls += 1
            if remark := episode.parts.remark(episode.rounds):
                messages.append(Message("user", remark))
            told[i] = messages
        return told

    def _complete(self, prompts: list[list[int]], keys: list[tuple[int, int]]) -> list[Generated]:
        answers: list[Generated | Exception | None] = [None] * len(prompts)
        with torch.inference_mode():
            batch = Batch(self.model, version=0, slots=len(prompts), max_len=CONTEXT, chunk=1 << 14)
            for place, (ids, key) in enumerate(zip(prompts, keys, strict=True)):
                request = Generate(ids, self.max_tokens, self.temperature, stop_ids=self.rendering.stop_ids)

                def deliver(answer: Generated | Exception, place: int = place) -> None:
                    answers[place] = answer

                draws = np.random.default_rng((self.seed, *key))
                batch.add(Running(request, deliver, np.asarray(ids, np.int32), draws))
            while batch.busy:
                batch.step()
        done = []
        for answer in answers:
            assert isinstance(answer, Generated)
            done.append(answer)
        return done

    async def _run(self, sandbox: Sandbox, called: dict[int, list[str]]) -> dict[int, list[tuple[str, int | None]]]:
        lines = [
            f"at {i} {i}.{n} {shlex.quote(command)}"
            for i, commands in called.items()
            for n, command in enumerate(commands)
        ]
        if not lines:
            return {}
        out = await self._script(sandbox, _RUN % COMMAND_S, lines)
        return {i: [_observation(out / f"{i}.{n}") for n in range(len(commands))] for i, commands in called.items()}

    async def _grade(self, sandbox: Sandbox, episodes: list[Episode]) -> None:
        clean = [i for i, episode in enumerate(episodes) if episode.clean]
        if not clean:
            return
        lines = [f"grade {i} {episodes[i].task.id}" for i in clean]
        mount = Mount(self.folder / "tasks", "/tasks")
        out = await self._script(sandbox, _GRADE, lines, mount)
        for i in clean:
            printed = _bounded(out / str(i)).split()
            episodes[i].reward = float(printed[-1]) if printed else 0.0

    async def _script(self, sandbox: Sandbox, functions: str, lines: list[str], mount: Mount | None = None) -> Path:
        """Run the lines in one bash; the folder on the host with what they left under ``$out``."""
        out = sandbox.home / "out"
        for old in out.glob("*"):
            old.unlink()
        head = [
            f"workspace={shlex.quote(sandbox.inside_workspace)}",
            f"out={shlex.quote(sandbox.inside_home)}/out",
            f"tasks={shlex.quote(sandbox.inside(mount)) if mount else ''}",
            "mkdir -p $out",
        ]
        script = sandbox.put_home("script.sh", "\n".join([*head, functions, *lines, ""]))
        limits = Limits(wall_s=60.0 + COMMAND_S * len(lines), cpu_s=60.0)
        command = Command(("/bin/bash", script), sandbox.environment(), (mount,) if mount is not None else (), limits)
        finished = await sandbox.run(command)
        if finished.code != 0:
            raise RuntimeError(
                f"got exit code {finished.code} from the script that runs the policy's commands, expected 0: "
                f"{finished.stderr[-500:].decode(errors='replace')}"
            )
        return out


@dataclass(frozen=True, slots=True)
class _Answer:
    """To a call: what a command prints, or a text."""

    command: str | None = None
    text: str = ""


def _given(parts: Part, call: ToolCall) -> _Answer | None:
    """How a call is answered, None where it cannot be made here."""
    if not isinstance(call.arguments, dict):
        return None
    found = parts.resolve(call.name, call.arguments)
    if isinstance(found, str):
        return _Answer(text=found)
    name, arguments = found
    command = arguments.get("command")
    if name != "execute_bash" or not isinstance(command, str) or "\0" in command:
        return None
    return _Answer(command)


def _observation(printed: Path) -> tuple[str, int | None]:
    """Text and exit code, as the loop's tools give them."""
    code = int(printed.with_name(f"{printed.name}.code").read_text())
    # `timeout` reports a time-out as 124, or 137 when it had to kill.
    ended = None if code in (124, 137) else code
    return observations.of_command(_bounded(printed), ended, COMMAND_S, OBSERVATION_CHARS), ended


def _bounded(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 16).decode(errors="replace")
