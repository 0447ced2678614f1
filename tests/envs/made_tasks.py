"""Small task sets of our own in each public format, and ways to break them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUBRIC = {"rubrics": [{"rubric": "Is the total right?", "weight": 3, "criterion": ["It says 91.", "It says why."]}]}
CHECKS = """def grade(transcript, workspace_path):
    from pathlib import Path
    said = any(m["message"]["role"] == "assistant" and m["message"]["content"] for m in transcript)
    return {"spoke": 1.0 if said else 0.0, "made": 1.0 if (Path(workspace_path) / "out.txt").exists() else 0.0}
"""


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def clawgym(root: Path, number: int) -> Path:
    folder = root / f"t{number:02}"
    entry = {"task_id": f"task_{number}", "user_query": "Make out.txt.", "metadata": {"category": "files"}}
    put(folder / "reward" / "reward.sh", "[ -e out.txt ] && echo 1.0 || echo 0.0\n")
    put(folder / "input_files" / "a.txt", "a\n")
    return put(folder / "data_entry.json", json.dumps(entry, indent=1))


def pinchbench(root: Path, number: int, kind: str = "hybrid", files: str = "") -> Path:
    put(root / "assets" / "notes.txt", "notes\n")
    files = files or "  - source: notes.txt\n    dest: in/notes.txt\n  - path: b.txt\n    content: |\n      b\n"
    return put(
        root / "tasks" / f"task_{number:02}_made.md",
        f"---\nid: task_{number:02}\nname: Made\ncategory: files\ngrading_type: {kind}\ntimeout_seconds: 60\n"
        f"workspace_files:\n{files}---\n\n## Prompt\n\nMake out.txt.\n\n## Expected Behavior\n\nIt is made.\n\n"
        "## Grading Criteria\n\n- [ ] It is made\n- [ ] It is good\n\n## Automated Checks\n\n"
        f"```python\n{CHECKS}```\n\n## LLM Judge Rubric\n\n"
        "### Criterion 1: Made (Weight: 70%)\n\n**Score 1.0**: yes\n\n"
        "### Criterion 2: Good (Weight: 30%)\n\n**Score 1.0**: yes\n",
    )


def jobbench(root: Path, number: int) -> Path:
    folder = root / "dataset" / "bakers" / f"task{number}"
    put(folder / "task_folder" / "TASK_INSTRUCTIONS.txt", "Find the total of the bills.\n")
    put(folder / "task_folder" / "bills.csv", "a,91\n")
    put(folder / "files_required_to_search" / "secret.txt", "hidden\n")
    return put(folder / "RUBRICS.json", json.dumps(RUBRIC, indent=1))


def harbor(root: Path, number: int) -> Path:
    folder = root / f"made-{number:02}"
    put(folder / "instruction.md", "Make out.txt.\n")
    put(folder / "environment" / "Dockerfile", "FROM debian\nWORKDIR /app\nCOPY files/ /app/\nCOPY one.txt two.txt\n")
    put(folder / "environment" / "files" / "sub" / "a.txt", "a\n")
    put(folder / "environment" / "one.txt", "1\n")
    test = "#!/bin/bash\n/bin/bash /tests/more.sh; echo $((! $?)) > /logs/verifier/reward.txt\n"
    put(folder / "tests" / "test.sh", test)
    put(folder / "tests" / "more.sh", "[ -e out.txt ] && [ -e sub/a.txt ] && [ -e two.txt ] && [ -e /tests/test.sh ]\n")
    return put(
        folder / "task.toml",
        f'schema_version = "1.1"\n[task]\nname = "made/{number:02}"\n[metadata]\ndifficulty = "easy"\n'
        "[verifier]\ntimeout_sec = 60.0\n[environment]\n" + 'docker_image = "made/image:1"\n',
    )


def terminal_bench(root: Path, number: int) -> Path:
    folder = root / f"older-{number:02}"
    put(folder / "Dockerfile", "FROM debian\nWORKDIR /app\nCOPY a.txt /app/\n")
    put(folder / "a.txt", "a\n")
    put(folder / "tests" / "test_outputs.py", "import pathlib\nassert pathlib.Path('out.txt').exists()\n")
    put(folder / "run-tests.sh", "#!/bin/bash\npython3 $TEST_DIR/test_outputs.py\n")
    return put(folder / "task.yaml", "instruction: |-\n  Make out.txt.\ndifficulty: easy\nparser_name: pytest\n")


def officeqa(root: Path, number: int) -> Path:
    put(root / "documents" / f"bulletin_{number}.txt", "The total was 2,602 million.\n")
    path = root / "officeqa_pro.csv"
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    if not path.exists():
        writer.writerow(["uid", "question", "answer", "source_docs", "source_files", "difficulty"])
    question = "What was the total,\nin millions?"
    writer.writerow([f"UID{number:04}", question, "2,602", "https://x", f"bulletin_{number}.txt", "easy"])
    return put(path, (path.read_text() if path.exists() else "") + table.getvalue())


def clawgym_lines(root: Path, number: int) -> Path:
    check = (
        "import json, os, sys\nprint(json.dumps({'a': float(os.path.exists(sys.argv[1] + '/out.txt')), 'b': 1.0}))\n"
    )
    row = {
        "prompt": "Make out.txt.",
        "hook_code": "python3 reward/test.py /root/.openclaw/workspace",
        "input_files": [
            {"file_path": "reward/test.py", "content": check},
            {"file_path": "input/a.csv", "content": "a\n"},
        ],
        "rule": None,
        "origin_template": f"---\nid: task_{number:02}_made\n---\n",
    }
    return _line(root / "syn_task.jsonl", row)


def jsonl(root: Path, number: int) -> Path:
    row = {
        "id": f"own-{number}",
        "instruction": "Write b into out.txt.",
        "files": {"in/a.txt": "a\n"},
        "expected": {"out.txt": "b\n", "sub/c.txt": "c\n"},
        "metadata": {"level": 1},
    }
    return _line(root / "own.jsonl", row)


def _line(path: Path, row: dict) -> Path:
    return put(path, (path.read_text() if path.exists() else "") + json.dumps(row) + "\n")


MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "clawgym": clawgym,
    "pinchbench": pinchbench,
    "jobbench": jobbench,
    "harbor": harbor,
    "terminal_bench": terminal_bench,
    "officeqa": officeqa,
    "clawgym_lines": clawgym_lines,
    "jsonl": jsonl,
}
NAMES = {name: "harbor" if name == "terminal_bench" else name for name in MAKERS}
"""The format by which each is recognised."""


@dataclass(frozen=True)
class Broken:
    """A fault put into the newest task of a set: in the file ``make`` gives, ``old`` becomes ``new``."""

    maker: str
    old: str | bytes
    new: str | bytes
    words: tuple[str, ...]
    file: str = ""
    """Another file, relative to the folder of the one that was made."""

    def put(self, made: Path) -> None:
        path = made.parent / self.file if self.file else made
        old, new = (part.encode() if isinstance(part, str) else part for part in (self.old, self.new))
        before, found, after = path.read_bytes().rpartition(old)
        assert found, f"{self.old!r} is not in {path}"
        path.write_bytes(before + new + after)


BROKEN = [
    Broken("clawgym", '"user_query": "Make out.txt."', '"user_query": 3', ("data_entry.json:3", "'user_query'", "int")),
    Broken("clawgym", "files", b"\xff\xfe", ("data_entry.json:", "not UTF-8")),
    Broken(
        "pinchbench", "grading_type: hybrid", "grading_type: luck", (".md:5", "'grading_type'", "'luck'", "llm_judge")
    ),
    Broken("pinchbench", "name: Made", "name: [Made", (".md:", "not valid YAML")),
    Broken("pinchbench", "id: task_22", "title: task_22", ("'id'", "is missing")),
    Broken("pinchbench", "dest: in/notes.txt", "dest: ../../x", (".md:7", "workspace_files[0]", "'dest'", "'..'")),
    Broken("pinchbench", "dest: in/notes.txt", "dest: reward/x", ("'dest'", "reward/")),
    Broken("pinchbench", "source: notes.txt", "source: ../tasks/x", ("'source'", "'..'")),
    Broken("pinchbench", "source: notes.txt", "source: absent.txt", ("'source'", "there is no file", "absent.txt")),
    Broken("pinchbench", "def grade(", "def mark(", ("## Automated Checks", "grade(transcript, workspace_path)")),
    Broken("pinchbench", "return {", "return {{", ("## Automated Checks", "line 4", "no Python")),
    Broken("pinchbench", "## Prompt", "## Task", ("'## Prompt'", "missing")),
    Broken("pinchbench", "Make out.txt.\n", b"\xe9\n", (".md:17", "not UTF-8")),
    Broken("pinchbench", "timeout_seconds: 60", "grading_weights: {automated: -1}", ("'automated'", "at least 0")),
    Broken("pinchbench", "category: files", "category: &a files\nmore: *a", (".md:5", "alias")),
    Broken("pinchbench", "category: files", "category: files\nname: Twice", (".md:5", "'name'", "twice")),
    Broken("pinchbench", "category: files", "category: !!bool maybe", (".md:2", "not YAML that can be read")),
    Broken("pinchbench", "category: files", "category: !!set [a]", (".md:2", "not YAML that can be read")),
    Broken("pinchbench", "category: files", "category: " + "[" * 5000, (".md:", "YAML")),
    Broken("pinchbench", "category: files", "category: " + "x" * (1 << 20), (".md:2", "characters of YAML")),
    Broken("pinchbench", "Weight: 30%", "Weight: 3.0.0%", ("## LLM Judge Rubric", "'3.0.0'", "a number")),
    Broken("pinchbench", "Make out.txt.", "Make\0 out.txt.", (".md", "zero byte")),
    Broken("pinchbench", "---\nid", "id", (".md:1", "no front matter")),
    Broken("jobbench", '"weight": 3', '"weight": "3"', ("RUBRICS.json", "rubrics[0]", "'weight'", "a number")),
    Broken("jobbench", '"weight": 3', '"weight": 0', ("RUBRICS.json:2", "'rubrics'", "every weight is 0")),
    Broken("jobbench", '"weight": 3', '"weight": NaN', ("'weight'", "finite")),
    Broken("jobbench", '"rubrics": [', '"marks": [', ("RUBRICS.json:1", "'rubrics'", "missing")),
    Broken("jobbench", "Find", b"\xff", ("TASK_INSTRUCTIONS.txt:1", "not UTF-8"), "task_folder/TASK_INSTRUCTIONS.txt"),
    Broken(
        "harbor", "[verifier]\ntimeout_sec = 60.0", "[verifier]\ntimeout_sec = 'x'", ("task.toml:6", "'timeout_sec'")
    ),
    Broken("harbor", "[metadata]", "[metadata", ("task.toml:4", "not valid TOML")),
    Broken("harbor", "[metadata]", "[[steps]]\n[metadata]", ("task.toml:4", "'steps'")),
    Broken("harbor", "made/22", "made\\u0007", ("task.toml", "'id'", "printable")),
    Broken("harbor", "Make out.txt.", "Make\0 it.", ("task.toml", "zero byte"), "instruction.md"),
    Broken(
        "harbor",
        "COPY one.txt",
        "COPY " + "x" * 300,
        ("Dockerfile", "COPY 'xxx", "255 bytes"),
        "environment/Dockerfile",
    ),
    Broken("harbor", "two.txt", "sub/a.txt/b", ("task.toml", "also a folder"), "environment/Dockerfile"),
    Broken("harbor", "two.txt", "reward/x", ("task.toml", "reward/"), "environment/Dockerfile"),
    Broken("harbor", "Make out.txt.", " ", ("instruction.md:1", "empty"), "instruction.md"),
    Broken("harbor", "COPY one.txt", "COPY ../../secret", ("Dockerfile", "leads out of"), "environment/Dockerfile"),
    Broken("terminal_bench", "instruction:", "asked:", ("task.yaml:1", "'instruction'", "missing")),
    Broken("terminal_bench", "difficulty: easy", "difficulty: [", ("task.yaml:", "not valid YAML")),
    Broken("terminal_bench", "difficulty: easy", "difficulty: !!int ''", ("task.yaml:1", "not YAML")),
    Broken("officeqa", "UID0022", "UID\x07", ("officeqa_pro.csv:46", "'uid'", "printable")),
    Broken("officeqa", ",easy\n", ',"easy\n', ("officeqa_pro.csv:46", "not a row of a CSV")),
    Broken("officeqa", "UID0022", "", ("officeqa_pro.csv:46", "'uid'", "empty")),
    Broken("officeqa", '"2,602"', '""', ("officeqa_pro.csv:46", "'answer'", "empty")),
    Broken(
        "officeqa", "bulletin_22.txt", "bulletin_99.txt", ("officeqa_pro.csv:46", "'source_files'", "bulletin_99.txt")
    ),
    Broken("officeqa", "bulletin_22.txt", "../../etc/passwd", ("officeqa_pro.csv:46", "'source_files'")),
    Broken("officeqa", ",easy", ",easy,more", ("officeqa_pro.csv:46", "more values than columns")),
    Broken(
        "clawgym_lines", '"input/a.csv"', '"../a.csv"', ("syn_task.jsonl:23", "input_files[1]", "'file_path'", "'..'")
    ),
    Broken("clawgym_lines", '"reward/test.py"', '"reward/../../x"', ("syn_task.jsonl:23", "input_files[0]", "'..'")),
    Broken("clawgym_lines", '"reward/test.py"', '"other/test.py"', ("syn_task.jsonl:23", "'input_files'", "reward/")),
    Broken("clawgym_lines", '"prompt"', '"question"', ("syn_task.jsonl:23", "'prompt'", "missing")),
    Broken("clawgym_lines", '"a\\n"', '"\\ud800"', ("syn_task.jsonl:23", "input_files[1]", "surrogate")),
    Broken("clawgym_lines", '"rule": null', '"rule": ' + "[" * 9999, ("syn_task.jsonl:23", "JSON")),
    Broken(
        "jsonl", '"metadata": {', '"rubric": {"criteria": []}, "metadata": {', ("own.jsonl:23", "'criteria'", "empty")
    ),
    Broken(
        "jsonl",
        '"metadata": {',
        '"rubric": {"criterion": []}, "metadata": {',
        ("own.jsonl:23", "'criterion'", "unknown"),
    ),
    Broken(
        "jsonl",
        '"metadata": {',
        '"rubric": {"share": 0.5, "criteria": [{"id": "a", "text": "b", "weigth": 2}]}, "metadata": {',
        ("own.jsonl:23", "criteria[0]", "'weigth'", "unknown", "weight"),
    ),
    Broken("jsonl", '"level": 1', '"level": 1}, "metadata": {"level": 2', ("own.jsonl:23", "'metadata'", "twice")),
    Broken("jsonl", '"own-22"', '["' + "x" * 99 + '"]', ("own.jsonl:23", "'id'", "list")),
    Broken("jsonl", '"own-22"', '"' + "x" * 201 + '"', ("own.jsonl:23", "'id'", "at most 200")),
    Broken("jsonl", '"own-22"', "9" * 5000, ("own.jsonl:23", "digits")),
    Broken("jsonl", '"in/a.txt"', '"in/a.txt": "", "in/a.txt/b"', ("own.jsonl:23", "also a folder")),
    Broken("jsonl", '"in/a.txt"', '"' + "d/" * 1600 + 'a"', ("own.jsonl:23", "'files'", "at most 3000 bytes")),
    Broken("jsonl", '"expected"', '"expect"', ("own.jsonl:23", "'expect'", "unknown")),
    Broken(
        "jsonl", '"expected": {"out.txt": "b\\n", "sub/c.txt": "c\\n"}, ', "", ("own.jsonl:23", "'grader'", "missing")
    ),
    Broken("jsonl", '"in/a.txt"', '"/etc/a.txt"', ("own.jsonl:23", "'files'", "'/etc/a.txt'")),
    Broken("jsonl", '"a\\n"', "7", ("own.jsonl:23", "'files'", "int")),
    Broken("jsonl", '"out.txt"', '"../out.txt"', ("own.jsonl:23", "'expected'", "'..'")),
    Broken("jsonl", "}}\n", "}\n", ("own.jsonl:23:", "not valid JSON")),
]
