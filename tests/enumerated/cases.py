"""The cases. Texts are certain up to the round in question, so that each has a few hundred runs at most."""

from dataclasses import replace

from tests.enumerated.network import Times
from tests.enumerated.scenes import Chosen, Scene, ahead
from tests.enumerated.tables import POSITIONS, Speed, certain_at, random_rows

from draftwire_gateway.config import LoopSettings

VOCAB = 3


def tables(*positions: int, seed: int = 1, vocab_size: int = VOCAB, num_drafters: int = 1):  # type: ignore[no-untyped-def]
    """Returns tables of a target and of drafters, random at these positions and certain at all others."""
    certain = [position for position in range(POSITIONS) if position not in positions]
    target = certain_at(random_rows(vocab_size, seed, 1.5), certain)
    drafts = [certain_at(random_rows(vocab_size, seed + 10 + n, 1.5), certain) for n in range(num_drafters)]
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
            name=f"{rounds_ahead} round(s) ahead, {branches} branches, a chooser that turns to plain",
            **tables(first, first + 1),
            length=first + 2,
            rounds_ahead=rounds_ahead,
            max_branches=branches,
            network={"times": slow_after(first, 0.050)},
            num_draft_tokens=2,
            chooser=lambda: Chosen({1: ahead(2)}),
            happens=frozenset({"asked as begun", "block ahead"}),
        )
    )
