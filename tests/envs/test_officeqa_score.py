"""Scores of answers to OfficeQA questions: what agrees with what is expected, and what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tasks import officeqa_score
from envs.tasks.officeqa_score import numbers, score

AGREE = [
    ("2,602", "2602"),
    ("2,602", "$2,602 million"),
    ("2,602", "2,602.00"),
    ("2,602", "It is <FINAL_ANSWER>1</FINAL_ANSWER>, no: <final_answer>\n2602\n</final_answer>"),
    ("507", "507 in 1934"),
    ("1608.80%", "1608.8"),
    ("36080 million", "36,080 millions"),
    ("-5", "(5)"),
    ("-5", "\u22125"),
    ("(1,234)", "-1234"),
    ("0", "0.00"),
    ("[0.096, \u2212184.143]", "[0.096, -184.143]"),
    ("[8, 152260]", "8,152,260"),
    ("[8, 152260]", "[8, 152,260]"),
    ("[Ohio, 0.866]", "Ohio: 0.866"),
    ("March 3, 1977", "march 3 1977"),
    ("August 1986", "in August 1986"),
    ("1977", "1977"),
    ("Bureau of Debt", '"bureau of  debt"'),
    ("Old-Age (OASI) Trust Fund", "Old-Age Trust Fund"),
]
DIFFER = [
    ("2,602", "2603"),
    ("2,602", ""),
    ("2,602", "2602 or 2603"),
    ("2,602", "2602\n2602"),
    ("2,602", "2602 <b>"),
    ("2,602", "2602" + " " * 10 + "x" * 250),
    ("36080 million", "36080 billion"),
    ("[1, 2]", "[2, 1]"),
    ("[1, 2]", "[1, 2, 3]"),
    ("March 3, 1977", "April 3, 1977"),
    ("March 1977", "1977"),
    ("0", "1"),
    ("Bureau of Debt", "Bureau of Debt 3"),
    ("Bureau of Debt", "The Bureau of Debt"),
    ("5", "Unable to determine: 5"),
    ("-5", "5"),
]


@pytest.mark.parametrize(("expected", "said"), AGREE)
def test_what_agrees(expected, said):
    assert score(expected, said) == 1.0


@pytest.mark.parametrize(("expected", "said"), DIFFER)
def test_what_differs(expected, said):
    assert score(expected, said) == 0.0


@pytest.mark.parametrize(("said", "tolerance", "right"), [("101", 0.01, 1.0), ("101.1", 0.01, 0.0), ("99", 0.01, 1.0)])
def test_the_tolerance_is_relative_to_what_is_expected(said, tolerance, right):
    assert score("100", said, tolerance) == right


@given(st.floats(-1e9, 1e9).map(lambda value: f"{value:.2f}"))
def test_a_number_agrees_with_itself_however_it_is_written(text):
    assert score(text, text) == 1.0
    assert score(text, f"{float(text):,.2f}") == 1.0
    assert score(text, f"<FINAL_ANSWER>${text}</FINAL_ANSWER>") == 1.0


@given(st.text(max_size=300), st.text(min_size=1, max_size=40))
def test_no_answer_breaks_the_scorer(said, expected):
    assert score(expected, said) in (0.0, 1.0)


def test_units_are_those_that_stand_near():
    found = [(number.value, number.unit) for number in numbers("5 million, and far away from that only 7 b")]
    assert found == [(5.0, "million"), (7.0, "billion")]


def test_it_runs_alone_as_a_grader(tmp_path):
    script = tmp_path / "score.py"
    script.write_text(Path(officeqa_score.__file__).read_text())
    (tmp_path / "answer.json").write_text(json.dumps({"answer": "5", "tolerance": 0.0}))
    (tmp_path / "said.txt").write_text("<FINAL_ANSWER>5</FINAL_ANSWER>")
    done = subprocess.run(
        [sys.executable, "-I", str(script)],
        env={"REINS_FINAL_MESSAGE": str(tmp_path / "said.txt")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1.0\n"
