"""Log-probabilities and entropies of sampled tokens under the policy.

Invariant: a token is scored at the temperature that it was sampled at, in at least float32. With equal
weights the trainer's number therefore equals the engine's, and every ratio is 1. Logits exist for the tokens that are
scored only, and for a chunk of those at a time, also while the gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGIT_CHUNK = 1024
"""Tokens whose logits are held at once: a third of a gigabyte in float32 for a vocabulary of 80,000."""
_MARK = 100.0
"""Larger than any logit that a model which bounds or scales its logits would leave as it is; exact in bfloat16."""
_alter_logits: WeakSet[nn.Module] = WeakSet()
"""Models found to do something to their logits after the head."""


class Scores(NamedTuple):
    """What a model says of N sampled tokens."""

    logprobs: Tensor
    """[N], natural log, with a gradient."""
    entropies: Tensor
    """[N] in nats, of the distributions that the tokens were drawn from."""
    hidden: Tensor
    """[N, H], what the head saw: of a value head, the input."""


def token_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """Score ``ids`` under softmax(logits / temperature).

    Args:
        logits: float [N, V], any float dtype; narrower ones are widened to float32.
        ids: int [N], the sampled tokens.
        temperature: float [N]. 0 stands for greedy sampling, whose log-probabilities are those at 1.

    Returns:
        Log-probabilities [N], natural log, with a gradient.
    """
    return _chosen(_log_distribution(logits, temperature), ids)


def _chosen(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(-1, ids[:, None].long()).squeeze(-1)


def token_entropies(logits: Tensor, temperature: Tensor) -> Tensor:
    """Entropies [N] in nats of softmax(logits / temperature), with a gradient; arguments as for ``token_logprobs``."""
    return _entropies(_log_distribution(logits, temperature))


def _entropies(logprobs: Tensor) -> Tensor:
    # A forbidden token (-inf) adds nothing; 0 * -inf would be NaN, in the gradient too.
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


def selected_scores(
    model: nn.Module,
    ids: Tensor,
    select: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: Tensor,
    *,
    chunk: int = LOGIT_CHUNK,
    entropy_gradient: bool = False,
    **arguments: object,
) -> Scores:
    """Score the tokens after chosen positions, without making the logits of more than ``chunk`` of them at once.

    They are made again for the gradient, chunk by chunk. The head module itself is called, inside of the model's
    forward and its hooks. A model that bounds or scales its logits after the head gets them of all N positions at once.

    Args:
        model: as ``ids``, ``select`` and ``arguments`` for ``selected_logits``.
        ids: int [B, T].
        select: to the hidden states of N positions.
        targets: int64 [N], the sampled tokens, in the order of ``select``.
        temperature: float [N], see ``token_logprobs``.
        chunk: at least 1.
        entropy_gradient: whether ``entropies`` has a gradient.
        arguments: more of what the model's forward takes.
    """
    seen: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        seen[:] = [select(hidden)]
        return seen[0]

    def score(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
        logprobs = _log_distribution(logits, temperature)
        chosen = _chosen(logprobs, targets)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = _entropies(logprobs)
        return torch.stack([chosen, entropies], dim=-1)

    def chunked(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        def of_chunk(hidden: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
            return score(forward(hidden[None])[0], targets, temperature)[None]

        # Split rather than sliced: the gradient of a slice is as large as the whole.
        parts = zip(*(part.split(chunk) for part in (keep(hidden), targets, temperature)), strict=True)
        scores = [checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        # Not a view: hooks on what the head answers have to stay with it.
        return torch.cat([*scores, scores[0].new_full((1, 1, 2), _MARK)], dim=1)

    if model not in _alter_logits:
        with _head_replaced(model, chunked):
            scores = model(input_ids=ids, use_cache=False, **arguments).logits[0]
        mark = scores[-1]
        scores = scores[:-1]
        if (mark != _MARK).any():
            _alter_logits.add(model)
    if model in _alter_logits:
        scores = score(selected_logits(model, ids, keep, **arguments), targets, temperature)
    logprobs, entropies = scores.unbind(-1)
    return Scores(logprobs, entropies if entropy_gradient else entropies.detach(), seen[0])


@contextmanager
def _head_replaced(model: nn.Module, by: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Iterator[None]:
    """Inside, the output head answers ``by(its own forward, hidden)``; hooks on it run as before."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    own = vars(head).get("forward")
    forward = head.forward
    head.forward = lambda hidden: by(forward, hidden)
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own
