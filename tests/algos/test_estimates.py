import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.estimates import Instance, clustered_error, figure, over, paired, pass_all, pass_at, ratio

rewards = st.lists(st.floats(0, 1), min_size=1, max_size=4)


def slow_clustered(instances):
    """The sandwich of a regression on a constant, written out pair by pair: values of one cluster go together."""
    means = [(one.task, sum(one.values) / len(one.values)) for one in instances if one.values]
    mean = sum(value for _, value in means) / len(means)
    total = 0.0
    for (task, value), (other_task, other) in itertools.product(means, means):
        if task == other_task:
            total += (value - mean) * (other - mean)
    clusters = len({task for task, _ in means})
    return math.sqrt(max(0.0, total) * clusters / (clusters - 1)) / len(means)


@given(st.lists(rewards, min_size=2, max_size=12))
def test_for_one_harness_the_error_is_that_of_the_tasks_means(values):
    found = figure([Instance(f"t{i}", tuple(own)) for i, own in enumerate(values)])
    means = [statistics.fmean(own) for own in values]
    assert found.value == pytest.approx(statistics.fmean(means), abs=1e-12)
    assert found.error == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 4), rewards), min_size=2, max_size=14))
def test_the_clustered_error_is_that_of_the_slow_reference(drawn):
    instances = [Instance(f"t{task}", tuple(own)) for task, own in drawn]
    found = figure(instances)
    if len({one.task for one in instances}) < 2:
        assert found.error is None
    else:
        assert found.error == pytest.approx(slow_clustered(instances), abs=1e-9)


def test_known_values():
    # Two tasks always solved, two never: stdev of (1, 1, 0, 0) is sqrt(1/3), over sqrt(4).
    found = figure([Instance(name, (value,) * 3) for name, value in zip("abcd", (1, 1, 0, 0), strict=True)])
    assert (found.value, found.tasks, found.graded, found.missing) == (0.5, 4, 12, 0)
    assert found.error == pytest.approx(math.sqrt(1 / 3) / 2)
    # More runs of the same tasks that say the same add nothing.
    again = figure([Instance(name, (value,) * 30) for name, value in zip("abcd", (1, 1, 0, 0), strict=True)])
    assert again.error == found.error


def test_the_same_tasks_in_two_harnesses_are_no_new_sample():
    values = [1.0, 1.0, 0.0, 0.0, 1.0]
    one = figure([Instance(f"t{i}", (value,)) for i, value in enumerate(values)])
    two = figure([Instance(f"t{i}", (value,)) for value_of in (values, values) for i, value in enumerate(value_of)])
    assert two.value == one.value
    assert two.error == pytest.approx(one.error)


def test_the_error_is_the_spread_over_repeated_evaluations():
    """Evaluations of fresh tasks, three runs each: the mean of the told errors is how far their figures scatter."""
    rng = random.Random(0)
    values, errors, naive = [], [], []
    for _ in range(800):
        instances = []
        for task in range(40):
            hard = rng.betavariate(0.4, 0.4)
            instances.append(Instance(f"t{task}", tuple(float(rng.random() < hard) for _ in range(3))))
        found = figure(instances)
        values.append(found.value)
        errors.append(found.error)
        naive.append(math.sqrt(found.value * (1 - found.value) / 120))
    spread = statistics.stdev(values)
    assert statistics.fmean(errors) == pytest.approx(spread, rel=0.08)
    assert statistics.fmean(naive) < 0.8 * spread


def test_what_is_missing_is_no_zero_and_bounds_the_figure():
    found = figure([Instance("a", (1.0, 1.0), 1), Instance("b", (), 3), Instance("c", (0.0, 1.0, 1.0))])
    assert found.value == pytest.approx((1 + 2 / 3) / 2)
    assert found.missing == 4
    assert found.low == pytest.approx((2 / 3 + 0 + 2 / 3) / 3)
    assert found.high == pytest.approx((1 + 1 + 2 / 3) / 3)


def test_of_nothing_there_is_no_figure():
    assert figure([]).value is None
    only = figure([Instance("a", (), 3)])
    assert (only.value, only.error, only.low, only.high) == (None, None, 0.0, 1.0)
    assert figure([Instance("a", (1.0, 0.0))]).error is None
    assert clustered_error(["a", "a"], [0.0, 1.0]) is None


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_all_choices_with_a_success_and_pass_all_of_those_with_only_successes(n, data):
    solved = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    attempts = [i < solved for i in range(n)]
    choices = list(itertools.combinations(attempts, k))
    assert pass_at(k, n, solved) == pytest.approx(sum(map(any, choices)) / len(choices))
    assert pass_all(k, n, solved) == pytest.approx(sum(map(all, choices)) / len(choices))


def test_pass_at_k_has_no_bias_in_few_attempts():
    """Of tasks solved with chance p, the mean estimate from 5 attempts is 1 - (1 - p)^2 and p^2."""
    rng = random.Random(1)
    p = 0.3
    drawn = [sum(rng.random() < p for _ in range(5)) for _ in range(20000)]
    assert statistics.fmean(pass_at(2, 5, c) for c in drawn) == pytest.approx(1 - (1 - p) ** 2, abs=0.01)
    assert statistics.fmean(pass_all(2, 5, c) for c in drawn) == pytest.approx(p**2, abs=0.01)


@pytest.mark.parametrize(("k", "graded", "solved"), [(0, 3, 1), (4, 3, 1), (1, 3, 4), (1, 0, 0)])
def test_estimates_that_do_not_exist_are_refused(k, graded, solved):
    with pytest.raises(ValueError, match="expected 1 <= k <= graded"):
        pass_at(k, graded, solved)


def test_instances_with_too_few_graded_attempts_make_pass_k_incomplete():
    found = over([Instance("a", (1.0, 0.0, 0.0)), Instance("b", (1.0, 1.0), 1)], 3, pass_at)
    assert (found.value, found.tasks, found.missing) == (1.0, 1, 1)
    assert over([Instance("a", (0.5, 0.9))], 2, pass_all, success=0.5).value == 1.0


@given(st.lists(st.tuples(rewards, rewards), min_size=2, max_size=10))
def test_the_paired_difference_is_that_of_the_figures_and_its_error_that_of_the_differences(drawn):
    before = {f"n{i}": Instance(f"t{i}", tuple(a)) for i, (a, _) in enumerate(drawn)}
    after = {f"n{i}": Instance(f"t{i}", tuple(b)) for i, (_, b) in enumerate(drawn)}
    found = paired(before, after)
    assert found.value == pytest.approx(figure(after.values()).value - figure(before.values()).value, abs=1e-9)
    gaps = [statistics.fmean(b) - statistics.fmean(a) for a, b in drawn]
    assert found.error == pytest.approx(statistics.stdev(gaps) / math.sqrt(len(gaps)), abs=1e-9)


def test_a_difference_takes_only_what_both_have():
    before = {"x": Instance("x", (0.0,)), "y": Instance("y", (1.0,)), "z": Instance("z", (), 1)}
    after = {"x": Instance("x", (1.0,)), "z": Instance("z", (1.0,)), "w": Instance("w", (0.0,))}
    found = paired(before, after)
    assert (found.value, found.tasks, found.missing, found.error) == (1.0, 1, 1, None)
    assert paired({}, after).value is None


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=2, max_size=12))
def test_a_ratio_with_one_chance_each_is_the_mean_with_its_clustered_error(drawn):
    clusters, values = [str(task) for task, _ in drawn], [value for _, value in drawn]
    found = ratio(clusters, values, [1] * len(values))
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.error == pytest.approx(clustered_error(clusters, values), abs=1e-9)


def test_the_error_of_a_ratio_is_its_spread_over_repetitions():
    rng = random.Random(2)
    values, errors = [], []
    for _ in range(600):
        counts, chances, tasks = [], [], []
        for task in range(60):
            hard = rng.betavariate(1, 2)
            for _ in range(2):
                of = rng.randrange(6)
                chances.append(of)
                counts.append(sum(rng.random() < hard for _ in range(of)))
                tasks.append(str(task))
        found = ratio(tasks, counts, chances)
        values.append(found.value)
        errors.append(found.error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(values), rel=0.08)


def test_a_ratio_of_no_chances_is_none():
    assert ratio(["a"], [0], [0]).value is None
    assert ratio([], [], []).value is None
