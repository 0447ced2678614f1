"""The desk tasks against a real shell: experts, graders, splits."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from envs.tasks import clawgym
from envs.tasks.desk import FAMILIES, LEVELS, DeskTask, expert, generate, split_of, write
from envs.tasks.desk.lexicon import WORDS
from envs.tasks.desk.wordings import WORDINGS


def workspace_of(task: DeskTask, folder: Path) -> tuple[Path, Path]:
    (written,) = write([task], folder / "tasks")
    workspace = folder / f"workspace-{task.id}"
    if written.input_files.exists():
        shutil.copytree(written.input_files, workspace)
    else:
        workspace.mkdir()
    return workspace, written.reward_dir / "reward.sh"


def shell(command: str, workspace: Path) -> tuple[str, int]:
    done = subprocess.run(
        ["bash", "-c", command], cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode(), done.returncode


def grade(grader: Path, workspace: Path) -> float:
    done = subprocess.run(["bash", grader, str(workspace)], cwd=workspace, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return float(done.stdout.splitlines()[-1])


def play(task: DeskTask, workspace: Path, bad_habit: bool) -> None:
    turns = expert(task, Random(5), bad_habit)
    for turn in turns[:-1]:
        assert shell(turn.command, workspace) == (turn.output, 0)
    assert turns[-1].command == ""
    assert turns[-1].text


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad_habit", [False, True])
def test_expert_prints_what_the_shell_prints_and_is_graded_so(tmp_path, family, level, bad_habit):
    for task in generate("train", 6, 3, [family], level):
        workspace, grader = workspace_of(task, tmp_path)
        assert grade(grader, workspace) == 0
        play(task, workspace, bad_habit)
        assert grade(grader, workspace) == (0 if bad_habit else 1)


@pytest.mark.parametrize("level", LEVELS)
def test_splits_are_disjoint_in_combinations_and_wordings(level):
    combinations: dict[str, set] = {}
    sentences: dict[str, set] = {}
    for split in ("train", "heldout", "wording"):
        tasks = generate(split, 400, 1, level=level)
        combinations[split] = {(t.family, tuple(sorted(t.slots.items()))) for t in tasks}
        sentences[split] = {(t.family, t.wording) for t in tasks}
        assert {split_of(t.family, t.level, t.slots) for t in tasks} == {split}
    assert not combinations["train"] & (combinations["heldout"] | combinations["wording"])
    assert not combinations["heldout"] & combinations["wording"]
    assert sentences["train"] == sentences["heldout"]
    assert not sentences["train"] & sentences["wording"]
    assert len(sentences["wording"]) == sum(len(w.heldout) for (_, at), w in WORDINGS.items() if at == level)


def test_generation_is_a_function_of_its_arguments():
    assert generate("train", 24, 7) == generate("train", 24, 7)
    assert generate("train", 24, 7)[:10] == generate("train", 10, 7)
    assert {t.id for t in generate("train", 24, 7)}.isdisjoint(t.id for t in generate("train", 24, 8))
    assert [t.family for t in generate("train", 8, 0)] == list(FAMILIES)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "split"),
        ({"families": ["chess"]}, "families"),
        ({"families": []}, "families"),
        ({"level": 9}, "level"),
        ({"count": -1}, "count"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=f"got {named}=.*expected"):
        generate(**({"split": "train", "count": 1, "seed": 0} | arguments))


def test_a_split_that_is_too_small_says_so():
    with pytest.raises(ValueError, match="ask for fewer"):
        generate("heldout", 6000, 0, ["write"])


IN_FOLDERS = ("write", "move")
TRICKS = ("directory", "link to the answer", "link to a copy", "pipe")


@pytest.mark.parametrize(
    ("family", "trick"),
    [(family, trick) for family in FAMILIES for trick in TRICKS] + [(family, "linked folder") for family in IN_FOLDERS],
)
def test_the_grader_is_not_fooled(tmp_path, family, trick):
    (task,) = generate("train", 1, 11, [family], level=2)
    workspace, grader = workspace_of(task, tmp_path)
    play(task, workspace, bad_habit=False)
    assert grade(grader, workspace) == 1
    path = workspace / next(iter(task.results))
    right = path.read_bytes()
    if trick == "linked folder":
        shutil.move(path.parent, tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
        assert path.read_bytes() == right
    else:
        path.unlink()
        if trick == "directory":
            path.mkdir()
        elif trick == "link to the answer":
            path.symlink_to(grader.parent / "expected" / path.relative_to(workspace))
            assert path.read_bytes() == right
        elif trick == "link to a copy":
            (workspace / "copy").write_bytes(right)
            path.symlink_to("copy")
        else:
            os.mkfifo(path)
    assert grade(grader, workspace) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spoil", [b"\n", b"\0", b" ", b"more\n"])
def test_every_byte_counts(tmp_path, family, spoil):
    (task,) = generate("train", 1, 12, [family])
    workspace, grader = workspace_of(task, tmp_path)
    play(task, workspace, bad_habit=False)
    with (workspace / next(iter(task.results))).open("ab") as file:
        file.write(spoil)
    assert grade(grader, workspace) == 0


def test_folders_are_loaded_as_they_were_written(tmp_path):
    tasks = generate("wording", 16, 2, level=2)
    written = write(tasks, tmp_path)
    assert clawgym.load(tmp_path).tasks == sorted(written, key=lambda task: task.id)
    assert [task.instruction for task in written] == [task.instruction for task in tasks]
    assert [task.metadata["wording"] for task in written] == [task.wording for task in tasks]
    assert write(tasks, tmp_path) == written


def test_inputs_must_stay_and_other_files_are_free(tmp_path):
    for task in generate("train", 8, 13, level=2):
        workspace, grader = workspace_of(task, tmp_path)
        play(task, workspace, bad_habit=False)
        (workspace / "scratch").write_text("notes\n")
        assert grade(grader, workspace) == 1
        kept = sorted(set(task.inputs) - set(task.results) - set(task.absent))
        with (workspace / kept[0]).open("a") as file:
            file.write("x\n")
        assert grade(grader, workspace) == 0


def test_partial_credit_is_between_and_never_for_nothing(tmp_path):
    for task in generate("train", 16, 14, partial_credit=True):
        workspace, grader = workspace_of(task, tmp_path)
        assert grade(grader, workspace) < 1
        play(task, workspace, bad_habit=False)
        assert grade(grader, workspace) == 1


def test_partial_credit_counts_lines_in_place(tmp_path):
    task = next(t for t in generate("train", 32, 14, ["head"], partial_credit=True) if t.slots["lines"] == 4)
    workspace, grader = workspace_of(task, tmp_path)
    ((name, text),) = task.results.items()
    lines = text.splitlines()
    (workspace / name).write_text("".join(line + "\n" for line in [*lines[:2], "wrong", lines[3]]))
    assert grade(grader, workspace) == 0.75
    (workspace / name).write_text(text.rstrip("\n"))
    assert grade(grader, workspace) == 0.9
    binary, strict = workspace_of(replace(task, partial_credit=False, id="binary"), tmp_path)
    (binary / name).write_text("".join(line + "\n" for line in lines[:3]))
    assert grade(strict, binary) == 0


def test_no_word_hides_in_another_or_in_an_instruction():
    instructions = " ".join(text for w in WORDINGS.values() for text in (*w.train, *w.heldout))
    for word in WORDS:
        assert [other for other in WORDS if word in other] == [word]
        assert word not in instructions


@pytest.mark.parametrize("level", LEVELS)
def test_held_out_wordings_use_words_of_the_training_wordings(level):
    def words(texts):
        return {word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"{\w+}", "", text))}

    known = words(t for (_, at), w in WORDINGS.items() if at == level for t in w.train)
    assert words(t for (_, at), w in WORDINGS.items() if at == level for t in w.heldout) <= known
