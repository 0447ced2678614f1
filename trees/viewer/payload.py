"""A tree as the page takes it: plain JSON values.

Ids travel once per token and texts once per distinct id, so a tree of many turns stays small.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from trees.linearise import live_leaves
from trees.tree import Node, Tree
from trees.viewer.wording import Wording

_EXACT = 2**53
"""Beyond this a JavaScript number is not exact."""
_DEEPEST = 64


def describe(name: str, tree: Tree, wording: Wording | None) -> dict[str, Any]:
    """The whole of a tree.

    ``words`` gives the text of each id and ``marks`` the ids that are marks of a chat template; both are None without
    a tokenizer. ``groups`` of a node are ``[first position, tokens, text]`` where several tokens make one character.
    """
    ids = sorted({int(token) for node in tree.nodes for token in node.ids})
    return {
        "episode": name,
        "meta": plain(tree.meta),
        "counts": asdict(tree.counts()),
        "live_leaves": len(live_leaves(tree)),
        "words": wording and {token: wording.piece(token) for token in ids},
        "marks": wording and sorted(wording.marks.intersection(ids)),
        "nodes": [_node(node, wording) for node in tree.nodes],
    }


def dumps(value: Any) -> str:
    """Compact JSON in ASCII, of values that JSON can hold (``plain``)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def plain(value: Any, depth: int = 0) -> Any:
    """The same as JSON can hold it: no NaN, no integer that a browser would round, text for anything else."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | str):
        return value
    return value if isinstance(value, int) and abs(value) <= _EXACT else str(value)


def _node(node: Node, wording: Wording | None) -> dict[str, Any]:
    ids = node.ids.tolist()
    return {
        "id": node.id,
        "parent": node.parent,
        "ids": ids,
        "groups": list(wording.groups(ids)) if wording else [],
        "sampled": node.sampled,
        "logprobs": [round(value, 4) if math.isfinite(value) else None for value in node.logprobs.tolist()],
        "versions": [(span.version, span.start, span.end) for span in node.versions],
        "temperature": plain(node.temperature),
        "call": node.call,
        "ordinal": node.ordinal,
        "kind": node.kind,
        "why": node.why,
        "fork": node.fork,
        "drift": node.drift,
        "finish": node.finish,
        "clean": node.clean,
        "trained": node.trained,
        "reason": node.reason,
    }
