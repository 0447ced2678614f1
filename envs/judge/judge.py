"""A judge: grades an outcome by a rubric, with a model behind an OpenAI-compatible endpoint.

Invariant: a grade is a grade. What gives none (an endpoint that is away, refuses, or never answers in the form that
was asked for) is a JudgeError and never a score of 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.judge import JudgeConfig
from envs.judge.cache import Cache
from envs.judge.client import Client, Cost, JudgeError
from envs.judge.evidence import evidence
from envs.judge.prompt import AnswerError, messages, read_answer
from envs.tasks.rubric import Criterion, Rubric
from envs.tasks.task import Task

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """``score`` is in [0, 1]. ``disagreement`` is the mean over criteria of the highest vote less the lowest."""

    score: float
    criteria: dict[str, dict[str, Any]]
    """By criterion: ``score``, ``votes``, and the ``reason`` of the first vote."""
    disagreement: float
    cost: Cost

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Judge:
    """Grades many outcomes at the same time; ``spent`` adds up what that took."""

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.spent = Cost()
        self._client = Client(config)

    async def grade(
        self, task: Task, rubric: Rubric, workspace: Path, final_message: str = "", transcript: str = ""
    ) -> Verdict:
        """Grade ``workspace``, which no agent can reach any more, and what was said. Raises JudgeError."""
        most = self.config.evidence_chars
        material = await asyncio.to_thread(evidence, workspace, task.input_files, final_message, transcript, most)
        instruction = "\n\n".join([task.instruction, *(f"In a later session:\n{text}" for text in task.sessions)])
        return await self.grade_words(instruction, rubric, material)

    async def grade_words(self, instruction: str, rubric: Rubric, material: str) -> Verdict:
        """Grade ``material``, in which nothing is trusted, by what was asked for. Raises JudgeError."""
        batches = [
            rubric.criteria[start : start + self.config.batch]
            for start in range(0, len(rubric.criteria), self.config.batch)
        ]
        cost = Cost()
        asked = [
            self._vote(messages(instruction, rubric.expected, batch, material), batch, vote, cost)
            for batch in batches
            for vote in range(self.config.votes)
        ]
        try:
            answers = await _all(asked)
        finally:
            self.spent.add(cost)
        given: dict[str, list[tuple[float, str]]] = {}
        for answer in answers:
            for name, graded in answer.items():
                given.setdefault(name, []).append(graded)
        return _verdict(rubric, given, cost)

    async def _vote(
        self, conversation: list[dict[str, str]], criteria: Sequence[Criterion], vote: int, cost: Cost
    ) -> dict[str, tuple[float, str]]:
        """One vote, from the cache or from the endpoint."""
        config = self.config
        question = {
            "url": config.url,
            "model": config.model,
            "messages": conversation,
            "temperature": config.temperature,
            "vote": vote,
        }
        cache = Cache(config.cache.expanduser()) if config.cache else None
        if cache and (held := cache.get(question)) is not None:
            try:
                answer = read_answer(held, criteria)
            except AnswerError:
                pass
            else:
                cost.cached += 1
                return answer
        fault = ""
        for _ in range(config.tries):
            text = await self._client.ask(conversation, criteria, cost)
            try:
                answer = read_answer(text, criteria)
            except AnswerError as error:
                fault = str(error)
                continue
            if cache:
                await asyncio.to_thread(cache.put, question, text)
            return answer
        raise JudgeError(
            f"the judge {config.model} gave no grade in {config.tries} tries: {fault}; "
            "try another judge.model, judge.structured or a smaller judge.batch"
        )


async def _all(asked: list[Any]) -> list[Any]:
    """Everything that was asked for; with the first error nothing more is waited or paid for."""
    running = [asyncio.ensure_future(one) for one in asked]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _verdict(rubric: Rubric, given: dict[str, list[tuple[float, str]]], cost: Cost) -> Verdict:
    graded: dict[str, dict[str, Any]] = {}
    spreads = []
    for criterion in rubric.criteria:
        votes = [score for score, _ in given[criterion.id]]
        spreads.append(max(votes) - min(votes))
        mean = fmean(votes)
        # Met or not met has no half: a tie is not met.
        score = float(mean > 0.5) if criterion.scale == "pass" else mean
        graded[criterion.id] = {"score": score, "votes": votes, "reason": given[criterion.id][0][1]}
    weights = {criterion.id: criterion.weight for criterion in rubric.criteria}
    total = sum(weights[name] * one["score"] for name, one in graded.items()) / sum(weights.values())
    return Verdict(min(1.0, max(0.0, total)), graded, fmean(spreads), cost)


def check_judge(tasks: Iterable[Task], config: JudgeConfig | None) -> None:
    """Raises ValueError when tasks are graded by a judge and there is none."""
    if config is not None:
        return
    judged = [task.id for task in tasks if task.rubric is not None]
    if judged:
        more = f" and {len(judged) - _SHOWN} more" if len(judged) > _SHOWN else ""
        raise ValueError(
            f"judge: got none, and {len(judged)} tasks are graded by one ({', '.join(judged[:_SHOWN])}{more}); give "
            "judge.url and judge.model, or leave these tasks out with tasks.graded_by=script"
        )
