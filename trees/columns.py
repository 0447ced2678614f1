"""Columns of numbers and texts as plain values, and back, exactly.

Invariant: ``unpack_x(pack_x(values))`` equals ``values`` bit by bit. A packed column is what msgpack takes: lists,
integers, bytes, strings. Numbers lie one after the other, little-endian, and not split into planes of bytes: what
repeats in ids and log-probabilities are whole ones, which zstandard then finds.

Unpacking raises ValueError or TypeError for what packing does not give, before it takes memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_TYPES = ("u1", "<u2", "<u4", "i1", "<i2", "<i4", "<i8")
_LIMITS = tuple((int(np.iinfo(name).min), int(np.iinfo(name).max), np.dtype(name).itemsize) for name in _TYPES)
_OUTLIER_BYTES = 8
"""What a value that does not fit the column's type is reckoned to cost."""


def pack_ints(values: Any) -> list[Any]:
    """64-bit integers as ``[type, delta?, bytes]``, or ``[type, delta?, bytes, outliers]``.

    The type is the smallest that nearly all fit, or their differences where those are smaller. The largest value of
    the type stands for an outlier, of which the fourth part is another packed column: so ids of a vocabulary of
    150,000 take two bytes each, since those over 65,534 are rare.
    """
    array = np.asarray(values, dtype=np.int64).reshape(-1)
    size, kind, rest = _cheapest(array)
    if size > len(array):
        deltas = array.copy()
        deltas[1:] -= array[:-1]
        smaller, delta_kind, delta_rest = _cheapest(deltas)
        if smaller < size:
            return [delta_kind, True, *_fitted(deltas, delta_kind, delta_rest)]
    return [kind, False, *_fitted(array, kind, rest)]


def unpack_ints(packed: Sequence[Any]) -> np.ndarray:
    """The integers of ``pack_ints``, int64 [n]."""
    kind, is_delta, data, *outliers = packed
    if not 0 <= kind < len(_TYPES) or len(outliers) > 1:
        raise ValueError(
            f"got type {kind} and {len(outliers)} columns of outliers, expected one of {len(_TYPES)} types"
        )
    array = np.frombuffer(data, _TYPES[kind]).astype(np.int64)
    if outliers:
        array[array == np.iinfo(_TYPES[kind]).max] = unpack_ints(outliers[0])
    return np.cumsum(array) if is_delta else array


def pack_flags(values: Sequence[bool]) -> bytes:
    """A bit each."""
    return np.packbits(np.array(values, bool)).tobytes()


def unpack_flags(packed: bytes, n: int) -> list[bool]:
    """The ``n`` flags of ``pack_flags``."""
    if len(packed) != (n + 7) // 8:
        raise ValueError(f"got {len(packed)} bytes of flags, expected {(n + 7) // 8} for {n}")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=n).astype(bool).tolist()


def pack_texts(values: Sequence[str]) -> list[Any]:
    """Strings as ``[different ones in order of appearance, which is where]``."""
    places = {text: place for place, text in enumerate(dict.fromkeys(values))}
    return [list(places), pack_ints([places[text] for text in values])]


def unpack_texts(packed: Sequence[Any]) -> list[str]:
    """The strings of ``pack_texts``."""
    texts, places = packed
    which = unpack_ints(places)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("got something else among the texts, expected strings")
    if len(which) and not 0 <= which.min() <= which.max() < len(texts):
        raise ValueError(f"got places from {which.min()} to {which.max()}, expected 0 to {len(texts) - 1}")
    return [texts[place] for place in which.tolist()]


def pack_runs(runs: Sequence[np.ndarray]) -> list[Any]:
    """Arrays of ids, one after the other in one column, as ``[their lengths, all ids]``."""
    return [pack_ints([len(run) for run in runs]), pack_ints(_concatenate(runs, np.int32))]


def unpack_runs(packed: Sequence[Any]) -> list[np.ndarray]:
    """The arrays of ``pack_runs``, int32, read-only."""
    lengths, ids = (unpack_ints(column) for column in packed)
    if len(ids) and not -(2**31) <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"got ids from {ids.min()} to {ids.max()}, expected 32-bit ones")
    return cut(ids.astype(np.int32), lengths.tolist())


def pack_floats(runs: Sequence[np.ndarray], dtype: str = "<f4") -> bytes:
    """Arrays of log-probabilities in one column of ``dtype``: ``<f4`` keeps every bit, ``<f2`` rounds.

    Raises ValueError where a finite one has no finite value in ``dtype``.
    """
    column = _concatenate(runs, np.float32)
    if np.dtype(dtype).itemsize < 4:
        most = float(np.finfo(dtype).max)
        wide = np.isfinite(column) & (np.abs(column) > most)
        if wide.any():
            raise ValueError(f"got log-probability {column[wide][0]}, expected at most {most:g} off 0: keep float32")
    return column.astype(dtype).tobytes()


def unpack_floats(packed: bytes, dtype: str, lengths: Sequence[int]) -> list[np.ndarray]:
    """The arrays of ``pack_floats``, float32, read-only."""
    return cut(np.frombuffer(packed, dtype).astype(np.float32), lengths)


def cut(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Read-only views of consecutive pieces. Raises ValueError unless the lengths add up to the whole."""
    if any(length < 0 for length in lengths) or sum(lengths) != len(array):
        raise ValueError(f"got {len(array)} values, expected {sum(lengths)}, in pieces of 0 or more")
    array.setflags(write=False)
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _cheapest(array: np.ndarray) -> tuple[int, int, bool]:
    """Bytes that an array takes in the type that takes fewest, that type, and whether it leaves outliers."""
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    found: list[tuple[int, int, bool]] = []
    for kind, (least, most, width) in enumerate(_LIMITS):
        size = width * len(array)
        if least <= low and high <= most:
            return min([*found, (size, kind, False)])
        if (least < 0) == (low < 0):
            found.append((size + _OUTLIER_BYTES * int(np.count_nonzero(_outside(array, kind))), kind, True))
    raise OverflowError(f"got integers from {low} to {high}, expected 64-bit ones")


def _outside(array: np.ndarray, kind: int) -> np.ndarray:
    least, most, _ = _LIMITS[kind]
    return (array < least) | (array >= most)


def _fitted(array: np.ndarray, kind: int, rest: bool) -> list[Any]:
    if not rest:
        return [array.astype(_TYPES[kind]).tobytes()]
    outside = _outside(array, kind)
    return [np.where(outside, _LIMITS[kind][1], array).astype(_TYPES[kind]).tobytes(), pack_ints(array[outside])]


def _concatenate(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
