"""The axes and numbers of the report's charts, whatever is drawn on them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.reporting import axes, charts
from algos.reporting.charts import Line, Look
from algos.reporting.groups import Curve
from algos.reporting.markup import html, tag
from algos.reporting.numbers import duration, figure, percent, reward
from algos.reporting.stages import STAGES, derived

anything = st.floats(-1e100, 1e100, allow_nan=False) | st.sampled_from(
    [math.nan, 0.0, 5e-324, -5e-324, 1e-200, 2.0**53]
)


@given(values=st.lists(anything, max_size=9), zero=st.booleans())
def test_every_figure_lies_inside_of_its_axis_with_a_few_round_ticks(values: list[float], zero: bool):
    frame = axes.SMALL
    y = axes.up(values, frame, zero=zero)
    assert all(axes.TOP <= y(value) <= frame.floor for value in values if math.isfinite(value))
    ticks = y.ticks(32)
    assert len(ticks) <= 8
    assert ticks == sorted(ticks)
    assert all(axes.TOP - 0.5 <= y(tick) <= frame.floor + 0.5 for tick in ticks)


@given(values=st.lists(anything, max_size=9), percent=st.booleans())
def test_no_two_labels_of_an_axis_are_alike_or_longer_than_their_room(values: list[float], percent: bool):
    labels = axes.labels(axes.up(values, axes.SMALL).ticks(32), percent)
    assert len(set(labels)) == len(labels)
    # The longest have a sign, two digits, an exponent of three and a percent sign.
    assert all(len(label) <= len("-1.5e-198%") for label in labels)


def test_labels_that_lie_close_together_have_more_digits_or_say_what_is_above_the_lowest():
    def told(*ends: float) -> list[str]:
        return axes.labels(axes.up(ends, axes.SMALL).ticks(32))

    assert told(0.999238, 1.001377) == ["0.9995", "1", "1.0005", "1.001", "1.0015"]
    assert told(1, 1 + 1e-7) == ["1", "+5e-8", "+1e-7"]


@given(values=st.lists(anything, min_size=1, max_size=9), low=st.floats(-5, 5))
def test_a_higher_figure_is_never_drawn_lower(values: list[float], low: float):
    y = axes.up(values, axes.SMALL, within=(low, low + 1))
    there = sorted(value for value in values if math.isfinite(value))
    places = [y(value) for value in there]
    assert places == sorted(places, reverse=True)


@given(values=st.lists(anything, min_size=1, max_size=9))
def test_any_curve_can_be_drawn(values: list[float]):
    steps = [float(step) for step in range(len(values))]
    curve = Curve(steps, values, values, values, [1] * len(values))
    if not curve.empty:
        drawn = html(charts.lines("title", "", [Line("a", curve, 0)], Look()))
        assert "nan" not in drawn
        assert "inf" not in drawn
    assert "nan" not in html(charts.sparkline([(0, curve)]))
    bars = charts.bars("title", "", [("a", 0, curve)])
    assert bars is None or "nan" not in html(bars)


def test_figures_over_many_decades_get_a_logarithmic_axis():
    assert axes.up([1e-5, 1.0], axes.SMALL).log
    assert not axes.up([0.0, 1.0], axes.SMALL).log
    assert not axes.up([0.01, 1.0], axes.SMALL).log
    assert axes.up([1e-5, 1.0], axes.SMALL).ticks(20) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], rel=1e-6)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *(
            (0, "0"),
            (0.15625, "0.156"),
            (28, "28"),
            (7.9, "7.9"),
            (1234, "1234"),
            (12345, "12.3k"),
            (37748736, "37.7M"),
            (2.5e50, "2.5e50"),
        ),
        *((2.1e-5, "2.1e-5"), (1e-4, "1e-4"), (-0.5, "-0.5"), (math.nan, "–"), (1e-12, "1e-12"), (99.96, "100")),
    ],
)
def test_figures_are_written_short(value: float, said: str):
    assert figure(value) == said


def test_shares_rewards_and_times_are_written_for_people():
    assert [percent(value) for value in (0.726, 0.084, 0.00031, 0.0, 1.0)] == [
        "73 %",
        "8.4 %",
        "0.031 %",
        "0 %",
        "100 %",
    ]
    assert [reward(value) for value in (0.5, math.nan)] == ["0.50", "–"]
    assert [duration(value) for value in (7.92, 59.99, 200, 7500)] == ["7.92 s", "60 s", "3 min 20 s", "2 h 05 min"]


def test_text_is_never_markup():
    said = html(tag("a", "<b>", tag("i", "&"), "</a>", title='">&', class_="x", hidden=None))
    assert said == '<a title="&quot;&gt;&amp;" class="x">&lt;b&gt;<i>&amp;</i>&lt;/a&gt;</a>'


@given(
    st.dictionaries(
        st.sampled_from(
            ["rollout_wait", "train", "learner_old", "learner_critic", "learner_forward", "update", "eval"]
        ),
        st.floats(0, 1e4),
    )
)
def test_the_stages_of_a_step_add_up_to_its_seconds(parts: dict[str, float]):
    inside = sum(value for key, value in parts.items() if key.startswith("learner_"))
    parts["train"] = parts.get("train", 0.0) + inside
    whole = sum(value for key, value in parts.items() if not key.startswith("learner_")) + 0.5
    found = derived({"step": 3, "seconds/step": whole} | {f"seconds/{key}": value for key, value in parts.items()})
    assert sum(found[stage] for stage in STAGES) == pytest.approx(whole)
