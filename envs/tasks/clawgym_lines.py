"""ClawGym's training set as one file: ``syn_task.jsonl`` of RUC-AIBOX/ClawGym-Task, about 13,500 tasks.

A line holds ``prompt``, ``hook_code`` (the command that prints scores as JSON, or a number), ``input_files`` (a list of
``{"file_path", "content"}``; those below ``reward/`` are the grader's) and ``origin_template``, whose ``id:`` names the
task. The grade is the mean of the scores.
"""

from __future__ import annotations

import re
from pathlib import Path

from envs.tasks.clawgym import MOUNT_DIR
from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError
from envs.tasks.fields import Fields, parse_json
from envs.tasks.jsonl import scan_lines, tables

_HEAD = 1 << 20
_ID = re.compile(r"^[ \t]*id:[ \t]*(\S.*)$", re.MULTILINE)
_REWARD_SH = """#!/usr/bin/env bash
set -euo pipefail
({hook}
) | python3 -c '
import json, sys
given = json.load(sys.stdin)
values = list(given.values()) if isinstance(given, dict) else [given]
print(sum(map(float, values)) / len(values) if values else 0.0)'
"""


def recognised(path: Path) -> bool:
    return any(_is_ours(file) for file in tables(path))


def _is_ours(file: Path) -> bool:
    if file.suffix != ".jsonl" or not file.is_file():
        return False
    with file.open("rb") as opened:
        return b'"hook_code"' in opened.readline(_HEAD)


def scan(path: Path) -> Scan:
    """Every line of the files. Raises NoTasksError where there is none."""
    files = [file for file in tables(path) if file.suffix == ".jsonl"]
    if not files:
        raise NoTasksError(f"{path}: holds no file *.jsonl")
    return scan_lines(files, _read)


def _read(file: Path, line: int, text: str) -> Draft:
    where = f"{file}:{line}"
    fields = Fields(parse_json(text, file, line), lambda _: where)
    named = _ID.search(fields.text("origin_template", ""))
    inputs, reward = _files(fields)
    hook = fields.text("hook_code")
    scripts = [name for name in reward if name.endswith(".py")]
    if not scripts:
        raise fields.fault("input_files", ": none of them is a Python file below reward/, which would grade the task")
    return Draft(
        where,
        named[1].strip() if named else f"task_{line - 1:05d}",
        fields.text("prompt"),
        inputs,
        {**reward, "reward.sh": _REWARD_SH.replace("{hook}", hook)},
        {"grading_type": "automated"},
        MOUNT_DIR,
    )


def _files(fields: Fields) -> tuple[dict[str, Content], dict[str, Content]]:
    """Those of the workspace and those of the grader."""
    inputs: dict[str, Content] = {}
    reward: dict[str, Content] = {}
    for number, entry in enumerate(fields.of("input_files", list, [])):
        given = fields.entry("input_files", number, entry)
        path, content = given.text("file_path"), given.content("content", given.of("content", str))
        graders = path.startswith("reward/")
        inside = given.name_in_workspace("file_path", path.removeprefix("reward/"))
        (reward if graders else inputs)[inside] = content
    return inputs, reward
