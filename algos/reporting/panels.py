"""What a report draws: sections of panels, each with the figures of ``metrics.jsonl`` that belong side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from algos.reporting import charts
from algos.reporting.charts import Line, Look
from algos.reporting.groups import Group, curve, figures
from algos.reporting.stages import STAGES


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of lines; ``figures`` are (key, label)."""

    title: str
    about: str
    figures: Sequence[tuple[str, str]]
    look: Look = field(default_factory=Look)


@dataclass(frozen=True, slots=True)
class Stack:
    """A chart of stacked bars for each group; ``layers`` are (key, label, colour)."""

    title: str
    about: str
    layers: Sequence[tuple[str, str, int]]
    unit: str = ""


_SHARE = Look(percent=True, zero=True)
_REWARD = Look(unit_range=True, large=True)
_ZERO = Look(zero=True)

POLICY: list[Panel | Stack] = [
    Panel("Entropy", "of the policy, nats per trained token", [("train/entropy", "entropy")], _ZERO),
    Panel("Loss", "of the policy", [("train/loss", "loss")]),
    Panel(
        "Gradient norm",
        "before clipping, over the optimiser steps of a step",
        [("train/grad_norm", "mean"), ("train/grad_norm_max", "highest")],
        _ZERO,
    ),
    Panel(
        "Ratio new to old",
        "probability of a token after against before the step",
        [("train/ratio_mean", "mean"), ("train/ratio_max", "highest"), ("train/ratio_min", "lowest")],
    ),
    Panel(
        "Clipped tokens",
        "share of tokens whose ratio was clipped",
        [("train/clip_high", "above"), ("train/clip_low", "below"), ("train/clip_dual", "dual clip")],
        _SHARE,
    ),
    Panel("KL old to new", "how far a step moved the policy, nats per token", [("train/kl_old_theta", "KL")], _ZERO),
    Panel(
        "KL engine to trainer",
        "sampled against recomputed log-probabilities, nats per token",
        [("train/kl_mu_old", "KL")],
        _ZERO,
    ),
    Panel(
        "Largest distance engine to trainer", "of one token's log-probability", [("train/mu_old_max", "nats")], _ZERO
    ),
    Panel("Truncated importance weight", "mean over tokens", [("train/tis_mean", "weight")]),
    Panel(
        "Tokens capped or left out by it",
        "share of tokens",
        [("train/tis_capped", "capped"), ("train/tis_masked", "left out")],
        _SHARE,
    ),
    Panel(
        "Staleness",
        "versions between sampling and training, by token",
        [("train/staleness_mean", "mean"), ("train/staleness_max", "highest")],
        _ZERO,
    ),
    Panel(
        "Groups without spread",
        "share of groups whose episodes all had the same reward",
        [("train/groups_without_spread_share", "share")],
        _SHARE,
    ),
    Panel(
        "Advantage",
        "over trained tokens",
        [("train/advantage_mean", "mean"), ("train/advantage_std", "deviation"), ("train/advantage_max", "largest")],
    ),
    Panel("Learning rate", "", [("train/learning_rate", "rate")], _ZERO),
]

CRITIC: list[Panel | Stack] = [
    Panel(
        "Explained variance",
        "1: values say all returns; 0: no better than their mean",
        [("train/explained_variance", "explained")],
        Look(within=(-1.0, 1.0)),
    ),
    Panel(
        "Value and return",
        "means over trained tokens",
        [("train/value_mean", "value"), ("train/return_mean", "return")],
    ),
    Panel("Value loss", "", [("train/value_loss", "loss")], _ZERO),
    Panel("Gradient norm of the critic", "", [("train/critic_grad_norm", "norm")], _ZERO),
]

EPISODES: list[Panel | Stack] = [
    Stack(
        "How episodes ended",
        "training episodes of a step",
        [
            ("episodes/completed", "completed", 2),
            ("episodes/truncated", "truncated", 6),
            ("episodes/failed", "failed", 5),
            ("episodes/dropped", "dropped", 7),
        ],
    ),
    Panel("Calls of an episode", "mean", [("train/calls", "calls")], _ZERO),
    Panel("Retries", "episodes that infrastructure failed, tried again", [("episodes/retries", "retries")], _ZERO),
    Panel("Flagged episodes", "with something suspicious in episodes.jsonl", [("train/flagged", "flagged")], _ZERO),
    Panel("Rejected episodes", "sampled too far from the trainer", [("train/episodes_rejected", "rejected")], _ZERO),
    Panel("Refused calls", "", [("calls/refused", "calls")], _ZERO),
    Panel("Drift of replayed histories", "characters in a step", [("calls/drift_chars", "characters")], _ZERO),
]

BEHAVIOUR: list[Panel | Stack] = [
    Panel(
        "Malformed replies",
        "cut, or with a tool call that cannot be parsed",
        [("behaviour/malformed", "share")],
        _SHARE,
    ),
    Panel(
        "Failing calls",
        "share of calls that an error answered; and of these the share that was made again",
        [("behaviour/failing", "failing"), ("behaviour/repeated_failing", "of these repeated")],
        _SHARE,
    ),
    Panel(
        "After an error",
        "share of runs of failing calls after which one succeeded",
        [("behaviour/recovered", "recovered")],
        _SHARE,
    ),
    Panel("Calls made again", "the same call, answered the same", [("behaviour/reread", "share")], _SHARE),
]

STEP_TIME = Stack(
    "Where the time of a step goes",
    "seconds; rollouts run beside the learner, so that only waiting for them counts",
    [(key, label, colour) for (key, label), colour in zip(STAGES.items(), (0, 4, 1, 3, 6, 5, 2, 7), strict=True)],
    " s",
)

TIME: list[Panel | Stack] = [
    STEP_TIME,
    Stack(
        "Where the time of an episode goes",
        "seconds, mean; many run side by side",
        [
            ("seconds/episode_create", "sandbox made", 4),
            ("seconds/episode_run", "harness runs", 0),
            ("seconds/episode_grade", "graded", 2),
            ("seconds/episode_destroy", "sandbox removed", 7),
        ],
        " s",
    ),
    Panel("Episodes a second", "", [("rate/episodes", "episodes")], _ZERO),
    Panel("Sampled tokens a second", "of training episodes", [("rate/tokens", "tokens")], _ZERO),
    Panel("Tokens a second in the learner", "", [("rate/learner_tokens", "tokens")], _ZERO),
    Panel("Tokens of paths for each computed", "what sharing prefixes saves", [("rate/shared", "tokens")], _ZERO),
]


def rewards(groups: Sequence[Group]) -> list[Panel]:
    """Training reward, every evaluation set that has a curve, and the reward in each harness of a mix."""
    keys = sorted(figures(groups))
    panels = [Panel("Training reward", "mean over the episodes of a step", [("train/reward", "reward")], _REWARD)]
    sets = dict.fromkeys(key.split("/")[1] for key in keys if key.startswith("eval/") and key.count("/") == 2)
    for name in sets:
        measured = [
            (f"eval/{name}/reward_{how}", how) for how in ("greedy", "sampled") if f"eval/{name}/reward_{how}" in keys
        ]
        if len({step for group in groups for run in group.runs for key, _ in measured for step in run.values(key)}) > 1:
            panels.append(Panel(f"Evaluation: {name}", "tasks never trained", measured, _REWARD))
    of_harness = [(key, key.split("/")[1]) for key in keys if key.startswith("harness/") and key.endswith("/reward")]
    if of_harness:
        panels.append(Panel("Training reward by harness", "", of_harness, _REWARD))
    return panels


def tokens(groups: Sequence[Group]) -> list[Stack]:
    """Sampled tokens by kind and by what the filters said."""
    keys = sorted(figures(groups))
    found = []
    for prefix, title, about in (
        ("kind/", "Kinds of calls", "sampled tokens of a step by kind"),
        ("filter/", "Filters", "sampled tokens of a step: kept for training, or removed and why"),
    ):
        named = sorted(
            (key for key in keys if key.startswith(prefix)), key=lambda key: (not key.endswith(("main", "kept")), key)
        )
        layers = [(key, key.removeprefix(prefix).removeprefix("removed: "), at) for at, key in enumerate(named)]
        found.append(Stack(title, about, layers))
    return found


def drawn(panels: Sequence[Panel | Stack], groups: Sequence[Group]) -> tuple[list[Element], list[str]]:
    """The charts that there is something to draw for, and the titles of panels that are 0 throughout."""
    found: list[Element | None] = []
    zero = []
    for panel in panels:
        if isinstance(panel, Stack):
            found += [_stack(panel, group, len(groups) > 1) for group in groups]
            continue
        shown = _curves(panel, groups)
        if any(value for line in shown for value in line.curve.high if math.isfinite(value)):
            found.append(_lines(panel, groups, shown))
        elif shown:
            zero.append(panel.title)
    return [chart for chart in found if chart is not None], zero


def _curves(panel: Panel, groups: Sequence[Group]) -> list[Line]:
    """One group has a colour for each figure; several have a colour each, and a dash for each figure."""
    several = len(groups) > 1
    shown = []
    for group in groups:
        for at, (key, label) in enumerate(panel.figures):
            name = label if not several else group.label if len(panel.figures) == 1 else f"{group.label}, {label}"
            line = Line(name, curve(group, key), group.number if several else at, at if several else 0)
            if not line.curve.empty:
                shown.append(line)
    return shown


def _lines(panel: Panel, groups: Sequence[Group], shown: Sequence[Line]) -> Element:
    marks = sorted({change.step for group in groups for run in group.runs for change in run.changes})
    keys: list[tuple[str, str]] = []
    if len(groups) == 1 and len(shown) > 1:
        keys = [(line.label, line.style) for line in shown]
    elif len(panel.figures) > 1:
        # The colours of the groups are explained once, at the head of the page.
        keys = [(label, f"plain d{at % 4}") for at, (_, label) in enumerate(panel.figures)]
    return charts.lines(panel.title, panel.about, shown, panel.look, keys, marks)


def _stack(panel: Stack, group: Group, several: bool) -> Element | None:
    layers = [(label, colour, curve(group, key)) for key, label, colour in panel.layers]
    owner = charts.named(group.label, group.number) if several else None
    return charts.bars(panel.title, panel.about, layers, panel.unit, owner)
