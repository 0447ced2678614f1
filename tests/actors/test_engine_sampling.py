import pytest
import torch

from actors.engines.sampling import draw, nucleus


def rows(n: int, value: float) -> torch.Tensor:
    return torch.full((n,), value)


def test_frequencies_follow_the_distribution_at_the_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).expand(20_000, 4)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, logprobs = draw(logits, rows(20_000, 0.7), rows(20_000, 1.0), uniform)
    expected = torch.softmax(logits[0] / 0.7, -1)
    assert torch.allclose(torch.bincount(ids, minlength=4) / 20_000, expected, atol=0.015)
    assert torch.allclose(logprobs, expected.log()[ids], atol=1e-6)


def test_top_p_limits_the_draw_and_leaves_the_logprobs_whole():
    probs = torch.tensor([0.1, 0.5, 0.15, 0.25])
    uniform = torch.linspace(0, 0.999, 500, dtype=torch.float64)
    ids, logprobs = draw(probs.log().expand(500, 4), rows(500, 1.0), rows(500, 0.7), uniform)
    assert set(ids.tolist()) == {1, 3}
    assert torch.allclose(logprobs, probs.log()[ids], atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.5, {1}), (0.51, {1, 3}), (0.76, {0, 1, 3}), (1.0, {0, 1, 2, 3})]
)
def test_nucleus_keeps_the_smallest_set_that_reaches_top_p(top_p: float, kept: set[int]):
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    assert set(nucleus(probs, rows(1, top_p))[0].nonzero()[:, 0].tolist()) == kept


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_an_impossible_token_is_never_drawn(uniform: float):
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 2:4] = 0.0
    ids, logprobs = draw(logits, rows(1, 1.0), rows(1, 1.0), torch.tensor([uniform], dtype=torch.float64))
    assert ids.item() in (2, 3)
    assert logprobs.item() == pytest.approx(-0.6931472, abs=1e-6)


def test_greedy_and_sampled_rows_mix():
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    ids, logprobs = draw(logits, torch.tensor([0.0, 1.0]), rows(2, 1.0), torch.tensor([0.0, 0.0], dtype=torch.float64))
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1)[[0, 1], [1, 0]])
