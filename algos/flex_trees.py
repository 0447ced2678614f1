"""Attention along the paths of a packed tree by FlexAttention, for GPUs: its block mask, and its call.

Invariant: the mask is that of ``Pack.mask``: key ``k`` is seen by query ``q`` exactly when ``k <= q < reach[k]``. The
kernel skips blocks of which nothing is seen, and asks only in blocks of which a part is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trees.packing import Pack

BLOCK = 128
"""Tokens of a block of queries and of keys, as large as FlexAttention's own default."""


def block_mask(pack: Pack, device: torch.device) -> BlockMask:
    """The mask of a pack's N tokens, made from one number for each of them, never from N x N."""
    n = len(pack)
    blocks = -(-n // BLOCK)
    reach = np.zeros(blocks * BLOCK, np.int32)
    reach[:n] = pack.reach
    farthest, nearest = (bound(reach.reshape(blocks, BLOCK), axis=1) for bound in (np.max, np.min))
    first = np.arange(blocks) * BLOCK
    below = np.tri(blocks, k=-1, dtype=bool)
    whole = below & (nearest[None, :] >= first[:, None] + BLOCK)
    some = below & (farthest[None, :] > first[:, None]) & ~whole | np.eye(blocks, dtype=bool)
    on_device = torch.tensor(reach, device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key <= query) & (query < on_device[key])

    return BlockMask.from_kv_blocks(
        *_listed(some, device), *_listed(whole, device), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(n, n)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None = None) -> Tensor:
    """Query [1, H, N, D], key and value [1, G, N, D], H a multiple of G; out [1, H, N, D]."""
    call: Any = _compiled() if query.device.type == "cuda" else flex_attention
    return call(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])


@cache
def _compiled() -> Callable[..., Any]:
    # Packs differ in length, and a kernel for each would be compiled anew.
    return torch.compile(flex_attention, dynamic=True)


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, int32 [1, 1, Q], and which, those first, int32 [1, 1, Q, K]."""
    count = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.tensor(count, device=device)[None, None], torch.tensor(order, device=device)[None, None]
