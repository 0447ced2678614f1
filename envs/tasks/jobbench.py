"""JobBench: professional work graded by a judge alone, as JobBench/job-bench publishes it.

    <split>/<occupation>/task<N>/task_folder/TASK_INSTRUCTIONS.txt   and the files that the agent works on
    <split>/<occupation>/task<N>/RUBRICS.json       {"rubrics": [{"rubric", "weight", "criterion": [...]}]}
    <split>/<occupation>/task<N>/files_required_to_search/           (main split only; never shown to the agent)
    tasks.parquet, easy.parquet                     task_id, occupation, task_num, prompt, reference_files, rubric_json

The splits are ``dataset`` and ``dataset_easy``, or ``main`` and ``easy``. Folders are read where they are there; from
parquet files alone (with ``pyarrow``) a task is read with those of its reference files that lie beside the table. A
rubric passes when all of its criteria hold.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, files_below, line_of, parse_json, read_text
from envs.tasks.rubric import Criterion, rubric_of

INSTRUCTIONS = "task_folder/TASK_INSTRUCTIONS.txt"
RUBRICS = "RUBRICS.json"
TABLES = {"tasks.parquet": "main", "easy.parquet": "easy"}
SPLITS = {"dataset": "main", "main": "main", "dataset_easy": "easy", "easy": "easy"}


def recognised(path: Path) -> bool:
    return bool(_folders(path)) or bool(_tables(path))


def _folders(path: Path) -> list[Path]:
    """The task folders at ``path``, or one to three levels below it."""
    found: set[Path] = set()
    for depth in range(4):
        for name in (RUBRICS, INSTRUCTIONS):
            pattern = "/".join(["*"] * depth + [name])
            found |= {file.parents[name.count("/")] for file in path.glob(pattern)}
    return sorted(found)


def _tables(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name in TABLES else []
    return [path / name for name in TABLES if (path / name).is_file()]


def scan(path: Path) -> Scan:
    """Every task folder, or without one every row of the tables. Raises NoTasksError where there is neither."""
    found = Scan([], [])
    folders = _folders(path)
    if not folders and not _tables(path):
        raise NoTasksError(f"{path}: holds no task; expected folders with {INSTRUCTIONS}, or {' or '.join(TABLES)}")
    for folder in folders:
        try:
            found.drafts.append(_read(folder))
        except TaskError as error:
            found.faults.extend(error.faults)
    for table in _tables(path) if not folders else ():
        _scan_table(table, found)
    return found


def _read(folder: Path) -> Draft:
    path = folder / RUBRICS
    text = read_text(path)
    fields = Fields(parse_json(text, path), lambda name: f"{path}:{line_of(text, name)}")
    files: dict[str, Content] = {**files_below(folder / "task_folder")}
    files.pop("TASK_INSTRUCTIONS.txt", None)
    instruction = read_text(folder / INSTRUCTIONS).strip()
    if not instruction:
        raise TaskError([f"{folder / INSTRUCTIONS}:1: is empty; expected what the agent is asked"])
    split = next((SPLITS[part] for part in reversed(folder.parts) if part in SPLITS), "main")
    occupation = folder.parent.name
    return _draft(str(path), split, f"{occupation}__{folder.name}", occupation, instruction, files, fields)


def _draft(
    source: str, split: str, name: str, occupation: str, instruction: str, files: dict[str, Content], fields: Fields
) -> Draft:
    return Draft(
        source,
        f"{split}__{name}",
        instruction,
        files,
        {},
        {"split": split, "occupation": occupation},
        grader_gets=("final_message",),
        rubric=_rubric(fields),
    )


def _rubric(fields: Fields) -> dict[str, Any]:
    criteria = []
    for number, value in enumerate(fields.of("rubrics", list), 1):
        entry = fields.entry("rubrics", number - 1, value)
        asked = entry.of("criterion", list)
        if not asked or not all(isinstance(one, str) and one.strip() for one in asked):
            raise entry.fault("criterion", ": expected a list of texts that is not empty")
        points = "".join(f"\n- {one.strip()}" for one in asked)
        text = f"{entry.text('rubric').strip()}\nMet only if all of this holds:{points}"
        criteria.append(Criterion(f"rubric_{number}", text, entry.number("weight", 1.0)))
    return rubric_of(fields, criteria, 1.0, "", "rubrics").plain()


def _scan_table(table: Path, found: Scan) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise NoTasksError(f"{table}: reading it needs pyarrow; run: pip install pyarrow")
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(table).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        found.faults.append(f"{table}: not a parquet file that can be read: {error}")
        return
    for number, row in enumerate(rows, 1):
        try:
            found.drafts.append(_read_row(table, number, row))
        except TaskError as error:
            found.faults.extend(error.faults)


def _read_row(table: Path, number: int, row: dict[str, Any]) -> Draft:
    where = f"{table}: row {number}"
    fields = Fields(row, lambda _: where)
    name = fields.identifier("task_id")
    files: dict[str, Content] = {}
    for value in fields.of("reference_files", list, []):
        inside = fields.name_in_workspace("reference_files", value)
        short = re.sub(r"^.*?task_folder/", "", inside)
        files[short] = fields.file_below("reference_files", table.parent, inside)
    rubric = parse_json(fields.text("rubric_json"), table)
    split = TABLES[table.name]
    rubrics = Fields(rubric, lambda _: f"{where}: field 'rubric_json'")
    return _draft(where, split, name, fields.text("occupation"), fields.text("prompt"), files, rubrics)
