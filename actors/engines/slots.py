"""Rows of tokens with their keys and values.

Invariant: for every row, ``data[..., row, :, :length[row], :]`` are the keys and values of
``tokens[row, :length[row]]`` under the current weights, left-aligned, position 0 first. What lies
beyond ``length[row]`` is never attended to. ``tokens[row, length[row]:known[row]]`` is still to be fed.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class _Layer(CacheLayerMixin):
    """What a model layer talks to: stores the new keys and values, returns those of all rows of the call."""

    def __init__(self, slots: Slots, index: int) -> None:
        super().__init__()
        self.slots = slots
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        del key_states, value_states

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots.store(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.slots.extent, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.slots.max_len


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of the cache in ``model.forward``: releases of Transformers differ."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def probe(model: PreTrainedModel, max_len: int) -> tuple[int, int, int]:
    """Layers, key/value heads and head dimension of ``model``, measured with a one-token forward.

    Raises ValueError for a model whose cache is more than one equal pair of keys and values per layer.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
    shapes = set()
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        if not isinstance(layer, DynamicLayer) or (window is not None and window < max_len):
            raise ValueError(
                f"got {type(model).__name__} with a {type(layer).__name__}"
                f"{f' of {window} tokens' if window else ''}, expected attention over the whole context; "
                f"set max_len to at most the window, or use another engine for this model"
            )
        shapes.add((layer.keys.shape[1], layer.keys.shape[3]))
        shapes.add((layer.values.shape[1], layer.values.shape[3]))
    if len(shapes) != 1:
        raise ValueError(
            f"got {type(model).__name__} with keys and values of shapes (heads, dim) {sorted(shapes)}, "
            f"expected one shape for all layers; use another engine for this model"
        )
    heads, dim = shapes.pop()
    return len(cache.layers), heads, dim


class Slots(Cache):
    """At most ``slots`` rows of at most ``max_len`` tokens; memory grows by doubling with what is used.

    ``data``: [layers, 2 (keys, values), rows, heads, positions, head dim] in the model's dtype.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_len: int) -> None:
        self.slots, self.max_len = slots, max_len
        depth, self.heads, self.dim = probe(model, max_len)
        super().__init__(layers=[_Layer(self, i) for i in range(depth)])
        self.dtype, self.device = model.dtype, model.device
        self.used = 0
        """Rows ``[0, used)`` have been handed out at least once."""
        self.extent = 0
        """Positions that the current forward call attends to at most."""
        self.data = torch.zeros(depth, 2, 0, self.heads, 0, self.dim, dtype=self.dtype, device=self.device)
        self.tokens = np.zeros((slots, 0), np.int32)
        self.length = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self._span = slice(0, 0)
        self._rows = self._positions = torch.empty(0, dtype=torch.long)
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None

    def reserve(self, rows: int, positions: int) -> None:
        """Make room for ``rows`` rows of ``positions`` positions."""
        have_rows, have_positions = self.data.shape[2], self.data.shape[4]
        if rows <= have_rows and positions <= have_positions:
            return
        if rows > have_rows:
            rows = min(self.slots, max(rows, 2 * have_rows, 8))
        if positions > have_positions:
            positions = min(self.max_len, max(positions, 2 * have_positions, 64))
        rows, positions = max(rows, have_rows), max(positions, have_positions)
        depth = len(self.layers)
        data = torch.zeros(depth, 2, rows, self.heads, positions, self.dim, dtype=self.dtype, device=self.device)
        data[:, :, :have_rows, :, :have_positions] = self.data
        self.data = data
        tokens = np.zeros((self.slots, positions), np.int32)
        tokens[:, :have_positions] = self.tokens
        self.tokens = tokens

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows with all that belongs to them."""
        if a == b:
            return
        extent = int(max(self.length[a], self.length[b]))
        if extent:
            rows = self.data[:, :, :, :, :extent]
            if not self.length[b]:
                rows[:, :, b] = rows[:, :, a]
            elif not self.length[a]:
                rows[:, :, a] = rows[:, :, b]
            else:
                kept = rows[:, :, a].clone()
                rows[:, :, a] = rows[:, :, b]
                rows[:, :, b] = kept
        for array in (self.tokens, self.length, self.known):
            array[[a, b]] = array[[b, a]]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy keys and values of the first ``length`` positions; the caller sets the tokens."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def match(self, ids: np.ndarray) -> np.ndarray:
        """Length of the common prefix of ``ids`` (int32) with the known tokens of every used row, [used]."""
        width = min(len(ids), self.tokens.shape[1])
        equal = self.tokens[: self.used, :width] == ids[:width]
        matched = np.where(equal.all(axis=1), width, equal.argmin(axis=1)) if width else np.zeros(self.used, int)
        return np.minimum(matched, self.known[: self.used])

    def feed(self, span: slice, take: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prepare a forward call that feeds the next ``take[i] >= 1`` known tokens of each row of ``span``.

        Chunks are right-aligned, so that the last column of the call is the newest token of every row.
        Returns input ids [rows, width], position ids [rows, width] and the additive mask
        [rows, 1, width, extent] in the model's dtype. Padding looks at position 0 and stores nothing.
        """
        width = int(take.max())
        start = self.length[span]
        self.extent = int((start + take).max())
        rows = np.arange(span.start, span.stop)
        positions = (start + take - width)[:, None] + np.arange(width)
        real = np.arange(width) >= (width - take)[:, None]
        positions = np.where(real, positions, 0)
        ids = self.tokens[rows[:, None], positions].astype(np.int64)
        self._span = span
        if width == 1:
            self._taken = None
            at, columns = rows, positions[:, 0]
        else:
            row, column = real.nonzero()
            self._taken = (self._move(row), self._move(column))
            at, columns = rows[row], positions[row, column]
        self._rows, self._positions = self._move(at), self._move(columns)
        position_ids = self._move(positions)
        hidden = torch.arange(self.extent, device=self.device) > position_ids[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return self._move(ids), position_ids, mask

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model: keys and values [rows, heads, width, dim] in, those of all positions out."""
        pair = []
        for kind, new in enumerate((keys, values)):
            held = self.data[layer, kind]
            fresh = new[:, :, 0] if self._taken is None else new.transpose(1, 2)[self._taken]
            held[self._rows, :, self._positions] = fresh
            pair.append(held[self._span, :, : self.extent])
        return pair[0], pair[1]

    def _move(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
