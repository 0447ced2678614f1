"""Trees and call records to bytes and back, exactly.

Invariant: ``decode(encode(x))`` equals ``x`` bit by bit, and no damaged input decodes; whatever the bytes, reading
raises CodecError and nothing else.

A tree is one frame (``trees.frames``): msgpack under zstandard, in columns (all ids in one array, all
log-probabilities in another), which pack better than a map per node. The trees of a group are a frame each, and what
they have in common is stored once: the prompt, and whatever several episodes read, wherever it stands in a tree.

A file is frames one after the other. It can be appended to, and one cut short by a crash reads up to its last whole
tree, also within a group.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

import msgpack
import numpy as np

from trees import columns, frames
from trees.frames import CodecError, Frame, Head
from trees.record import CallRecord, VersionSpan
from trees.tree import Node, Tree

LEVEL = 9
"""Of zstandard. ``benchmarks/trees.py`` measures it: 3 gives 9% more bytes, 17 10% fewer in 8 to 9 times the time."""
_SPANS = ("version", "start", "end")
_NODE_INTS = ("parent", "ordinal", "drift")
_NODE_FLAGS = ("sampled", "clean", "trained")
_NODE_TEXTS = ("call", "kind", "why", "fork", "finish", "reason")
_RECORD_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("session", "call", "finish", "kind", "why", "fork"), str),
    **dict.fromkeys(("ordinal", "drift", "cached_tokens"), int),
    **dict.fromkeys(("temperature", "seconds"), int | float),
    "parent": str | None,
    "clean": bool,
    "extra": dict,
}
_T = TypeVar("_T")


def encode(tree: Tree, level: int = LEVEL, *, float16: bool = False) -> bytes:
    """One frame.

    Args:
        tree: what to write.
        level: zstandard's, 1 to 22.
        float16: round log-probabilities to half precision; the frame says so (``heads``). Each is then off by at most
            ``max(2**-11 * abs(it), 2**-25)``: the importance weight of a token by 0.5% at -10. All else stays exact.

    Raises:
        TypeError: a value of ``meta`` is not plain.
        ValueError: the tree takes more than ``frames.MOST_BYTES``, or half precision cannot hold a log-probability.
    """
    return encode_group([tree], level, float16=float16)


def decode(data: bytes) -> Tree:
    """The tree of exactly one frame. Raises CodecError."""
    trees = decode_group(data)
    if len(trees) > 1:
        raise CodecError(f"got a group of {len(trees)} trees, expected one that stands alone: use decode_group()")
    return trees[0]


def encode_group(trees: Sequence[Tree], level: int = LEVEL, *, float16: bool = False) -> bytes:
    """The trees of a group in their order. Arguments and errors are those of ``encode``; ValueError for no tree."""
    return b"".join(_tree_frames(trees, level, float16))


def decode_group(data: bytes) -> list[Tree]:
    """The trees of exactly one group, or of a frame that stands alone. Raises CodecError."""
    return _only(data, frames.TREE, _tree)


def encode_records(records: Sequence[CallRecord], level: int = LEVEL) -> bytes:
    """Call records of one session, or of several, as one frame."""
    body = [
        *([getattr(record, name) for record in records] for name in _RECORD_PLAIN),
        columns.pack_runs([record.prompt_ids for record in records]),
        columns.pack_runs([record.sampled_ids for record in records]),
        columns.pack_ints([len(record.logprobs) for record in records]),
        columns.pack_floats([record.logprobs for record in records]),
        _pack_spans([record.versions for record in records]),
    ]
    return b"".join(frames.pack(frames.RECORDS, [_packed(body)], level))


def decode_records(data: bytes) -> list[CallRecord]:
    """The records of one ``encode_records``. Raises CodecError."""
    return [record for records in _only(data, frames.RECORDS, _records) for record in records]


def write(file: BinaryIO, items: Iterable[Tree | Sequence[Tree]], level: int = LEVEL, *, float16: bool = False) -> int:
    """Append trees, and groups of trees, to a binary file, each tree in one call of ``file.write``.

    Returns how many trees. Arguments and errors are those of ``encode``.
    """
    count = 0
    for item in items:
        for frame in _tree_frames([item] if isinstance(item, Tree) else item, level, float16):
            file.write(frame)
            count += 1
    return count


def read(file: BinaryIO) -> Iterator[Tree]:
    """The trees of a binary file, one at a time. Raises CodecError at the first damaged or cut one."""
    return (tree for _, tree in _parsed(frames.scan(file, frames.TREE), _tree))


def heads(file: BinaryIO) -> Iterator[Head]:
    """What the trees of a binary file say of themselves, none of them unpacked. Raises CodecError as ``read``."""
    return (frame.head for frame in frames.scan(file, frames.TREE))


def _tree_frames(trees: Sequence[Tree], level: int, float16: bool) -> Iterator[bytes]:
    bodies = [_tree_body(tree, "<f2" if float16 else "<f4") for tree in trees]
    return frames.pack(frames.TREE, bodies, level, frames.FLOAT16 if float16 else 0)


def _only(data: bytes, kind: int, parse: Callable[[Any, Head], _T]) -> list[_T]:
    file, found = io.BytesIO(data), []
    for head, value in _parsed(frames.scan(file, kind), parse):
        found.append(value)
        if len(found) == head.of:
            break
    if not found:
        raise CodecError("got 0 bytes, expected a frame: empty or cut short")
    if rest := len(data) - file.tell():
        raise CodecError(f"at byte {file.tell()}: got {rest} bytes after it, expected none: use read() for several")
    return found


def _parsed(scanned: Iterator[Frame], parse: Callable[[Any, Head], _T]) -> Iterator[tuple[Head, _T]]:
    for frame, body in frames.unpack(scanned):
        try:
            value = parse(msgpack.unpackb(body, raw=False, strict_map_key=False), frame.head)
        except Exception as error:
            # A right digest says nothing of who wrote it. Msgpack, numpy and the tree refuse a body each in its way.
            raise CodecError(f"{frame.where}: the payload is not what this codec writes: {error}") from error
        yield frame.head, value


def _tree_body(tree: Tree, dtype: str) -> bytes:
    nodes = tree.nodes
    body = [
        tree.meta,
        columns.pack_runs([node.ids for node in nodes]),
        *(columns.pack_ints([getattr(node, name) for node in nodes]) for name in _NODE_INTS),
        *(columns.pack_flags([getattr(node, name) for node in nodes]) for name in _NODE_FLAGS),
        *(columns.pack_texts([getattr(node, name) for node in nodes]) for name in _NODE_TEXTS),
        columns.pack_floats([node.logprobs for node in nodes if node.sampled], dtype),
        np.array([node.temperature for node in nodes], "<f8").tobytes(),
        _pack_spans([node.versions for node in nodes]),
    ]
    return _packed(body)


def _tree(body: Any, head: Head) -> Tree:
    meta, runs, *packed, logprobs, temperature, spans = body
    if not isinstance(meta, dict):
        raise TypeError(f"got meta of type {type(meta).__name__}, expected dict")
    ids = columns.unpack_runs(runs)
    n = len(ids)
    fields: dict[str, Sequence[Any]] = {}
    for name, column in zip((*_NODE_INTS, *_NODE_FLAGS, *_NODE_TEXTS), packed, strict=True):
        if name in _NODE_INTS:
            fields[name] = columns.unpack_ints(column).tolist()
        else:
            fields[name] = columns.unpack_flags(column, n) if name in _NODE_FLAGS else columns.unpack_texts(column)
    lengths = [len(run) if sampled else 0 for run, sampled in zip(ids, fields["sampled"], strict=True)]
    fields |= {
        "id": range(n),
        "ids": ids,
        "logprobs": columns.unpack_floats(logprobs, "<f2" if head.float16 else "<f4", lengths),
        "temperature": np.frombuffer(temperature, "<f8").tolist(),
        "versions": _unpack_spans(spans),
    }
    return Tree(tuple(Node(**row) for row in _rows(fields)), meta)


def _records(body: Any, _: Head) -> list[CallRecord]:
    *plain, prompts, sampled, lengths, logprobs, spans = body
    fields: dict[str, Sequence[Any]] = {}
    for (name, expected), column in zip(_RECORD_PLAIN.items(), plain, strict=True):
        if not all(isinstance(value, expected) for value in column):
            raise TypeError(f"got another type among the values of {name}, expected {expected}")
        fields[name] = column
    fields |= {
        "prompt_ids": columns.unpack_runs(prompts),
        "sampled_ids": columns.unpack_runs(sampled),
        "logprobs": columns.unpack_floats(logprobs, "<f4", columns.unpack_ints(lengths).tolist()),
        "versions": _unpack_spans(spans),
    }
    return [CallRecord(**row) for row in _rows(fields)]


def _rows(fields: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Columns as rows. ValueError where they differ in length."""
    for values in zip(*fields.values(), strict=True):
        yield dict(zip(fields, values, strict=True))


def _pack_spans(versions: Sequence[tuple[VersionSpan, ...]]) -> list[Any]:
    flat = [span for spans in versions for span in spans]
    counts = columns.pack_ints([len(spans) for spans in versions])
    return [counts, *(columns.pack_ints([getattr(span, name) for span in flat]) for name in _SPANS)]


def _unpack_spans(packed: Sequence[Any]) -> list[tuple[VersionSpan, ...]]:
    counts, *values = (columns.unpack_ints(column).tolist() for column in packed)
    flat = [VersionSpan(*row) for row in zip(*values, strict=True)]
    ends = np.cumsum([0, *counts]).tolist()
    if min(counts, default=0) < 0 or ends[-1] != len(flat):
        raise ValueError(f"got {len(flat)} version spans, expected {ends[-1]}")
    return [tuple(flat[start:end]) for start, end in itertools.pairwise(ends)]


def _packed(body: list[Any]) -> bytes:
    return msgpack.packb(body, use_bin_type=True, strict_types=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    raise TypeError(
        f"got {value!r} of type {type(value).__name__}, expected plain values: None, bool, int, "
        "float, str, bytes, list or dict"
    )
