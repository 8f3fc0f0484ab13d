"""Cases of blocks that end before a place of which the drafter is not sure, some of them before their first."""

import asyncio
from dataclasses import replace

from tiny_models import tiny_compiler

from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.statistics import Statistics
from tests.enumerated.network import Ids, Network
from tests.enumerated.scenes import Chosen, Scene, slow_after, tables
from tests.enumerated.tables import random_rows

UNSURE = frozenset({"unsure", "plain: unsure", "rejection"})
FORM = StructuredOutput.regex("[ab]{2}c?")
STOP = 3


def in_form(text: list[int]) -> tuple[int, ...]:
    """Returns what may follow in a text of `FORM`."""
    return {0: (0, 1), 1: (0, 1), 2: (2, STOP)}.get(len(text), (STOP,))


async def of_two_kinds(scene: Scene, network: Network) -> tuple[Ids, Statistics]:
    """Returns two texts that are generated at once, of drafts that end where they are not sure, and that never do."""
    stops = (scene.fields["stop_below"], 0.0)
    (one, statistics), (other, _) = await asyncio.gather(
        *(network.generate(scene.generation(seed=5 + place, stop_below=stop)) for place, stop in enumerate(stops))
    )
    return (*one, *other), statistics


UNSURE_CASES: list[Scene] = [
    Scene(
        name="unsure, block",
        **tables(2, 3, 4),
        length=5,
        num_draft_tokens=3,
        fields={"stop_below": 0.7},
        happens=UNSURE | {"whole block"},
    ),
    Scene(
        name="unsure, token",
        **tables(2, 3, seed=7),
        length=4,
        num_draft_tokens=2,
        rule="token",
        fields={"stop_below": 0.6},
        happens=frozenset({"unsure", "whole block", "rejection"}),
    ),
    Scene(
        name="unsure behind a token",
        **tables(3, 4, seed=7),
        length=5,
        num_draft_tokens=3,
        fields={"stop_below": 0.6},
        happens=frozenset({"unsure", "whole block", "rejection"}),
    ),
    Scene(
        name="unsure, coupled",
        **tables(2, 3, 4, vocab_size=2),
        length=5,
        num_draft_tokens=2,
        rule="coupled",
        fields={"stop_below": 0.75},
        happens=UNSURE | {"whole block"},
    ),
    Scene(
        name="unsure, of a drafter slow after a token",
        **tables(2, 3, seed=7),
        length=5,
        num_draft_tokens=3,
        network={"times": slow_after(2, 1.5)},
        fields={"stop_below": 0.6},
        happens=frozenset({"unsure", "flush", "reply", "whole block", "rejection"}),
    ),
    Scene(
        name="unsure, beside one that never ends so",
        **tables(3, seed=7),
        length=4,
        num_texts=2,
        num_draft_tokens=2,
        work=of_two_kinds,
        fields={"stop_below": 0.8},
        happens=frozenset({"unsure", "whole block", "rejection"}),
    ),
    Scene(
        name="unsure, 1 ahead",
        **tables(4, 5, 6),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"times": slow_after(5)},
        fields={"stop_below": 0.7},
        happens=UNSURE | {"hit", "miss"},
    ),
    Scene(
        name="unsure, turning to plain",
        **tables(5, 6),
        length=7,
        num_draft_tokens=2,
        network={"times": replace(slow_after(5), to_gateway_s=0.003)},
        chooser=lambda: Chosen({1: Arm(DraftSource.DRAFTER, 2)}),
        fields={"stop_below": 0.7},
        happens=frozenset({"unsure", "asked as begun", "outcome", "rejection"}),
    ),
    Scene(
        name="unsure of the first place, turning to plain",
        **tables(2, 5, 6, seed=2),
        length=7,
        num_draft_tokens=2,
        network={"times": replace(slow_after(5), to_gateway_s=0.003)},
        chooser=lambda: Chosen({1: Arm(DraftSource.DRAFTER, 2)}),
        fields={"stop_below": 0.45},
        happens=frozenset({"plain: unsure", "asked as begun", "outcome"}),
    ),
    Scene(
        name="unsure, a drafter lost, and replaced",
        **tables(4, 5, seed=4, num_drafters=2),
        length=7,
        num_draft_tokens=3,
        network={"times": slow_after(4)},
        plot=lambda network: network.after(0.0305, network.drafters[0].lose),
        fields={"stop_below": 0.7},
        happens=frozenset({"plain: unsure", "drafter lost", "rejection"}),
    ),
    Scene(
        name="unsure, a verifier lost",
        **tables(4, 5),
        length=6,
        num_draft_tokens=2,
        network={"num_verifiers": 2, "times": slow_after(4)},
        plot=lambda network: network.after(0.0305, network.verifiers[0].lose),
        fields={"stop_below": 0.7},
        happens=UNSURE | {"verifier lost"},
        is_slow=True,
    ),
    Scene(
        name="unsure, a form",
        target=random_rows(4, 3),
        drafts=(random_rows(4, 4),),
        length=4,
        num_draft_tokens=2,
        sampling=SamplingParams(structured_output=FORM),
        stop_token_ids=frozenset({STOP}),
        possible=in_form,
        network={"compiler": tiny_compiler(["a", "b", "c", "."], 4, [STOP])},
        fields={"stop_below": 0.45},
        happens=UNSURE | {"whole block"},
    ),
    Scene(
        name="unsure, penalties and a least length",
        **tables(2, 3, 4),
        length=5,
        num_draft_tokens=2,
        sampling=SamplingParams(0.8, presence_penalty=0.7, repetition_penalty=1.3, min_tokens=4),
        stop_token_ids=frozenset({2}),
        fields={"stop_below": 0.7},
        happens=UNSURE | {"whole block"},
        is_slow=True,
    ),
]
