"""The cases. Texts are certain up to the round in question, so that each has a few hundred runs at most."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.enumerated.network import Times
from tests.enumerated.scenes import Chosen, Scene, ahead
from tests.enumerated.tables import POSITIONS, Speed, certain_at, random_rows

from draftwire_gateway.config import LoopSettings

VOCAB = 3
LATE = 5
"""Position of the round that is late, of cases in which a drafter falls asleep."""


def tables(
    *positions: int, seed: int = 1, vocab_size: int = VOCAB, num_drafters: int = 1, wrong: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns tables of a target and of drafters, random at these positions and certain at all others; the drafters'
    are certain of another token at the `wrong` ones.
    """
    certain = [position for position in range(POSITIONS) if position not in positions]
    target = certain_at(random_rows(vocab_size, seed, 1.5), certain)
    drafts = []
    for number in range(num_drafters):
        rows = certain_at(random_rows(vocab_size, seed + 10 + number, 1.5), certain)
        # The target's token is the drafter's next guess, too unlikely to be drawn: see `Quantization.mass`.
        rows[list(wrong)] = 0.999 * rows[list(wrong)].roll(1, dims=2) + 0.001 * rows[list(wrong)]
        drafts.append(rows)
    return {"target": target, "drafts": tuple(drafts)}


def slow_after(position: int, seconds: float, tokens: tuple[int, ...] = (1,)) -> Times:
    """Times of a drafter whose pass takes longer after some tokens at a position."""
    return Times(drafter=Speed(0.001, frozenset((position, token) for token in tokens), seconds))



CASES: list[Scene] = []
for rule in ("block", "token"):
    CASES.append(
        Scene(
            name=f"chains, {rule}",
            **tables(2, 3, 4),
            length=5,
            num_draft_tokens=2,
            rule=rule,
            happens=frozenset({"whole block", "rejection"}),
        )
    )
for rounds_ahead, branches in ((1, 1), (1, 4), (2, 2), (2, 4)):
    first = 5 if rounds_ahead == 1 else 8
    CASES.append(
        Scene(
            name=f"{rounds_ahead} ahead, {branches} branches, turning to plain",
            **tables(first, first + 1),
            length=first + 2,
            num_draft_tokens=2,
            rounds_ahead=rounds_ahead,
            max_branches=branches,
            network={"times": slow_after(first, 0.050)},
            chooser=lambda: Chosen({1: ahead(2)}),
            happens=frozenset({"asked as begun", "hit", "late ahead"}),
        )
    )
CASES.append(
    Scene(
        name="a drafter slow after a token",
        **tables(2, 3),
        length=5,
        num_draft_tokens=3,
        network={"times": slow_after(2, 1.5)},
        happens=frozenset({"flush", "reply", "whole block", "rejection"}),
    )
)
for bridge, rounds_ahead in ((1, 1), (2, 1), (1, 2), (2, 2)):
    # The drafter is frozen when it has sent the first block, and wakes while the run goes on that takes its place. The
    # gateway hears of that later. Each round of the run commits a token that the drafter has guessed in the place of its
    # own: so it has drafted for the text of the round after the last that it may begin, if its tokens are fast.
    first = LATE + rounds_ahead
    CASES.append(
        Scene(
            name=f"asleep, and awake in a run, bridge {bridge}, {rounds_ahead} ahead",
            **tables(first, first + 1, wrong=range(LATE, first)),
            length=first + 3,
            num_draft_tokens=2,
            rounds_ahead=rounds_ahead,
            max_branches=2 * rounds_ahead,
            network={
                "times": replace(slow_after(first, 0.050), from_drafter_s=0.100),
                "settings": LoopSettings(bridge_rounds=bridge),
                "frozen": (0.0195, 0.385),
                "acceptance": 0.05,
            },
            happens=frozenset({"plain: late", "long run", "block ahead"}),
        )
    )
