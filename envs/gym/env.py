"""``Harness-v0``: the harness is the environment. ``reset`` starts it and gives its first model request; ``step``
answers that request and gives the next one.

    env = gymnasium.make("Harness-v0", harness="codex", tasks="DIR", limits={"calls": 40})

Invariant: what an episode leaves on the machine goes with its end, with ``close``, or with this process.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.error import ResetNeeded
from tokenizers import Tokenizer

from configs.environment import settings
from envs.episode import EpisodeOutcome, EpisodeSpec
from envs.gym import folders
from envs.gym.actions import answer_of
from envs.gym.choice import chosen, tasks_of
from envs.gym.observations import Observation, nothing_asked, observation
from envs.gym.spaces import Actions, observations
from envs.gym.stage import Asked, Over, Stage, Turn, open_stage
from envs.gym.text import SessionText
from envs.harnesses.base import check_tools, check_variables
from envs.harnesses.registry import harness as adapter_of
from envs.judge.judge import check_judge
from envs.sandbox.create import chosen as backend_of
from envs.sandbox.create import unavailable
from envs.tasks.task import Task

Info = dict[str, Any]
_OWN_LIMIT = "max turns"
"""The reason of an episode that the harness ended at a limit of its own."""


class EpisodeFailedError(RuntimeError):
    """The harness made no first request, whatever fresh sandbox it was given; the message says why."""


class HarnessEnv(gymnasium.Env[Observation, Any]):
    """One harness in one sandbox; the spaces are those of ``envs.gym.spaces``.

    - The reward comes at the end, from the task's grader, as in training: on a frozen copy, out of the agent's reach;
      0 where the last answer was cut or unreadable (``reward={"clean_end": False}`` leaves it as graded).
    - Where the task has a step grader (``reward/step.sh``), each step earns what its progress changes, and the last one
      the reward less the progress so far: shaping by a potential (Ng et al., 1999, theorem 1, without discount). All
      add up to the reward less the progress at the start, and feigned progress earns nothing.
    - ``terminated``: the harness has ended, by its own will or broken by what it was answered. ``truncated``: a limit
      ended it (``info["record"]["reason"]`` names it); what it has done is graded.
    - An episode that infrastructure ended, a failing grader included, has no reward: ``step`` then gives NaN, which no
      mean swallows, with ``truncated``, and ``info["record"]["status"]`` is ``failed``.
    - Requests that come at the same time are observed in the order in which they came. One that the harness took back
      while its answer was made is answered in vain; ``info["answered"]`` is then False.
    - ``info`` has ``task``, ``harness``, and of each request ``call`` (order of arrival), ``kind`` (main line,
      sub-agent, ...) and ``waiting`` (requests that wait behind it); at the end ``tree`` and ``record``, the fields of
      ``EpisodeOutcome`` that are not None.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own form

    def __init__(
        self,
        harness: str | Mapping[str, Any] = "agent_loop",
        task: Task | str | Path | None = None,
        tasks: Sequence[Task] | str | Path | None = None,
        sandbox: str | Mapping[str, Any] = "auto",
        limits: Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        remote: bool = False,
        render_mode: str | None = None,
        **more: Any,
    ) -> None:
        """Nothing is started before ``reset``.

        Args:
            harness: a name (``python -m envs.harnesses``), or settings as ``harness`` has in a run's configuration.
            task: a task folder in the ClawGym format, or a Task. With neither ``task`` nor ``tasks``: desk tasks.
            tasks: a folder or file of tasks in any format of ``python -m envs.tasks formats``, or Tasks; each episode
                draws one by the seed, or ``options["task"]`` names it.
            sandbox: a backend, or settings as ``sandbox`` has in a run's configuration.
            limits: ``calls``, ``tokens``, ``wall_s``, ``concurrent`` of an episode, as ``proxy.limits`` has; without a
                tokenizer a token is a piece of up to three bytes.
            tokenizer: folder of a tokenizer; with it there are ``prompt_ids``, and answers may be tokens.
            remote: the sandbox lives in an actor on the Ray cluster (``RAY_ADDRESS``, or one on this machine).
            render_mode: ``ansi``, or None.
            more: ``judge``, which tasks with a rubric need, and whatever else ``configs.environment.EnvironmentConfig``
                has.

        Raises ValueError: settings, tasks or a tokenizer that cannot be used, or a harness or sandbox that is not
        there.
        """
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode: got {render_mode!r}, expected 'ansi' or None")
        self.render_mode = render_mode
        self._config = settings(harness=harness, sandbox=sandbox, limits=limits, tokenizer=tokenizer, **more)
        self._remote = remote
        adapter = adapter_of(self._config.harness)
        if not remote and self._config.sandbox.backend != "auto":
            fault = unavailable(backend_of(self._config.sandbox))
            if fault:
                raise ValueError(f"sandbox.backend {self._config.sandbox.backend}: {fault}")
        self._vocabulary = None if self._config.tokenizer is None else _vocabulary(self._config.tokenizer)
        self.observation_space = observations(self._vocabulary)
        self.action_space = Actions(self._vocabulary)
        self._given = (task, tasks)
        with tempfile.TemporaryDirectory(prefix="reins-check-") as folder:
            found = tasks_of(*self._given, Path(folder))
        check_tools(adapter, found)
        check_variables(found)
        check_judge(found, self._config.judge)
        self._tasks: list[Task] = []
        self._name = ""
        self._episodes = 0
        self._stage: Stage | None = None
        self._closing: weakref.finalize[Any, Any] | None = None
        self._asked: Asked | None = None
        self._task: Task | None = None
        self._text = SessionText("not reset yet")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """End what is under way and begin an episode.

        Raises EpisodeFailedError where the harness comes to no first request, ValueError for options that are none.
        """
        super().reset(seed=seed)
        self._asked = None
        stage = self._opened()
        self._task = task = chosen(self._tasks, options, self.np_random)
        first = int(self.np_random.integers(1 << 31))
        name, attempt = self._config.harness.known_as, 0
        while isinstance(turn := stage.begin(self._spec(task, first, attempt)), Over):
            attempt += 1
            # What is no failure of infrastructure, such as a limit of no token, is the same in another sandbox.
            if turn.outcome.status != "failed" or attempt > self._config.sandbox.retries:
                reason = turn.outcome.reason
                raise EpisodeFailedError(f"task {task.id!r} in {name}: no request after {attempt} tries: {reason}")
        self._text = SessionText(f"task {task.id} in {name}")
        return self._observed(turn), self._info(turn)

    def step(self, action: Any) -> tuple[Observation, SupportsFloat, bool, bool, Info]:
        """Answer the request that was observed.

        Raises ActionError for an action that is no answer, after which another may be tried; ResetNeeded where no
        request waits.
        """
        if self._asked is None or self._stage is None:
            raise ResetNeeded("no request waits for an answer: call reset() before step(), and after an episode's end")
        answer = answer_of(action, self._vocabulary)
        turn = self._stage.answer(self._asked.call, answer)
        self._text.said(answer)
        before = self._asked.progress
        if isinstance(turn, Asked):
            return self._observed(turn), turn.progress - before, False, False, self._info(turn)
        self._asked = None
        self._text.over(turn)
        outcome = turn.outcome
        limited = outcome.status == "failed" or _limited(outcome)
        reward = float("nan") if outcome.reward is None else outcome.reward - before
        return nothing_asked(self._vocabulary is not None), reward, not limited, limited, self._last_info(turn)

    def render(self) -> str | None:
        """The session so far as text (``ansi``)."""
        return str(self._text) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the episode under way and remove everything. Safe to call twice; ``reset`` opens it again."""
        closing, self._closing = self._closing, None
        self._stage = self._asked = None
        if closing is not None:
            closing()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of an environment that is closed. Raises TypeError for one that is open."""
        if self._stage is not None:
            raise TypeError("a running harness cannot be copied or pickled: close() the environment, or make another")
        return self.__dict__

    def _opened(self) -> Stage:
        if self._stage is None:
            folder = folders.make(folders.root(self._config.sandbox.root))
            try:
                self._tasks = tasks_of(*self._given, folder)
                self._stage = open_stage(self._config, self._remote)
            except BaseException:
                folders.remove(folder)
                raise
            self._closing = weakref.finalize(self, _close, self._stage, folder, os.getpid())
            self._name, self._episodes = f"env-{secrets.token_hex(4)}", 0
            # At the end of the process threads cannot be started any more: the warden of its sandboxes cleans up.
            self._closing.atexit = False
        return self._stage

    def _spec(self, task: Task, seed: int, attempt: int) -> EpisodeSpec:
        self._episodes += 1
        return EpisodeSpec(
            id=f"{self._name}-{self._episodes - 1}",
            task=task,
            harness=self._config.harness.known_as,
            group=task.id,
            seed=seed,
            step=0,
            temperature=self._config.temperature,
            attempt=attempt,
        )

    def _observed(self, asked: Asked) -> Observation:
        self._asked = asked
        seen = observation(asked, self._vocabulary is not None)
        self._text.asked(asked.ordinal, asked.kind, seen)
        return seen

    def _info(self, turn: Turn) -> Info:
        assert self._task is not None
        info: Info = {"task": self._task.id, "harness": self._config.harness.known_as}
        if isinstance(turn, Asked):
            info |= {"call": turn.ordinal, "kind": turn.kind, "waiting": turn.waiting, "answered": turn.answered}
        return info

    def _last_info(self, over: Over) -> Info:
        info = self._info(over)
        # Copies side by side put each field into one array, whose type the first one settles: None fits into few.
        record = {name: value for name, value in asdict(over.outcome).items() if value is not None}
        return info | {"record": record | info, "tree": over.tree}


def _close(stage: Stage, folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        # The copy in a forked process: what is running is its parent's.
        return
    try:
        stage.close()
    finally:
        folders.remove(folder)


def _limited(outcome: EpisodeOutcome) -> bool:
    return outcome.reason.startswith("limit: ") or outcome.reason == _OWN_LIMIT


def _vocabulary(folder: Path) -> int:
    """Number of ids. Raises ValueError."""
    path = folder.expanduser() / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"tokenizer: {path}: no such file; expected the folder of a Hugging Face tokenizer or model")
    return max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()) + 1
