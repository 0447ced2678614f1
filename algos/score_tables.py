"""Evaluations as tables for people: Markdown, one self-contained HTML page, the terminal.

Invariant: a figure from which attempts are missing is marked wherever it stands, with the range that it could have.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

from algos.estimates import Figure
from algos.scores import METHOD, Place, Score, Scores, difference

INCOMPLETE = "incomplete"
_NAME, _REASON = 60, 160
"""Characters that are shown of a name and of a reason."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. ``depth`` of a row: 0 for a ring as a whole, 1 for a part of it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def table(evaluations: Sequence[Scores]) -> Table:
    """One evaluation with all of its figures, or several side by side with their difference from the first.

    Raises ValueError for none.
    """
    if not evaluations:
        raise ValueError("got no evaluation, expected at least one")
    return _single(evaluations[0]) if len(evaluations) == 1 else _several(evaluations)


def _single(scores: Scores) -> Table:
    k = scores.runs
    found = [scores.score(place) for place in scores.places()]
    graded = any(value not in (0.0, 1.0) for one in scores.attempts if (value := one.get("reward")) is not None)
    columns = ["", "Pass@1", *([f"pass@{k}", f"pass^{k}"] if k > 1 else []), *(["mean reward"] if graded else [])]
    made = Table(_title(scores), (*columns, "tasks", "episodes"))
    for score in found:
        cells = [_name(score.place), with_error(score.pass_1)]
        cells += [number(score.pass_k), number(score.pass_all)] if k > 1 else []
        cells += [with_error(score.reward)] if graded else []
        made.rows.append((_depth(score.place), (*cells, str(score.pass_1.tasks), _episodes(score))))
    made.notes.extend(_notes([scores]))
    return made


def _several(evaluations: Sequence[Scores]) -> Table:
    first, *others = evaluations
    names = [one.name for one in evaluations]
    columns = ("", *(f"{name}" for name in names), *(f"{one.name} - {first.name}" for one in others), "tasks")
    made = Table("Pass@1 of " + ", ".join(names), columns)
    unlike = False
    places = list(dict.fromkeys(place for one in evaluations for place in one.places()))
    for place in sorted(places, key=lambda place: [p.ring for p in places].index(place.ring)):
        figures = [one.score(place).pass_1 for one in evaluations]
        gaps = [difference(first, one, place) for one in others]
        counts = sorted({one.tasks for one in [*figures, *gaps]} - {0})
        unlike |= len(counts) > 1
        told = [*map(with_error, figures), *(with_error(gap, signed=True) for gap in gaps)]
        made.rows.append((_depth(place), (_name(place), *told, ", ".join(map(str, counts)) or "0")))
    made.notes.append(
        "A difference is the mean over the tasks that both have, with the standard error of the paired differences."
    )
    if unlike:
        made.notes.append("Several numbers of tasks in a row: the evaluations are not of the same tasks there.")
    made.notes.extend(_notes(evaluations))
    return made


def with_error(figure: Figure, signed: bool = False) -> str:
    """``0.82 ± 0.03``, marked where attempts are missing."""
    if figure.value is None:
        return f"none ({INCOMPLETE}: {figure.missing} missing)" if figure.missing else "none"
    error = "" if figure.error is None else f" ± {figure.error:.3f}"
    text = f"{figure.value:{'+' if signed else ''}.3f}{error}"
    if figure.missing:
        could = "" if figure.low is None else f", {figure.low:.3f} to {figure.high:.3f} with them"
        text += f" ({INCOMPLETE}: {figure.missing} missing{could})"
    return text


def number(figure: Figure) -> str:
    """A figure without its error."""
    if figure.value is None:
        return "none"
    return f"{figure.value:.3f}" + (f" ({INCOMPLETE})" if figure.missing else "")


def markdown(made: Table) -> str:
    lines = [f"### {_escaped(made.title)}", "", "| " + " | ".join(map(_escaped, made.columns)) + " |"]
    lines.append("|" + "|".join(["---", *["---:"] * (len(made.columns) - 1)]) + "|")
    for depth, (name, *cells) in made.rows:
        shown = f"**{_escaped(name)}**" if depth == 0 else f"&nbsp;&nbsp;{_escaped(name)}"
        lines.append("| " + " | ".join([shown, *map(_escaped, cells)]) + " |")
    return "\n".join([*lines, "", *(f"- {_escaped(note)}" for note in made.notes)]) + "\n"


def rich_table(made: Table) -> RichTable:
    shown = RichTable(title=Text(plain(made.title)), title_justify="left")
    for index, column in enumerate(made.columns):
        shown.add_column(Text(plain(column)), justify="right" if index else "left", overflow="fold")
    for depth, (name, *cells) in made.rows:
        first = Text(f"  {plain(name)}") if depth else Text(plain(name), "bold")
        shown.add_row(first, *(Text(plain(cell)) for cell in cells))
    return shown


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: light-dark(#ddd, #444); --alarm: light-dark(#a40000, #ff8a80); }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
td:first-child, td.incomplete {{ white-space: normal; }}
tr.part td:first-child {{ padding-left: 2rem; font-weight: 400; }}
tr.whole td {{ font-weight: 600; border-top: 2px solid var(--line); }}
.incomplete {{ color: var(--alarm); }}
div {{ overflow-x: auto; }}
</style>
<h1>{title}</h1>
{body}
"""
_TABLE = """<div><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div>
<ul>
{notes}
</ul>
"""


def page(first: Table, *others: Table, picture: str = "") -> str:
    """A page that needs nothing else. ``picture``: markup that stands above the table that it shows, the last."""
    parts = [_html(first)]
    for one in others:
        parts += [f"<h2>{html.escape(plain(one.title))}</h2>", _html(one)]
    parts.insert(-1, picture)
    return _PAGE.format(title=html.escape(plain(first.title)), body="\n".join(part for part in parts if part))


def _html(made: Table) -> str:
    def shown(text: str) -> str:
        return html.escape(plain(text))

    def cell(text: str) -> str:
        marked = ' class="incomplete"' if INCOMPLETE in text else ""
        return f"<td{marked}>{shown(text)}</td>"

    body = [
        f'<tr class="{"part" if depth else "whole"}"><td>{shown(name)}</td>{"".join(map(cell, cells))}</tr>'
        for depth, (name, *cells) in made.rows
    ]
    return _TABLE.format(
        head="".join(f"<th>{shown(column)}</th>" for column in made.columns),
        body="\n".join(body),
        notes="\n".join(f"<li>{shown(note)}</li>" for note in made.notes),
    )


def _title(scores: Scores) -> str:
    runs = f"{scores.runs} independent runs" if scores.runs > 1 else "one run"
    return f"{scores.name}: {runs}" + ("" if scores.complete else f" ({INCOMPLETE})")


def _notes(evaluations: Sequence[Scores]) -> list[str]:
    notes = [METHOD]
    for one in evaluations:
        alone = [score for place in one.places() if _depth(place) == 0 for score in (one.score(place),)]
        if one.runs > 1:
            runs = "; ".join(f"{score.place.ring} " + ", ".join(map(_share, score.runs)) for score in alone)
            notes.append(f"{one.name}, each run alone: {runs}")
        if one.unfinished:
            notes.append(f"{one.name}: {one.unfinished} of {len(one.attempts)} episodes have not ended: {INCOMPLETE}")
        if one.failed:
            notes.append(f"{one.name}: {len(one.failed)} of {len(one.attempts)} episodes failed and are in no figure:")
            notes.extend(
                f"{bad['id']} ({bad['ring']}, {bad['harness']}, {bad['tasks']}/{plain(bad['task'], _NAME)}, "
                f"run {bad['run'] + 1}): {plain((str(bad.get('reason')).splitlines() or [''])[0], _REASON)}"
                for bad in one.failed
            )
    return notes


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _name(place: Place) -> str:
    category = place.category and f"category {plain(place.category, _NAME)}"
    parts = [place.harness, place.tasks and f"tasks {place.tasks}", category]
    return ", ".join(part for part in parts if part) or place.ring


def _depth(place: Place) -> int:
    return int(place != Place(place.ring))


def _episodes(score: Score) -> str:
    figure = score.pass_1
    return f"{figure.graded}" + (f" of {figure.graded + figure.missing}" if figure.missing else "")


def plain(text: str, most: int | None = None) -> str:
    """Words of others in one line of what can be printed, at most ``most`` characters."""
    line = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in " ".join(text.split()))
    return line if most is None or len(line) <= most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def _escaped(text: str) -> str:
    """For Markdown, where words of others are no cell of their own, no markup and no link."""
    return re.sub(r"[\\`|<\[]", r"\\\g<0>", plain(text))
