"""A model prepared for training: low-rank adapters, recomputed activations, shards on the ranks of a group.

Invariant: the names of ``state_dict`` and what the model computes stay those of the model as it was, whatever is done
to it here; ``merged`` takes the adapters out again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from algos.ranks import Ranks
from configs.learner import LearnerConfig, LoraSettings

_BASE, _ADAPTER = ".base_layer.weight", "default"


def prepare(model: Any, settings: LearnerConfig, ranks: Ranks) -> Any:
    """The model with what the settings ask for, on its device.

    Compute in bfloat16 keeps the weights, the gradients' sums and the optimiser in float32. Raises ``ValueError`` for
    adapters on modules that the model does not have.
    """
    if settings.lora is not None:
        _add_adapters(model, settings.lora)
    layer_names = set(model._no_split_modules or ())

    def is_layer(part: nn.Module) -> bool:
        return type(part).__name__ in layer_names

    if settings.checkpoint_activations:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda layer: checkpoint_wrapper(
                layer, context_fn=lambda: (contextlib.nullcontext(), _as_now(model))
            ),
            check_fn=is_layer,
        )
    if ranks.size == 1 and settings.dtype == "float32":
        return model.to(settings.device)
    if not dist.is_initialized():
        dist.init_process_group(backend(settings.device), store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(torch.device(settings.device).type, (ranks.size,))
    narrow = settings.dtype == "bfloat16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    # Listed first: sharding gives a layer another class.
    layers = [part for part in model.modules() if is_layer(part)]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # The loss is divided by the tokens of all ranks already: their gradients are to be added up.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return model


def backend(device: str) -> str:
    """What ranks on such a device talk through: CPU tensors always go through gloo."""
    return "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"


def merged(weights: Mapping[str, Tensor], lora: LoraSettings | None) -> dict[str, Tensor]:
    """Weights of a model with adapters as those of the model without: W + (alpha / rank) B A (Hu et al. 2021, 4.1)."""
    if lora is None:
        return dict(weights)
    found = {}
    for name, tensor in weights.items():
        if name.endswith(_BASE):
            layer = name.removesuffix(_BASE)
            down, up = (weights[f"{layer}.lora_{which}.{_ADAPTER}.weight"] for which in "AB")
            found[f"{layer}.weight"] = tensor + lora.alpha / lora.rank * (up @ down)
        elif ".lora_" not in name:
            found[name.replace(".base_layer.", ".")] = tensor
    return found


def further_names(model: nn.Module) -> set[str]:
    """Names in ``state_dict`` of parameters that have another one before it, such as a head tied to the embedding."""
    seen: set[int] = set()
    found = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            found.add(name.replace(_CHECKPOINT_PREFIX, ""))
        seen.add(id(parameter))
    return found


def _add_adapters(model: Any, lora: LoraSettings) -> None:
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    missing = [t for t in lora.targets if not any(f".{name}".endswith(f".{t}") for name in linear)]
    if missing:
        raise ValueError(
            f"learner.lora.targets: got {missing}, expected names of linear layers of the model: "
            f"{sorted({name.rpartition('.')[2] for name in linear})}"
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    # Every rank must draw the same ones.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inject_adapter_in_model(config, model, _ADAPTER)


@contextlib.contextmanager
def _entered(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _as_now(model: Any) -> contextlib.AbstractContextManager[None]:
    """The attention of this forward pass, for when its activations are computed again in the backward pass."""
    return _entered(model, model.config._attn_implementation)


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters: the matrices inside of layers, and the others (embeddings, head, norms, biases)."""
    ends = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}  # type: ignore[operator]
    trained = [p for p in model.parameters() if p.requires_grad]
    inner = [p for p in trained if p.ndim == 2 and id(p) not in ends]
    chosen = set(map(id, inner))
    return inner, [p for p in trained if id(p) not in chosen]
