"""Linear layers over a handful of rows, as fast as the weights can be read.

On a CPU, matrix products of 2 to 16 rows with weights as models store them take three to five times as long as reading
the weights does: they are rearranged anew in every call. Here they are rearranged once. `benchmarks/linear.py` measures
it: on two cores with float32 weights of 1,024 x 4,096, 0.42 instead of 0.84 ms for one row, 0.49 instead of 1.89 ms for
nine.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

TYPICAL_ROWS = 8
"""Number of rows that the arrangement is chosen for. What is chosen for one row is slow for more."""


class Linear:
    """A linear layer, or several that read the same input, one behind the other."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Takes `[outputs, inputs]` weights, copied only if they are rearranged, and `[outputs]` biases."""
        self.bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS) if self._is_packed else weight

    @classmethod
    def of(cls, *layers: torch.nn.Linear) -> "Linear":
        """Takes over layers of torch. The weights of a single one are shared with it unless they are rearranged."""
        weights, biases = [layer.weight.detach() for layer in layers], [layer.bias for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return cls(weight, None if biases[0] is None else torch.cat([bias.detach() for bias in biases]))

    def weight(self) -> Tensor:
        """Returns the weights as they were given, `[outputs, inputs]`; a copy if they were rearranged."""
        return self._weight.to_dense() if self._is_packed else self._weight

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns `[num_rows, outputs]` for `[num_rows, inputs]`."""
        if self._is_packed:
            product: Tensor = _PRODUCT(rows, self._weight, self.bias, "none", [], "")
            return product
        return linear(rows, self._weight, self.bias)


_PRODUCT: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def _can_pack(weight: Tensor) -> bool:
    """Whether this machine has a library that multiplies with rearranged weights of this type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32
