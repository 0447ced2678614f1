"""Tree attention against the plain forward of every path, in float64 but for the norms, which Transformers narrows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig
from tree_sessions import KINDS, grow, path_of, relaxed, sessions

from algos.path_attention import layout_of
from algos.tree_attention import use
from trees.filters import apply
from trees.linearise import linearise
from trees.packing import pack

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "llama": LlamaConfig(**COMMON),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_local_experts=4
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request):
    torch.manual_seed(0)
    config = CONFIGS[request.param]
    # The grouped product of experts has no form in float64.
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()


def packs_of(sessions_, max_tokens=10**6):
    trees = [apply(grow(*records), 10_000, KINDS)[0] for records in sessions_]
    return pack([path.ids for tree in trees for path in linearise(tree)], max_tokens)


def on_the_tree(model, packed):
    """Logits [N, V] of every token of a pack."""
    ids, positions = (torch.tensor(part, dtype=torch.int64)[None] for part in (packed.ids, packed.positions))
    with use(model):
        return model(input_ids=ids, position_ids=positions, use_cache=False, tree_layout=layout_of(packed)).logits[0]


def leaves_of(packed):
    above = set(packed.before.tolist())
    return [token for token in range(len(packed)) if token not in above]


@settings(relaxed, max_examples=8)
@given(st.lists(sessions(), min_size=1, max_size=2))
def test_logits_and_gradients_are_those_of_every_path_alone(model, sessions_):
    for packed in packs_of(sessions_):
        packed.ids[:] %= 64
        got = on_the_tree(model, packed)
        weight = torch.linspace(-1, 1, len(packed), dtype=torch.float64)
        counted = torch.zeros(len(packed), dtype=torch.bool)
        expected = torch.zeros((), dtype=torch.float64)
        for leaf in leaves_of(packed):
            places = path_of(packed, leaf)
            ids = torch.tensor(packed.ids[places], dtype=torch.int64)[None]
            alone = model(input_ids=ids, use_cache=False).logits[0]
            torch.testing.assert_close(got[places], alone, rtol=0, atol=1e-10)
            fresh = ~counted[places]
            expected = expected + (alone.logsumexp(-1)[fresh] * weight[places][fresh]).sum()
            counted[places] = True
        assert counted.all()
        parameters = list(model.parameters())
        tree_grad = torch.autograd.grad((got.logsumexp(-1) * weight).sum(), parameters, allow_unused=True)
        path_grad = torch.autograd.grad(expected, parameters, allow_unused=True)
        for mine, theirs in zip(tree_grad, path_grad, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@relaxed
@given(st.lists(sessions(), min_size=1, max_size=3), st.sampled_from([7, 40, 10**6]))
def test_the_cost_is_that_of_the_mask(sessions_, max_tokens):
    for packed in packs_of(sessions_, max_tokens):
        layout = layout_of(packed)
        assert layout.pairs == int(packed.mask().sum())
        assert [block.end for block in layout.blocks[:-1]] == [block.start for block in layout.blocks[1:]]


def test_a_model_that_forgets_is_refused():
    config = MistralConfig(**COMMON, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"sliding window 8.*train this model on paths"), use(model):
        pass


def test_the_model_computes_as_before_afterwards(model):
    before = model.config._attn_implementation
    with use(model):
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
