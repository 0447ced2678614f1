"""What was trained and what came of it, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from algos.reporting.groups import Group, at_ends
from algos.reporting.numbers import reward

_METHODS = {"gae": "PPO", "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO"}
HELD_OUT = "eval/heldout/reward_greedy"


def said(group: Group) -> list[str]:
    """One sentence on what was trained, one on the outcome, and the state of each run that is not done."""
    return [_trained(group), _outcome(group), *_states(group)]


def _trained(group: Group) -> str:
    of = group.settings
    if not of:
        return "The settings of this run are not known."
    steps, asked = max(run.last_step for run in group.runs), of.get("steps")
    if asked == 0:
        return f"An evaluation of {_policy(group)} on {_tasks(group)}, through {_harnesses(group)}."
    method = _METHODS.get(str(of.get("learner.advantage")), str(of.get("learner.advantage")))
    if method == "PPO":
        method += " with a value head on the policy" if of.get("learner.critic.shared") else " with a critic of its own"
    groups, size = of.get("rollout.groups"), of.get("rollout.group_size")
    batch = f" of {groups} × {size} episodes" if isinstance(groups, int) and isinstance(size, int) else ""
    done = f"{steps} steps" if steps == asked else f"{steps} of {asked} steps"
    return (
        f"{method} trained {_policy(group)} for {done}{batch}, on {_tasks(group)}, through {_harnesses(group)}"
        f"{_seeds(group)}."
    )


def _policy(group: Group) -> str:
    path = group.settings.get("model.path")
    return str(path) if path else "the tiny policy of the cold start"


def _tasks(group: Group) -> str:
    of = group.settings
    return (
        str(of["tasks.path"])
        if of.get("tasks.path")
        else f"{of.get('tasks.train')} built-in {of.get('tasks.builtin')} tasks"
    )


def _harnesses(group: Group) -> str:
    mix = group.settings.get("mix")
    if isinstance(mix, list) and mix:
        names = [str(one.get("label") or one.get("name")) for one in mix if isinstance(one, dict)]
        return "each of " + ", ".join(names)
    return str(group.settings.get("harness.label") or group.settings.get("harness.name"))


def _seeds(group: Group) -> str:
    seeds = [str(run.settings.get("seed")) for run in group.runs]
    return f" (seed {seeds[0]})" if len(seeds) == 1 else f" ({len(seeds)} runs, seeds {', '.join(seeds)})"


def _outcome(group: Group) -> str:
    before, after = at_ends(group, HELD_OUT)
    if before and after:
        return f"The greedy reward on held-out tasks went from {_spread(before)} to {_spread(after)}."
    if before and group.settings.get("steps") == 0:
        return f"The greedy reward on held-out tasks is {_spread(before)}."
    first, last = _training(group)
    training = (
        f" The training reward went from {_spread(first)} in the first step to {_spread(last)} in the newest."
        if first
        else ""
    )
    if before:
        return (
            f"The greedy reward on held-out tasks was {_spread(before)} before, and was not measured since.{training}"
        )
    return f"Held-out tasks were not evaluated.{training}"


def _training(group: Group) -> tuple[list[float], list[float]]:
    courses = [[value for value in run.values("train/reward").values() if value == value] for run in group.runs]
    return [course[0] for course in courses if course], [course[-1] for course in courses if course]


def _spread(values: Sequence[float]) -> str:
    mean = reward(sum(values) / len(values))
    low, high = reward(min(values)), reward(max(values))
    return mean if low == high else f"{mean} ({low} to {high})"


def _states(group: Group) -> list[str]:
    several = len(group.runs) > 1
    return [
        f"{run.name + ': ' if several else ''}{run.told}.".replace("..", ".").capitalize()
        if not several
        else f"{run.name}: {run.told}."
        for run in group.runs
        if run.state != "done"
    ]
