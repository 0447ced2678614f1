"""Turns of a conversation in the form in which histories are compared.

Invariant: two turns have the same key exactly when they mean the same: role, text, reasoning, and per tool
call its name and parsed arguments. Key order, spacing and escapes of arguments, 1.0 against 1, white space
at the ends of a text, null against empty, and tool-call ids do not enter the key; cache markers cannot,
because the key is made of plain values.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

Arguments = Mapping[str, Any] | str | None
_EXACT = 1000
"""Characters up to which a differing stretch is compared character by character (quadratic time)."""
_EQUAL_PAIRS = 1_000_000
"""Pairs of equal lines up to which two texts are aligned by lines; their number is the time that it takes."""


class PrefixKey(NamedTuple):
    """What stands before every turn of a conversation, as two hashes."""

    system: str
    tools: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. Make it with ``Turn.of``; ``call_ids`` of an own reply are the ids that we minted."""

    role: str
    key: str
    bare_key: str
    """The key that the turn would have without its reasoning, which many harnesses drop."""
    call_ids: tuple[str, ...]
    body: str
    """Canonical text and tool calls: what a replayed turn is measured on."""
    reasoning: str
    calls: int = 0
    """How many tool calls it makes."""

    @classmethod
    def of(
        cls,
        role: str,
        text: str | None = "",
        reasoning: str | None = "",
        tool_calls: Sequence[tuple[str, Arguments]] = (),
        call_ids: Sequence[str] = (),
    ) -> Turn:
        """``tool_calls`` are (tool name, arguments as object or JSON text), ``call_ids`` their ids."""
        body = canonical_body(role, text, tool_calls)
        thought = (reasoning or "").strip()
        bare = _hash(role, "", body)
        key = _hash(role, thought, body) if thought else bare
        return cls(role, key, bare, tuple(call_ids), body, thought, len(tool_calls))


def canonical_key(
    role: str,
    text: str | None = "",
    reasoning: str | None = "",
    tool_calls: Sequence[tuple[str, Arguments]] = (),
) -> str:
    """Hash of what a turn means, 32 hexadecimal digits."""
    return Turn.of(role, text, reasoning, tool_calls).key


def prefix_key(system: str | None, tools: Sequence[Mapping[str, Any]]) -> PrefixKey:
    """Key of the system text and the tools. The order of the tools counts, that of their keys does not."""
    return PrefixKey(_hash((system or "").strip()), _hash(_json([dict(tool) for tool in tools])))


def canonical_body(role: str, text: str | None, tool_calls: Sequence[tuple[str, Arguments]]) -> str:
    """Text and tool calls as one string. White space at the head of what a tool or user says is kept."""
    said = text or ""
    said = said.strip() if role == "assistant" else said.rstrip()
    return "\n".join([said, *(f"{name}({canonical_arguments(arguments)})" for name, arguments in tool_calls)])


def canonical_arguments(arguments: Arguments) -> str:
    """Arguments as JSON with sorted keys and no spacing; text that is not JSON stays as it is, trimmed."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments.strip()
    if value is None or value == "" or value == {}:
        return "{}"
    return value if isinstance(value, str) else _json(_integral(value))


def distance(a: str, b: str) -> int:
    """Characters inserted, deleted or replaced between two texts; an upper bound where they differ at length.

    Stretches over 1,000 characters are aligned by lines first, white space at their ends aside, and a pair of
    differing blocks that is still longer counts as the longer of the two; so do texts of one line over and over.
    """
    a, b = _strip_common(a, b)
    if max(len(a), len(b)) <= _EXACT:
        return _block_distance(a, b)
    lines_a, lines_b = a.splitlines(keepends=True), b.splitlines(keepends=True)
    bare_a, bare_b = [x.strip() for x in lines_a], [x.strip() for x in lines_b]
    in_b = Counter(bare_b)
    if sum(count * in_b[line] for line, count in Counter(bare_a).items()) > _EQUAL_PAIRS:
        return max(len(a), len(b))
    total = 0
    for tag, i1, i2, j1, j2 in _opcodes(bare_a, bare_b):
        if tag == "equal":
            total += sum(map(_block_distance, lines_a[i1:i2], lines_b[j1:j2]))
        else:
            total += _block_distance("".join(lines_a[i1:i2]), "".join(lines_b[j1:j2]))
    return total


def _block_distance(a: str, b: str) -> int:
    """Exact up to a length, the longer of the two beyond."""
    a, b = _strip_common(a, b)
    if not a or not b or max(len(a), len(b)) > _EXACT:
        return max(len(a), len(b))
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in _opcodes(a, b) if tag != "equal")


def _opcodes(a: Sequence[str], b: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, a, b, autojunk=False).get_opcodes()


def _strip_common(a: str, b: str) -> tuple[str, str]:
    if a == b:
        return "", ""
    shorter = min(len(a), len(b))
    head = bisect_left(range(shorter), True, key=lambda i: a[: i + 1] != b[: i + 1])
    a, b, shorter = a[head:], b[head:], shorter - head
    tail = bisect_left(range(shorter), True, key=lambda i: a[-1 - i :] != b[-1 - i :])
    return a[: len(a) - tail], b[: len(b) - tail]


def _integral(value: Any) -> Any:
    """Floats that are whole numbers as integers: 1.0 and 1e3 come back from JavaScript as 1 and 1000."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _integral(inner) for key, inner in value.items()}
    return [_integral(inner) for inner in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _hash(*parts: str) -> str:
    packed = "\x00".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(packed.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
