"""From lines of episodes to tables: nothing that failed is a 0, and nothing that is missing goes unseen."""

import io
import json
import re

import pytest
from rich.console import Console

from algos.score_tables import markdown, page, rich_table, table
from algos.scores import Place, Scores, difference


def asked(runs=3, tasks=4, harnesses=("loop",), ring="training"):
    return [
        {
            "id": f"{ring}r{run}n{task}{harness}",
            "ring": ring,
            "tasks": "desk",
            "run": run,
            "task": f"t{task}",
            "harness": harness,
            "category": f"f{task % 2}",
        }
        for run in range(runs)
        for harness in harnesses
        for task in range(tasks)
    ]


def ended(attempts, reward=lambda one: 1.0, status=lambda one: "completed"):
    rows = []
    for one in attempts:
        how = status(one)
        graded = None if how == "failed" else reward(one)
        rows.append(one | {"status": how, "reward": graded, "reason": "no room" if how == "failed" else ""})
    return rows


def scores(reward=lambda one: 1.0, status=lambda one: "completed", name="policy", **shape):
    attempts = asked(**shape)
    return Scores(name, attempts, ended(attempts, reward, status), shape.get("runs", 3))


def test_pass_1_is_the_mean_over_runs_and_each_run_is_told():
    found = scores(lambda one: float(one["task"] == "t0" or one["run"] == 1))
    score = found.score(Place("training"))
    assert score.runs == (0.25, 1.0, 0.25)
    assert score.pass_1.value == pytest.approx(sum(score.runs) / 3)
    assert score.pass_k.value == 1.0
    assert score.pass_all.value == 0.25
    assert found.complete


def test_figures_are_told_of_the_ring_of_each_pair_and_of_categories():
    found = scores(lambda one: float(one["category"] == "f0"), harnesses=("loop", "other"))
    places = found.places()
    assert Place("training") in places
    assert Place("training", "loop", "desk") in places
    assert found.score(Place("training", category="f0")).pass_1.value == 1.0
    assert found.score(Place("training", category="f1")).pass_1.value == 0.0


def test_one_harness_and_one_set_are_told_once():
    attempts = [one | {"category": None} for one in asked()]
    assert Scores("policy", attempts, ended(attempts), 3).places() == [Place("training")]


def test_failed_episodes_are_no_zeros_and_are_listed():
    found = scores(status=lambda one: "failed" if one["id"] == "trainingr1n2loop" else "completed")
    score = found.score(Place("training"))
    assert score.pass_1.value == 1.0
    assert score.pass_1.missing == 1
    assert not found.complete
    text = markdown(table([found]))
    assert "1.000 ± 0.000 (incomplete: 1 missing, 0.917 to 1.000 with them)" in text
    assert "trainingr1n2loop (training, loop, desk/t2, run 2): no room" in text
    assert "11 of 12" in text
    assert 'class="incomplete"' in page(table([found]))
    plain = found.plain()
    assert plain["complete"] is False
    assert plain["episodes"] == {"asked": 12, "graded": 11, "failed": 1, "not_ended": 0}
    assert [one["id"] for one in plain["failed"]] == ["trainingr1n2loop"]
    json.dumps(plain, allow_nan=False)


def test_episodes_that_have_not_ended_make_the_figure_incomplete():
    attempts = asked()
    found = Scores("policy", attempts, ended(attempts[:6]), 3)
    assert found.unfinished == 6
    assert "6 of 12 episodes have not ended: incomplete" in markdown(table([found]))
    nothing = Scores("policy", attempts, [], 3)
    assert "none (incomplete: 12 missing)" in markdown(table([nothing]))


def test_a_dropped_tree_leaves_the_reward():
    found = scores(status=lambda one: "dropped")
    assert found.complete
    assert found.score(Place("training")).pass_1.value == 1.0


def test_fractions_pass_from_the_threshold_on_and_their_mean_is_told():
    found = scores(lambda one: 0.5)
    assert found.score(Place("training")).pass_1.value == 0.0
    assert "mean reward" in markdown(table([found]))
    assert "mean reward" not in markdown(table([scores()]))


def test_several_evaluations_stand_side_by_side_with_the_paired_difference():
    before = scores(lambda one: float(one["task"] == "t0"), name="before")
    after = scores(lambda one: float(one["task"] in ("t0", "t1")), name="after")
    assert difference(before, after, Place("training")).value == 0.25
    text = markdown(table([before, after]))
    assert "| after - before |" in text
    assert "+0.250 ± 0.250" in text


def test_places_of_only_one_evaluation_are_shown_without_a_difference():
    text = markdown(table([scores(name="a"), scores(name="b", ring="outside")]))
    line = next(line for line in text.splitlines() if line.startswith("| **outside**"))
    assert line == "| **outside** | none | 1.000 ± 0.000 | none | 4 |"


HOSTILE = (
    "a|b<i>",
    "[red]",
    "[/x]",
    "a\r\n| b",
    "\x1b[31mred",
    "end\\",
    "![x](javascript:1)",
    "\u202eleft",
    "x" * 5000,
)


@pytest.mark.parametrize("words", HOSTILE)
def test_texts_of_others_break_no_table(words):
    attempts = [
        one | {"category": words if one["task"] == "t0" else "b", "task": one["task"] + words} for one in asked()
    ]
    found = ended(attempts, status=lambda one: "failed" if one["run"] else "completed")
    for row in found:
        row["reason"] = words
    made = table([Scores("policy", attempts, found, 3)])
    text = markdown(made)
    assert text.isprintable() or set(filter(lambda one: not one.isprintable(), text)) == {"\n"}
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in rows} == {7}
    assert not re.search(r"(?<!\\)(?:\\\\)*[<\[]", text)
    told = page(made)
    assert "<i>" not in told.split("<style>")[0] + told.split("</style>")[1]
    assert "\x1b" not in told
    terminal = io.StringIO()
    Console(file=terminal, width=100).print(rich_table(made))
    assert "\x1b" not in terminal.getvalue()
    assert "1.000" in terminal.getvalue()


def test_evaluations_of_unlike_tasks_are_told():
    few, many = scores(name="few", tasks=2), scores(name="many")
    text = markdown(table([few, many]))
    assert "| **training** | 1.000 ± 0.000 | 1.000 ± 0.000 | +0.000 ± 0.000 | 2, 4 |" in text
    assert "not of the same tasks" in text
    assert "not of the same tasks" not in markdown(table([few, few]))


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="expected at least one"):
        table([])
