"""Drafters of this process that lie, for as long as a test wants."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from draftwire.drafting.drawing import Drawer
from draftwire.drafting.strategy import Draft
from draftwire.engine.draft_session import DraftSession
from draftwire.method.distributions import QuantizedRows
from draftwire.method.rounds import Calibration, DraftSessionSpec, Permit
from draftwire_drafter.scheduler import Scheduler

CORRUPTED_TEMPERATURE = 0.875
"""Requests of this temperature get corrupted blocks, others honest ones."""


def argmax(patch: pytest.MonkeyPatch) -> None:
    """Takes the likeliest token, and sends its distribution as if the token had been drawn."""
    patch.setattr(QuantizedRows, "draw", lambda self, uniforms: self.token_ids[:, 0])


def too_cold(patch: pytest.MonkeyPatch) -> None:
    """Draws at a lower temperature than it declares."""

    def draw(self: QuantizedRows, uniforms: Tensor) -> Tensor:
        cumulated = self.weights.double().pow(2.0).cumsum(dim=1)
        places = (cumulated <= uniforms.unsqueeze(1) * cumulated[:, -1:]).sum(dim=1, keepdim=True)
        return self.token_ids.gather(1, places).squeeze(1)

    patch.setattr(QuantizedRows, "draw", draw)


def corrupt(patch: pytest.MonkeyPatch) -> None:
    """Sends weights that do not sum to 65,536, in some sessions."""
    honest = Drawer.drafts

    def drafts(self: Drawer) -> list:
        result = []
        for block, draft in zip(self.blocks, honest(self), strict=True):
            if isinstance(draft, Draft) and block.request.sampling.temperature == CORRUPTED_TEMPERATURE:
                stated = draft.distributions
                data = stated.data[:-2] + bytes([stated.data[-2] ^ 1, stated.data[-1]])
                draft = replace(draft, distributions=replace(stated, data=data))
            result.append(draft)
        return result

    patch.setattr(Drawer, "drafts", drafts)


def forge(patch: pytest.MonkeyPatch) -> None:
    """Shows permits of numbers that it was not given."""
    honest, honest_calibrate = Scheduler.open, Scheduler.calibrate

    def forged(permit: Permit | None) -> Permit | None:
        return None if permit is None else replace(permit, number=permit.number + 1)

    def forged_open(self: Scheduler, spec: DraftSessionSpec, *rest: Any) -> DraftSession:
        return honest(self, replace(spec, permit=forged(spec.permit)), *rest)

    def forged_calibrate(self: Scheduler, calibration: Calibration) -> None:
        honest_calibrate(self, replace(calibration, permit=forged(calibration.permit)))

    patch.setattr(Scheduler, "open", forged_open)
    patch.setattr(Scheduler, "calibrate", forged_calibrate)


@contextmanager
def lying(way: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    """Makes drafters lie in one of these ways."""
    with pytest.MonkeyPatch.context() as patch:
        way(patch)
        yield
