"""The contract of a task folder, checked for real, in sentences that say what fails and what it means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from envs.finding import Finding
from envs.sandbox.base import Limits, WorkspaceTooLarge
from envs.sandbox.create import Backend, unavailable
from envs.sandbox.grading import LIMITS, GraderFailureError, progress, read_score, run_grader
from envs.sandbox.relay import tried
from envs.tasks import clawgym
from envs.tasks.fields import parse_json, read_text
from envs.tasks.task import Task

_MARK = "reins: counters of the network"
# What the kernel counted comes after everything that the grader prints, on the stream that holds no score.
_COUNTED = f"""/bin/bash reward/reward.sh
code=$?
printf '\\n%s\\n' '{_MARK}' >&2
cat /proc/net/snmp >&2
printf '%s\\n' '{_MARK}' >&2
cat /proc/net/snmp6 >&2
exit $code
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the grader: its score, or why there is none."""

    score: float | None
    fault: str
    seconds: float
    network: tuple[int, int]


async def check_task(folder: Path, root: Path, backend: Backend = "auto", limits: Limits = LIMITS) -> list[Finding]:
    """Every promise of a task folder with what is wrong with it; its grader runs three times, and once ``step.sh``.

    ``root``: where sandboxes are made; ``limits``: of each run. Raises SandboxError when the sandbox fails.
    """
    try:
        task = clawgym.read(folder.resolve())
    except clawgym.TaskError as error:
        return [Finding("loads", fault) for fault in error.faults]
    fields = _of_the_fields(folder)
    if not task.scripted:
        alone = "only a judge grades it: there is no script to run"
        return [Finding("loads"), fields, Finding("is graded by a script", alone, fault=False)]
    inputs = task.input_files if task.input_files.is_dir() else None
    try:
        first = await _run(task, inputs, root, backend, limits)
    except WorkspaceTooLarge as error:
        return [Finding("loads"), fields, Finding("fits into a workspace", f"{error}: no episode could begin")]
    findings = [Finding("loads"), fields, *_of_the_start(first, limits)]
    if first.score is not None:
        again = await _run(task, inputs, root, backend, limits)
        findings.append(_of_two_runs(first, again))
    empty = await _run(task, None, root, backend, limits)
    deleted = (
        f"{empty.fault}: an agent that deletes everything would have no score, and its episode would count as failed "
        "and be tried again; print 0 where something is missing"
    )
    findings.append(Finding("scores an empty workspace", deleted if empty.fault else ""))
    if task.gives_steps:
        findings.append(await _of_the_steps(task, root, backend, limits))
    if backend != "process" and not (backend == "auto" and unavailable()):
        findings.append(_of_the_network([first, empty]))
    return findings


def _of_the_fields(folder: Path) -> Finding:
    path = folder / clawgym.ENTRY
    entry = parse_json(read_text(path), path)
    wrong = ""
    if unknown := sorted(entry.keys() - clawgym.FIELDS):
        wrong = f"nothing reads {', '.join(unknown)}; what is read is {', '.join(sorted(clawgym.FIELDS))}"
    return Finding(f"has no field in {clawgym.ENTRY} that nothing reads", wrong, fault=False)


async def _run(task: Task, workspace: Path | None, root: Path, backend: Backend, limits: Limits) -> _Run:
    start = ("/bin/bash", "-c", _COUNTED)
    finished, reached = await run_grader(task, workspace, backend, root, limits, start=start)
    said, *counters = finished.stderr.decode(errors="replace").split(f"{_MARK}\n")
    network = (0, 0)
    if len(counters) == 2:
        network = tried(*counters)
    try:
        score = read_score(replace(finished, stderr=said.encode()), reached).score
    except GraderFailureError as error:
        return _Run(None, " ".join(str(error).split()), finished.seconds, network)
    return _Run(score, "", finished.seconds, network)


def _of_the_start(run: _Run, limits: Limits) -> list[Finding]:
    slow = full = failed = ""
    if run.fault:
        failed = f"{run.fault}: without a score there is no reward, and every episode of this task counts as failed"
    if run.score == 1.0:
        full = "the untouched workspace has the full score already: there is nothing to learn from doing the task"
    if run.seconds > limits.wall_s / 2:
        slow = f"it took {run.seconds:.1f} of {limits.wall_s:g} s: on a busy machine it would run out of time"
    return [
        Finding("scores the untouched workspace", failed),
        Finding("leaves something to do", full, fault=False),
        Finding("is graded well within the time", slow, fault=False),
    ]


def _of_two_runs(first: _Run, again: _Run) -> Finding:
    wrong = ""
    if first.score != again.score:
        shown = [f"{run.score:g}" if run.score is not None else run.fault for run in (first, again)]
        wrong = f"two runs on the same files gave {shown[0]} and {shown[1]}: the reward would be noise"
    return Finding("gives the same score again", wrong)


async def _of_the_steps(task: Task, root: Path, backend: Backend, limits: Limits) -> Finding:
    wrong = ""
    try:
        await progress(task, "", backend, root, limits)
    except GraderFailureError as error:
        wrong = (
            f"reward/step.sh, before anything was said: {' '.join(str(error).split())}: the steps of Harness-v0 would "
            "earn nothing; print a number in [0, 1], 0 where nothing is done yet"
        )
    return Finding("tells the progress of an episode that begins", wrong)


def _of_the_network(runs: list[_Run]) -> Finding:
    unrouted, lookups = (sum(run.network[i] for run in runs) for i in range(2))
    wrong = ""
    if unrouted or lookups:
        wrong = (
            f"the grader sent {unrouted} times to where no network leads and asked {lookups} times for the address "
            "of a name: a grader has no network"
        )
    return Finding("is graded without a network", wrong)
