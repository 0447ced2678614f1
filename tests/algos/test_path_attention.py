"""Attention along paths against a softmax over the dense mask of a pack."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_sessions import deep_sequences, relaxed

from algos import path_attention
from algos.path_attention import attend, attend_causally, layout_of
from trees.packing import pack

SMALL = st.sampled_from([0, 4, 20, 128])


def tensors(n, values=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    shapes = ((1, 4, n, 8), (1, 2, n, 8), (1, 2, n, values))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def dense(query, key, value, seen, scaling):
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def assert_same(got, expected, inputs, **tolerance):
    torch.testing.assert_close(got, expected, **tolerance)
    weight = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    for mine, theirs in zip(
        *(torch.autograd.grad((out * weight).sum(), inputs) for out in (got, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


@relaxed
@given(deep_sequences(), SMALL, st.sampled_from([25, 10**6]))
def test_blocks_hold_every_token_once_and_see_what_the_mask_says(sequences, small, max_tokens):
    for packed in pack(sequences, max_tokens):
        layout = layout_of(packed, small)
        seen = np.zeros((len(packed), len(packed)), bool)
        end = 0
        for block in layout.blocks:
            assert block.start == end < block.end
            end = block.end
            own = slice(block.start, block.end)
            seen[own, own] = np.tri(end - block.start, dtype=bool) if block.inside is None else block.inside
            for start, stop in block.above:
                seen[own, start:stop] = True
            assert block.inside is None or len(block.inside) <= small
        assert end == len(packed)
        np.testing.assert_array_equal(seen, packed.mask())
        assert layout.pairs == seen.sum()


def test_many_branches_add_up_in_full_precision():
    prompt = list(range(8))
    packed = pack([np.array([*prompt, 100 + leaf]) for leaf in range(400)], 10**6)[0]
    wide = tensors(len(packed))
    narrow = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in wide]
    attend(*narrow, layout_of(packed, 0)).double().sum().backward()
    dense(*wide, torch.tensor(packed.mask()), 8**-0.5).sum().backward()
    for mine, exact in zip(narrow[1:], wide[1:], strict=True):
        assert (mine.grad.double() - exact.grad).norm() < 1e-2 * exact.grad.norm()


@pytest.mark.parametrize("flash", [True, False], ids=["whole torch", "a torch without normalisers of parts"])
@relaxed
@given(deep_sequences(), SMALL, st.sampled_from([8, 6]))
def test_values_and_gradients_are_those_of_a_dense_softmax(flash, sequences, small, values):
    """Values narrower than keys take the form of devices other than a CPU."""
    packed = pack(sequences, 10**6)[0]
    inputs = tensors(len(packed), values)
    with patch.object(path_attention, "_FLASH", flash):
        got = attend(*inputs, layout_of(packed, small), 0.3)
    assert_same(got, dense(*inputs, torch.tensor(packed.mask()), 0.3), inputs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_stay_near(dtype):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 64, 300)
    packed = pack([np.concatenate([prompt[:at], rng.integers(64, 99, 90)]) for at in (300, 300, 150, 20)], 10**6)[0]
    wide = tensors(len(packed))
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in wide]
    expected = dense(*wide, torch.tensor(packed.mask()), 8**-0.5)
    # Two of bfloat16's 8 bits may go.
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    got = attend(*inputs, layout_of(packed))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    got.double().sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(inputs, wide, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("gradient", [True, False])
def test_rows_are_causal(gradient):
    inputs = [tensor if gradient else tensor.detach() for tensor in tensors(9)]
    got = attend_causally(*inputs, 0.3)
    expected = dense(*inputs, torch.ones(9, 9, dtype=torch.bool).tril(), 0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
