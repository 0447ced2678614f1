r"""JSON lines of one's own, one task a line.

    {"id": "sum-1", "instruction": "Write the sum of numbers.txt into sum.txt.",
     "files": {"numbers.txt": "1\n2\n"}, "expected": {"sum.txt": "3\n"}}

Graded by one of: ``expected`` (files that must have exactly this text; the grade is the share that has), ``grader`` (a
bash script, run in the workspace, whose last line is the score); and by ``rubric`` (as in rubric.json, for a judge), by
itself or with one of these. May hold besides: ``metadata``, ``mount_dir``, ``grader_gets``, ``sessions``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from envs.sandbox.create import mount_dir_fault
from envs.tasks.clawgym import GRADER_GETS
from envs.tasks.draft import MOUNT_DIR, Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import MOST_BYTES as LONGEST_LINE
from envs.tasks.fields import Fields, check_file, decoded, parse_json, plain_metadata
from envs.tasks.rubric import rubric_in

MOST_BYTES = 8 << 30
"""Of one file of lines."""
KNOWN = frozenset(
    {"id", "instruction", "files", "expected", "grader", "rubric", "metadata", "mount_dir", "grader_gets", "sessions"}
)
_EXPECTED_SH = """#!/usr/bin/env bash
# The share of the expected files that are there, byte by byte.
right=0 all=0
while IFS= read -r -d '' file; do
  all=$((all + 1))
  [[ -f $file && ! -L $file ]] && cmp -s -- "$file" "reward/expected/$file" && right=$((right + 1))
done < <(cd reward/expected && find . -type f -print0)
awk "BEGIN { print $right / $all }"
"""


def tables(path: Path) -> list[Path]:
    """The files of JSON lines at ``path``: itself, or those directly in it."""
    return [path] if path.is_file() else sorted(path.glob("*.jsonl"))


def scan_lines(files: Sequence[Path], read: Callable[[Path, int, str], Draft]) -> Scan:
    """``read`` of file, number and text of each line that is not blank; a broken line costs no other."""
    found = Scan([], [])
    for file in files:
        try:
            for number, line in _lines(file):
                try:
                    found.drafts.append(read(file, number, decoded(line, file, number)))
                except TaskError as error:
                    found.faults.extend(error.faults)
        except TaskError as error:
            found.faults.extend(error.faults)
    return found


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """One after the other, since a file of them may be larger than the memory. Raises TaskError."""
    check_file(file, MOST_BYTES)
    with file.open("rb") as opened:
        number = 0
        while line := opened.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise TaskError([f"{file}:{number}: got a longer line, expected at most {LONGEST_LINE} bytes"])
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def recognised(path: Path) -> bool:
    return any(file.suffix == ".jsonl" for file in tables(path))


def scan(path: Path) -> Scan:
    """Every line of the files. Raises NoTasksError where there is none."""
    found = scan_lines([file for file in tables(path) if file.suffix == ".jsonl"], _read)
    if not found.drafts and not found.faults:
        raise NoTasksError(f"{path}: holds no lines; expected files *.jsonl with a task on each line")
    return found


def _read(file: Path, line: int, text: str) -> Draft:
    where = f"{file}:{line}"
    fields = Fields(parse_json(text, file, line), lambda _: where)
    fields.only(KNOWN)
    mount_dir = fields.text("mount_dir", MOUNT_DIR)
    if fault := mount_dir_fault(mount_dir):
        raise fields.fault("mount_dir", f" is {mount_dir!r}; {fault}")
    return Draft(
        where,
        fields.identifier("id"),
        fields.text("instruction"),
        _files(fields, "files"),
        _grader(fields),
        plain_metadata(fields.of("metadata", dict, {})),
        mount_dir,
        fields.texts("grader_gets", GRADER_GETS),
        _rubric(fields),
        fields.texts("sessions"),
    )


def _files(fields: Fields, name: str) -> dict[str, Content]:
    given = fields.of(name, dict, {})
    return {fields.name_in_workspace(name, path): fields.content(name, content) for path, content in given.items()}


def _grader(fields: Fields) -> dict[str, Content]:
    given = [name for name in ("expected", "grader") if name in fields.values]
    if len(given) > 1:
        raise fields.fault("grader", " stands beside 'expected'; leave one of them out")
    if not given and "rubric" not in fields.values:
        raise fields.fault("grader", " is missing, and so are 'expected' and 'rubric'; nothing would grade this task")
    if given == ["grader"]:
        return {"reward.sh": fields.text("grader")}
    if not given:
        return {}
    expected = _files(fields, "expected")
    if not expected:
        raise fields.fault("expected", " is empty; expected a file at least")
    return {"reward.sh": _EXPECTED_SH, **{f"expected/{path}": text for path, text in expected.items()}}


def _rubric(fields: Fields) -> dict[str, Any] | None:
    if "rubric" not in fields.values:
        return None
    rubric = rubric_in(fields.within("rubric"))
    scripted = "expected" in fields.values or "grader" in fields.values
    if scripted and rubric.share == 1:
        raise fields.fault("rubric", ": its share is 1, which leaves nothing to the script; give a share below 1")
    if not scripted and rubric.share < 1:
        raise fields.fault("rubric", ": its share is below 1, and no script gives the rest; leave the share out")
    return json.loads(json.dumps(rubric.plain()))
