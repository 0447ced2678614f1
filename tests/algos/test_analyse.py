"""Behaviour of whole folders: the same from trees and from transcripts, before and after."""

import itertools
import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest
from judge_api import endpoint
from message_rows import USER, desk_row, heard, said

from actors.rendering import Rendering
from algos.analyse import main
from algos.behaviour import indicators
from algos.behaviour_rubric import DIMENSIONS, RUBRIC
from algos.behaviour_tables import Series, dimension_table, radar
from algos.conversations import tree_of
from algos.score_tables import markdown
from algos.spoken import Place, text_of
from algos.tiny import build_tokenizer
from envs.tasks import desk
from trees import codec
from trees.tree import Tree

FAILING = [
    USER,
    said("", "cat a.txt", at=0),
    heard("cat: a.txt: No such file or directory\n[exit code 1]", at=0),
    said("", "cat a.txt", at=1),
    heard("cat: a.txt: No such file or directory\n[exit code 1]", at=1),
    said("", "wc -l b.txt > c.txt", at=2),
    heard("", at=2),
    said("Done."),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return folder


def row_of(name, step=0, split="train", harness="agent_loop", task="t", reward=1.0):
    return {
        "id": name,
        "step": step,
        "split": split,
        "task": task,
        "harness": harness,
        "status": "failed" if reward is None else "completed",
        "reward": reward,
    }


@cache
def rendering(folder):
    return Rendering(folder)


def put(folder, tokenizer, conversations, kind="tree", **more):
    """A folder with an episode for each conversation, named by its place."""
    folder.mkdir(exist_ok=True)
    with (folder / "episodes.jsonl").open("a") as file:
        for number, messages in enumerate(conversations):
            name = f"{more.get('split', 'train')}{more.get('step', 0)}n{number}".replace("/", "")
            row = row_of(name, task=f"t{number}", **more)
            file.write(json.dumps(row) + "\n")
            if kind == "tree":
                trees = folder / "trees" / "step_000000"
                trees.mkdir(parents=True, exist_ok=True)
                tree = tree_of({"messages": messages}, rendering(tokenizer))
                (trees / f"{name}.tree").write_bytes(codec.encode(Tree(tree.nodes, {"episode": name})))
            elif kind == "transcript":
                (folder / "transcripts").mkdir(exist_ok=True)
                (folder / "transcripts" / f"{name}.jsonl").write_text(transcript(messages))
    return folder


def transcript(messages):
    lines, number = [], 0
    for message in messages:
        line = {"call": number, "kind": "main", "role": message["role"], "text": message["content"] or ""}
        calls = [
            {"id": c["id"], "name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
            for c in message.get("tool_calls", ())
        ]
        line |= {"tool_calls": calls} if calls else {}
        line |= {"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {}
        number += message["role"] == "assistant"
        lines.append(json.dumps({name: value for name, value in line.items() if value not in ("", [])}))
    return "\n".join(lines) + "\n"


def test_a_tree_and_the_transcript_of_the_same_episode_give_the_same_steps(tmp_path, tokenizer):
    rng = random.Random(0)
    made = desk.generate("heldout", 16, 0)
    talks = [FAILING, *(desk_row(task, rng, bad_habit=rng.random() < 0.5)["messages"] for task in made)]
    trees = Place(str(put(tmp_path / "a", tokenizer, talks)), tokenizer)
    words = Place(str(put(tmp_path / "b", tokenizer, talks, kind="transcript")))
    for one, other in zip(trees.rows(), words.rows(), strict=True):
        # In the tokens of a chat template the white space at the ends of a result is the template's.
        from_tree, from_words = trees.spoken(one).steps, words.spoken(other).steps
        assert [step.text for step in from_tree] == [step.text for step in from_words]
        assert trimmed(from_tree) == trimmed(from_words)
        assert indicators(from_tree) == indicators(from_words)


def trimmed(steps):
    return [
        tuple(replace(call, result=None if call.result is None else call.result.strip()) for call in step.calls)
        for step in steps
    ]


def test_the_words_of_an_episode_for_a_reader_are_bounded_and_hold_its_ends(tmp_path, tokenizer):
    long = [USER, said("", "cat a", at=0), heard("x" * 50_000, at=0), said("Done.")]
    place = Place(str(put(tmp_path / "a", tokenizer, [long], kind="transcript")))
    text = text_of(place.spoken(place.rows()[0]), 4000)
    assert len(text) < 5000
    assert "count the lines" in text
    assert text.endswith("Done.")
    assert "characters left out" in text


def test_before_and_after_stand_side_by_side_in_three_forms(tmp_path, tokenizer, capsys):
    before = put(tmp_path / "before", tokenizer, [FAILING] * 4)
    after = put(tmp_path / "after", tokenizer, [[USER, said("", "cat b.txt"), heard("1"), said("Done.")]] * 4)
    assert main([str(before), str(after), f"model={tokenizer}"]) == 0
    told = capsys.readouterr().out
    assert "| **failing** | 0.667 ± 0.000 of 12 | 0.000 ± 0.000 of 4 |" in told
    assert "| **repeated failing** | 0.500 ± 0.000 of 8 | no chance |" in told
    assert "| **recovered** | 1.000 ± 0.000 of 4 | no chance |" in told
    plain = json.loads((after / "behaviour.json").read_text())
    assert [one["name"] for one in plain["places"]] == ["before", "after"]
    assert plain["places"][0]["indicators"]["failing"]["graded"] == 12
    assert (after / "behaviour.html").read_text().startswith("<!doctype html>")


def test_steps_of_a_run_are_named_and_only_its_training_counts_there(tmp_path, tokenizer):
    run = put(tmp_path / "run", tokenizer, [FAILING])
    put(run, tokenizer, [FAILING], step=7)
    put(run, tokenizer, [FAILING], step=7, split="heldout/greedy")
    put(run, tokenizer, [FAILING], step=9, kind="none", reward=None)
    assert len(Place(str(run)).rows()) == 3
    assert [row["step"] for row in Place(f"{run}@7").rows()] == [7]
    assert [row["step"] for row in Place(f"{run}@0-8").rows()] == [0, 7]
    assert Place(f"{run}@0-8").name == "run@0-8"


def test_samples_of_two_places_are_of_the_same_tasks(tmp_path, tokenizer, capsys):
    for name in ("before", "after"):
        put(tmp_path / name, tokenizer, [FAILING] * 9, kind="transcript")
    arguments = [str(tmp_path / "before"), str(tmp_path / "after"), "sample=3", f"out={tmp_path / 'out'}"]
    assert main(arguments) == 0
    assert "0.667 ± 0.000 of 9 | 0.667" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"behaviour.{s}" for s in ("html", "json", "md")
    ]


def test_a_workflow_of_ones_own(tmp_path, tokenizer, capsys):
    place = put(tmp_path / "a", tokenizer, [FAILING] * 2, kind="transcript")
    assert main([str(place), "workflow=[{name: plan, pattern: todo}, {name: answer}]"]) == 0
    told = capsys.readouterr().out
    assert "skipped: plan | 1.000 ± 0.000 of 2" in told
    assert "skipped: look" not in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no episodes.jsonl there"),
        (["{a}", "splits=[other]"], "no graded episode of the splits"),
        (["{empty}"], "has a tree or a transcript"),
        (["{a}", "smple=3"], "did you mean 'sample'"),
        (["{a}", "workflow=[{{name: x, pattern: '('}}]"], "expected a regular expression"),
        (["{damaged}"], "line 1: got no JSON"),
        (["{trees}"], "name its folder with model=DIR"),
    ],
)
def test_what_cannot_be_looked_at_is_told(tmp_path, tokenizer, capsys, arguments, says):
    places = {
        "a": put(tmp_path / "a", tokenizer, [FAILING], kind="transcript"),
        "empty": put(tmp_path / "empty", tokenizer, [FAILING], kind="none"),
        "trees": put(tmp_path / "trees", tokenizer, [FAILING]),
        "damaged": tmp_path / "damaged",
    }
    places["damaged"].mkdir()
    (places["damaged"] / "episodes.jsonl").write_text("garbage\n")
    assert main([argument.format(**places) for argument in arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_tree_is_read_from_its_transcript_or_counted(tmp_path, tokenizer, capsys):
    place = put(tmp_path / "a", tokenizer, [FAILING] * 2)
    (place / "trees" / "step_000000" / "train0n0.tree").write_bytes(b"no tree")
    assert main([str(place), f"model={tokenizer}"]) == 0
    assert "a: 1 of 2 episodes have no words and are left out" in capsys.readouterr().out


def test_a_transcript_cut_short_is_counted(tmp_path, tokenizer, capsys):
    place = put(tmp_path / "a", tokenizer, [FAILING] * 2, kind="transcript")
    cut = place / "transcripts" / "train0n0.jsonl"
    cut.write_text(cut.read_text()[:-9])
    assert main([str(place)]) == 0
    assert "a: 1 of 2 episodes have no words and are left out" in capsys.readouterr().out


def by_a_judge(points):
    """An endpoint's answer: so many points in every dimension, or what ``points`` gives for what is asked."""

    def answer(number, body):
        given = points(body) if callable(points) else points
        if not isinstance(given, int) or given > 5:
            return given
        return json.dumps({"criteria": [{"id": name, "reason": "", "score": given} for name in DIMENSIONS]})

    return answer


def test_a_judge_grades_a_sample_in_six_dimensions_from_0_to_1(tmp_path, tokenizer, capsys):
    before = put(tmp_path / "before", tokenizer, [FAILING] * 4, kind="transcript")
    calm = [USER, said("", "cat b.txt"), heard("1"), said("Done.")]
    after = put(tmp_path / "after", tokenizer, [calm] * 4, kind="transcript")
    with endpoint(by_a_judge(lambda body: 2 if "No such file" in str(body) else 5)) as made:
        judge = [f"judge.url={made.url}", "judge.model=m", "judge.votes=2", "judge.cache=", "judged=3"]
        assert main([str(before), str(after), *judge]) == 0
    assert len(made.asked) == 2 * 3 * 2
    told = capsys.readouterr().out
    for name in DIMENSIONS:
        assert f"| **{name.replace('_', ' ')}** | 0.250 ± 0.000 | 1.000 ± 0.000 |" in told
    assert "over a sample of 3 episodes of before, 3 episodes of after" in told
    assert "12 requests" in told
    assert "<svg" in (after / "behaviour.html").read_text()
    plain = json.loads((after / "behaviour.json").read_text())
    assert plain["places"][0]["dimensions"]["error_recovery"]["value"] == 0.25


def test_an_episode_that_the_judge_cannot_grade_is_counted_and_no_zero(tmp_path, tokenizer, capsys):
    talks = [FAILING, [{"role": "user", "content": "unspeakable"}, said("Done.")]]
    place = put(tmp_path / "a", tokenizer, talks, kind="transcript")
    with endpoint(by_a_judge(lambda body: 400 if "unspeakable" in str(body) else 5)) as made:
        assert main([str(place), f"judge.url={made.url}", "judge.model=m", "judge.cache="]) == 0
    told = capsys.readouterr().out
    assert "a: 1 episodes got no grade and are left out: the judge at" in told
    assert "| **state tracking** | 1.000 |" in told


@pytest.mark.parametrize("points", [0, "no JSON", 401])
def test_a_judge_that_grades_nothing_is_an_error(tmp_path, tokenizer, capsys, points):
    place = put(tmp_path / "a", tokenizer, [FAILING], kind="transcript")
    with endpoint(by_a_judge(points)) as made:
        assert main([str(place), f"judge.url={made.url}", "judge.model=m", "judge.cache="]) == 2
    assert "the judge graded none of 1 episodes" in capsys.readouterr().err


def test_every_dimension_says_what_its_points_mean():
    assert len(DIMENSIONS) == 6
    for criterion in RUBRIC.criteria:
        assert criterion.scale == "points"
        assert all(f"{points}: " in criterion.text for points in (1, 3, 5))


def graded(name, value):
    return Series(name, scores=[{"state": value, "work": 1.0, "care": 0.5}] * 2, judged_tasks=["a", "b"])


def test_a_radar_has_a_shape_for_each_place_and_text_of_others_stays_text():
    drawn = radar([graded("<before>", 0.0), graded("after", 1.0), Series("unjudged")], ["state", "work", "care"])
    assert drawn.count("stroke-width") == 2
    assert "&lt;before&gt;" in drawn
    assert "<before>" not in drawn
    # The first axis points up: 0 is the middle, 1 the rim.
    assert 'points="300.0,170.0 ' in drawn
    assert 'points="300.0,40.0 ' in drawn


def test_no_word_of_a_radar_is_cut_or_lies_on_another():
    series = [graded(f"{number} " + "long " * 40, 0.5) for number in range(6)]
    for one in series:
        one.scores = [dict.fromkeys(DIMENSIONS, 0.5)] * 2
    drawn = radar(series, list(DIMENSIONS))
    wide, high = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
    boxes = []
    for x, y, anchor, words in re.findall(r'<text x="(.*?)" y="(.*?)" text-anchor="(\w+)".*?>(.*?)</text>', drawn):
        # A letter of 12 pixels is 7 wide, rather than less.
        long, left = 7 * len(words), {"start": 0, "middle": 0.5, "end": 1}[anchor]
        boxes.append((float(x) - left * long, float(y) - 7, float(x) + (1 - left) * long, float(y) + 7))
    assert len(boxes) == 6 + 6 + 4
    assert all(a >= 0 and b >= 0 and c <= wide and d <= high for a, b, c, d in boxes)
    for (a, b, c, d), (e, f, g, h) in itertools.combinations(boxes, 2):
        assert c <= e or g <= a or d <= f or h <= b


def test_grades_are_tabled_with_their_errors():
    told = markdown(dimension_table([graded("before", 0.25)], {"state": "keeps track"}))
    assert "| **state** | 0.250 ± 0.000 |" in told
    assert "2 episodes of before" in told
