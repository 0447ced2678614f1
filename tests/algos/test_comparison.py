"""Scores of several policies in several places, as a page."""

import math
import re

import pytest

from algos.reporting.comparison import Comparison, Policy, document, mean_and_error


def test_mean_and_standard_error():
    mean, error = mean_and_error([0.2, 0.4, 0.9])
    assert mean == pytest.approx(0.5)
    # Sample variance (0.09 + 0.01 + 0.16) / 2, over three.
    assert error == pytest.approx(math.sqrt(0.13 / 3))
    assert math.isnan(mean_and_error([0.3])[1])
    assert mean_and_error([]) is None


def test_the_page_has_a_bar_for_what_was_measured_and_none_for_what_was_not():
    one = Policy("one <b>", {"near": [0.25, 0.75], "far": []}, [[0.1, 0.2], [0.3, 0.4, 0.5]])
    other = Policy("other", {"near": [1.0]})
    page = document("Head & more", "about", [Comparison("(a) of a", ["near", "far"], [one, other], "what came out")])
    assert "<title>Head &amp; more</title>" in page
    assert "one &lt;b&gt;" in page
    assert "<b>" not in page
    bars = [
        float(height)
        for height in re.findall(r'<rect x="[^"]*" y="[^"]*" width="[^"]*" height="([0-9.]+)" class="fill', page)
    ]
    assert len(bars) == 2
    # Half the height of a whole one.
    assert bars[0] == pytest.approx(bars[1] / 2, abs=0.01)
    assert page.count('class="seed"') == 3
    assert page.count('class="whisker"') == 1
    assert re.search("50.% ± 25.0", re.sub("<[^>]*>", "", page))
    assert "–" in page
    assert "what came out" in page
    # Reward while training: as far as both seeds are.
    assert page.count('aria-label="Reward while training, by step"') == 1
    assert "script" not in page.replace("script-src", "")


def test_nothing_measured_draws_nothing():
    page = document("h", "a", [Comparison("t", ["near"], [Policy("one", {})])])
    assert 'class="seed"' not in page
    assert "Reward while training" not in page
