"""What a run would take, before anything starts: GPUs, memory and the course of the learning rates.

Memory is an estimate from the model's shape. Weights, gradients and AdamW's two moments are float32, 16 bytes a
parameter, shared by the ranks. Activations are 34 bytes a token, layer and hidden unit in 16 bits where attention holds
no scores; computed again in the backward pass they are 2 bytes, and the 34 for one layer (after Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import RunConfig

_GIB = 1 << 30
_STATE = 16
"""Bytes of a trained parameter: weight, gradient and two moments in float32."""
_HELD = 34
_BYTES = {"float32": 4, "bfloat16": 2}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of the papers' models by the name of their folder, for machines that do not have them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory goes by, of a decoder as Qwen3's and Llama's."""

    layers: int
    hidden: int
    vocabulary: int
    layer: int
    """Parameters of one layer."""
    active: int
    """Those of them that one token uses."""
    embeddings: int
    cached: int
    """Keys and values of one token, numbers in all layers."""

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embeddings

    @property
    def used(self) -> int:
        """Parameters that one token uses."""
        return self.layers * self.active + self.embeddings


def shape_of(model: Path | None) -> Shape | None:
    """From the model's ``config.json``, or published under its name; None: neither is known, or is of another form."""
    if model is None:
        return None
    file = model / "config.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else PUBLISHED.get(model.name)
    try:
        return _shape(found) if found is not None else None
    except KeyError:
        return None


def _shape(config: dict[str, Any]) -> Shape:
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    width = config.get("head_dim") or hidden // heads
    cached = 2 * config.get("num_key_value_heads", heads) * width
    attention = 2 * hidden * heads * width + hidden * cached + 2 * hidden + 2 * width
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        expert, router = 3 * hidden * config["moe_intermediate_size"], hidden * experts
        every, used = experts * expert + router, config["num_experts_per_tok"] * expert + router
    else:
        every = used = 3 * hidden * config["intermediate_size"]
    tables = 1 if config.get("tie_word_embeddings") else 2
    vocabulary = config["vocab_size"]
    return Shape(
        layers, hidden, vocabulary, attention + every, attention + used, tables * vocabulary * hidden + hidden,
        layers * cached,
    )  # fmt: skip


def forecast(config: RunConfig) -> Iterator[str]:
    """Lines of a plan: ``placement``, ``memory`` where the model's shape is known, and ``schedule``."""
    yield f"placement   {_placement(config)}"
    shape = shape_of(config.model.path)
    if shape is not None:
        experts = f", {shape.used / 1e9:.3g} B used by a token" if shape.used < shape.parameters else ""
        yield f"memory      {shape.parameters / 1e9:.3g} B parameters{experts}"
        if config.steps:
            yield f"            learner, a rank: {_of_learner(config, shape)}"
        if config.engine.kind != "endpoint":
            yield f"            engine, a GPU: {_of_engine(config, shape)}"
    if config.steps:
        yield f"schedule    {_schedule(config)}"


def _placement(config: RunConfig) -> str:
    rank, replica = config.learner.each_gpus, config.engine.each_gpus
    ranks = config.learner.ranks if config.steps else 0
    whole = ranks * rank + config.engine.replicas * replica
    if not whole:
        return "no GPU: everything on this machine's CPUs"
    parts = [f"learner {ranks} ranks x {rank:g} GPU"] if ranks else []
    server, kind = config.engine.sglang, config.engine.kind
    inside = f" (tp {server.tp} x pp {server.pp} x dp {server.dp})" if kind == "sglang" else ""
    parts.append(f"{kind} {config.engine.replicas} replicas x {replica:g} GPU{inside}")
    return f"{', '.join(parts)}: {whole:g} GPUs"


def _of_learner(config: RunConfig, shape: Shape) -> str:
    learner = config.learner
    trained = shape.parameters if learner.lora is None else 0
    state = (_STATE * trained + 4 * (shape.parameters - trained)) / learner.ranks
    size = _BYTES[learner.dtype]
    tokens = learner.max_tokens_per_microbatch
    each = tokens * shape.hidden * size
    if learner.checkpoint_activations:
        activations = each * (shape.layers + _HELD / 2)
    else:
        activations = each * shape.layers * _HELD / 2
    # Two layers at a time are whole on every rank; a chunk's logits and their gradient are float32.
    gathered = 2 * shape.layer * size if learner.ranks > 1 else 0
    logits = 8 * learner.logit_chunk * shape.vocabulary
    critic = ""
    if learner.critic is not None and not learner.critic.shared:
        state += _STATE * shape.parameters / learner.ranks
        critic = " with the critic's"
    parts = f"{_gib(state)} weights and optimiser{critic}, {_gib(activations)} activations of {tokens} tokens"
    whole = state + activations + gathered + logits
    return f"{parts}, {_gib(gathered + logits)} layers and logits: about {_gib(whole)}"


def _of_engine(config: RunConfig, shape: Shape) -> str:
    engine, server = config.engine, config.engine.sglang
    shared = server.tp * server.pp if engine.kind == "sglang" else 1
    size = _BYTES[engine.dtype]
    copies = engine.replicas * (server.dp if engine.kind == "sglang" else 1)
    sessions = -(-config.sandbox.actors * config.sandbox.concurrency // copies)
    token = shape.cached * size / shared
    return (
        f"{_gib(size * shape.parameters / shared)} weights, {token / 1024:.0f} KiB of cache a token; "
        f"{sessions} sessions of {engine.max_len} tokens would be {_gib(sessions * engine.max_len * token)}"
    )


def _schedule(config: RunConfig) -> str:
    learner, critic = config.learner, config.learner.critic
    episodes = config.rollout.groups * config.rollout.group_size
    rate = f"{learner.learning_rate:g}"
    if learner.warmup_steps:
        rate = f"{learner.warmup_steps} steps up to {rate}"
    if learner.final_lr_factor < 1:
        rate += f", then {learner.decay} to {learner.learning_rate * learner.final_lr_factor:g}"
    parts = [
        f"learning rate {rate}",
        f"{learner.epochs * learner.minibatches} optimiser steps of {episodes // learner.minibatches} episodes a step",
    ]
    if critic is not None:
        alone = f", the first {critic.warmup_steps} steps alone" if critic.warmup_steps else ""
        parts.append(f"critic {critic.learning_rate:g}{alone}")
    if config.assignment.kind not in ("all", "single"):
        parts.append(f"blocks of {config.assignment.k} steps with the same tasks")
    return "; ".join(parts)


def _gib(count: float) -> str:
    return f"{count / _GIB:.3g} GiB"
