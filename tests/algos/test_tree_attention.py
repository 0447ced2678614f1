"""Tree attention against the plain forward of every path, in float64 but for the norms, which Transformers narrows."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from tree_sessions import KINDS, deep_sequences, grow, path_of, relaxed, sessions

from algos.logprobs import token_logprobs
from algos.path_attention import SMALL, layout_of
from algos.tree_attention import refuse, unfit, use
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


def on_the_tree(model, packed, small=SMALL):
    """Logits [N, V] of every token of a pack."""
    ids, positions = (torch.tensor(part, dtype=torch.int64)[None] for part in (packed.ids, packed.positions))
    with use(model):
        return model(
            input_ids=ids, position_ids=positions, use_cache=False, tree_layout=layout_of(packed, small)
        ).logits[0]


def leaves_of(packed):
    above = set(packed.before.tolist())
    return [token for token in range(len(packed)) if token not in above]


@settings(relaxed, max_examples=6)
@given(st.lists(sessions(), min_size=1, max_size=2))
def test_logits_of_sessions_are_those_of_every_path_alone(model, sessions_):
    for packed in packs_of(sessions_):
        packed.ids[:] %= 64
        got = on_the_tree(model, packed)
        for leaf in leaves_of(packed):
            places = path_of(packed, leaf)
            alone = model(input_ids=torch.tensor(packed.ids[places], dtype=torch.int64)[None]).logits[0]
            torch.testing.assert_close(got[places], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@settings(relaxed, max_examples=6)
@given(sequences=deep_sequences(), small=st.sampled_from([0, SMALL]))
def test_loss_and_gradients_on_deep_trees_are_those_of_every_path_alone(model, dtype, tolerance, sequences, small):
    """The loss is of every token that follows another, once, with weights of both signs."""
    model = copy.deepcopy(model).to(dtype)
    packed = pack(sequences, 10**6)[0]
    n = len(packed)
    weight = torch.linspace(-1, 1, n, dtype=dtype) / n

    def loss_of(logits, places):
        """Of the tokens at these places of the pack but the first, by the logits [T, V] before each."""
        targets = torch.tensor(packed.ids[places], dtype=torch.int64)
        return token_logprobs(logits, targets, torch.ones(len(places))) * weight[places]

    following = (packed.before >= 0).nonzero()[0]
    got = loss_of(on_the_tree(model, packed, small)[packed.before[following]], following).sum()
    expected = torch.zeros((), dtype=dtype)
    counted = torch.zeros(n, dtype=torch.bool)
    for leaf in leaves_of(packed):
        places = path_of(packed, leaf)
        ids = torch.tensor(packed.ids[places], dtype=torch.int64)[None]
        losses = loss_of(model(input_ids=ids).logits[0, :-1], places[1:])
        expected = expected + losses[~counted[places[1:]]].sum()
        counted[places[1:]] = True
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if len(following):
        mine, theirs = (gradient(model, loss) for loss in (got, expected))
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def gradient(model, loss):
    parameters = list(model.parameters())
    parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


@settings(relaxed, max_examples=20)
@given(st.lists(sessions(), min_size=1, max_size=3), st.sampled_from([7, 40, 10**6]))
def test_the_cost_is_that_of_the_mask(sessions_, max_tokens):
    for packed in packs_of(sessions_, max_tokens):
        assert layout_of(packed).pairs == int(packed.mask().sum())


UNFIT = {
    "sliding window 8": MistralConfig(**COMMON, sliding_window=8),
    "sliding_attention.*sliding window 8": Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8),
    "bounded scores": Gemma2Config(
        **COMMON, head_dim=16, sliding_window=None, use_sliding_window=False, layer_types=["full_attention"] * 2
    ),
    "running state .linear_attention": Qwen3NextConfig(**COMMON, head_dim=16, num_experts=4),
    "running state": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "with a running state": JambaConfig(**COMMON, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
}


@pytest.mark.parametrize("fault", list(UNFIT))
def test_a_model_that_forgets_or_bends_is_refused(fault):
    model = AutoModelForCausalLM.from_config(UNFIT[fault])
    with pytest.raises(ValueError, match=rf"{fault}.*train this model on paths instead \(learner.layout=paths\)"):
        refuse(model)
    with pytest.raises(ValueError, match="expected full attention everywhere"), use(model):
        pass


def test_a_layer_that_asks_for_more_than_attention_is_refused(model):
    assert not unfit(model)
    packed = pack([torch.arange(5).numpy()], 10)[0]
    ids = torch.tensor(packed.ids, dtype=torch.int64)[None]
    with use(model), pytest.raises(ValueError, match=r"softcap, expected plain attention.*learner.layout=paths"):
        model(input_ids=ids, use_cache=False, tree_layout=layout_of(packed), softcap=30.0)


def test_the_model_computes_as_before_afterwards(model):
    before = model.config._attn_implementation
    with use(model):
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
