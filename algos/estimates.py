"""Figures of an evaluation with their errors: pure functions from graded attempts to numbers.

Tasks are the sample, and attempts at the same task are not independent: each task is one cluster, whatever harnesses
it was done in and however often. Invariant: an attempt that has no grade enters no figure and is counted as missing;
of nothing there is no figure rather than a zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instance:
    """One task in one harness, attempted several times."""

    task: str
    """Instances of the same task are one cluster."""
    values: tuple[float, ...]
    """What was graded, each in [0, 1]."""
    missing: int = 0
    """Attempts without a grade."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean with what is known of its error."""

    value: float | None
    """None: nothing was graded."""
    error: float | None
    """Standard error; None where it cannot be told: fewer than two tasks."""
    tasks: int
    graded: int
    missing: int = 0
    low: float | None = None
    """What ``value`` would be if every missing attempt had come to 0."""
    high: float | None = None
    """And to 1."""


def figure(instances: Iterable[Instance]) -> Figure:
    """The mean over instances of the mean over their attempts, each in [0, 1], with its standard error.

    With instance means ``m_ch`` of task ``c`` in harness ``h``, ``N`` of them over ``C`` tasks:

        value = sum(m_ch) / N
        error = sqrt(C / (C - 1) * sum_c (sum_h (m_ch - value))^2) / N

    the clustered standard error (Miller, "Adding Error Bars to Evals", arXiv:2411.00640, on clustered questions), with
    the usual correction for the number of clusters. For one harness it is the standard deviation of the tasks' means
    over sqrt(C), which holds the noise of the attempts as well as the choice of tasks (there on resampling). Where no
    instance has more graded attempts than another, ``value`` is also the mean of the means of the single runs.
    """
    kept = list(instances)
    graded = [one for one in kept if one.values]
    means = [math.fsum(one.values) / len(one.values) for one in graded]
    missing = sum(one.missing for one in kept)
    total = sum(len(one.values) for one in kept)
    tasks = {one.task for one in graded}
    low, high = _bounds(kept)
    if not means:
        return Figure(None, None, 0, 0, missing, low, high)
    value = math.fsum(means) / len(means)
    error = clustered_error([one.task for one in graded], means)
    return Figure(value, error, len(tasks), total, missing, low, high)


def clustered_error(clusters: Sequence[str], values: Sequence[float]) -> float | None:
    """Standard error of the mean of ``values``, which are independent between ``clusters`` only.

    As in ``figure``. None for fewer than two clusters.
    """
    if len(set(clusters)) < 2:
        return None
    mean = math.fsum(values) / len(values)
    sums: dict[str, float] = {}
    for cluster, value in zip(clusters, values, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - mean
    correction = len(sums) / (len(sums) - 1)
    return math.sqrt(correction * math.fsum(each * each for each in sums.values())) / len(values)


def paired(before: Mapping[str, Instance], after: Mapping[str, Instance]) -> Figure:
    """How much better ``after`` is on the instances that both have, by their names.

    The mean of the differences of the instances' means and its clustered error, which is smaller than that of two
    independent figures wherever the same tasks are hard for both (there on paired differences). ``low`` and ``high``
    are None.
    """
    clusters, differences, missing, graded = [], [], 0, 0
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        missing += one.missing + other.missing
        graded += len(one.values) + len(other.values)
        if one.values and other.values:
            clusters.append(one.task)
            differences.append(math.fsum(other.values) / len(other.values) - math.fsum(one.values) / len(one.values))
    if not differences:
        return Figure(None, None, 0, graded, missing)
    value = math.fsum(differences) / len(differences)
    return Figure(value, clustered_error(clusters, differences), len(set(clusters)), graded, missing)


def ratio(clusters: Sequence[str], counts: Sequence[float], chances: Sequence[float]) -> Figure:
    """``sum(counts) / sum(chances)`` with its clustered standard error, to first order in the deviations.

    Both numbers of an entry belong to its cluster. ``graded`` is the number of chances. With a chance of 1 for each
    entry this is the mean of ``counts`` with ``clustered_error``.
    """
    total = math.fsum(chances)
    if not total:
        return Figure(None, None, 0, 0)
    value = math.fsum(counts) / total
    sums: dict[str, float] = {}
    for cluster, count, chance in zip(clusters, counts, chances, strict=True):
        if chance:
            sums[cluster] = sums.get(cluster, 0.0) + count - value * chance
    error = None
    if len(sums) > 1:
        correction = len(sums) / (len(sums) - 1)
        error = math.sqrt(correction * math.fsum(each * each for each in sums.values())) / total
    return Figure(value, error, len(sums), round(total))


def pass_at(k: int, graded: int, solved: int) -> float:
    """Chance that of ``k`` attempts at least one succeeds, without bias from ``solved`` of ``graded`` >= k attempts.

    1 - C(graded - solved, k) / C(graded, k): Chen et al., arXiv:2107.03374, equation 1.
    """
    _check(k, graded, solved)
    return 1 - math.comb(graded - solved, k) / math.comb(graded, k)


def pass_all(k: int, graded: int, solved: int) -> float:
    """Chance that all of ``k`` attempts succeed (pass^k), without bias from ``solved`` of ``graded`` >= k attempts.

    C(solved, k) / C(graded, k): Yao et al., tau-bench, arXiv:2406.12045, section 3.
    """
    _check(k, graded, solved)
    return math.comb(solved, k) / math.comb(graded, k)


def over(
    instances: Iterable[Instance], k: int, estimator: Callable[[int, int, int], float], success: float = 1.0
) -> Figure:
    """The mean of ``pass_at`` or ``pass_all`` over instances, a value of at least ``success`` being a success.

    Instances with fewer than ``k`` graded attempts have no estimate: their missing attempts are counted, so that the
    figure is not taken for a whole one.
    """
    found = []
    for one in instances:
        successes = sum(value >= success for value in one.values)
        estimate = (estimator(k, len(one.values), successes),) if len(one.values) >= k else ()
        found.append(Instance(one.task, estimate, one.missing))
    told = figure(found)
    return Figure(told.value, told.error, told.tasks, told.graded, told.missing)


def solved(one: Instance, success: float) -> Instance:
    """The same attempts as successes (1) and failures (0)."""
    return Instance(one.task, tuple(float(value >= success) for value in one.values), one.missing)


def _bounds(instances: Sequence[Instance]) -> tuple[float | None, float | None]:
    attempted = [one for one in instances if one.values or one.missing]
    if not attempted:
        return None, None
    low = [math.fsum(one.values) / (len(one.values) + one.missing) for one in attempted]
    high = [(math.fsum(one.values) + one.missing) / (len(one.values) + one.missing) for one in attempted]
    return math.fsum(low) / len(low), math.fsum(high) / len(high)


def _check(k: int, graded: int, solved: int) -> None:
    if not 1 <= k <= graded or not 0 <= solved <= graded:
        raise ValueError(f"got k={k}, {solved} solved of {graded}, expected 1 <= k <= graded and 0 <= solved <= graded")
