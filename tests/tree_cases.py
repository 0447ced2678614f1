"""Random trees of episodes with tiny models that can be trained on them, and rearrangements that change nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from reference import OracleEpisode
from transformers import Qwen3Config, Qwen3ForCausalLM

from algos.batching import Sample, sample_of
from algos.critic import as_critic
from trees.linearise import linearise
from trees.record import VersionSpan
from trees.tree import NO_IDS, Node, Tree

VOCABULARY = 24


def tiny_model(seed: int = 0, vocabulary: int = VOCABULARY, layers: int = 1) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.4,
    )
    return Qwen3ForCausalLM(config).double().eval()


def tiny_critic() -> Qwen3ForCausalLM:
    critic = as_critic(tiny_model(1)).double()
    with torch.no_grad():
        critic.lm_head.weight.normal_(0, 0.1)
    return critic


def moved(model, size: float = 0.03):
    """The same model after a step that is large enough to set off the clips."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def gradients(model) -> torch.Tensor:
    found = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
    return torch.cat([gradient.flatten() for gradient in found])


Call = tuple[int, int, int, str]
"""How many calls back the one is that it extends (0: the call before; beyond the first: none), tokens observed before
it, tokens sampled, and ``main``, ``side`` or ``untrained``."""

_call = st.tuples(
    st.one_of(st.just(0), st.integers(0, 12)),
    st.integers(0, 2),
    st.sampled_from([0, 1, 1, 2, 3]),
    st.sampled_from(["main", "main", "main", "side", "untrained"]),
)
calls = st.one_of(
    st.lists(_call, min_size=1, max_size=12),
    # Up to six branches from one call, some deeper, and chains twelve calls deep.
    st.lists(st.integers(1, 3), min_size=2, max_size=6).map(
        lambda sizes: [(99, 2, 2, "main"), *((i, 1, size, "main") for i, size in enumerate(sizes))]
    ),
    st.lists(st.integers(0, 2), min_size=12, max_size=12).map(lambda sizes: [(0, 1, size, "main") for size in sizes]),
)


def tree_of(shape: Sequence[Call], seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    nodes = [Node(0, -1, NO_IDS)]
    ends: list[int] = []
    for number, (back, observed, sampled, kind) in enumerate(shape):
        extends = number - 1 - back
        above = ends[extends] if extends >= 0 else 0
        if observed or above == 0:
            ids = rng.integers(0, VOCABULARY, max(1, observed)).astype(np.int32)
            nodes.append(Node(len(nodes), above, ids, call=f"c{number}", ordinal=number))
            above = len(nodes) - 1
        nodes.append(
            Node(
                len(nodes),
                above,
                rng.integers(0, VOCABULARY, sampled).astype(np.int32),
                sampled=True,
                logprobs=rng.uniform(-4.5, -1.5, sampled).astype(np.float32),
                versions=(VersionSpan(0, 0, sampled),),
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                call=f"c{number}",
                ordinal=number,
                kind="side" if kind == "side" else "main",
                trained=kind != "untrained",
            )
        )
        ends.append(len(nodes) - 1)
    return Tree(tuple(nodes))


@st.composite
def batches(draw, size: int = 4) -> list[OracleEpisode]:
    shapes = draw(st.lists(calls, min_size=1, max_size=size))
    return [
        OracleEpisode(draw(st.sampled_from("ab")), draw(st.sampled_from([0.0, 0.3, 1.0])), tree_of(shape, seed))
        for seed, shape in enumerate(shapes)
    ]


def samples_of(episode: OracleEpisode, advantage: float = 1.0) -> list[Sample]:
    found = [sample_of(path, advantage) for path in linearise(episode.tree)]
    return [sample for sample in found if sample is not None]


# Rearrangements: the same tokens, trained once each, after the same tokens.


def cut(tree: Tree, rng: np.random.Generator) -> Tree:
    """Every run of two tokens or more, sampled or not, in two."""
    nodes, end = [tree.nodes[0]], {0: 0}
    for node in tree.nodes[1:]:
        above = end[node.parent]
        at = int(rng.integers(1, len(node))) if len(node) > 1 else len(node)
        for part in (slice(0, at), slice(at, None))[: 1 + (len(node) > 1)]:
            ids, logprobs = node.ids[part], node.logprobs[part]
            versions = (VersionSpan(0, 0, len(ids)),) if node.sampled else ()
            nodes.append(replace(node, id=len(nodes), parent=above, ids=ids, logprobs=logprobs, versions=versions))
            above = len(nodes) - 1
        end[node.id] = len(nodes) - 1
    return Tree(tuple(nodes))


def apart(tree: Tree) -> Tree:
    """Branches part before what they were fed together: every child of an observed run has a copy of it for itself."""
    nodes, place = [tree.nodes[0]], {0: 0}
    for node in tree.nodes[1:]:
        if not node.sampled and tree.children[node.id]:
            place[node.id] = -1
            continue
        above = place[node.parent]
        if above == -1:
            run = tree.nodes[node.parent]
            while place.get(run.parent) == -1:
                up = tree.nodes[run.parent]
                run = replace(run, ids=np.concatenate([up.ids, run.ids]), parent=up.parent)
            nodes.append(replace(run, id=len(nodes), parent=place[run.parent]))
            above = len(nodes) - 1
        nodes.append(replace(node, id=len(nodes), parent=above))
        place[node.id] = len(nodes) - 1
    return Tree(tuple(nodes))


def reordered(tree: Tree, rng: np.random.Generator) -> Tree:
    """The calls came in another order, so that shared tokens are trained on another path."""
    order: list[int] = []
    open_nodes = [0]
    while open_nodes:
        node = open_nodes.pop(int(rng.integers(len(open_nodes))))
        order.append(node)
        open_nodes.extend(tree.children[node])
    place = {old: new for new, old in enumerate(order)}
    return Tree(
        tuple(
            replace(tree.nodes[old], id=new, parent=place.get(tree.nodes[old].parent, -1), ordinal=new)
            for new, old in enumerate(order)
        )
    )


def with_idle_leaves(tree: Tree) -> Tree:
    """Leaves that add no trained token: an empty answer, and an observation that nothing followed."""
    nodes = list(tree.nodes)
    for node in tree.nodes:
        if node.sampled and node.id % 2:
            nodes.append(Node(len(nodes), node.id, np.array([1, 2], np.int32), ordinal=len(nodes)))
            nodes.append(
                Node(len(nodes), len(nodes) - 1, NO_IDS, sampled=True, ordinal=-5, trained=True, kind=node.kind)
            )
    return Tree(tuple(nodes))
