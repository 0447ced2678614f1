"""Task folders in the ClawGym format: read with errors that name file, line and field, and written.

    <task>/data_entry.json   {"task_id", "user_query", "input_mount_dir", "metadata", "grader_gets", "mcp", "sessions"}
    <task>/input_files/      the workspace at the start (may be missing)
    <task>/reward/reward.sh  the grader: the last line of its output is the score
    <task>/rubric.json       what a judge grades by (may be missing), see ``envs.tasks.rubric``

``grader_gets``, ``mcp``, ``sessions`` and ``rubric.json`` are ours; everything else is as ClawGym publishes it.
Invariant: what ``load`` returns can be run; every fault of a folder is found before anything starts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.mcp.spec import ServerFault, read_servers
from envs.sandbox.create import mount_dir_fault
from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, files_below, line_of, parse_json, plain_metadata, read_text
from envs.tasks.openclaw_events import VARIABLE
from envs.tasks.rubric import FILE as RUBRIC
from envs.tasks.rubric import read_rubric
from envs.tasks.task import Task

__all__ = ["NoTasksError", "TaskError"]
ENTRY = "data_entry.json"
FIELDS = frozenset({"task_id", "user_query", "input_mount_dir", "metadata", "grader_gets", "mcp", "sessions"})
MOUNT_DIR = "/root/.openclaw/workspace"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tasks that can be run, by folder name, and a sentence for each one that was skipped."""

    tasks: list[Task]
    skipped: tuple[str, ...]


GRADER_GETS = ("final_message", "transcript", "payload")
_LONGEST_SCRIPT = 1 << 20


def read(folder: Path) -> Task:
    """One task folder. Raises TaskError."""
    path = folder / ENTRY
    if not path.is_file():
        raise TaskError([f"{path}: no such file; every task folder needs one"])
    text = read_text(path)
    entry = parse_json(text, path)
    fields = Fields(entry, lambda name: f"{path}:{line_of(text, name)}")
    task_id = fields.identifier("task_id")
    instruction = fields.text("user_query")
    mount_dir = fields.text("input_mount_dir", MOUNT_DIR)
    if fault := mount_dir_fault(mount_dir):
        raise fields.fault("input_mount_dir", f" is {mount_dir!r}; {fault}")
    grader_gets = fields.texts("grader_gets", GRADER_GETS)
    sessions = fields.texts("sessions")
    for part in ("input_files", "reward"):
        files_below(folder / part)
    try:
        servers = read_servers(entry.get("mcp", []), folder)
    except ServerFault as fault:
        raise TaskError([f"{path}:{line_of(text, 'mcp')}: {fault}"]) from None
    if _reads_payload(folder / "reward"):
        grader_gets = (*grader_gets, "payload")
    task = Task(
        task_id,
        instruction,
        folder,
        mount_dir,
        plain_metadata(fields.of("metadata", dict, {})),
        tuple(dict.fromkeys(grader_gets)),
        servers,
        read_rubric(folder / RUBRIC) if (folder / RUBRIC).exists() else None,
        sessions,
    )
    grader = task.reward_dir / "reward.sh"
    missing = not grader.is_file() or grader.is_symlink() or grader.parent.is_symlink()
    if missing and task.scripted:
        raise TaskError([f"{grader}: expected a file, not a link, in a folder; it prints the score as its last line"])
    return task


def _reads_payload(reward: Path) -> bool:
    """Whether a grader of ClawGym's reads what was said, which its folder says nowhere else."""
    scripts = [path for path in reward.glob("*.*") if path.suffix in (".py", ".sh") and path.is_file()]
    return any(path.stat().st_size <= _LONGEST_SCRIPT and VARIABLE.encode() in path.read_bytes() for path in scripts)


def folders(path: Path) -> list[Path]:
    """The task folders directly under ``path``, or ``path`` itself if it is one. Raises TaskError without any."""
    if not path.is_dir():
        raise NoTasksError(f"{path}: no such folder; expected one that holds task folders")
    if (path / ENTRY).exists():
        return [path]
    found = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not found:
        raise NoTasksError(f"{path}: holds no task folders; expected folders with a {ENTRY} each")
    return found


def scan(path: Path) -> Loaded:
    """Every task folder directly under ``path`` in the order of their names, sound or not."""
    tasks: list[Task] = []
    faults: list[str] = []
    seen: dict[str, Path] = {}
    for folder in folders(path):
        try:
            task = read(folder.resolve())
        except TaskError as error:
            faults += error.faults
            continue
        if first := seen.get(task.id):
            faults.append(f"{folder / ENTRY}: field 'task_id': {task.id!r} is also the id of {first / ENTRY}")
            continue
        seen[task.id] = folder
        tasks.append(task)
    return Loaded(tasks, tuple(faults))


def load(path: Path, skip_bad: bool = False) -> Loaded:
    """The tasks under ``path``.

    Raises TaskError for any broken folder; with ``skip_bad`` only when none is sound.
    """
    loaded = scan(path)
    if loaded.skipped and not (skip_bad and loaded.tasks):
        raise TaskError(list(loaded.skipped))
    return loaded


def recognised(path: Path) -> bool:
    """Whether ``path`` is a task folder or has one directly under it."""
    return (path / ENTRY).exists() or any(path.glob(f"*/{ENTRY}"))


def drafts(path: Path) -> Scan:
    """Every task folder directly under ``path``, with its files."""
    loaded = scan(path)
    faults = list(loaded.skipped)
    found = []
    for task in loaded.tasks:
        try:
            found.append(_draft(task))
        except TaskError as error:
            faults += error.faults
    return Scan(found, faults)


def _draft(task: Task) -> Draft:
    path = task.folder / ENTRY
    return Draft(
        str(path),
        task.id,
        task.instruction,
        files_below(task.input_files),
        files_below(task.reward_dir),
        task.metadata,
        task.mount_dir,
        task.grader_gets,
        None if task.rubric is None else task.rubric.plain(),
        task.sessions,
        tuple(parse_json(read_text(path), path).get("mcp", [])),
    )


def write(
    folder: Path,
    task_id: str,
    instruction: str,
    inputs: Mapping[str, Content],
    reward: Mapping[str, Content],
    metadata: Mapping[str, str | int | float | bool],
    mount_dir: str = MOUNT_DIR,
    grader_gets: Sequence[str] = (),
) -> Task:
    """``write_draft`` of these parts."""
    parts = Draft(str(folder), task_id, instruction, inputs, reward, metadata, mount_dir, tuple(grader_gets))
    return write_draft(parts, folder)


def write_draft(draft: Draft, folder: Path) -> Task:
    """Write one task folder, replacing one that is there.

    ``inputs`` and ``reward`` map relative paths to contents; an input that ends in ``/`` is an empty folder,
    and ``reward`` must hold ``reward.sh`` unless only a judge grades. Raises TaskError when the result could not be
    loaded.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    entry: dict[str, Any] = {
        "task_id": draft.id,
        "user_query": draft.instruction,
        "input_mount_dir": draft.mount_dir,
        "metadata": dict(draft.metadata),
    }
    given = {"grader_gets": draft.grader_gets, "sessions": draft.sessions, "mcp": draft.mcp}
    entry |= {name: list(value) for name, value in given.items() if value}
    for name, plain in ((ENTRY, entry), (RUBRIC, draft.rubric)):
        if plain is not None:
            (folder / name).write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for below, files in (("input_files", draft.inputs), ("reward", draft.reward)):
        for name, content in files.items():
            _put(folder / below / name, content, name.endswith("/"))
    return read(folder)


def _put(path: Path, content: Content, empty_folder: bool) -> None:
    if empty_folder:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        shutil.copy2(content, path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
