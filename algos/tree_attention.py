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
_CHANGES = ("attention_mask", "dropout", "sliding_window", "softcap", "s_aux", "position_bias")
"""What a layer may ask of an attention that changes its result."""


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
    """Why a model cannot compute trees: a layer looks at a window, bounds its scores or keeps a running state.

    Empty where it can.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if getattr(model, "_is_stateful", False):
        return f"layers with a running state ({', '.join(sorted(kinds - {'full_attention'})) or 'recurrent'})"
    if kinds != {"full_attention"} or window is not None:
        return f"layers {sorted(kinds)}, sliding window {window}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"attention with bounded scores (attn_logit_softcapping {config.attn_logit_softcapping})"
    if not getattr(model, "_supports_attention_backend", False):
        return "an attention that cannot be replaced"
    return ""


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
    **rest: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: query [1, H, N, D], key and value [1, G, N, D], H a multiple of G; out [1, N, H, D]."""
    remedy = "train this model with learner.layout=paths, or layout=paths in algos.sft"
    _refuse_changes(remedy, attention_mask=attention_mask, dropout=dropout or None, **rest)
    assert query.shape[0] == 1
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
    **rest: Any,
) -> tuple[Tensor, None]:
    """As Transformers calls it: query [B, H, T, D], key and value [B, G, T, D]; out [B, T, H, D]."""
    remedy = "this model cannot be trained in any layout"
    _refuse_changes(remedy, attention_mask=attention_mask, dropout=dropout or None, **rest)
    return path_attention.attend_causally(query, key, value, scaling).transpose(1, 2).contiguous(), None


def _refuse_changes(remedy: str, **arguments: Any) -> None:
    """Raise ``ValueError`` when a layer asks for what would be left out in silence."""
    asked = [name for name in _CHANGES if arguments.get(name) is not None]
    if asked:
        raise ValueError(f"got an attention layer with {', '.join(asked)}, expected plain attention: {remedy}")


AttentionInterface.register(TREE, tree_attention)
AttentionInterface.register(CAUSAL, causal_attention)
