"""The contract of a harness adapter, checked for real, in sentences that say what fails and what it means.

The harness runs three times in a sandbox against a model API that answers at once, that has reached its limit, and
that stays silent. Nothing leaves the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.finding import Finding
from envs.harnesses.base import Endpoint, Harness
from envs.harnesses.own_files import OWN_FILES
from envs.harnesses.scripted_model import Model, Part, serving
from envs.sandbox.base import Finished, Limits, Sandbox
from envs.sandbox.create import Backend, create
from envs.sandbox.flags import written_outside
from envs.sandbox.relayed import RELAY_BASE_URL, Leavings, leavings, through_relay
from envs.tasks import clawgym
from envs.tasks.task import Task

_LIMITS = Limits(wall_s=120.0, cpu_s=120.0, memory_mb=4096)
_INSTRUCTION = "Say that you are done. Do nothing else: there is nothing to read and nothing to write."
_SHOWN = 300
_START_S = 3.0
"""How much longer than an answered run, at least, one without an answer gets to come to its call."""
_TRIES_S = 20.0
"""How long a harness may try again when it is told that the limit is reached."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the harness against one part of the model."""

    model: Model
    key: str
    finished: Finished
    ended: bool
    reason: str
    changed: tuple[str, ...]
    outside: tuple[str, ...]
    end: Leavings


async def check_harness(
    adapter: Harness, root: Path, backend: Backend = "auto", limits: Limits = _LIMITS
) -> list[Finding]:
    """Every promise of an adapter with what is wrong with it.

    ``root``: where sandboxes are made; ``limits``: of each run. Raises SandboxError without the backend, and what
    ``adapter.command`` raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="reins-"))
    try:
        task = clawgym.write(
            folder / "task",
            "check",
            _INSTRUCTION,
            {"notes.txt": "nothing\n"},
            {"reward.sh": "echo 0\n"},
            {},
            "/root/workspace",
        )

        async def run(part: Part, wall_s: float) -> _Run:
            return await _run(adapter, task, part, root, folder, backend, replace(limits, wall_s=wall_s))

        answered = await run("answer", limits.wall_s)
        findings = _of_an_answer(answered, limits)
        if any(finding.broken for finding in findings):
            # A harness that does not even hear an answer has nothing to say of limits.
            return findings
        # Enough to start and to call once; the first gets time for a few tries of its own besides.
        once_s = answered.finished.seconds + _START_S
        patient = replace(limits, wall_s=min(limits.wall_s, once_s + _TRIES_S))
        findings += _of_a_limit(await run("limit", patient.wall_s), patient)
        silent = await run("silence", min(limits.wall_s, once_s))
        return findings + _of_silence(silent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    adapter: Harness, task: Task, part: Part, root: Path, folder: Path, backend: Backend, limits: Limits
) -> _Run:
    sockets = folder / part
    sockets.mkdir()
    model = Model(part)
    key = secrets.token_hex(16)
    sandbox = await create(backend, f"harness-{os.getpid()}-{part}", task.input_files, task.mount_dir, root)
    try:
        with serving(model, sockets / "model.sock"):
            command = adapter.command(sandbox, task, Endpoint(RELAY_BASE_URL, key), limits)
            command = through_relay(sandbox, command, sockets / "model.sock")
            began = time.time_ns()
            finished = await sandbox.run(command)
        ended, reason = adapter.ended(finished)
        outside = tuple(written_outside(sandbox, finished, began, OWN_FILES.get(adapter.name, ())))
        return _Run(model, key, finished, ended, reason, _changed(sandbox, task), outside, leavings(finished.stderr))
    finally:
        await sandbox.destroy()


def _changed(sandbox: Sandbox, task: Task) -> tuple[str, ...]:
    """Paths in the workspace that are not as they were."""
    before = {path.relative_to(task.input_files): path.read_bytes() for path in task.input_files.iterdir()}
    after = {path.relative_to(sandbox.workspace): path for path in sandbox.workspace.rglob("*")}
    odd = [name for name, path in after.items() if not path.is_file() or before.get(name) != path.read_bytes()]
    return tuple(sorted(str(name) for name in {*odd, *(before.keys() - after.keys())}))


def _of_an_answer(run: _Run, limits: Limits) -> list[Finding]:
    model, code = run.model, run.finished.code
    if not model.calls and not model.refused:
        call = (
            f"the harness made no call to the base URL ({run.reason}; {_tail(run.finished)}): `command` does not point "
            "it there, or it does not start; calls that go elsewhere are seen by nobody and train nothing"
        )
        # What it would do with an answer is not known.
        return [Finding("calls the model API at the base URL", call), *_of_its_traces(run)]
    key = read = lacks = end = own = ""
    if foreign := sorted({key[:8] or "none" for key in model.keys if key != run.key}):
        key = (
            f"calls came with another key than that of the endpoint (beginning {', '.join(foreign)}): the proxy knows "
            "an episode by its key and refuses them"
        )
    if model.refused:
        read = f"a call was refused: {model.refused[0][:_SHOWN]}"
    if model.unknown:
        lacks = f"it asked for {_some(model.unknown)}, which is answered with 404: harmless if it goes on without"
    if code is None:
        end = f"it still ran after {limits.wall_s:g} s: every episode would last until its wall limit"
    elif not run.ended:
        own = (
            f"`ended` says that it did not come to its own end ({run.reason!r}, exit code {code}) after a plain "
            f"answer: every episode would count as failed. Its output: {_tail(run.finished)}"
        )
    words = "" if run.reason.strip() else "`ended` gives no reason: the episode's record would say nothing"
    return [
        Finding("calls the model API at the base URL"),
        Finding("puts the key on every call", key),
        Finding("sends what the proxy can read", read),
        Finding("asks for nothing that the proxy lacks", lacks, fault=False),
        Finding("ends by itself after an answer without tool calls", end),
        Finding("`ended` reads its own end", own),
        Finding("says in words why it ended", words),
        *_of_its_traces(run),
    ]


def _of_its_traces(run: _Run) -> list[Finding]:
    workspace = outside = left = network = ""
    if run.changed:
        workspace = f"the harness itself changed {_some(run.changed)}: graders would take that for the agent's work"
    if run.outside:
        outside = (
            f"it wrote {_some(run.outside)}, which the second look at an episode takes for the agent's doing: add a "
            "pattern to envs/harnesses/own_files.py"
        )
    if run.end.processes:
        left = (
            f"{run.end.processes} of its processes still ran when it had ended ({', '.join(run.end.names)}): they are "
            "killed, and the second look takes them for the agent's"
        )
    if run.end.unrouted or run.end.lookups:
        network = (
            f"it sent {run.end.unrouted} times to where no network leads and asked {run.end.lookups} times for the "
            "address of a name: look for settings of telemetry, updates and accounts; each try may cost seconds"
        )
    return [
        Finding("leaves the workspace to the agent", workspace),
        Finding("writes only to hidden places of the home", outside, fault=False),
        Finding("leaves no process", left, fault=False),
        Finding("tries no other network", network, fault=False),
    ]


def _of_a_limit(run: _Run, limits: Limits) -> list[Finding]:
    still = own = ""
    if run.finished.code is None:
        still = f"told with status 429 that its limit is reached, it still ran after {limits.wall_s:.0f} s"
    if run.ended:
        own = f"`ended` says that it came to its own end ({run.reason!r}), though it got no answer at all"
    words = "" if run.reason.strip() else "`ended` gives no reason for it"
    return [
        Finding("ends when the session's limit is reached", still, fault=False),
        Finding("takes no limit for its own end", own, fault=False),
        Finding("tells a limit in words", words),
    ]


def _of_silence(run: _Run) -> list[Finding]:
    code = run.finished.code
    if code is not None:
        early = f"it gave up by itself while a call was running (exit code {code}): its own timeout is short"
        return [Finding("waits for an answer that takes long", early, fault=False)]
    own = "`ended` says that a run which was cut at its wall limit came to its own end" if run.ended else ""
    words = "" if run.reason.strip() else "`ended` gives no reason for it"
    return [Finding("takes the wall limit for no end of its own", own), Finding("tells the wall limit in words", words)]


def _some(things: Sequence[str]) -> str:
    return ", ".join(things[:5]) + (f" and {len(things) - 5} more" if len(things) > 5 else "")


def _tail(finished: Finished) -> str:
    text = (finished.stdout + finished.stderr).decode(errors="replace").strip()
    return text[-_SHOWN:] or "no output"
