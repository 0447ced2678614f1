"""OfficeQA: a CSV of questions with answers, as databricks/officeqa publishes it (officeqa_pro.csv, ..._full, ..._v2).

    uid, question, answer, source_docs, source_files, difficulty     the last three may be missing

Documents are texts in folders beside the CSV. As ``officeqa`` a question's workspace holds its own source files; as
``officeqa_search`` the harness is given the one folder of documents behind the ``search`` MCP server, and has to find
them. An answer is scored as the published scorer does, ``envs.tasks.officeqa_score``.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.tasks import officeqa_score
from envs.tasks.draft import Content, Draft, Scan
from envs.tasks.faults import NoTasksError, TaskError
from envs.tasks.fields import Fields, read_text

COLUMNS = ("uid", "question", "answer")
_HEAD = 1 << 12
_ASKED = """{question}

{where} End your last message with the answer alone, between <FINAL_ANSWER> and </FINAL_ANSWER>.
"""
_FILES = "The documents are in the folder documents/."
_SEARCH = "Find the documents with the search tool."
_NOTHING = "Answer from what you know and can find."
_REWARD_SH = """#!/usr/bin/env bash
exec python3 reward/score.py
"""


@dataclass(frozen=True, slots=True)
class _Sources:
    """What a question is answered from, and how that is said."""

    words: str
    files: Mapping[str, Content] = field(default_factory=dict)
    mcp: tuple[Mapping[str, Any], ...] = ()


def recognised(path: Path) -> bool:
    return any(_is_ours(file) for file in _tables(path))


def _tables(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.csv"))


def _is_ours(file: Path) -> bool:
    if file.suffix != ".csv" or not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(_HEAD).decode("utf-8-sig", "replace")
    return set(COLUMNS) <= {name.strip().strip('"') for name in head.partition("\n")[0].split(",")}


def scan(path: Path) -> Scan:
    """Every row of the tables, with the files that it names. Raises NoTasksError where there is no table."""
    documents = _documents(path)
    return _scan(path, lambda row: _files(row, documents))


def scan_for_search(path: Path) -> Scan:
    """Every row of the tables, with a search over all documents. Raises NoTasksError without a table or documents."""
    folders = sorted({folder for folder in _root(path).iterdir() if folder.is_dir() and any(folder.rglob("*.txt"))})
    if len(folders) != 1:
        named = f"{len(folders)}: {', '.join(folder.name for folder in folders)}" if folders else "none"
        raise NoTasksError(f"{_root(path)}: expected one folder of texts to be searched, got {named}")
    argv = ["python", "-P", "-m", "envs.mcp", "search", "--corpus", os.fspath(folders[0].resolve())]
    server = {"name": "search", "argv": argv, "env": {"PYTHONPATH": os.fspath(Path(__file__).parents[2])}}
    return _scan(path, lambda _: _Sources(_SEARCH, mcp=(server,)))


def _scan(path: Path, sources: Callable[[Fields], _Sources]) -> Scan:
    tables = [file for file in _tables(path) if _is_ours(file)]
    if not tables:
        raise NoTasksError(f"{path}: holds no CSV with the columns {', '.join(COLUMNS)}")
    found = Scan([], [])
    for table in tables:
        try:
            _scan_table(table, sources, found)
        except TaskError as error:
            found.faults.extend(error.faults)
    return found


def _root(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _documents(path: Path) -> dict[str, Path]:
    """Every text below the folders beside the tables, by its name."""
    folders = [folder for folder in sorted(_root(path).iterdir()) if folder.is_dir() and not folder.is_symlink()]
    return {
        file.name: file
        for folder in folders
        for file in sorted(folder.rglob("*.txt"))
        if file.is_file() and not file.is_symlink()
    }


def _files(row: Fields, documents: Mapping[str, Path]) -> _Sources:
    names = [name.strip() for name in re.split(r"[\n;,]+", row.text("source_files", "")) if name.strip()]
    for name in names:
        if name not in documents and documents:
            raise row.fault(
                "source_files", f": there is no {name[:80]!r} in the folders beside the table; put it there"
            )
    if not names or not documents:
        return _Sources(_NOTHING)
    return _Sources(_FILES, {f"documents/{name}": documents[name] for name in names})


def _scan_table(table: Path, sources: Callable[[Fields], _Sources], found: Scan) -> None:
    reader = csv.DictReader(io.StringIO(read_text(table), newline=""), strict=True)
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise TaskError([f"{table}:1: not a row of a CSV: {error}"]) from None
    if twice := next((name for name in columns if columns.count(name) > 1), ""):
        raise TaskError([f"{table}:1: the column {twice!r} stands there twice; leave one of them out"])
    reader.fieldnames = columns
    more = bool(columns)
    while more:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
            more = row is not None
            if row is not None:
                found.drafts.append(_read(row, table, line, sources))
        except csv.Error as error:
            found.faults.append(f"{table}:{line}: not a row of a CSV: {error}")
        except TaskError as error:
            found.faults.extend(error.faults)


def _read(row: Mapping[str, str], table: Path, line: int, sources: Callable[[Fields], _Sources]) -> Draft:
    where = f"{table}:{line}"
    if None in row:
        raise TaskError([f"{where}: more values than columns; put values that hold a comma into quotes"])
    fields = Fields(row, lambda _: where)
    given = sources(fields)
    answer = {"answer": fields.text("answer"), "tolerance": 0.0}
    return Draft(
        where,
        fields.identifier("uid"),
        _ASKED.format(question=fields.text("question").strip(), where=given.words),
        given.files,
        {"reward.sh": _REWARD_SH, "score.py": Path(officeqa_score.__file__), "answer.json": json.dumps(answer)},
        {"difficulty": fields.text("difficulty", "") or "hard", "table": table.stem},
        grader_gets=("final_message",),
        mcp=given.mcp,
    )
