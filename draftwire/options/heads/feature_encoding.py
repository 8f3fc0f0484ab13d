"""Rows of features as bytes. On the torch thread."""

import numpy as np
import torch
from torch import Tensor

from draftwire.options.heads.feature_format import FeatureEncoding

LARGEST = 448.0
"""Largest number of e4m3."""
_TYPES = {
    FeatureEncoding.FLOAT32: torch.float32,
    FeatureEncoding.BFLOAT16: torch.bfloat16,
    FeatureEncoding.FLOAT8: torch.float8_e4m3fn,
}


def encode_rows(rows: Tensor, encoding: FeatureEncoding) -> tuple[bytes, bytes]:
    """Returns `[count, size]` rows, floating point on any device, and their scales as bytes; no scales but for
    `FLOAT8`.
    """
    if encoding is not FeatureEncoding.FLOAT8:
        return _bytes_of(rows.to(_TYPES[encoding])), b""
    rows = rows.float()
    # By row: an outlier in one token's features leaves those of others as precise as they are.
    scales = (rows.abs().amax(dim=-1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return _bytes_of((rows / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)), _bytes_of(scales)


def decode_rows(rows: bytes, scales: bytes, count: int, encoding: FeatureEncoding) -> Tensor:
    """Returns `[count, size] float32` rows on the CPU.

    Args:
        rows: encoded; as many bytes for each row.
        scales: of the rows, of the encodings that have them.
        count: rows, at least 1.
        encoding: of the bytes.
    """
    numbers = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(_TYPES[encoding]).view(count, -1).float()
    if encoding is not FeatureEncoding.FLOAT8:
        return numbers
    return numbers * torch.frombuffer(bytearray(scales), dtype=torch.float32).unsqueeze(-1)


def _bytes_of(tensor: Tensor) -> bytes:
    return np.asarray(tensor.contiguous().cpu().view(torch.uint8)).tobytes()
