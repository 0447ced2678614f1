"""The critic: values of what precedes each trained token.

Invariant: a critic starts at the value 0 everywhere, since its head starts at zero, and sees what the policy saw: the
same batches, the same positions.

It is a model of its own, whose output head gives one number in place of a distribution over tokens, or a head on the
hidden states of the policy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def value_head(hidden_size: int) -> nn.Linear:
    """A head [H -> 1] at zero."""
    head = nn.Linear(hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def as_critic(model: Any) -> Any:
    """A causal language model of Transformers with a value head in place of its output head; changes ``model``.

    What the model's family does to logits after its head, such as a bound, is done to the values too.
    """
    model.set_output_embeddings(value_head(model.get_output_embeddings().in_features))
    return model


def values_of(head: nn.Module, hidden: Tensor) -> Tensor:
    """Values [N] from hidden states [N, H], in at least the precision of the head."""
    return head(hidden.to(next(head.parameters()).dtype))[:, 0]
