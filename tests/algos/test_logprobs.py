import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from algos.logprobs import selected_logits, token_entropies, token_logprobs


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
