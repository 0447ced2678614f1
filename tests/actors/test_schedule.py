from collections import Counter
from pathlib import Path

import pytest

from actors.assignment import Assignment
from actors.schedule import Schedule, evaluation
from actors.seeds import stable_seed
from configs.harness import AssignmentConfig
from envs.tasks.task import Task


def tasks(n, families=1):
    return [Task(f"t{i}", "do it", Path("/t"), "/workspace", {"family": f"f{i % families}"}) for i in range(n)]


def in_each(*names):
    return Assignment(AssignmentConfig(), names, seed=0)


def schedule(n=16, families=4, groups=4, group_size=3, seed=0):
    return Schedule(
        tasks(n, families), assignment=in_each("h"), groups=groups, group_size=group_size, temperature=1.0, seed=seed
    )


def test_a_step_is_the_same_in_every_process_and_order():
    forward = [schedule().step(s) for s in range(9)]
    one = schedule()
    backward = [one.step(s) for s in reversed(range(9))][::-1]
    assert forward == backward
    assert schedule(seed=1).step(0) != forward[0]


def test_an_epoch_takes_every_task_once():
    one = schedule()
    seen = [spec.task.id for s in range(4) for spec in one.step(s)]
    assert Counter(seen) == Counter({f"t{i}": 3 for i in range(16)})


def test_each_step_is_balanced_over_families():
    one = schedule(n=40, families=4)
    for s in range(10):
        assert {spec.task.metadata["family"] for spec in one.step(s)} == {"f0", "f1", "f2", "f3"}


def test_ids_and_seeds_are_unique_and_groups_are_of_one_task():
    specs = [spec for s in range(6) for spec in schedule().step(s)]
    assert len({spec.id for spec in specs}) == len({spec.seed for spec in specs}) == len(specs)
    by_group = {}
    for spec in specs:
        by_group.setdefault(spec.group, set()).add(spec.task.id)
    assert all(len(found) == 1 for found in by_group.values())


def test_fewer_tasks_than_groups_go_round_again():
    one = Schedule(tasks(3), assignment=in_each("h"), groups=8, group_size=1, temperature=1.0, seed=0)
    assert Counter(s.task.id for s in one.step(0)).most_common(1)[0][1] == 3


def test_no_task_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Schedule([], assignment=in_each("h"), groups=1, group_size=1, temperature=1.0, seed=0)


def test_evaluation_ids_tell_greedy_from_sampled():
    greedy = evaluation("heldout", tasks(2), harnesses=["h"], temperature=0.0, step=3, seed=0)
    sampled = evaluation("heldout", tasks(2), harnesses=["h"], temperature=1.0, step=3, seed=0)
    assert [s.split for s in greedy + sampled] == ["heldout/greedy"] * 2 + ["heldout/sampled"] * 2
    assert len({s.id for s in greedy + sampled}) == 4


def test_seeds_are_stable_over_releases():
    assert stable_seed(0, "a") == stable_seed(0, "a") != stable_seed(1, "a")
    assert 0 <= stable_seed(5, "x") < 2**63


def test_every_task_is_done_in_every_harness_in_groups_of_their_own():
    one = Schedule(tasks(6), assignment=in_each("a", "b", "c"), groups=6, group_size=2, temperature=1.0, seed=0)
    steps = [one.step(s) for s in range(3)]
    assert all(Counter(spec.harness for spec in step) == {"a": 4, "b": 4, "c": 4} for step in steps)
    pairs = [(spec.task.id, spec.harness) for step in steps for spec in step]
    assert Counter(pairs) == {(f"t{i}", name): 2 for i in range(6) for name in "abc"}
    by_group = {}
    for step in steps:
        for spec in step:
            by_group.setdefault(spec.group, set()).add((spec.task.id, spec.harness))
    assert all(len(found) == 1 for found in by_group.values())
    asked = evaluation("heldout", tasks(2), harnesses=["a", "b"], temperature=0.0, step=0, seed=0)
    assert {(spec.task.id, spec.harness) for spec in asked} == {(f"t{i}", name) for i in range(2) for name in "ab"}
    assert len({spec.id for spec in asked}) == 4


def test_the_balance_of_anchors_is_logged_where_there_are_any():
    assert schedule().balance(3) == {}
    how = Assignment(AssignmentConfig(kind="random", k=2), ["a", "b", "c"], seed=0)
    one = Schedule(tasks(9), assignment=how, groups=4, group_size=1, temperature=1.0, seed=0)
    assert one.balance(1) == {"schedule/anchors_least": 1, "schedule/anchors_most": 2}
    assert one.balance(4) == {"schedule/anchors_least": 4, "schedule/anchors_most": 4}
    harnesses = [[spec.harness for spec in one.step(step)] for step in range(6)]
    tasks_of = [[spec.task.id for spec in one.step(step)] for step in range(6)]
    assert tasks_of[0] == tasks_of[1] != tasks_of[2]
    assert all(a != b for a, b in zip(harnesses[0], harnesses[1], strict=True))
