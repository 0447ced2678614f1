"""What there is to see in tasks, as text: the numbers of a set, and one task as a whole."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from envs.tasks.draft import Draft, size

GROUPS = ("split", "category", "family", "level", "difficulty", "occupation", "grading_type", "table")
"""Fields of the metadata by which tasks are counted."""
_MOST_GROUPS = 40
_HEAD = 1200


def statistics_of(drafts: Sequence[Draft]) -> dict[str, Any]:
    """Counts of tasks by how they are graded and by their metadata, and how large they are."""
    found: dict[str, Any] = {"tasks": len(drafts), "graded_by": dict(Counter(draft.graded_by for draft in drafts))}
    for name in GROUPS:
        counted = Counter(str(draft.metadata[name]) for draft in drafts if draft.metadata.get(name) not in (None, ""))
        if counted and len(counted) <= _MOST_GROUPS:
            found[name] = dict(counted.most_common())
        elif counted:
            found[name] = f"{len(counted)} different"
    found["instruction_characters"] = _spread(len(draft.instruction) for draft in drafts)
    found["input_files"] = _spread(len(draft.inputs) for draft in drafts)
    found["input_bytes"] = _spread(sum(map(size, draft.inputs.values())) for draft in drafts)
    found["several_sessions"] = sum(bool(draft.sessions) for draft in drafts)
    found["with_mcp_servers"] = sum(bool(draft.mcp) for draft in drafts)
    return found


def _spread(values: Iterable[int]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"least": ordered[0], "median": statistics.median(ordered), "most": ordered[-1]}


def as_text(draft: Draft) -> str:
    """One task: what the agent is asked and given, and how it is graded."""
    lines = [f"{draft.id}  ({draft.source})", f"graded by {draft.graded_by}; workspace at {draft.mount_dir}"]
    lines += [f"  {name}: {value}" for name, value in draft.metadata.items()]
    lines += ["", "instruction", _indented(draft.instruction)]
    for number, session in enumerate(draft.sessions, 2):
        lines += [f"session {number}", _indented(session)]
    for title, files in (("workspace", draft.inputs), ("grader", draft.reward)):
        lines += [title, *(f"    {size(content):>9}  {name}" for name, content in sorted(files.items()))]
    if draft.mcp:
        lines += ["MCP servers", *(f"    {server.get('name')}" for server in draft.mcp)]
    if draft.rubric is not None:
        lines.append(f"rubric, with {draft.rubric['share']:.0%} of the grade")
        for one in draft.rubric["criteria"]:
            head = one["text"].strip().splitlines()[0]
            lines.append(f"    {one['weight']:>5g}  {one['scale']:<8} {head[:_HEAD]}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """Text of somebody else's with its control characters written out, which would else command the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
