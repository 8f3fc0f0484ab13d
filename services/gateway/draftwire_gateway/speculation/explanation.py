"""What is expected of each way to draft, and which is chosen by that: a read-only view for users."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftwire_gateway.session.policy import PLAIN, Arm
from draftwire_gateway.speculation.pair_model import Load, load_of
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser


class RoundParts(NamedTuple):
    """Parts of a round's time, seconds."""

    verify_s: float
    """The verifier's step."""
    draft_s: float
    """The drafter's passes."""
    between_s: float
    """What lies between: messages, and waiting for each other; below 0 where steps overlap."""


@dataclass(frozen=True, slots=True)
class WayEstimate:
    """What is expected of one way."""

    arm: Arm
    tokens_per_round: float
    parts: RoundParts
    """Of a round's time."""
    share: float
    """What sessions make of that, as far as it was measured: they wait, and drafters read their texts."""
    num_rounds: int
    """Rounds of all sessions in which it was measured lately; 0 if its time is inferred from other ways."""


@dataclass(frozen=True, slots=True)
class LoadExplanation:
    """What is chosen at one load, and by what."""

    min_sessions: int
    max_sessions: int
    arm: Arm
    """The chosen one."""
    ways: Sequence[WayEstimate]
    """Plain decoding, and each length of each source; empty before a step of the verifier was measured."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the sessions of a pair draft, and why."""

    num_sessions: int
    """Of the pair."""
    loads: Sequence[LoadExplanation]
    """Each load that there was."""


def explain(chooser: PredictingChooser) -> Explanation:
    """Returns what a chooser chooses by."""
    loads = sorted(chooser.model.loads.items())
    return Explanation(chooser.num_sessions, tuple(_explained(chooser, load, known) for load, known in loads))


def _explained(chooser: PredictingChooser, load: int, known: Load) -> LoadExplanation:
    is_now = load == load_of(chooser.num_sessions)
    return LoadExplanation(
        min_sessions=math.floor(2 ** (load - 1.0 / 2.0)) + 1,
        max_sessions=math.floor(2 ** (load + 1.0 / 2.0)),
        arm=chooser.arm if is_now else known.arm or PLAIN,
        ways=_ways(chooser, 2**load, known) if chooser.model.verifier.is_known else (),
    )


def _ways(chooser: PredictingChooser, num_sessions: int, known: Load) -> Sequence[WayEstimate]:
    expected, ways = chooser.rates(num_sessions), []
    for arm in chooser.arms:
        steps_s = chooser.model.steps_s(arm, known, num_sessions)
        parts = RoundParts(*steps_s, chooser.model.round_s(arm, num_sessions, chooser.now) - sum(steps_s))
        accepted = 1.0 if arm.source is None else sum(chooser.acceptance[arm.source].survival(arm.length))
        measured = known.between_s.get(arm)
        num_rounds = 0 if measured is None else round(measured.weight(chooser.now))
        ways.append(WayEstimate(arm, accepted, parts, expected[arm] * sum(parts) / accepted, num_rounds))
    return ways
