"""The formats that tasks come in: which one a place holds, and its tasks as folders that can be run.

To add a format: a module with ``recognised`` and ``scan``, and one line in ``FORMATS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.sandbox.files import Bounds
from envs.tasks import clawgym, clawgym_lines, harbor, jobbench, jsonl, officeqa, pinchbench
from envs.tasks.clawgym import Loaded
from envs.tasks.draft import Draft, Scan, size
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, place_fault


@dataclass(frozen=True, slots=True)
class Format:
    """One public format. ``scan`` raises NoTasksError where there is nothing of it; a broken task is a fault in it."""

    name: str
    what: str
    recognised: Callable[[Path], bool]
    scan: Callable[[Path], Scan]


_BOUNDS = Bounds()


def _never(_: Path) -> bool:
    """Only who names the format gets it."""
    return False


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("clawgym", "folders with data_entry.json", clawgym.recognised, clawgym.drafts),
        Format("pinchbench", "task_*.md with front matter", pinchbench.recognised, pinchbench.scan),
        Format("jobbench", "folders with TASK_INSTRUCTIONS.txt and RUBRICS.json", jobbench.recognised, jobbench.scan),
        Format("harbor", "folders with task.toml, or task.yaml", harbor.recognised, harbor.scan),
        Format("officeqa", "a CSV with uid, question, answer", officeqa.recognised, officeqa.scan),
        Format("officeqa_search", "the same, with a search over all documents", _never, officeqa.scan_for_search),
        Format("clawgym_lines", "*.jsonl with hook_code", clawgym_lines.recognised, clawgym_lines.scan),
        Format("jsonl", "*.jsonl with a task on each line", jsonl.recognised, jsonl.scan),
    )
}


def format_of(path: Path, name: str | None = None) -> Format:
    """The format called ``name``, or the first one that recognises what lies at ``path``.

    Raises NoTasksError for a path that is not there, a name that is none, and a place of no known format.
    """
    if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a name that is too long
        raise NoTasksError(f"{path}: no such folder or file; expected tasks in one of: {', '.join(FORMATS)}")
    if name is not None and name not in FORMATS:
        raise NoTasksError(f"got the format {name!r}, expected one of: {', '.join(FORMATS)}")
    if name is not None:
        return FORMATS[name]
    found = next((one for one in FORMATS.values() if one.recognised(path)), None)
    if found is None:
        known = "; ".join(f"{one.name}: {one.what}" for one in FORMATS.values())
        raise NoTasksError(f"{path}: holds no task of a known format ({known}); or name one with tasks.format")
    return found


def scan(path: Path, name: str | None = None) -> Scan:
    """What ``path`` holds, sound or not; a second task of one id is a fault. Raises NoTasksError."""
    one = format_of(path, name)
    found = one.scan(path)
    seen: dict[str, Draft] = {}
    faults = list(found.faults)
    for draft in found.drafts:
        if fault := _words_fault(draft):
            faults.append(fault)
        elif fault := _files_fault(draft):
            faults.append(f"{draft.source}: {fault}")
        elif first := seen.get(draft.id):
            faults.append(f"{draft.source}: its id {draft.id!r} is also that of {first.source}")
        else:
            seen[draft.id] = draft
    if not found.drafts and not faults:
        raise NoTasksError(f"{path}: holds no task; expected {one.what}")
    return Scan(list(seen.values()), faults)


def _words_fault(draft: Draft) -> str:
    """Why the id or the instructions of a task cannot be used, which may come from names of folders and from texts."""
    said = {"id": draft.id, "instruction": draft.instruction, "sessions": list(draft.sessions)}
    fields = Fields(said, lambda _: draft.source)
    try:
        fields.identifier("id")
        fields.text("instruction")
        fields.texts("sessions")
    except TaskError as error:
        return error.faults[0]
    return ""


def _files_fault(draft: Draft) -> str:
    """Why the files of a task cannot be written; empty when they can."""
    large = sum(map(size, draft.inputs.values()))
    if large > _BOUNDS.total_bytes:
        return f"its files have {large} bytes, expected at most {_BOUNDS.total_bytes} in a workspace"
    if len(draft.inputs) > _BOUNDS.entries:
        return f"it has {len(draft.inputs)} files, expected at most {_BOUNDS.entries} in a workspace"
    for name in draft.inputs:
        if fault := place_fault(name):
            return f"its file {name[:80]!r}: {fault}"
    for names in (draft.inputs, draft.reward):
        if both := _file_and_folder(names):
            return f"its file {both[:80]!r} is also a folder of another file"
    return ""


def _file_and_folder(names: Iterable[str]) -> str:
    """A name that is also the beginning of another one's path; empty when there is none."""
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    return next((name for name in names if name in folders), "")


def load(
    path: Path,
    folder: Path,
    name: str | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
    scripted: bool = False,
) -> Loaded:
    """The tasks at ``path``, the first ``limit`` of them; task folders stay where they are, others are written below
    ``folder``. With ``scripted`` only those whose grade needs no judge.

    Raises TaskError for any broken task; with ``skip_bad`` only when none is sound. NoTasksError when none is left.
    """
    found = scan(path, name)
    if found.faults and not (skip_bad and found.drafts):
        raise TaskError(found.faults)
    drafts = [draft for draft in found.drafts if draft.rubric is None or not scripted][:limit]
    if not drafts:
        raise NoTasksError(f"{path}: every task there needs a judge; give one, or take tasks.graded_by=any")
    if format_of(path, name).name == "clawgym":
        tasks = [clawgym.read(Path(draft.source).parent) for draft in drafts]
    else:
        tasks = [clawgym.write_draft(draft, folder / draft.folder_name) for draft in drafts]
    return Loaded(tasks, tuple(found.faults))
