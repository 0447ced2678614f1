"""Muon: momentum whose update is made orthogonal, for the matrices of small models.

Invariant: each update is close to semi-orthogonal (singular values near 1), so a step has the same
size in every direction; ``lr`` is that size, scaled by sqrt(max(1, rows / columns)).

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The
Newton-Schulz iteration runs in fp32 and over stacks of equally shaped matrices: on a CPU without
bf16 units that is several times faster than ``torch.optim.Muon``.

Parameters may be sharded: every rank then gathers the momentum's matrices, makes them orthogonal as a whole (which no
shard can be alone), and keeps its shard of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(stack_nRC: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Map each matrix of a stack (shape n, rows, columns; float) near to its closest semi-orthogonal one.

    The quintic Newton-Schulz iteration with the coefficients of the source; singular values end in
    about 0.7 to 1.2.
    """
    a, b, c = _COEFFICIENTS
    x = stack_nRC
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.transpose(-2, -1)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.transpose(-2, -1)


class Muon(torch.optim.Optimizer):
    """Takes two-dimensional parameters only."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(
                        f"got a parameter of shape {tuple(parameter.shape)}, expected a matrix; "
                        "give the others to AdamW"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update with Nesterov momentum."""
        if closure is not None:
            raise ValueError("got a closure, expected None; compute the gradients before step()")
        for group in self.param_groups:
            stacks: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks[parameter.shape].append(parameter)
            for (rows, columns), alike in stacks.items():
                updates = orthogonalize(torch.stack([_whole(self._momentum(p, group["momentum"])) for p in alike]))
                size = group["lr"] * max(1.0, rows / columns) ** 0.5
                for parameter, update in zip(alike, updates, strict=True):
                    parameter.add_(_like(update, parameter), alpha=-size)

    def _momentum(self, parameter: torch.nn.Parameter, decay: float) -> torch.Tensor:
        grad = parameter.grad
        assert grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(grad, 1 - decay)
        return grad.lerp(state["momentum"], decay)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``whole``, which every rank has, sharded as ``parameter``."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
