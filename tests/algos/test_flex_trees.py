"""FlexAttention's mask of a tree, and its results, computed without compiling on a CPU.

The compiled kernel, which is what a GPU runs, is not run by these tests.
"""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask
from tree_sessions import deep_sequences, relaxed

from algos import flex_trees, path_attention
from trees.packing import pack

CPU = torch.device("cpu")


@st.composite
def long_sequences(draw):
    """Paths of a deep tree with every token repeated, so that runs are of the order of FlexAttention's blocks."""
    times = draw(st.sampled_from([1, 17, 64]))
    return [np.repeat(ids, times) * 128 + np.tile(np.arange(times), len(ids)) for ids in draw(deep_sequences())]


@pytest.fixture
def gradients_on_a_cpu(monkeypatch):
    """FlexAttention has them, but refuses where it would be slow."""
    monkeypatch.setattr(
        importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device", lambda *_: None
    )


@settings(relaxed, max_examples=25)
@given(long_sequences())
def test_the_blocks_are_those_of_the_dense_mask(sequences):
    packed = pack(sequences, 1500)[0]
    n = len(packed)
    got = flex_trees.block_mask(packed, CPU)
    index = torch.arange(n)
    assert torch.equal(got.mask_mod(0, 0, index[:, None], index[None, :]), torch.tensor(packed.mask()))
    expected = create_block_mask(got.mask_mod, None, None, n, n, device="cpu", BLOCK_SIZE=flex_trees.BLOCK)
    for part in ("kv", "full_kv", "q", "full_q"):
        counts, listed = (
            [getattr(mask, f"{part}_{what}")[0, 0] for mask in (got, expected)] for what in ("num_blocks", "indices")
        )
        assert torch.equal(*counts)
        for row, count in enumerate(counts[0].tolist()):
            assert sorted(listed[0][row, :count].tolist()) == sorted(listed[1][row, :count].tolist())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(relaxed, max_examples=5, suppress_health_check=list(HealthCheck))
@given(sequences=long_sequences(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_values_and_gradients_are_those_of_the_runs(gradients_on_a_cpu, sequences, dtype):
    packed = pack(sequences, 800)[0]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, len(packed), 8, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    got = flex_trees.attend(*inputs, flex_trees.block_mask(packed, CPU), 0.3)
    expected = path_attention.attend(*inputs, path_attention.layout_of(packed), 0.3)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    weight = torch.linspace(-1, 1, got.numel(), dtype=dtype).view_as(got)
    for mine, theirs in zip(
        *(torch.autograd.grad((out * weight).sum(), inputs) for out in (got, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
