"""Token ids that grow at their end, so that a call costs what it adds and not what it extends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST = 1024


class _Room:
    """Memory that paths with a common beginning share; ids up to ``used`` are never written again."""

    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids = np.empty(max(_LEAST, capacity), np.int32)
        self.used = 0


class TokenPath:
    """Ids that do not change, int32. ``then`` makes a longer path: in amortised time linear in what is new.

    The first to extend a path shares its memory; every other extension copies it.
    """

    __slots__ = ("_length", "_room")

    def __init__(self, ids: Sequence[int] | np.ndarray = ()) -> None:
        self._room, self._length = _Room(2 * len(ids)), 0
        self._length = self._append(ids)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> np.ndarray:
        """All ids, int32 [T]; a view that must not be written to."""
        view = self._room.ids[: self._length]
        view.flags.writeable = False
        return view

    def then(self, new: Sequence[int] | np.ndarray) -> TokenPath:
        """The path that goes on with ``new`` ids."""
        length = self._length + len(new)
        longer = TokenPath.__new__(TokenPath)
        longer._length = self._length
        if self._room.used == self._length and length <= len(self._room.ids):
            longer._room = self._room
        else:
            longer._room = _Room(2 * length)
            longer._room.ids[: self._length] = self.ids
        longer._length = longer._append(new)
        return longer

    def _append(self, new: Sequence[int] | np.ndarray) -> int:
        end = self._length + len(new)
        self._room.ids[self._length : end] = new
        self._room.used = end
        return end
