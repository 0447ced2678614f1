"""The report as one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element

from algos.reporting import panels, tables
from algos.reporting.examples import Example
from algos.reporting.groups import Group
from algos.reporting.markup import Child, tag
from algos.reporting.numbers import figure
from algos.reporting.panels import Panel, Stack
from algos.reporting.settings import settings
from algos.reporting.sheet import sheet
from algos.reporting.words import said


def document(
    groups: Sequence[Group], examples: Sequence[Example], trees: str, notes: Sequence[str], defaults: dict[str, Any]
) -> str:
    """The whole page. ``trees``: the file with the trees of the examples, beside it; ``defaults``: settings, flat."""
    heading = _heading(groups)
    legend = tag("nav", [tables.named(group, True) for group in groups]) if len(groups) > 1 else None
    main = tag("main", legend, _top(groups, heading, notes), *_sections(groups, examples, trees, defaults))
    body = tag("body", main, tag("div", id="tip", hidden="hidden"))
    return sheet(f"{heading}: report", body, "report.js")


def _heading(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1:
        return runs[0].name
    names = dict.fromkeys(str(run.settings.get("name", run.name)) for run in runs)
    return f"{' and '.join(names)}, {len(runs)} runs"


def _top(groups: Sequence[Group], heading: str, notes: Sequence[str]) -> Element:
    several = len(groups) > 1
    words: list[Element] = []
    for group in groups:
        text = " ".join(said(group))
        words.append(tag("p", tag("b", tables.named(group, True), " "), text) if several else tag("p", text))
    told = tag("ul", [tag("li", note) for note in notes], class_="notes") if notes else None
    return tag("header", tag("h1", heading), words, tables.evaluations(groups, families=False), told)


def _sections(
    groups: Sequence[Group], examples: Sequence[Example], trees: str, defaults: dict[str, Any]
) -> list[Element]:
    rewards: list[Panel | Stack] = list(panels.rewards(groups))
    tokens = panels.tokens(groups)
    families = tables.evaluations(groups, families=True)
    by_family = tag("details", tag("summary", "By family and harness"), families) if families is not None else None
    found = [
        _section("Reward", [*_charts(rewards, groups, large=True), by_family]),
        _section("Runs", [tables.runs(groups)]),
        _section("Policy and learner", [*_charts(panels.POLICY, groups)]),
        _section("Critic", [*_charts(panels.CRITIC, groups)]),
        _section("Episodes", [*_charts([*panels.EPISODES, *tokens], groups)]),
        _section("Behaviour", _charts(panels.BEHAVIOUR, groups)),
        _section("Examples", [_examples(examples, trees, len(groups) > 1)]),
        _section("Time", [tables.times(groups), *_charts(panels.TIME, groups)]),
        _section("Settings", settings(groups, defaults)),
    ]
    every: list[Panel | Stack] = [
        *rewards,
        *tokens,
        *panels.POLICY,
        *panels.CRITIC,
        *panels.EPISODES,
        *panels.BEHAVIOUR,
        *panels.TIME,
    ]
    shown = {one[0] for panel in every for one in (panel.figures if isinstance(panel, Panel) else panel.layers)}
    rest = tables.others(groups, shown)
    if rest is not None:
        found.append(_section("All other figures", [tag("details", tag("summary", "Show them"), rest)]))
    return [section for section in found if section is not None]


def _section(title: str, content: Sequence[Element | None]) -> Element | None:
    there = [part for part in content if part is not None]
    return tag("section", tag("h2", title), there, id=title.lower().replace(" ", "-")) if there else None


def _charts(shown: Sequence[Panel | Stack], groups: Sequence[Group], large: bool = False) -> list[Element]:
    charts, zero = panels.drawn(shown, groups)
    found = [tag("div", charts, class_="grid large" if large else "grid")] if charts else []
    if zero:
        found.append(tag("p", tag("small", f"0 in every step: {', '.join(title.lower() for title in zero)}.")))
    return found


def _examples(examples: Sequence[Example], trees: str, several: bool) -> Element | None:
    if not examples:
        return None
    return tag("div", [_example(example, trees, several) for example in examples], class_="examples")


def _example(example: Example, trees: str, several: bool) -> Element:
    row = example.row
    facts: list[tuple[str, Child]] = [
        ("reward", figure(float(row["reward"]))),
        ("ended", f"{row.get('status')}: {row.get('reason')}"),
    ]
    facts += [(name, str(row[key])) for name, key in _FACTS if row.get(key) is not None]
    facts += [("step", str(row.get("step"))), ("tokens", str(example.tokens)), ("run", example.run.name)]
    href = f"{quote(trees)}#episode={quote(example.name, safe='')}"
    link = (
        tag("a", "its tree", href=href, class_="tree")
        if example.payload is not None
        else tag("small", "tree unreadable")
    )
    listed = tag("dl", [part for name, value in facts for part in (tag("dt", name), tag("dd", value))])
    head = tag("header", tag("h3", ", ".join(example.why)), link)
    group = tag("p", tables.named(example.group, True)) if several else None
    return tag("article", head, group, listed, _conversation(example))


_FACTS = (("task", "task"), ("family", "family"), ("harness", "harness"), ("calls", "calls"), ("leaves", "leaves"))


def _conversation(example: Example) -> Element | None:
    if not example.pieces:
        return None
    said = []
    for piece in example.pieces:
        cut = tag("small", f" ({piece.left_out} characters left out)") if piece.left_out else None
        said.append(tag("span", piece.text, cut, class_="sampled" if piece.sampled else "heard"))
    return tag("details", tag("summary", "What was said"), tag("pre", said))
