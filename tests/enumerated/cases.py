"""The cases. Texts are certain up to the round in question, so that each has a few hundred runs at most."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from tests.enumerated.network import Ids, Network, Times
from tests.enumerated.scenes import PROMPT, Chosen, Scene, ahead
from tests.enumerated.tables import POSITIONS, Speed, certain_at, random_rows
from tiny_models import tiny_compiler
from toy_heads import ToyHead

from benchmarks.pair_simulation import round_times
from draftwire.drafting.heads.head_drafter import HeadDrafter
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire_gateway.config import LoopSettings
from draftwire_gateway.session import generation
from draftwire_gateway.session.generation import RequestedGeneration, SpeculationDefaults, complete_request
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.speculation.arms import DraftSource
from draftwire_gateway.speculation.pairs import PairName, Pairs

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
CASES += [
    Scene(
        name="1 ahead, a guess that is right or wrong",
        **tables(4, 5),
        length=6,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=1,
        happens=frozenset({"hit", "miss", "rejection"}),
    ),
]
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
for bridge, rounds_ahead in ((1, 1), (2, 2)):
    # As before, but the gateway loses the drafter, which does not hear of it, and another one takes over.
    first = LATE + rounds_ahead
    CASES.append(
        Scene(
            name=f"lost with a block under way, and replaced, bridge {bridge}, {rounds_ahead} ahead",
            **tables(first, first + 1, wrong=range(LATE, first), num_drafters=2),
            length=first + 2,
            num_draft_tokens=2,
            rounds_ahead=rounds_ahead,
            max_branches=2 * rounds_ahead,
            network={
                "times": slow_after(first, 0.050),
                "settings": LoopSettings(bridge_rounds=bridge),
                "frozen": (0.0195, 0.049),
                "acceptance": 0.05,
            },
            plot=lambda network: network.after(0.045, network.drafters[0].lose),
            happens=frozenset({"drafter lost", "plain: warming_up", "long run", "block ahead"}),
        )
    )
CASES += [
    Scene(
        name="a verifier lost in a run",
        **tables(2, 3, 4, num_drafters=0),
        length=5,
        network={"num_verifiers": 2},
        plot=lambda network: network.after(0.027, network.verifiers[0].lose),
        happens=frozenset({"verifier lost"}),
    ),
    Scene(
        name="a verifier lost with a block ahead",
        **tables(5, 6),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"num_verifiers": 2, "times": slow_after(5, 0.050)},
        plot=lambda network: network.after(0.033, network.verifiers[0].lose),
        happens=frozenset({"verifier lost", "block ahead"}),
    ),
    Scene(
        name="overflow on both sides",
        **tables(2, 3),
        length=4,
        num_draft_tokens=2,
        network={"bad_targets": frozenset({(2, 1)}), "bad_drafts": frozenset({(2, 2), (2, 1)})},
        happens=frozenset({"failure", "whole block", "rejection"}),
    ),
    Scene(
        name="overflow on both sides, 1 ahead",
        **tables(5, 6),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"bad_targets": frozenset({(5, 1)}), "bad_drafts": frozenset({(5, 2), (5, 1)})},
        happens=frozenset({"failure", "hit", "rejection"}),
    ),
    Scene(
        name="penalties",
        **tables(2, 3, 4),
        length=5,
        num_draft_tokens=2,
        sampling=SamplingParams(0.8, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
        happens=frozenset({"whole block", "rejection"}),
    ),
    Scene(
        name="trees that are drawn",
        **tables(2, 3),
        length=4,
        num_draft_tokens=2,
        num_draft_nodes=3,
        happens=frozenset({"tree", "rejection"}),
    ),
    Scene(
        name="trees that are walked",
        **tables(2, 3, 4, vocab_size=2),
        length=5,
        num_draft_tokens=2,
        num_draft_nodes=3,
        rule="coupled",
        happens=frozenset({"tree", "rejection"}),
    ),
    Scene(
        name="chains, coupled",
        **tables(2, 3, 4, 5, vocab_size=2),
        length=6,
        num_draft_tokens=2,
        rule="coupled",
        happens=frozenset({"whole block", "rejection"}),
    ),
    Scene(
        name="a head in the verifier",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        network={"head": lambda model: HeadDrafter(ToyHead(VOCAB), model), "head_names": ("eagle3",)},
        fields={"local_strategies": ("eagle3",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    ),
]
FORM = StructuredOutput.regex("[ab]{2}c?")
STOP = 3


def in_form(text: list[int]) -> tuple[int, ...]:
    """Returns what may follow in a text of `FORM`."""
    return {0: (0, 1), 1: (0, 1), 2: (2, STOP)}.get(len(text), (STOP,))


CASES.append(
    Scene(
        name="a form, whose drafter is slow after a token",
        target=random_rows(4, 3),
        drafts=(random_rows(4, 4),),
        length=4,
        num_draft_tokens=2,
        sampling=SamplingParams(structured_output=FORM),
        stop_token_ids=frozenset({STOP}),
        possible=in_form,
        network={"compiler": tiny_compiler(["a", "b", "c", "."], 4, [STOP]), "times": slow_after(2, 1.5)},
        happens=frozenset({"whole block", "rejection"}),
    )
)


async def again(scene: Scene, network: Network, seeds: tuple[int | None, int | None]) -> tuple[Ids, Statistics]:
    """Returns the second of two texts of equal requests, but for their seeds, whose texts may be guessed from others."""
    defaults = SpeculationDefaults(scene.num_draft_tokens, 8, scene.rule, local_strategies=("suffix",))
    ids, statistics = (), Statistics()
    with mock.patch.object(generation, "new_seed", itertools.count(100).__next__):
        for seed in seeds:
            request = RequestedGeneration([PROMPT], scene.sampling, "", max_tokens=scene.length, seed=seed)
            (one,) = complete_request(request, network.verifiers[0].description, defaults)
            ids, statistics = await network.generate(one)
            await asyncio.sleep(1.0)
    return ids, statistics


for name, seeds, happens in (
    ("texts guessed from others", (None, None), {"guess", "whole block"}),
    ("a text of a seed guessed from others", (None, 7), {}),
    ("a request sent again with its seed", (7, 7), {}),
):
    CASES.append(
        Scene(
            name=name,
            **tables(3, 4, num_drafters=0),
            length=5,
            num_draft_tokens=2,
            network={"make_texts": partial(TextDrafters, max_shared_tokens=1000)},
            work=partial(again, seeds=seeds),
            happens=frozenset(happens),
        )
    )


def taught(num_rounds: int) -> Pairs:
    """Returns the shipped choosers after rounds of another session, in which drafting ahead was the fastest."""
    pairs, now = Pairs(2, 2), -4.0 * num_rounds
    other = pairs.session_length(PairName("verifier0:1", "drafter", can_go_ahead=True))
    for number in range(num_rounds):
        arm = other.next_draft(number, 4, now)
        ended_at = now + (3.5 if arm.source is DraftSource.AHEAD else 4.0)
        other.observe(round_times(number, now, ended_at, arm.length, arm.length, 0.1, 0.1))
        now = ended_at
    other.close()
    return pairs


CASES += [
    Scene(
        name=f"the shipped chooser, after {num_rounds} rounds",
        **tables(8, 9),
        length=12,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"times": slow_after(8, 0.050)},
        chooser=partial(taught, num_rounds),
        happens=frozenset({"asked as begun", "hit", "late ahead"}),
    )
    for num_rounds in (4, 9)
]
