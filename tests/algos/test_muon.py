"""Muon against the singular value decomposition."""

import pytest
import torch

from algos.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_singular_values_end_near_one_and_directions_stay(shape):
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, *shape, generator=generator) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    made = orthogonalize(stack)
    values = torch.linalg.svdvals(made)
    assert values.max() < 1.3
    # Directions far weaker than the strongest one (a square Gaussian has some) need more iterations.
    assert (values > 0.6).float().mean() > 0.95
    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    inside = u.transpose(-2, -1) @ made @ v.transpose(-2, -1)
    off = inside - torch.diag_embed(torch.diagonal(inside, dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-3


def test_a_stack_is_its_matrices_one_by_one():
    stack = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(1))
    single = torch.cat([orthogonalize(matrix[None]) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack), single)


@pytest.mark.parametrize("shape", [(24, 24), (48, 24), (24, 48)])
def test_the_first_step_has_the_stated_size(shape):
    generator = torch.Generator().manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
    before = parameter.detach().clone()
    parameter.grad = torch.randn(shape, generator=generator)
    Muon([parameter], lr=0.1).step()
    values = torch.linalg.svdvals(before - parameter.detach()) / (0.1 * max(1.0, shape[0] / shape[1]) ** 0.5)
    assert 0.6 < values.median() < 1.3


def test_momentum_carries_on():
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([parameter], lr=0.1)
    parameter.grad = torch.eye(8)
    optimizer.step()
    after = parameter.detach().clone()
    parameter.grad = torch.zeros(8, 8)
    optimizer.step()
    assert (parameter.detach() - after).diagonal().max() < -0.05


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
