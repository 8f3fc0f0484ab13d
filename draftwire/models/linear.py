"""Linear layers for a few rows, as fast as the weights can be read from memory.

On a CPU, matrix products of 2 to 16 rows with weights in the models' layout take three to five times as long as reading
the weights: every call packs the weights anew. Here they are packed once. `benchmarks/linear.py` measures it: on two
cores with float32 weights of 1,024 x 4,096, 0.65 instead of 1.01 ms for one row, 0.78 instead of 2.29 ms for nine.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

TYPICAL_ROWS = 8
"""Number of rows that the packed layout is chosen for. A layout chosen for one row is slow for more."""


def least_rows(capability: str, cpu_info: str) -> int:
    """Returns the number of rows as of which products with streamed weights are computed, if they have fewer.

    The library's kernels for one row and two do not keep up with the memory on AMD's CPUs with AVX-512. On Intel's they
    do, as those for AVX2, and more rows would take longer.

    Args:
        capability: instructions that torch uses, such as "AVX512".
        cpu_info: beginning of /proc/cpuinfo.
    """
    return 6 if capability == "AVX512" and "AuthenticAMD" in cpu_info else 1


def _cpu_info() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""


LEAST_ROWS = least_rows(torch.backends.cpu.get_cpu_capability(), _cpu_info())

STREAMED_BYTES = 2**27
"""The weights of a larger model are streamed: its products take as long as reading them. Those of smaller models are
short, whether they stay in the caches from step to step or not, and more rows make them longer."""

LEAST_PACKED_BYTES = 2**19
"""Smaller weights are packed only if they are streamed: else a call of the library takes longer than the product."""


def is_streamed(model: torch.nn.Module) -> bool:
    """Whether the time of a step is that of reading the model's weights from memory."""
    return sum(weight.nbytes for weight in model.parameters()) > STREAMED_BYTES


class Linear:
    """A linear layer, or several with the same input, fused in this order."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, streamed: bool) -> None:
        """Wraps `[outputs, inputs]` weights, copied only if they are packed, and `[outputs]` biases."""
        self.bias, self.streamed = bias, streamed
        self._is_packed = _can_pack(weight) and (streamed or weight.nbytes >= LEAST_PACKED_BYTES)
        self.least_rows = LEAST_ROWS if self._is_packed and streamed else 1
        """Number of rows below which `repeated` rows cost nothing."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS) if self._is_packed else weight

    @classmethod
    def of(cls, *layers: torch.nn.Linear, streamed: bool) -> "Linear":
        """Fuses layers of torch. The weights of a single layer are shared with it unless they are packed."""
        weights, biases = [layer.weight.detach() for layer in layers], [layer.bias for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        return cls(weight, bias, streamed=streamed)

    def weight(self) -> Tensor:
        """Returns the weights in the original layout, `[outputs, inputs]`; a copy if they were packed."""
        return self._weight.to_dense() if self._is_packed else self._weight

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns `[num_rows, outputs]` for `[num_rows, inputs]`."""
        if self._is_packed:
            product: Tensor = _PRODUCT(repeated(rows, self.least_rows), self._weight, self.bias, "none", [], "")
            return product if len(product) == len(rows) else product[: len(rows)]
        return linear(rows, self._weight, self.bias)


def repeated(rows: Tensor, count: int) -> Tensor:
    """Returns a tensor's rows, over and over, until there are `count`; all of them if there are more, or none."""
    own = len(rows)
    if own >= count or not own:
        return rows
    return torch.cat([rows] * -(-count // own))[:count]  # in fewer operations than `repeat`


_PRODUCT: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def _can_pack(weight: Tensor) -> bool:
    """Whether this machine has a library that multiplies with packed weights of this type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32
