"""Every loader: what it reads, and that each fault is named by file, line and field before anything starts. Case D1."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_tasks import BROKEN, MAKERS, NAMES, clawgym, harbor, jobbench, jsonl, officeqa, pinchbench, put
from needs import require

from envs.sandbox.create import unavailable
from envs.sandbox.files import remove_tree
from envs.sandbox.grading import GraderFailureError, Told, grade
from envs.tasks import fields, formats
from envs.tasks.faults import NoTasksError, TaskError

KINDS = pytest.mark.parametrize("maker", MAKERS)


def made(root: Path, maker: str, count: int = 3) -> list[Path]:
    return [MAKERS[maker](root, number) for number in range(count)]


@KINDS
def test_a_place_is_recognised_and_its_tasks_are_written_as_they_were_read(maker, tmp_path):
    made(tmp_path / "set", maker)
    found = formats.scan(tmp_path / "set")
    assert (formats.format_of(tmp_path / "set").name, found.faults) == (NAMES[maker], [])
    loaded = formats.load(tmp_path / "set", tmp_path / "written")
    assert loaded.skipped == ()
    assert len({task.id for task in loaded.tasks}) == len(loaded.tasks) == 3
    for draft, task in zip(found.drafts, loaded.tasks, strict=True):
        assert (draft.id, draft.instruction, draft.mount_dir) == (task.id, task.instruction, task.mount_dir)
        inside = {
            path.relative_to(task.input_files).as_posix() for path in task.input_files.rglob("*") if path.is_file()
        }
        assert inside == set(draft.inputs)
        assert draft.source.startswith(str(tmp_path))


@KINDS
def test_what_the_agent_must_not_see_is_not_in_its_workspace(maker, tmp_path):
    made(tmp_path, maker, 1)
    (draft,) = formats.scan(tmp_path).drafts
    assert draft.inputs
    for name in draft.inputs:
        assert not any(word in name for word in ("reward", "tests", "secret", "RUBRICS", "solution", "task."))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case.maker}: {case.new!r}"[:60])
def test_one_broken_among_23_is_named_and_22_run_without_it(case, tmp_path):
    files = made(tmp_path / "set", case.maker, 23)
    case.put(files[-1])
    with pytest.raises(TaskError) as caught:
        formats.load(tmp_path / "set", tmp_path / "written")
    assert len(caught.value.faults) == 1, caught.value.faults
    for word in case.words:
        assert word in caught.value.faults[0]
    assert not (tmp_path / "written").exists()
    loaded = formats.load(tmp_path / "set", tmp_path / "written", skip_bad=True)
    assert (len(loaded.tasks), loaded.skipped) == (22, tuple(caught.value.faults))


@KINDS
def test_a_second_task_of_one_id_names_both_places(maker, tmp_path):
    first, second = made(tmp_path, maker, 2)
    ids = {"pinchbench": ("task_00", "task_01"), "harbor": ("made/00", "made/01"), "officeqa": ("UID0000", "UID0001")}
    old = {
        "clawgym": ("task_0", "task_1"),
        "clawgym_lines": ("task_00_made", "task_01_made"),
        "jsonl": ("own-0", "own-1"),
    }
    if maker in ("jobbench", "terminal_bench"):
        # Their ids are the names of folders: the same one in two places.
        where = tmp_path / "main" / "bakers" if maker == "jobbench" else tmp_path / "zz"
        shutil.copytree(first.parent, where / first.parent.name)
    else:
        one, two = (ids | old)[maker]
        second.write_text(second.read_text().replace(two, one))
    (fault,) = formats.scan(tmp_path).faults
    assert "is also th" in fault
    assert str(first) in fault or str(first.parent) in fault


@KINDS
def test_a_file_that_is_too_large_is_not_read(maker, tmp_path, monkeypatch):
    (file,) = made(tmp_path, maker, 1)
    file.write_bytes(file.read_bytes() + b"\n" * 5000)
    monkeypatch.setattr(fields, "MOST_BYTES", 4000)
    monkeypatch.setattr(fields.read_text, "__defaults__", (4000,))
    monkeypatch.setattr("envs.tasks.jsonl.MOST_BYTES", 4000)
    (fault,) = formats.scan(tmp_path).faults
    assert fault.startswith(f"{file}: got ")
    assert "expected at most 4000" in fault


@KINDS
def test_a_link_in_place_of_a_file_is_not_followed(maker, tmp_path):
    (file,) = made(tmp_path / "set", maker, 1)
    outside = tmp_path / f"outside{file.suffix}"
    file.replace(outside)
    file.symlink_to(outside)
    try:
        found = formats.scan(tmp_path / "set", NAMES[maker])
    except NoTasksError:
        return
    assert found.drafts == []
    assert "link" in found.faults[0]


@pytest.mark.parametrize(
    ("maker", "file"),
    [
        ("clawgym", "input_files/deep/leak.txt"),
        ("clawgym", "reward/leak.txt"),
        ("jobbench", "task_folder/leak.txt"),
        ("harbor", "environment/files/leak.txt"),
        ("harbor", "tests/leak.txt"),
        ("terminal_bench", "tests/leak.txt"),
        ("pinchbench", "../assets/notes.txt"),
    ],
)
def test_a_link_among_a_tasks_files_is_a_fault(maker, file, tmp_path):
    (entry,) = made(tmp_path, maker, 1)
    link = entry.parent / file
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("/etc/passwd")
    (fault,) = formats.scan(tmp_path).faults
    assert "link" in fault
    with pytest.raises(TaskError, match="link"):
        formats.load(tmp_path, tmp_path / "written")


@KINDS
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bytes_break_a_loader_or_lead_it_out_of_its_folder(maker, tmp_path_factory, data):
    root = tmp_path_factory.mktemp("t")
    made(root / "set", maker, 1)
    file = data.draw(st.sampled_from(sorted(path for path in (root / "set").rglob("*") if path.is_file())))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(at, min(len(content), at + 12)))
        content[at:end] = data.draw(
            st.binary(max_size=6)
            | st.sampled_from([b"../", b"null", b"[]", b"{}", b"-1", b"\\ud800", b"\x00", b"1e999", b'"'])
        )
    file.write_bytes(bytes(content))
    try:
        found = formats.scan(root / "set", NAMES[maker])
    except NoTasksError:
        return
    assert all(str(root) in fault for fault in found.faults)
    for draft in found.drafts:
        try:
            formats.clawgym.write_draft(draft, root / "written" / draft.folder_name)
        except TaskError:
            continue
        assert {path.name for path in root.iterdir()} <= {"set", "written"}


def test_a_place_of_no_format_or_a_wrong_name_says_which_there_are(tmp_path):
    put(tmp_path / "a.txt", "x")
    with pytest.raises(NoTasksError, match=r"no task of a known format .*pinchbench: task_\*\.md"):
        formats.scan(tmp_path)
    with pytest.raises(NoTasksError, match="got the format 'gym', expected one of: clawgym, pinchbench"):
        formats.scan(tmp_path, "gym")
    for name in formats.FORMATS:
        with pytest.raises(NoTasksError, match=str(tmp_path)):
            formats.load(tmp_path, tmp_path / "written", name)


def test_tasks_of_a_judge_can_be_left_out(tmp_path):
    pinchbench(tmp_path, 1)
    pinchbench(tmp_path, 2, "automated")
    pinchbench(tmp_path, 3, "llm_judge")
    tasks = formats.load(tmp_path, tmp_path / "all").tasks
    assert [(task.scripted, task.rubric is not None) for task in tasks] == [(True, True), (True, False), (False, True)]
    (left,) = formats.load(tmp_path, tmp_path / "some", scripted=True).tasks
    assert left.id == "task_02"
    with pytest.raises(NoTasksError, match="needs a judge"):
        formats.load(jobbench(tmp_path / "jobs", 1).parent, tmp_path / "none", scripted=True)


def test_pinchbench_weights_sessions_and_checklists(tmp_path):
    file = pinchbench(tmp_path, 1)
    sessions = "sessions:\n  - id: a\n    prompt: First.\n  - id: b\n    new_session: true\n    prompt: Then.\n"
    weights = "grading_weights:\n  automated: 0.6\n  llm_judge: 0.2\n"
    file.write_text(file.read_text().replace("timeout_seconds", f"{sessions}{weights}timeout_seconds"))
    (task,) = formats.load(tmp_path, tmp_path / "w").tasks
    assert (task.instruction, task.sessions) == ("First.", ("Then.",))
    assert task.rubric is not None
    assert task.rubric.share == pytest.approx(0.25)
    assert [(one.weight, one.scale) for one in task.rubric.criteria] == [(70.0, "fraction"), (30.0, "fraction")]
    file.write_text(file.read_text().replace("(Weight:", "(Worth:"))
    (task,) = formats.load(tmp_path, tmp_path / "v").tasks
    assert [one.text for one in task.rubric.criteria] == ["It is made", "It is good"]


def test_jobbench_is_read_from_parquet_too(tmp_path):
    require(find_spec("pyarrow") is not None, "pip install reins[parquet]")
    import pyarrow
    from pyarrow import parquet

    reference = "dataset/bakers/task1/task_folder/bills.csv"
    put(tmp_path / reference, "a,91\n")
    row = {
        "task_id": "bakers__task1",
        "occupation": "bakers",
        "task_num": 1,
        "prompt": "Find the total.",
        "reference_files": [reference],
        "reference_file_urls": ["https://x"],
        "rubric_json": json.dumps({"rubrics": [{"rubric": "Right?", "weight": 1, "criterion": ["91"]}]}),
        "task_card": "# Card",
    }
    table = pyarrow.Table.from_pylist([row, row | {"task_id": "bakers__task2", "rubric_json": "{}"}])
    parquet.write_table(table, tmp_path / "easy.parquet")
    found = formats.scan(tmp_path)
    (draft,) = found.drafts
    assert (draft.id, set(draft.inputs), draft.metadata["split"]) == ("easy__bakers__task1", {"bills.csv"}, "easy")
    assert found.faults == [
        f"{tmp_path / 'easy.parquet'}: row 2: field 'rubric_json': field 'rubrics' is missing; expected a list"
    ]
    put(tmp_path / "easy.parquet", "no parquet")
    assert "not a parquet file" in formats.scan(tmp_path).faults[0]


def test_officeqa_can_be_given_a_search_instead_of_files(tmp_path):
    officeqa(tmp_path, 1)
    (draft,) = formats.scan(tmp_path, "officeqa_search").drafts
    assert (draft.inputs, draft.mcp[0]["name"]) == ({}, "search")
    (task,) = formats.load(tmp_path, tmp_path / "w", "officeqa_search").tasks
    assert str(tmp_path / "documents") in task.mcp[0].argv
    put(tmp_path / "more" / "a.txt", "x")
    with pytest.raises(NoTasksError, match="expected one folder of texts to be searched, got 2: documents, more"):
        formats.scan(tmp_path, "officeqa_search")


SAID = json.dumps({"call": 0, "kind": "main", "role": "assistant", "text": "It is <FINAL_ANSWER>2602</FINAL_ANSWER>"})
GRADED = [
    ("clawgym", {"out.txt": ""}, 0.0, 1.0),
    ("pinchbench", {"out.txt": ""}, 0.5, 1.0),
    ("harbor", {"out.txt": ""}, 0.0, 1.0),
    ("terminal_bench", {"out.txt": ""}, 0.0, 1.0),
    ("clawgym_lines", {"out.txt": ""}, 0.5, 1.0),
    ("jsonl", {"out.txt": "b\n"}, 0.0, 0.5),
    ("officeqa", {}, 1.0, 1.0),
]


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
@pytest.mark.parametrize(("maker", "outcome", "untouched", "score"), GRADED, ids=[case[0] for case in GRADED])
async def test_graders_run_on_both_backends(maker, outcome, untouched, score, backend, tmp_path):
    if backend == "bubblewrap":
        require(not unavailable(), f"apt-get install bubblewrap ({unavailable()})")
    made(tmp_path / "set", maker, 1)
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    told = Told("It is <FINAL_ANSWER>2602</FINAL_ANSWER>", SAID + "\n")
    workspace = tmp_path / "outcome"
    fields_of = {
        path.relative_to(task.input_files).as_posix(): path.read_bytes()
        for path in task.input_files.rglob("*")
        if path.is_file()
    }
    for name, content in fields_of.items():
        put(workspace / name, content)
    assert (await grade(task, workspace, backend, tmp_path / "r", told=told)).score == untouched
    for name, content in outcome.items():
        put(workspace / name, content)
    assert (await grade(task, workspace, backend, tmp_path / "r", told=told)).score == score


async def test_harbor_tests_that_leave_no_reward_are_no_score(tmp_path):
    entry = harbor(tmp_path / "set", 1)
    put(entry.parent / "tests" / "test.sh", "exit 0\n")
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    with pytest.raises(GraderFailureError, match="left no reward"):
        await grade(task, task.input_files, "process", tmp_path / "r")
    put(entry.parent / "tests" / "test.sh", 'echo \'{"a": 1.0, "b": 0.5}\' > /logs/verifier/reward.json\n')
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    assert (await grade(task, task.input_files, "process", tmp_path / "r")).score == 0.75


async def test_a_clawgym_grader_that_reads_what_was_said_is_given_it(tmp_path):
    entry = clawgym(tmp_path / "set", 1)
    check = (
        "import json, os\nsaid = json.load(open(os.environ['OPENCLAW_REWARD_PAYLOAD']))\n"
        "parts = [m['message']['content'] for m in said['transcript']]\n"
        "print(float(said['final_message'] == 'Bye' and parts[0][0]['text'] == 'Hi' and said['task_id'] == 'task_1'"
        " and parts[1][0]['arguments'] == {'a': 1} and parts[1][0]['params'] == {'a': 1} and len(parts) == 2))\n"
    )
    put(entry.parent / "reward" / "check.py", check)
    put(entry.parent / "reward" / "reward.sh", "python3 reward/check.py\n")
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    assert task.wants_transcript
    lines = [
        {"kind": "main", "role": "system", "text": "You are"},
        {"kind": "main", "role": "user", "text": "Hi"},
        {"kind": "side", "role": "user", "text": "a title"},
        {"kind": "main", "role": "assistant", "tool_calls": [{"id": "1", "name": "bash", "arguments": {"a": 1}}]},
    ]
    told = Told("Bye", "".join(json.dumps(line) + "\n" for line in lines))
    assert (await grade(task, task.input_files, "process", tmp_path / "r", told=told)).score == 1.0


def test_ids_that_cannot_name_a_folder_are_told_apart(tmp_path):
    rows = [{"id": name, "instruction": "x", "grader": "echo 1"} for name in ("a/b", "a b", "a-b", "../a", "é")]
    put(tmp_path / "own.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    tasks = formats.load(tmp_path, tmp_path / "w").tasks
    assert [task.id for task in tasks] == ["a/b", "a b", "a-b", "../a", "é"]
    assert len({task.folder for task in tasks}) == 5
    assert {task.folder.parent for task in tasks} == {(tmp_path / "w")}


def test_clawgym_folders_stay_where_they_are(tmp_path):
    clawgym(tmp_path / "set", 1)
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    assert task.folder == (tmp_path / "set" / "t01").resolve()
    assert not (tmp_path / "written").exists()


async def test_harbor_tests_that_cannot_run_are_no_verdict_on_the_agent(tmp_path):
    entry = harbor(tmp_path / "set", 1)
    put(entry.parent / "tests" / "test.sh", "uvx pytest /tests/x.py\necho 0 > /logs/verifier/reward.txt\n")
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    with pytest.raises(GraderFailureError, match="the tests call a program that the sandbox has not"):
        await grade(task, task.input_files, "process", tmp_path / "r")


def test_a_rubric_beside_a_script_needs_a_share(tmp_path):
    file = jsonl(tmp_path, 1)
    row = json.loads(file.read_text()) | {"rubric": {"criteria": [{"id": "a", "text": "Good?"}]}}
    put(file, json.dumps(row))
    assert "share is 1" in formats.scan(tmp_path).faults[0]
    row["rubric"]["share"] = 0.5
    put(file, json.dumps(row))
    (draft,) = formats.scan(tmp_path).drafts
    assert draft.graded_by == "script and judge"


def jsonl_of(folder: Path, ids: list[str]) -> Path:
    rows = [{"id": name, "instruction": "x", "grader": "echo 1"} for name in ids]
    return put(folder / "own.jsonl", "".join(json.dumps(row) + "\n" for row in rows)).parent


def test_two_ids_never_share_a_folder(tmp_path):
    """The second is what the folder of the first is called."""
    (first,) = formats.load(jsonl_of(tmp_path / "one", ["a/b"]), tmp_path / "w").tasks
    tasks = formats.load(jsonl_of(tmp_path / "two", ["a/b", first.folder.name]), tmp_path / "v").tasks
    assert len({task.folder for task in tasks}) == 2


@KINDS
def test_the_ends_of_lines_and_a_byte_order_mark_make_no_difference(maker, tmp_path):
    (file,) = made(tmp_path / "set", maker, 1)
    (before,) = formats.scan(tmp_path / "set").drafts
    text = file.read_bytes().replace(b"\n", b"\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + text)
    (after,) = formats.scan(tmp_path / "set").drafts
    assert (before.id, before.metadata) == (after.id, after.metadata)
    assert before.instruction.split() == after.instruction.split()
    assert before.graded_by == after.graded_by


@KINDS
@pytest.mark.parametrize("content", ["x".encode("utf-16"), b"\x7fELF\x00\xff" * 99, b"\x1f\x8b\x08\x00", b"\0" * 99])
def test_a_file_that_is_no_text_is_named(maker, content, tmp_path):
    (file,) = made(tmp_path / "set", maker, 1)
    file.write_bytes(content)
    try:
        faults = formats.scan(tmp_path / "set", NAMES[maker]).faults
    except NoTasksError as error:
        faults = error.faults
    assert faults
    assert all(fault.startswith(str(tmp_path / "set")) for fault in faults)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("officeqa_pro.csv", "uid,question,answer\n"),
        ("own.jsonl", ""),
        ("own.jsonl", "\n \n"),
        ("syn_task.jsonl", ""),
    ],
)
def test_a_set_without_a_task_says_that_it_is_empty(name, content, tmp_path):
    put(tmp_path / name, content)
    named = "clawgym_lines" if name.startswith("syn") else None
    with pytest.raises(NoTasksError, match="holds no"):
        formats.load(tmp_path, tmp_path / "written", named)


@pytest.mark.parametrize(
    ("header", "words"),
    [("uid,question,answer,answer", "the column 'answer' stands there twice"), ('uid,question,answer,"x', "not a row")],
)
def test_the_columns_of_a_table_are_looked_at_first(header, words, tmp_path):
    file = put(tmp_path / "a.csv", f"{header}\n1,Why?,2,3\n")
    (fault,) = formats.scan(tmp_path).faults
    assert fault.startswith(f"{file}:1: ")
    assert words in fault


def test_names_of_columns_may_have_spaces_around_them(tmp_path):
    put(tmp_path / "a.csv", "uid, question , answer\n1,Why?,2\n")
    (draft,) = formats.scan(tmp_path).drafts
    assert "Why?" in draft.instruction


@pytest.mark.parametrize("name", ["~$lock.docx", "back\\slash.txt", "a b.txt", "é.txt", "-rf"])
def test_files_that_lie_there_may_have_any_name(name, tmp_path):
    entry = jobbench(tmp_path / "set", 1)
    put(entry.parent / "task_folder" / name, "x")
    (task,) = formats.load(tmp_path / "set", tmp_path / "written").tasks
    assert (task.input_files / name).read_text() == "x"


@pytest.mark.parametrize("name", [b"\xff.txt", b"reward"])
def test_files_that_no_workspace_can_have_are_named(name, tmp_path):
    entry = jobbench(tmp_path / "set", 1)
    put(entry.parent / "task_folder" / os.fsdecode(name) / "x", "x")
    (fault,) = formats.scan(tmp_path / "set").faults
    assert fault.startswith(f"{entry}: its file")


def test_a_task_folder_whose_files_do_not_fit_is_told_before_a_run(tmp_path):
    entry = clawgym(tmp_path, 1)
    with (entry.parent / "input_files" / "huge.bin").open("wb") as huge:
        huge.truncate((512 << 20) + 1)
    with pytest.raises(TaskError, match="expected at most 536870912 in a workspace"):
        formats.load(tmp_path, tmp_path / "written")


def test_a_fence_that_is_opened_a_hundred_thousand_times_takes_no_time(tmp_path):
    file = pinchbench(tmp_path, 1)
    file.write_text(file.read_text().replace("```python", "x```python\n" * 100_000))
    (fault,) = formats.scan(tmp_path).faults
    assert "expected a block of ```python" in fault


def test_a_folder_may_be_nested_deeper_than_python_calls(tmp_path):
    folder = clawgym(tmp_path, 1).parent / "input_files"
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1400):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert [draft.id for draft in formats.scan(tmp_path).drafts] == ["task_1"]
    remove_tree(folder)
