"""What a real harness says around a task: heard once, in an episode of its own, so that transcripts can be written.

Invariant: the texts are the harness's own, of the installed version. Marks tell where the task and an output stand in
them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium

import envs  # noqa: F401 - registers Harness-v0
from algos.primer import SHELLS
from algos.recipe import ColdstartError
from envs.gym.actions import words
from envs.gym.env import EpisodeFailedError
from envs.harnesses.external.releases import missing, releases
from envs.sandbox.create import Backend
from envs.tasks import clawgym
from envs.tasks.desk.grading import MOUNT_DIR

LAST = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
"""The command that ends an episode, of harnesses that end by one; the others end on an answer without a call."""

_TASK = "The task of the mark."
_OUTPUT = "first mark\nsecond mark\n"
_FILE = "heard.txt"
_LISTEN, _KEEP_STILL = f"cat {_FILE}", f"test -e {_FILE}"


@dataclass(frozen=True, slots=True)
class Overheard:
    """One harness. ``opening`` are the messages of the first request, as (role, text), with a mark for the task."""

    name: str
    opening: tuple[tuple[str, str], ...]
    tools: tuple[dict[str, Any], ...]
    printed: str
    """The message of a command's result, with the marks of the command and of its output."""
    silent: str
    """The same for a command that prints nothing."""

    @property
    def shell(self) -> str:
        """What the harness calls the shell."""
        return str(SHELLS[self.name]("")["name"])

    @property
    def last(self) -> str:
        """The command that ends an episode; empty: an answer without a call does."""
        return LAST.get(self.name, "")

    def messages(self, task: str) -> list[dict[str, Any]]:
        """The first request's, with this task."""
        return [{"role": role, "content": text.replace(_TASK, task)} for role, text in self.opening]

    def result(self, command: str, output: str) -> str:
        """What the model is told of a command and what it printed."""
        if not output:
            return self.silent.replace(_KEEP_STILL, command)
        return self._output(output).join(self.printed.split(self._output(_OUTPUT))).replace(_LISTEN, command)

    def _output(self, text: str) -> str:
        """An output as the harness shows it: as a JSON text, or without the end of its last line."""
        escaped = json.dumps(text)[1:-1]
        return escaped if json.dumps(_OUTPUT)[1:-1] in self.printed else text.rstrip("\n")

    def phrases(self) -> list[str]:
        """Its boilerplate, line by line, in pieces that no task, command or output is a part of."""
        texts = [part for _, text in self.opening for part in text.split(_TASK)]
        for around in self.printed.split(self._output(_OUTPUT)):
            texts += around.split(_LISTEN)
        texts += [*self.silent.split(_KEEP_STILL), self.last]
        found = [line for text in texts for line in text.splitlines(keepends=True)]
        found += ["\n" + json.dumps(tool, ensure_ascii=False) for tool in self.tools]
        found.append(f'\n{{"name": "{self.shell}", "arguments": {{"command": "')
        return [line for line in dict.fromkeys(found) if len(line) > 1]


def check_outside(names: Sequence[str]) -> None:
    """Raise ColdstartError for a harness that is not installed, or whose shell call takes more than a command."""
    fit = sorted(one for one in SHELLS if one in releases() and SHELLS[one]("x").get("arguments") == {"command": "x"})
    for name in names:
        if name not in fit:
            raise ColdstartError(f"coldstart.outside: got {name!r}, expected some of {', '.join(fit)}")
        known = releases()
        if lacking := [part for part in (*known[name].needs, name) if missing(known[part])]:
            raise ColdstartError(
                f"coldstart.outside: {' and '.join(lacking)} not installed: python -m envs.harnesses install {name}"
            )


def overhear(name: str, backend: Backend = "auto") -> Overheard:
    """Run one episode in the harness with a task and an output that are marks.

    Raises ColdstartError for a harness that is not installed, or whose prompts cannot be told beforehand: its shell
    call takes more than a command, or its first request holds more of the task than the instruction.
    """
    check_outside([name])
    with TemporaryDirectory(prefix="reins-heard-") as folder:
        inputs: dict[str, str | bytes] = {_FILE: _OUTPUT}
        task = clawgym.write(Path(folder) / "task", "heard", _TASK, inputs, {"reward.sh": "echo 1\n"}, {}, MOUNT_DIR)
        env = gymnasium.make("Harness-v0", harness=name, task=task, sandbox=backend)
        try:
            first, _ = env.reset(seed=0)
            shell = str(SHELLS[name]("")["name"])
            results = [env.step(words("", [(shell, {"command": text})]))[0] for text in (_LISTEN, _KEEP_STILL)]
        except EpisodeFailedError as error:
            raise ColdstartError(f"coldstart.outside: {error}") from error
        finally:
            env.close()
    printed, silent = (_last(observation["messages"]) for observation in results)
    opening = tuple((message["role"], message["text"]) for message in first["messages"])
    if not any(_TASK in text for _, text in opening):
        raise ColdstartError(f"coldstart.outside: the first request of {name} does not have the task word for word")
    if any(_FILE in text for _, text in opening):
        raise ColdstartError(
            f"coldstart.outside: the first request of {name} tells the files of the task, as no form can"
        )
    tools = tuple(
        {"type": "function", "function": tool | {"parameters": json.loads(tool["parameters"])}}
        for tool in first["tools"]
    )
    heard = Overheard(name, opening, tools, printed, silent)
    if heard.result(_LISTEN, _OUTPUT) != printed or heard.result(_LISTEN, "x\n") == printed:
        raise ColdstartError(f"coldstart.outside: {name} does not show what a command prints word for word")
    return heard


def _last(messages: Sequence[dict[str, Any]]) -> str:
    return str(messages[-1]["text"])
