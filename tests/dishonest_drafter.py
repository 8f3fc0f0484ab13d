"""A drafter service that lies: `python -m tests.dishonest_drafter WAY --model FOLDER --port PORT ...`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwire.distributions import QuantizedRows
from draftwire.drafting.drawing import Drawer
from draftwire.drafting.strategy import Draft
from draftwire.rounds import DraftSessionSpec
from draftwire.services.drafter.scheduler import DraftSession, Scheduler
from draftwire.services.options import main

CORRUPTED_TEMPERATURE = 0.875
"""Requests of this temperature get corrupted blocks, others honest ones."""


def argmax() -> None:
    """Takes the likeliest token, and sends its distribution as if the token had been drawn."""
    QuantizedRows.draw = lambda self, uniforms: self.token_ids[:, 0]


def too_cold() -> None:
    """Draws at a lower temperature than it declares."""

    def draw(self: QuantizedRows, uniforms: Tensor) -> Tensor:
        cumulated = self.weights.double().pow(2.0).cumsum(dim=1)
        places = (cumulated <= uniforms.unsqueeze(1) * cumulated[:, -1:]).sum(dim=1, keepdim=True)
        return self.token_ids.gather(1, places).squeeze(1)

    QuantizedRows.draw = draw


def corrupt() -> None:
    """Sends weights that do not sum to 65,536, in some sessions."""
    honest = Drawer.drafts

    def drafts(self: Drawer) -> list:
        result = []
        for block, draft in zip(self._blocks, honest(self), strict=True):
            if isinstance(draft, Draft) and block.request.sampling.temperature == CORRUPTED_TEMPERATURE:
                stated = draft.distributions
                data = stated.data[:-2] + bytes([stated.data[-2] ^ 1, stated.data[-1]])
                draft = replace(draft, distributions=replace(stated, data=data))
            result.append(draft)
        return result

    Drawer.drafts = drafts


def forge() -> None:
    """Shows permits of numbers that it was not given."""
    honest = Scheduler.open

    def forged_open(self: Scheduler, spec: DraftSessionSpec, *rest: Any) -> DraftSession:
        return honest(self, replace(spec, permit=replace(spec.permit, number=spec.permit.number + 1)), *rest)

    Scheduler.open = forged_open


WAYS: dict[str, Callable[[], None]] = {"argmax": argmax, "too_cold": too_cold, "corrupt": corrupt, "forge": forge}

if __name__ == "__main__":
    WAYS[sys.argv.pop(1)]()
    torch.set_num_threads(1)
    main("drafter")
