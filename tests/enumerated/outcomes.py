"""Cases of rounds that a drafter begins on the verifier's outcome, and that go on otherwise than it takes them to."""

import asyncio
from dataclasses import replace

from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.statistics import Statistics
from tests.enumerated.network import Ids, Network
from tests.enumerated.scenes import Chosen, Scene, slow_after, tables

FIRST = 5
"""Position of the first token of the round that may have begun: the one before is certain, and commits two drafts."""


async def after_one_that_is_given_up(scene: Scene, network: Network) -> tuple[Ids, Statistics]:
    """Returns a text that is generated after another one, whose request was cancelled while it was drafted for."""
    given_up = asyncio.create_task(network.generate(scene.generation(seed=6)))
    await asyncio.sleep(0.040)
    given_up.cancel()
    return await network.generate(scene.generation())


def turning(name: str, *arms: Arm) -> Scene:
    """A chooser wants these arms for the rounds from the second one on, and then plain decoding."""
    return Scene(
        name=name,
        **tables(FIRST, FIRST + 1),
        length=FIRST + 2,
        num_draft_tokens=2,
        network={"times": replace(slow_after(FIRST), to_gateway_s=0.003)},
        chooser=lambda: Chosen(dict(enumerate(arms, 1))),
        happens=frozenset({"asked as begun", "outcome", "rejection"}),
    )


OUTCOME_CASES: list[Scene] = [
    turning("on outcomes, turning to plain", Arm(DraftSource.DRAFTER, 2)),
    turning("on outcomes, turning to another length", Arm(DraftSource.DRAFTER, 2), Arm(DraftSource.DRAFTER, 1)),
    turning("on outcomes, turning to drafts ahead", Arm(DraftSource.DRAFTER, 2), Arm(DraftSource.AHEAD, 1)),
    Scene(
        name="on outcomes, a verifier lost before the calibration",
        **tables(FIRST, FIRST + 1),
        length=FIRST + 2,
        num_draft_tokens=2,
        network={"num_verifiers": 2, "times": slow_after(FIRST)},
        plot=lambda network: network.after(0.0305, network.verifiers[0].lose),
        happens=frozenset({"verifier lost", "outcome", "rejection"}),
    ),
    Scene(
        name="on outcomes, a stop string",
        **tables(3, 4, 5),
        length=7,
        num_draft_tokens=2,
        network={"times": slow_after(4)},
        fields={"stop": ("c",)},
        happens=frozenset({"outcome", "wasted", "whole block", "rejection"}),
    ),
    Scene(
        name="on outcomes, a drafter whose context is full",
        **tables(3, 4, 5),
        length=6,
        num_draft_tokens=2,
        network={"times": slow_after(4), "draft_context": 6},
        happens=frozenset({"outcome", "plain: no_room", "rejection"}),
    ),
    Scene(
        name="on outcomes, after a text that was given up",
        **tables(FIRST),
        length=FIRST + 2,
        num_draft_tokens=2,
        network={"times": slow_after(FIRST)},
        work=after_one_that_is_given_up,
        happens=frozenset({"outcome", "whole block", "rejection"}),
        is_slow=True,
    ),
]
