"""PinchBench: one Markdown file a task, with front matter and sections, as pinchbench/skill publishes them.

    <place>/tasks/task_*.md   id, name, category, grading_type, timeout_seconds, workspace_files, sessions, ...;
                              "## Prompt", "## Expected Behavior", "## Grading Criteria", "## Automated Checks",
                              "## LLM Judge Rubric"
    <place>/assets/           files that workspace_files copy

``grading_type`` is ``automated`` (a Python function ``grade(transcript, workspace_path)`` that gives scores by
criterion, whose mean is the grade), ``llm_judge`` (a rubric whose criteria have weights) or ``hybrid`` (both, with
``grading_weights``). Of a task with ``sessions`` each is a session of the harness, in one workspace.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, parse_yaml, plain_metadata, read_text
from envs.tasks.rubric import Criterion, rubric_of

PATTERN = "task_*.md"
TYPES = ("automated", "llm_judge", "hybrid")
_FRONT = re.compile(r"---[ \t]*\n(.*?\n)---[ \t]*\n(.*)", re.DOTALL)
_SECTION = re.compile(r"^##[ \t]+(\S.*)$", re.MULTILINE)
_CODE = re.compile(r"^```python[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CRITERION = re.compile(r"^###[ \t].*\(Weight:[ \t]*([\d.]+)[ \t]*%\)", re.MULTILINE)
_CHECK = re.compile(r"^-[ \t]+\[[ xX]\][ \t]+(.+)$", re.MULTILINE)
_REWARD_SH = """#!/usr/bin/env bash
# The checks may look at every file of the workspace, so they must not lie in it.
set -eu
mv reward "$HOME/.checks"
exec python3 "$HOME/.checks/run.py" "$PWD"
"""
_RUN_PY = '''"""Calls grade(transcript, workspace_path) and prints the mean of the scores that it gives."""

import json
import os
import sys

with open(os.environ["OPENCLAW_REWARD_PAYLOAD"], encoding="utf-8") as payload:
    transcript = json.load(payload)["transcript"]
from checks import grade  # noqa: E402

scores = grade(transcript, sys.argv[1])
values = [float(score) for score in scores.values() if isinstance(score, (int, float))]
print(json.dumps(scores))
print(sum(values) / len(values) if values else 0.0)
'''


@dataclass(frozen=True, slots=True)
class _File:
    """One task file, taken apart."""

    path: Path
    fields: Fields
    sections: dict[str, str]
    lines: dict[str, int]
    """On which line each section begins."""

    def section(self, name: str) -> str:
        """A section that must be there. Raises TaskError."""
        if not self.sections.get(name, "").strip():
            raise TaskError([f"{self.path}:{self.lines.get(name, 1)}: section '## {name}' is missing or empty"])
        return self.sections[name].strip()


def recognised(path: Path) -> bool:
    return any(_task_folder(path).glob(PATTERN))


def scan(path: Path) -> Scan:
    """Every task file. Raises NoTasksError where there is none."""
    folder = _task_folder(path)
    files = sorted(folder.glob(PATTERN))
    if not files:
        raise NoTasksError(f"{path}: holds no task files; expected tasks/{PATTERN}")
    found = Scan([], [])
    for file in files:
        try:
            found.drafts.append(_read(file, folder.parent))
        except TaskError as error:
            found.faults.extend(error.faults)
    return found


def _task_folder(path: Path) -> Path:
    return path / "tasks" if (path / "tasks").is_dir() else path


def _read(path: Path, root: Path) -> Draft:
    file = _parse(path)
    fields = file.fields
    kind = fields.choice("grading_type", TYPES, "automated")
    judged, scripted = kind != "automated", kind != "llm_judge"
    sessions = _sessions(fields)
    return Draft(
        str(path),
        fields.identifier("id"),
        sessions[0] if sessions else file.section("Prompt"),
        _inputs(fields, root),
        {"reward.sh": _REWARD_SH, "run.py": _RUN_PY, "checks.py": _checks(file)} if scripted else {},
        plain_metadata(fields.values),
        grader_gets=("payload",),
        rubric=_rubric(file, _share(fields) if scripted else 1.0) if judged else None,
        sessions=tuple(sessions[1:]),
    )


def _parse(path: Path) -> _File:
    text = read_text(path).replace("\r\n", "\n")
    match = _FRONT.match(text)
    if match is None:
        raise TaskError([f"{path}:1: no front matter; expected YAML between two lines of ---"])
    values = parse_yaml(match[1], path, 2)

    def where(name: str) -> str:
        found = re.search(rf"^{re.escape(name)}:", match[1], re.MULTILINE)
        return f"{path}:{2 + match[1].count(chr(10), 0, found.start()) if found else 1}"

    headings = list(_SECTION.finditer(text, match.start(2)))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    sections = {heading[1].rstrip(): text[heading.end() : end] for heading, end in zip(headings, ends, strict=True)}
    lines = {heading[1].rstrip(): 1 + text.count("\n", 0, heading.start()) for heading in headings}
    return _File(path, Fields(values, where), sections, lines)


def _sessions(fields: Fields) -> list[str]:
    entries = fields.of("sessions", list, [])
    return [fields.entry("sessions", number, entry).text("prompt") for number, entry in enumerate(entries)]


def _inputs(fields: Fields, root: Path) -> dict[str, Content]:
    inputs: dict[str, Content] = {}
    for number, entry in enumerate(fields.of("workspace_files", list, [])):
        given = fields.entry("workspace_files", number, entry)
        if "content" in given.values:
            inside = given.name_in_workspace("path", given.text("path"))
            inputs[inside] = given.content("content", given.values["content"])
            continue
        source = given.text("source")
        inside = source if source.startswith("assets/") else f"assets/{source}"
        file = given.file_below("source", root, inside)
        inputs[given.name_in_workspace("dest", given.text("dest", source))] = file
    return inputs


def _checks(file: _File) -> str:
    code = _CODE.search(file.section("Automated Checks"))
    where = f"{file.path}:{file.lines['Automated Checks']}: section '## Automated Checks'"
    if code is None:
        raise TaskError([f"{where}: expected a block of ```python"])
    try:
        tree = ast.parse(code[1])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        what = error.args[0] if error.args else "it is nested too deeply"
        raise TaskError([f"{where}: line {line} of its code is no Python: {what}"]) from None
    if not any(getattr(part, "name", "") == "grade" for part in tree.body):
        raise TaskError([f"{where}: expected a function grade(transcript, workspace_path)"])
    return code[1]


def _share(fields: Fields) -> float:
    """The judge's part of the grade."""
    weights = fields.within("grading_weights", {})
    script, judge = weights.number("automated", 0.5), weights.number("llm_judge", 0.5)
    if not (script > 0 and judge > 0):
        raise fields.fault(
            "grading_weights", f": got {weights.values}, expected two weights above 0 for a hybrid grade"
        )
    return judge / (script + judge)


def _rubric(file: _File, share: float) -> dict[str, Any]:
    """The rubric's criteria, or where it has none with weights, the checklist of the section before it."""
    text = file.sections.get("LLM Judge Rubric", "")
    headings = list(_CRITERION.finditer(text))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    criteria = [
        Criterion(f"criterion_{number}", text[h.start() : end].lstrip("# ").strip(), _weight(file, h[1]), "fraction")
        for number, (h, end) in enumerate(zip(headings, ends, strict=True) if headings else (), 1)
    ]
    if not criteria:
        asked = _CHECK.findall(file.section("Grading Criteria"))
        criteria = [Criterion(f"criterion_{number}", line, 1.0, "fraction") for number, line in enumerate(asked, 1)]
    expected = file.sections.get("Expected Behavior", "").strip()
    return rubric_of(file.fields, criteria, share, expected, "grading_type").plain()


def _weight(file: _File, written: str) -> float:
    try:
        return float(written)
    except ValueError:
        where = f"{file.path}:{file.lines['LLM Judge Rubric']}: section '## LLM Judge Rubric'"
        raise TaskError([f"{where}: got the weight {written[:20]!r} %, expected a number"]) from None
