"""Attention over a packed tree: every token attends to the tokens on its own path, and is computed once.

The layout is that of ``trees.packing``: depth-first order, so that what a run of tokens may see is its ancestors,
whole, and itself, causally. Cost: the sum over runs of own length times path length, where paths one by one would
cost the sum over paths of their length squared.

This is the exact form for any device. ``use`` makes a Transformers model compute with it, or, for rows of whole
sequences, with plain causal attention whose gradient is fast on a CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from trees.packing import Pack

TREE, CAUSAL = "reins_tree", "reins_causal"


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens ``[start, end)`` without a fork among them, and the spans of what lies above them on their path."""

    start: int
    end: int
    above: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The runs of a pack in order; neighbours among ``above`` are joined, so a first child copies nothing."""

    runs: tuple[Run, ...]

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees: what attention costs."""
        return sum(_pairs(run.end - run.start, _length(run.above)) for run in self.runs)


def layout_of(pack: Pack) -> Layout:
    """The runs of a pack: cut where a token does not follow its neighbour, and where its subtree is another."""
    n = len(pack)
    index = np.arange(n)
    cuts = np.flatnonzero(
        (pack.before != index - 1) | np.append(True, pack.reach[1:] != pack.reach[:-1]) | (index == 0)
    )
    starts, ends = cuts, np.append(cuts[1:], n)
    above: dict[int, tuple[tuple[int, int], ...]] = {}
    last: dict[int, int] = {int(end) - 1: int(start) for start, end in zip(starts, ends, strict=True)}
    runs = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        before = int(pack.before[start])
        if before < 0:
            spans: tuple[tuple[int, int], ...] = ()
        else:
            parent = last[before]
            spans = _with(above[parent], (parent, before + 1))
        above[start] = spans
        runs.append(Run(start, end, spans))
    return Layout(tuple(runs))


@contextmanager
def use(model: PreTrainedModel, name: str = TREE) -> Iterator[None]:
    """Compute with an attention of this module inside.

    ``TREE``: calls of ``model`` are given ``tree_layout`` and ``position_ids``. ``CAUSAL``: rows of whole sequences,
    padded on the right. Raises ``ValueError`` for a model whose layers do not attend to their whole past.
    """
    refuse(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def refuse(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` for a model that is ``unfit``."""
    if fault := unfit(model):
        raise ValueError(
            f"{type(model).__name__}: got {fault}, expected full attention everywhere: a token of a tree must see its "
            "whole path; train this model on paths instead (learner.layout=paths)"
        )


def unfit(model: PreTrainedModel) -> str:
    """Why a model cannot compute trees: a layer looks at a window or keeps a running state; empty where it can."""
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        return "an attention that cannot be replaced"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return "" if kinds == {"full_attention"} and window is None else f"layers {sorted(kinds)}, sliding window {window}"


def tree_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: query [1, H, N, D], key and value [1, G, N, D], H a multiple of G; out [1, N, H, D]."""
    assert attention_mask is None
    assert query.shape[0] == 1
    assert not dropout
    parts = []
    for run in tree_layout.runs:
        spans = _with(run.above, (run.start, run.end))
        seen_key, seen_value = (_taken(tensor, spans) for tensor in (key, value))
        parts.append(
            _attend(
                query[:, :, run.start : run.end],
                seen_key,
                seen_value,
                _visible(run.end - run.start, seen_key.shape[2], query.device),
                scaling,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def causal_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: query [B, H, T, D], key and value [B, G, T, D]; out [B, T, H, D]."""
    assert attention_mask is None
    assert not dropout
    return _attend(query, key, value, None, scaling).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """``mask`` bool [T, S]; None: causal."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type == "cpu" and query.requires_grad:
        # On a CPU the gradient of grouped queries falls back to the full matrix of scores: ten times slower.
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _taken(tensor: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    pieces = [tensor[:, :, start:end] for start, end in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _visible(own: int, seen: int, device: torch.device) -> Tensor | None:
    """Which are seen, bool [own, seen]: what lies above, and the run up to the token; None where nothing is above."""
    if own == seen:
        return None
    return torch.ones(own, seen, dtype=torch.bool, device=device).tril(seen - own)


def _with(spans: tuple[tuple[int, int], ...], span: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    if spans and spans[-1][1] == span[0]:
        return (*spans[:-1], (spans[-1][0], span[1]))
    return (*spans, span)


def _pairs(own: int, above: int) -> int:
    return own * above + own * (own + 1) // 2


def _length(spans: tuple[tuple[int, int], ...]) -> int:
    return sum(end - start for start, end in spans)


AttentionInterface.register(TREE, tree_attention)
AttentionInterface.register(CAUSAL, causal_attention)
