"""The optimiser Muon, in a type that the device multiplies."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from draftwire.models.loading import cpu_multiplies_bfloat16

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the polynomial that brings every singular value near one, applied `STEPS` times."""
STEPS = 5
MOMENTUM = 0.95
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps by the momentum of the gradient, with all its singular values made about equal.

    What `torch.optim.Muon` does, which multiplies in bfloat16 alone: on CPUs without instructions for that, its steps
    took two thirds of a small head's training.

    Source: Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon/).
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        """Takes parameters of two dimensions; see `orthogonalised` for `dtype`."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # nothing here needs closures
        """Changes all parameters that have a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonalised(matrix.grad.lerp(momentum, MOMENTUM), self._dtype)
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a matrix with the same singular vectors and singular values between about 0.5 and 1.5.

    Args:
        matrix: `[rows, columns]`.
        dtype: that products are computed in, and that is returned.
    """
    scale, square, fourth = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    rows = (matrix.T if is_tall else matrix).to(dtype, copy=True)
    rows.div_(rows.norm().clamp(min=EPSILON))
    for _ in range(STEPS):
        gram = rows @ rows.T
        rows = torch.addmm(rows, torch.addmm(gram, gram, gram, beta=square, alpha=fourth), rows, beta=scale)
    return rows.T if is_tall else rows


def fast_type(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where the device has instructions that multiply it, else float32, which is faster there."""
    return torch.bfloat16 if device.type != "cpu" or cpu_multiplies_bfloat16() else torch.float32
