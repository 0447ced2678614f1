"""Log-probabilities and entropies of sampled tokens under the policy.

Invariant: a token is scored at the temperature that it was sampled at, in at least float32. With equal
weights the trainer's number therefore equals the engine's, and every ratio is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def token_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """Score ``ids`` under softmax(logits / temperature).

    Args:
        logits: float [N, V], any float dtype; narrower ones are widened to float32.
        ids: int [N], the sampled tokens.
        temperature: float [N]. 0 stands for greedy sampling, whose log-probabilities are those at 1.

    Returns:
        Log-probabilities [N], natural log, with a gradient.
    """
    return _log_distribution(logits, temperature).gather(-1, ids[:, None].long()).squeeze(-1)


def token_entropies(logits: Tensor, temperature: Tensor) -> Tensor:
    """Entropies [N] in nats of softmax(logits / temperature); arguments as for ``token_logprobs``."""
    logprobs = _log_distribution(logits, temperature)
    # A forbidden token (-inf) adds nothing; 0 * -inf would be NaN.
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)


def _log_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = torch.where(temperature > 0, temperature, 1.0).to(wide.dtype)
    return torch.log_softmax(wide / scale[:, None], dim=-1)


def selected_logits(model: nn.Module, ids: Tensor, select: Callable[[Tensor], Tensor], **arguments: object) -> Tensor:
    """Logits after chosen positions, without making those of any other.

    Args:
        model: a causal language model of Transformers.
        ids: int [B, T].
        select: takes hidden states [B, T, H] to those of N positions, [N, H].
        arguments: more of what the model's forward takes.

    Returns:
        Logits [N, V] in the order of ``select``.
    """

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (select(inputs[0])[None],)

    # Before the head rather than around it: what a model does to its logits after the head still happens.
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    handle = head.register_forward_pre_hook(before)
    try:
        return model(input_ids=ids, use_cache=False, **arguments).logits[0]
    finally:
        handle.remove()
