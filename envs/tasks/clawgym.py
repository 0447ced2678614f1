"""Task folders in the ClawGym format: read with errors that name file, line and field, and written.

    <task>/data_entry.json   {"task_id", "user_query", "input_mount_dir", "metadata", "grader_gets", "mcp"}
    <task>/input_files/      the workspace at the start (may be missing)
    <task>/reward/reward.sh  the grader: the last line of its output is the score

Invariant: what ``load`` returns can be run; every fault of a folder is found before anything starts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.mcp.spec import ServerFault, read_servers
from envs.sandbox.create import mount_dir_fault
from envs.tasks.task import Task

ENTRY = "data_entry.json"
FIELDS = frozenset({"task_id", "user_query", "input_mount_dir", "metadata", "grader_gets", "mcp"})
MOUNT_DIR = "/root/.openclaw/workspace"


class TaskError(ValueError):
    """Task folders that cannot be used; ``faults`` holds a sentence for each: file, line, field, remedy."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(
            f"{len(faults)} broken task folder{'s' if len(faults) > 1 else ''} "
            "(to run the others: --skip-bad-tasks):\n" + "\n".join(f"  {fault}" for fault in faults)
        )


class NoTasksError(TaskError):
    """A place without task folders: there are no others to run."""

    def __init__(self, fault: str) -> None:
        super().__init__([fault])
        self.args = (fault,)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tasks that can be run, by folder name, and a sentence for each folder that was skipped."""

    tasks: list[Task]
    skipped: tuple[str, ...]


def _line_of(text: str, field: str) -> int:
    """The line on which a field of the entry begins; 1 when it is not there."""
    before, found, _ = text.partition(f'"{field}"')
    return before.count("\n") + 1 if found else 1


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError([f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"]) from error
    except (RecursionError, ValueError) as error:
        raise TaskError([f"{path}:1: not JSON that can be read: {error}"]) from error
    if not isinstance(entry, dict):
        raise TaskError([f"{path}:1: expected a JSON object, got {type(entry).__name__}"])
    return entry


def _field(path: Path, text: str, entry: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = entry.get(name, default)
    where = f"{path}:{_line_of(text, name)}: field {name!r}"
    if value is None:
        raise TaskError([f"{where} is missing; expected {_KINDS[kind]}"])
    if not isinstance(value, kind):
        raise TaskError([f"{where}: expected {_KINDS[kind]}, got {type(value).__name__} {str(value)[:80]!r}"])
    if isinstance(value, str) and not value.strip():
        raise TaskError([f"{where} is empty; expected {_KINDS[kind]}"])
    return value


_KINDS: dict[type, str] = {str: "a text", dict: "an object", list: "a list"}
GRADER_GETS = ("final_message", "transcript")


def read(folder: Path) -> Task:
    """One task folder. Raises TaskError."""
    path = folder / ENTRY
    if not path.is_file():
        raise TaskError([f"{path}: no such file; every task folder needs one"])
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise TaskError([f"{path}:{line}: not UTF-8 at byte {error.start}"]) from error
    entry = _parse(path, text)
    task_id = _field(path, text, entry, "task_id", str)
    instruction = _field(path, text, entry, "user_query", str)
    mount_dir = _field(path, text, entry, "input_mount_dir", str, MOUNT_DIR)
    if fault := mount_dir_fault(mount_dir):
        line = _line_of(text, "input_mount_dir")
        raise TaskError([f"{path}:{line}: field 'input_mount_dir' is {mount_dir!r}; {fault}"])
    metadata = _field(path, text, entry, "metadata", dict, {})
    grader_gets = _field(path, text, entry, "grader_gets", list, [])
    if unknown := [name for name in grader_gets if name not in GRADER_GETS]:
        line = _line_of(text, "grader_gets")
        raise TaskError([f"{path}:{line}: field 'grader_gets': got {unknown[0]!r}, expected some of {GRADER_GETS}"])
    if any("\ud800" <= character <= "\udfff" for character in instruction):
        raise TaskError([f"{path}:{_line_of(text, 'user_query')}: field 'user_query' holds half a surrogate pair"])
    grader = folder / "reward" / "reward.sh"
    if not grader.is_file() or grader.is_symlink() or grader.parent.is_symlink():
        raise TaskError([f"{grader}: expected a file, not a link, in a folder; it prints the score as its last line"])
    inputs = folder / "input_files"
    if inputs.is_symlink() or (inputs.exists() and not inputs.is_dir()):
        raise TaskError([f"{inputs}: expected a folder, not a link"])
    plain = {name: value for name, value in metadata.items() if isinstance(value, str | int | float | bool)}
    try:
        servers = read_servers(entry.get("mcp", []), folder)
    except ServerFault as fault:
        raise TaskError([f"{path}:{_line_of(text, 'mcp')}: {fault}"]) from None
    return Task(task_id, instruction, folder, mount_dir, plain, tuple(dict.fromkeys(grader_gets)), servers)


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


def write(
    folder: Path,
    task_id: str,
    instruction: str,
    inputs: dict[str, str | bytes],
    reward: dict[str, str | bytes],
    metadata: dict[str, str | int | float | bool],
    mount_dir: str = MOUNT_DIR,
    grader_gets: Sequence[str] = (),
) -> Task:
    """Write one task folder, replacing one that is there.

    ``inputs`` and ``reward`` map relative paths to contents; an input that ends in ``/`` is an empty folder,
    and ``reward`` must hold ``reward.sh``. Raises TaskError when the result could not be loaded.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    entry: dict[str, Any] = {
        "task_id": task_id,
        "user_query": instruction,
        "input_mount_dir": mount_dir,
        "metadata": metadata,
    }
    if grader_gets:
        entry["grader_gets"] = list(grader_gets)
    (folder / ENTRY).write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for below, files in (("input_files", inputs), ("reward", reward)):
        for name, content in files.items():
            path = folder / below / name
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(folder)
