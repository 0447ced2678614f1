"""The settings of a report's runs, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from algos.reporting.groups import Group, differing
from algos.reporting.markup import Child, tag
from algos.reporting.tables import table

_LONGEST = 120


def settings(groups: Sequence[Group], defaults: Mapping[str, Any]) -> list[Element]:
    """What tells the groups apart, what a resume changed, what differs from the defaults, and everything."""
    labels = [group.label for group in groups]
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    own = [key for key in keys if any(group.settings.get(key) != defaults.get(key) for group in groups)]
    apart = differing(groups) if len(groups) > 1 else []
    found = [
        *_titled("What tells them apart", ["setting", *labels], [_row(groups, key) for key in apart]),
        *_titled("Changed by a resume", ["run", "after step", "setting", "before", "from then on"], _changed(groups)),
        *_titled(
            "Other than the defaults",
            ["setting", *labels, "default"],
            [[*_row(groups, key), short(defaults[key]) if key in defaults else ""] for key in own],
        ),
    ]
    if keys:
        every = table(["setting", *labels], [_row(groups, key) for key in keys])
        found.append(tag("details", tag("summary", f"All {len(keys)} settings"), every))
    return found


def short(value: Any) -> str:
    """A value as one would write it in YAML, cut where it is long."""
    if value is None:
        return "none"
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"


def _titled(title: str, head: Sequence[str], rows: Sequence[Sequence[Child]]) -> list[Element]:
    return [tag("h3", title), table(head, rows)] if rows else []


def _row(groups: Sequence[Group], key: str) -> list[Child]:
    return [tag("code", key), *(", ".join(map(short, group.values(key))) for group in groups)]


def _changed(groups: Sequence[Group]) -> list[list[Child]]:
    return [
        [run.name, str(change.step), tag("code", key), short(before), short(after)]
        for group in groups
        for run in group.runs
        for change in run.changes
        for key, before, after in change.settings
    ]
