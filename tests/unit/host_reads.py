"""Counts where code waits for a device, without one: a tensor's numbers are read on the host.

To index by a tensor of bools waits too, and is not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

READERS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yields a list to which every such read adds its name."""
    found: list[str] = []

    def noting(name: str, read: Any) -> Any:
        def noted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            found.append(name)
            return read(tensor, *arguments, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in READERS:
            patch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        yield found
