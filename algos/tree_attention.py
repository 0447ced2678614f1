"""Models of Transformers that compute trees: every token attends to the tokens on its own path, and is computed once.

``use`` makes a model compute with it, or, for rows of whole sequences, with plain causal attention whose gradient is
fast on a CPU too. On CUDA a tree is FlexAttention with the tree's block mask, elsewhere ``path_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel

from algos import flex_trees, path_attention
from algos.path_attention import Layout
from trees.packing import Pack

TREE, CAUSAL = "reins_tree", "reins_causal"


def layout_of(pack: Pack, device: torch.device) -> Layout | BlockMask:
    """What a model on ``device`` is given as ``tree_layout``."""
    return flex_trees.block_mask(pack, device) if device.type == "cuda" else path_attention.layout_of(pack)


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
    tree_layout: Layout | BlockMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: query [1, H, N, D], key and value [1, G, N, D], H a multiple of G; out [1, N, H, D]."""
    assert attention_mask is None
    assert query.shape[0] == 1
    assert not dropout
    if isinstance(tree_layout, BlockMask):
        out = flex_trees.attend(query, key, value, tree_layout, scaling)
    else:
        out = path_attention.attend(query, key, value, tree_layout, scaling)
    return out.transpose(1, 2).contiguous(), None


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
    return path_attention.attend_causally(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE, tree_attention)
AttentionInterface.register(CAUSAL, causal_attention)
