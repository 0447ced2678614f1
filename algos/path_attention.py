"""Attention along the paths of a packed tree, on any device: a token sees exactly the tokens on its own path.

The layout is that of ``trees.packing``: depth-first order, so that what a run of tokens may see is its ancestors,
whole, and itself, causally. Cost: the sum over runs of own length times path length, where paths one by one would
cost the sum over paths of their length squared.

On a CPU the two parts of what a run sees are computed apart, where they lie, and merged by their softmax's
normalisers, as FlashAttention does with blocks of keys (Dao et al. 2022, section 3.1): no mask, no copy of keys.

Shapes: query [B, H, T, D], key and value [B, G, T, D], H a multiple of G; B is 1 for a tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trees.packing import Pack

_FLASH = all(
    hasattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{part}") for part in ("", "_backward")
)
"""Whether this build of torch has what gives a part's normalisers along with it; elsewhere keys are joined."""
SMALL = 128
"""Tokens up to which neighbouring subtrees are one block with a mask: a call costs as much as attention over them."""
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tokens ``[start, end)`` of which each sees all of ``above``, and of the block what ``inside`` says."""

    start: int
    end: int
    above: Spans
    """What lies above them on their path; neighbours are joined."""
    inside: np.ndarray | None = None
    """Bool [T, T], whether a token (row) sees another (column); None: causal."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a pack, in order and without gaps."""

    blocks: tuple[Block, ...]

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees: what attention costs."""
        return sum(_pairs(block) for block in self.blocks)


def layout_of(pack: Pack, small: int = SMALL) -> Layout:
    """A block for each run without a fork, and for each neighbourhood of subtrees of at most ``small`` tokens."""
    return Layout(tuple(_joined(list(_runs(pack)), pack.reach, small)))


def _runs(pack: Pack) -> Iterator[Block]:
    """The pack cut where a token does not follow its neighbour, and where its subtree is another."""
    n = len(pack)
    before, reach = pack.before, pack.reach
    cuts = np.flatnonzero((before != np.arange(n) - 1) | (np.arange(n) == 0) | (reach != np.roll(reach, 1)))
    ends = [*cuts[1:].tolist(), n]
    last: dict[int, Block] = {}
    for start, end in zip(cuts.tolist(), ends, strict=True):
        parent = last.get(int(before[start]))
        above = () if parent is None else _with(parent.above, (parent.start, parent.end))
        last[end - 1] = Block(start, end, above)
        yield last[end - 1]


def _joined(runs: list[Block], reach: np.ndarray, small: int) -> Iterator[Block]:
    """Runs in order, small subtrees beneath the same run, which have the same above them, as one block."""
    at = 0
    while at < len(runs):
        first, stop = runs[at], at
        end = first.start
        while stop < len(runs) and runs[stop].above == first.above and reach[runs[stop].start] - first.start <= small:
            end = int(reach[runs[stop].start])
            while stop < len(runs) and runs[stop].start < end:
                stop += 1
        if stop <= at + 1:
            yield first
            at += 1
        else:
            index = np.arange(first.start, end)
            seen = index[:, None] < reach[None, first.start : end]
            yield Block(first.start, end, first.above, seen & (index[:, None] >= index[None, :]))
            at = stop


def _with(spans: Spans, span: tuple[int, int]) -> Spans:
    if spans and spans[-1][1] == span[0]:
        return (*spans[:-1], (spans[-1][0], span[1]))
    return (*spans, span)


def _pairs(block: Block) -> int:
    own = block.end - block.start
    inside = own * (own + 1) // 2 if block.inside is None else int(block.inside.sum())
    return own * sum(end - start for start, end in block.above) + inside


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None = None) -> Tensor:
    """Attention [B, H, T, D] along the paths of ``layout``; ``scaling`` None: by the root of D."""
    if _FLASH and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        key, value = (_for_each_head(tensor, query) for tensor in (key, value))
        masks = [None if block.inside is None else _bias(block.inside, query.dtype) for block in layout.blocks]
        return _Merged.apply(query, key, value, layout, scaling, masks)
    parts = []
    for block in layout.blocks:
        spans = _with(block.above, (block.start, block.end))
        seen_key, seen_value = (_taken(tensor, spans) for tensor in (key, value))
        mask = _visible(block, seen_key.shape[2]).to(query.device)
        own = query[:, :, block.start : block.end]
        parts.append(_attend(own, seen_key, seen_value, mask, scaling))
    return torch.cat(parts, dim=2)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """Attention [B, H, T, D] of every token to itself and all before it in its row."""
    if query.device.type == "cpu" and query.requires_grad:
        key, value = (_for_each_head(tensor, query) for tensor in (key, value))
    return _attend(query, key, value, None, scaling)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """``mask`` bool [T, S]; None: causal."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    # On a CPU the gradient of grouped queries falls back to the full matrix of scores: ten times slower.
    groups = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def _taken(tensor: Tensor, spans: Spans) -> Tensor:
    pieces = [tensor[:, :, start:end] for start, end in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _visible(block: Block, seen: int) -> Tensor:
    """Which are seen, bool [own, seen]: what lies above, and what of the block its tokens see."""
    own = block.end - block.start
    inside = np.tri(own, dtype=bool) if block.inside is None else block.inside
    return torch.from_numpy(np.concatenate([np.ones((own, seen - own), bool), inside], axis=1))


def _bias(seen: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)


class _Merged(torch.autograd.Function):
    """Every block's attention to what lies above it and to itself, merged; H = G.

    With ``lse`` the logarithm of a softmax's normaliser, parts a and b of the keys merge to
    ``out = out_a + sigmoid(lse_b - lse_a) (out_b - out_a)`` and ``lse = log(exp lse_a + exp lse_b)``. The gradient of
    a part is FlashAttention's, given the merged ``out`` and ``lse``.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scaling, masks):
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block, mask in zip(layout.blocks, masks, strict=True):
            own = slice(block.start, block.end)
            merged, normaliser = _flash(query[:, :, own], key[:, :, own], value[:, :, own], mask is None, mask, scaling)
            for span in block.above:
                seen = slice(*span)
                part, its = _flash(query[:, :, own], key[:, :, seen], value[:, :, seen], False, None, scaling)
                merged.lerp_(part, torch.sigmoid(its - normaliser)[..., None].to(merged.dtype))
                normaliser = torch.logaddexp(normaliser, its)
            out[:, :, own], lse[:, :, own] = merged, normaliser
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = layout, scaling, masks
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        layout, scaling, masks = ctx.rest
        # What many blocks see is a sum of as many parts: in bfloat16 it would lose most of them.
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        for block, mask in zip(layout.blocks, masks, strict=True):
            own = slice(block.start, block.end)
            for seen in (own, *(slice(*span) for span in block.above)):
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad[:, :, own],
                    query[:, :, own],
                    key[:, :, seen],
                    value[:, :, seen],
                    out[:, :, own],
                    lse[:, :, own],
                    0.0,
                    seen is own and mask is None,
                    attn_mask=mask if seen is own else None,
                    scale=scaling,
                )
                for whole, part, place in zip(grads, parts, (own, seen, seen), strict=True):
                    whole[:, :, place] += part
        return *(whole.to(query.dtype) for whole in grads), None, None, None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Attention [B, H, T, D] and the logarithms of its normalisers [B, H, T]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
    )
