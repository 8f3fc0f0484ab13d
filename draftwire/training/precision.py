"""Chooses the type in which training multiplies."""

import torch

from draftwire.models.loading import cpu_multiplies_bfloat16


def fast_type(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where the device has instructions that multiply it, else float32, which is faster there."""
    return torch.bfloat16 if device.type != "cpu" or cpu_multiplies_bfloat16() else torch.float32
