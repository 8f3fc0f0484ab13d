"""The optimiser of matrices steps as torch's own does, in float32 too."""

import pytest
import torch
from torch import nn

from draftwire.training.muon import Muon, orthogonalised

SHAPES = ((6, 10), (10, 6), (8, 8))


def trained(kind: str) -> list[torch.Tensor]:
    """Returns matrices after some steps on the gradients of a fixed loss, whose rate changes."""
    generator = torch.Generator().manual_seed(1)
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    aims = [torch.randn(shape, generator=generator) for shape in SHAPES]
    optimizer: torch.optim.Optimizer
    if kind == "torch":
        optimizer = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, nesterov=True)
    else:
        optimizer = Muon(matrices, lr=0.02, weight_decay=0.01, dtype=getattr(torch, kind))
    for rate in (0.02, 0.05, 0.01):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = sum((matrix @ aim.T).square().mean() for matrix, aim in zip(matrices, aims, strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [matrix.detach() for matrix in matrices]


def test_steps_in_bfloat16_are_those_of_torch() -> None:
    for own, other in zip(trained("bfloat16"), trained("torch"), strict=True):
        assert torch.equal(own, other)


def test_steps_in_float32_differ_by_rounding_alone() -> None:
    for own, other in zip(trained("float32"), trained("torch"), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-3)  # three steps of at most 0.05, of 8 bits


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_equal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before = matrix.clone()
    found = orthogonalised(matrix, torch.float64)
    assert torch.equal(matrix, before)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.T @ found @ right.T
    diagonal = values.diagonal()
    assert ((diagonal > 0.4) & (diagonal < 1.6)).all()
    torch.testing.assert_close(values, diagonal.diag(), rtol=0, atol=1e-9)
