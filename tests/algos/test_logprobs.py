import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, Qwen3Config, Qwen3ForCausalLM

from algos.logprobs import selected_logits, selected_scores, token_entropies, token_logprobs


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_scores_are_those_of_the_distribution_that_was_sampled_from(temperature):
    """L5."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=generator) * 3
    sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    mu = (logits / temperature).softmax(-1)[torch.arange(6), sampled].log()
    scored = token_logprobs(logits, sampled, torch.full((6,), temperature))
    torch.testing.assert_close((scored - mu).exp(), torch.ones(6))
    truth = torch.distributions.Categorical(logits=logits / temperature).entropy()
    torch.testing.assert_close(token_entropies(logits, torch.full((6,), temperature)), truth)


def test_each_token_has_its_own_temperature_and_greedy_counts_as_one():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, 3, 6])
    scored = token_logprobs(logits, ids, torch.tensor([0.0, 1.0, 0.5]))
    expected = torch.log_softmax(logits * torch.tensor([[1.0], [1.0], [2.0]]), -1)[torch.arange(3), ids]
    torch.testing.assert_close(scored, expected)


def test_narrow_logits_are_widened():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2)).bfloat16()
    scored = token_logprobs(logits, torch.arange(4), torch.ones(4))
    assert scored.dtype == token_entropies(logits, torch.ones(4)).dtype == torch.float32
    torch.testing.assert_close(scored, torch.log_softmax(logits.float(), -1).diagonal())


def test_a_forbidden_token_leaves_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    token_logprobs(logits, torch.tensor([2]), torch.ones(1)).sum().backward()
    assert torch.isfinite(token_entropies(logits, torch.ones(1))).all()
    assert torch.isfinite(logits.grad).all()


def test_logits_are_made_only_where_asked_and_padding_is_not_seen():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    ).eval()
    ids = torch.randint(1, 50, (2, 9))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, [1, 4, 8]] = True
    mask[1, [2, 5]] = True
    padded = ids.clone()
    padded[1, 6:] = 0
    picked = selected_logits(model, padded, lambda hidden: hidden[:, :-1][mask[:, 1:]])
    assert picked.shape == (5, 50)
    full = model(input_ids=ids).logits
    expected = torch.stack([full[0, 0], full[0, 3], full[0, 7], full[1, 1], full[1, 4]])
    torch.testing.assert_close(picked, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(input_ids=ids).logits, full)


SIZES = {
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
}
HEADS = {
    "own": Qwen3Config(**SIZES),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "scaled": CohereConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"}, logit_scale=0.3),
    "bounded": Gemma2Config(
        **SIZES, final_logit_softcapping=3.0, sliding_window=64, layer_types=["full_attention"] * 2
    ),
}


def scoring(name):
    """A model in float64, ids [2, 30], which of them are scored, and the temperature of each of those."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[name]).double().eval()
    ids = torch.randint(0, 512, (2, 30))
    mask = torch.rand(2, 30) < 0.7
    mask[:, 0] = False
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(20)[: int(mask.sum())]
    return model, ids, mask, temperature


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", list(HEADS))
def test_scores_in_chunks_are_those_of_all_logits(name, chunk):
    model, ids, mask, temperature = scoring(name)
    weight = torch.linspace(-1, 1, len(temperature), dtype=torch.float64)

    def gradients(logprobs, entropies, hidden):
        loss = (logprobs * weight).sum() + (entropies * weight.flip(0)).sum() + hidden.square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    whole = model(input_ids=ids, output_hidden_states=True)
    logits, hidden = (part[:, :-1][mask[:, 1:]] for part in (whole.logits, whole.hidden_states[-1]))
    expected = token_logprobs(logits, ids[mask], temperature), token_entropies(logits, temperature), hidden
    got = selected_scores(
        model,
        ids,
        lambda hidden: hidden[:, :-1][mask[:, 1:]],
        ids[mask],
        temperature,
        chunk=chunk,
        entropy_gradient=True,
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    for mine, theirs in zip(gradients(*got), gradients(*expected), strict=True):
        # Transformers narrows norms to float32, in the gradient too.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())
    torch.testing.assert_close(model(input_ids=ids).logits[:, :-1][mask[:, 1:]], logits, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [part.numel() for part in tree_leaves(out) if isinstance(part, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


@pytest.mark.parametrize(("name", "chunk", "whole"), [("own", 4, False), ("own", 1000, True), ("bounded", 4, True)])
def test_logits_are_held_for_a_chunk_at_a_time(name, chunk, whole):
    model, ids, mask, temperature = scoring(name)
    largest_weight = max(parameter.numel() for parameter in model.parameters())
    with Largest() as largest:
        scores = selected_scores(
            model, ids, lambda hidden: hidden[:, :-1][mask[:, 1:]], ids[mask], temperature, chunk=chunk
        )
        scores.logprobs.sum().backward()
    n, vocabulary = len(temperature), 512
    assert largest_weight < n * vocabulary / 2
    assert largest.elements == (n * vocabulary if whole else largest_weight)
    assert not scores.entropies.requires_grad


def test_a_head_with_an_adapter_and_hooks_is_called_as_it_is():
    model, ids, mask, temperature = scoring("own")
    called = []

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, torch.nn.Linear(16, 2).double(), torch.nn.Linear(2, 512).double()

        def forward(self, hidden):
            return self.base(hidden) + self.up(self.down(hidden))

    model.set_output_embeddings(Adapted(model.lm_head))
    model.lm_head.register_forward_hook(lambda *_: called.append(1))
    logits = model(input_ids=ids).logits[:, :-1][mask[:, 1:]]
    assert called == [1]
    got = selected_scores(model, ids, lambda hidden: hidden[:, :-1][mask[:, 1:]], ids[mask], temperature, chunk=5)
    torch.testing.assert_close(got.logprobs, token_logprobs(logits, ids[mask], temperature), rtol=0, atol=1e-10)
    assert called == [1, 1]
    got.logprobs.sum().backward()
    assert model.lm_head.up.weight.grad.abs().sum() > 0
    assert "forward" not in vars(model.lm_head)
