"""The cases. Texts are certain up to the round in question, so that each has a few hundred runs at most."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from tiny_models import tiny_compiler
from torch import Tensor
from toy_heads import ToyHead

from benchmarks.pair_simulation import round_times
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.method.round_parts import StepSize
from draftwire.models.sequence_model import Reading
from draftwire.options.draft_model.draft_model_name import DRAFT_MODEL
from draftwire.options.draft_model.model_drafts import ModelDrafts
from draftwire.options.heads.head_drafter import HeadDrafter
from draftwire.options.heads.head_drafts import HeadDrafts
from draftwire.options.model_free.registry import TextDrafters
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire_gateway import requested_generation
from draftwire_gateway.requested_generation import RequestedGeneration, SpeculationDefaults, complete_request
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.policy import DraftSource
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.speculation.pairs import PairName, Pairs
from tests.enumerated.network import Ids, Network
from tests.enumerated.outcomes import OUTCOME_CASES
from tests.enumerated.scenes import PROMPT, VOCAB, Chosen, Scene, ahead, slow_after, tables
from tests.enumerated.tables import POSITIONS, PlacedTable, Speed, random_rows
from tests.enumerated.unsure import UNSURE_CASES

LATE = 5
"""Position of the round that is late, of cases in which a drafter falls asleep or is lost."""
FORM = StructuredOutput.regex("[ab]{2}c?")
STOP = 3
"""The token that ends a text of the form."""


async def together(scene: Scene, network: Network) -> tuple[Ids, Statistics]:
    """Returns two texts that are generated at the same time, one after the other."""
    (one, statistics), (other, _) = await asyncio.gather(
        *(network.generate(scene.generation(seed=seed)) for seed in (5, 6))
    )
    return (*one, *other), statistics


def turning(rounds_ahead: int, max_branches: int) -> Scene:
    """A chooser wants one round drafted for ahead of the verdict, and all later ones plain."""
    first = 5 if rounds_ahead == 1 else 8  # of the last round that the drafter may begin
    return Scene(
        name=f"{rounds_ahead} ahead, {max_branches} branches, turning to plain",
        **tables(first, first + 1),
        length=first + 2,
        num_draft_tokens=2,
        rounds_ahead=rounds_ahead,
        max_branches=max_branches,
        network={"times": slow_after(first)},
        chooser=lambda: Chosen({1: ahead(2)}),
        happens=frozenset({"asked as begun", "hit", "late ahead"}),
    )


def asleep(bridge: int, rounds_ahead: int) -> Scene:
    """The drafter is frozen when it has sent the first block, and wakes while the run goes on that takes its place. The
    gateway hears of that later. Each round of the run commits a token that the drafter has guessed in the place of its
    own: so it drafts for the text of the round after the last that it may begin, if its tokens are fast.
    """
    first = LATE + rounds_ahead
    return Scene(
        name=f"asleep, and awake in a run, bridge {bridge}, {rounds_ahead} ahead",
        **tables(first, wrong=range(LATE, first)),
        length=first + 3,
        num_draft_tokens=2,
        rounds_ahead=rounds_ahead,
        max_branches=2 * rounds_ahead,
        network={
            "times": replace(slow_after(first), from_drafter_s=0.100),
            "settings": LoopSettings(bridge_rounds=bridge),
            "frozen": (0.0195, 0.385),
            "acceptance": 0.05,
        },
        happens=frozenset({"plain: late", "long run", "block ahead"}),
    )


def replaced(bridge: int, rounds_ahead: int) -> Scene:
    """As `asleep`, but the gateway loses the drafter, which does not hear of it, and another one takes over."""
    first = LATE + rounds_ahead
    return Scene(
        name=f"lost with a block under way, and replaced, bridge {bridge}, {rounds_ahead} ahead",
        **tables(first, wrong=range(LATE, first), num_drafters=2),
        length=first + 2,
        num_draft_tokens=2,
        rounds_ahead=rounds_ahead,
        max_branches=2 * rounds_ahead,
        network={
            "times": slow_after(first),
            "settings": LoopSettings(bridge_rounds=bridge),
            "frozen": (0.0195, 0.049),
            "acceptance": 0.05,
        },
        plot=lambda network: network.after(0.045, network.drafters[0].lose),
        happens=frozenset({"drafter lost", "plain: warming_up", "long run", "block ahead"}),
    )


class FailingTable(PlacedTable):
    """A table some of whose passes fail, by their number."""

    def __init__(self, vocab_size: int, failing: frozenset[int]) -> None:
        super().__init__(random_rows(vocab_size, 7).float(), Speed(0.0), lambda _: None)
        self._failing, self._num_passes = failing, 0

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        self._num_passes += 1
        if self._num_passes in self._failing:
            raise RuntimeError("a pass of the draft model fails")
        return super().read(readings, fuzzily)


def own_model(_: PlacedTable, vocab_size: int = VOCAB, failing: frozenset[int] = frozenset()) -> dict[str, ModelDrafts]:
    """Returns a draft model beside the target."""
    model: Any = FailingTable(vocab_size, failing)
    return {DRAFT_MODEL: ModelDrafts(LanguageModelDrafter(model, POSITIONS - 1), vocab_size)}


def in_form(text: list[int]) -> tuple[int, ...]:
    """Returns what may follow in a text of `FORM`."""
    return {0: (0, 1), 1: (0, 1), 2: (2, STOP)}.get(len(text), (STOP,))


async def again(scene: Scene, network: Network, seeds: tuple[int | None, int | None]) -> tuple[Ids, Statistics]:
    """Returns the last texts of two requests that are equal, but for their seeds, and may be guessed from others."""
    defaults = SpeculationDefaults(scene.num_draft_tokens, 8, scene.rule, local_strategies=("suffix",))
    texts: list[Ids] = []
    with mock.patch.object(requested_generation, "new_seed", itertools.count(100).__next__):
        for seed in seeds:
            request = RequestedGeneration([PROMPT], scene.sampling, "", max_tokens=scene.length, seed=seed)
            (one,) = complete_request(request, network.verifiers[0].description, defaults)
            ids, statistics = await network.generate(one)
            texts.append(ids)
            await asyncio.sleep(1.0)  # until the verifier has closed the session
    return tuple(itertools.chain(*texts[-scene.num_texts :])), statistics


async def both(scene: Scene, network: Network) -> tuple[Ids, Statistics]:
    """Returns the texts of two choices of a request, which are generated at once."""
    texts = await asyncio.gather(*(network.generate(scene.generation(choice=choice)) for choice in range(2)))
    return tuple(itertools.chain(*(ids for ids, _ in texts))), texts[-1][1]


async def beside_equal_seeds(scene: Scene, network: Network) -> tuple[Ids, Statistics]:
    """Returns the text of a request without a seed, beside two at once that have the same."""
    defaults = SpeculationDefaults(scene.num_draft_tokens, 8, scene.rule, adapts_length=True, rounds_ahead=1)
    description = network.verifiers[0].description
    with mock.patch.object(requested_generation, "new_seed", itertools.count(100).__next__):
        requests = [
            RequestedGeneration([PROMPT], scene.sampling, "", max_tokens=scene.length, seed=seed)
            for seed in (7, 7, None)
        ]
        texts = await asyncio.gather(
            *(network.generate(one) for request in requests for one in complete_request(request, description, defaults))
        )
    assert texts[0][0] == texts[1][0], "of equal seeds"
    return texts[-1]


def guessed(name: str, seeds: tuple[int | None, int | None], *happens: str) -> Scene:
    """A text after another one, of whose tokens the verifier guesses, unless its numbers may have been drawn before."""
    return Scene(
        name=name,
        **tables(3, 4, num_drafters=0),
        length=5,
        num_texts=1 if seeds[0] is not None else 2,  # equal numbers make equal texts
        num_draft_tokens=2,
        network={"make_texts": partial(TextDrafters, max_shared_tokens=1000)},
        work=partial(again, seeds=seeds),
        happens=frozenset(happens),
    )


def taught(num_rounds: int, seconds: dict[DraftSource | None, float]) -> Pairs:
    """Returns the shipped choosers after rounds of another session, which took as long as given, by who drafted."""
    pairs, now = Pairs(2, 2), -20.0
    other = pairs.session_length(PairName("verifier0:1", "drafter", can_go_ahead=True))
    for number in range(num_rounds):
        arm = other.next_draft(number, 4, now)
        ended_at = now + seconds[arm.source]
        step = StepSize(1 + arm.length, 1, number)
        other.observe(round_times(number, now, ended_at, arm.length, arm.length, 0.1, 0.1 + number / 1e3, step=step))
        now = ended_at
    other.close()
    return pairs


CASES: list[Scene] = [
    Scene(
        name="chains, block",
        **tables(2, 3, 4),
        length=5,
        num_draft_tokens=2,
        happens=frozenset({"whole block", "rejection"}),
    ),
    Scene(
        name="chains, token",
        **tables(2, 3),
        length=4,
        num_draft_tokens=2,
        rule="token",
        happens=frozenset({"whole block", "rejection"}),
    ),
    Scene(
        name="chains, coupled",
        **tables(2, 3, 4, vocab_size=2),
        length=5,
        num_draft_tokens=2,
        rule="coupled",
        happens=frozenset({"whole block", "rejection"}),
    ),
    Scene(
        name="a drafter slow after a token",
        **tables(2, 3),
        length=5,
        num_draft_tokens=3,
        network={"times": slow_after(2, 1.5)},
        happens=frozenset({"flush", "reply", "whole block", "rejection"}),
    ),
    Scene(
        name="1 ahead, a guess that is right or wrong",
        **tables(4, 5),
        length=6,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=1,
        happens=frozenset({"hit", "miss", "rejection"}),
    ),
    turning(1, 1),
    replace(turning(1, 4), is_slow=True),
    turning(2, 2),
    turning(2, 4),
    asleep(1, 1),
    replace(asleep(2, 1), is_slow=True),
    replace(asleep(1, 2), is_slow=True),
    replace(asleep(2, 2), is_slow=True),
    replaced(1, 1),
    replaced(2, 2),
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
        network={"num_verifiers": 2, "times": slow_after(5)},
        plot=lambda network: network.after(0.033, network.verifiers[0].lose),
        happens=frozenset({"verifier lost", "block ahead"}),
        is_slow=True,
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
        is_slow=True,
    ),
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
        happens=frozenset({"flush", "whole block", "rejection"}),
    ),
    Scene(
        name="1 ahead, masks that take long after a token",
        **tables(2, 5),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        # Whether later rounds are plain depends on tokens that were drafted, accepted or not.
        network={"times": slow_after(5), "mask_us": lambda drafted: 50_000 * (1 in drafted[:1])},
        happens=frozenset({"plain: slow_masks", "asked as begun", "late ahead", "rejection"}),
    ),
    Scene(
        name="1 ahead, masks that a session waits for outside of steps",
        **tables(2, 5),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        is_slow=True,
        # Blocks of coming rounds arrive meanwhile, or before, by what was drafted.
        network={"mask_us": lambda drafted: 30_000 * (1 in drafted[:1]), "masks_are_apart": True},
        happens=frozenset({"plain: slow_masks", "hit", "miss", "rejection"}),
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
        name="a head in the verifier",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        network={"head": lambda model: {"eagle3": HeadDrafts(HeadDrafter(ToyHead(VOCAB), model), VOCAB)}},
        fields={"local_strategies": ("eagle3",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    ),
    Scene(
        name="a draft model in the verifier",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        network={"head": own_model},
        fields={"local_strategies": ("model",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    ),
    Scene(
        name="a draft model in the verifier, penalties",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        sampling=SamplingParams(0.8, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
        network={"head": own_model},
        fields={"local_strategies": ("model",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    ),
    Scene(
        name="a draft model in the verifier, a form",
        target=random_rows(4, 3),
        drafts=(),
        length=4,
        num_draft_tokens=2,
        sampling=SamplingParams(structured_output=FORM),
        stop_token_ids=frozenset({STOP}),
        possible=in_form,
        network={"compiler": tiny_compiler(["a", "b", "c", "."], 4, [STOP]), "head": partial(own_model, vocab_size=4)},
        fields={"local_strategies": ("model",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    ),
    Scene(
        name="a draft model in the verifier, coupled",
        **tables(2, 3, vocab_size=2, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        rule="coupled",
        network={"head": partial(own_model, vocab_size=2)},
        fields={"local_strategies": ("model",)},
        happens=frozenset({"guess", "rejection"}),
    ),
    Scene(
        name="a draft model in the verifier, which is lost while it runs on",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        network={"num_verifiers": 2, "head": own_model},
        fields={"local_strategies": ("model",)},
        plot=lambda network: network.after(0.02, network.verifiers[0].lose),
        happens=frozenset({"guess", "verifier lost", "rejection"}),
        is_slow=True,
    ),
    Scene(
        name="a draft model in the verifier, which fails",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        network={"head": partial(own_model, failing=frozenset({4, 5, 7}))},
        fields={"local_strategies": ("model",)},
        happens=frozenset({"guess", "rejection"}),
    ),
    Scene(
        name="two texts at once, 1 ahead",
        **tables(5),
        length=7,
        num_texts=2,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"times": slow_after(5)},
        work=together,
        happens=frozenset({"hit", "late ahead", "rejection"}),
        is_slow=True,
    ),
    Scene(
        name="1 ahead, coupled",
        **tables(4, 5, 6, vocab_size=2),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        rule="coupled",
        network={"times": slow_after(5)},
        happens=frozenset({"hit", "miss", "rejection"}),
        is_slow=True,
    ),
    replace(turning(1, 4), name="1 ahead, 4 branches, turning to plain, token", rule="token", is_slow=True),
    replace(
        turning(1, 4),
        name="1 ahead, 4 branches, three tokens",
        **tables(6, 7),
        length=9,
        num_draft_tokens=3,
        network={"times": slow_after(7)},
        chooser=lambda: Chosen({1: ahead(3)}),
        is_slow=True,
    ),
    guessed("texts guessed from others", (None, None), "guess", "whole block", "rejection"),
    guessed("a text of a seed beside others", (None, 7), "plain: no_guess"),
    guessed("a request sent again with its seed", (7, 7), "plain: no_guess"),
    Scene(
        name="the shipped chooser, which ends a trial of drafts ahead",
        **tables(8, 9),
        length=12,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"times": slow_after(8)},
        chooser=partial(taught, 29, {None: 3.2, DraftSource.DRAFTER: 6.0, DraftSource.AHEAD: 5.0}),
        happens=frozenset({"asked as begun", "hit", "late ahead"}),
    ),
    # It tries to draft ahead.
    Scene(
        name="the shipped chooser, which tries another way",
        **tables(8, 9),
        length=12,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=2,
        network={"times": slow_after(8)},
        chooser=partial(taught, 22, dict.fromkeys((None, DraftSource.DRAFTER, DraftSource.AHEAD), 4.0)),
        happens=frozenset({"hit", "late ahead", "miss", "rejection"}),
    ),
    # The trial of plain rounds is over, and they are better.
    Scene(
        name="the shipped chooser, which turns to plain",
        **tables(5, wrong=(2, 4)),
        length=7,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=1,
        network={"times": replace(slow_after(5), to_gateway_s=0.003)},
        chooser=partial(taught, 29, {None: 3.2, DraftSource.DRAFTER: 6.0, DraftSource.AHEAD: 5.0}),
        happens=frozenset({"asked as begun", "plain: does_not_pay", "rejection"}),
    ),
    Scene(
        name="the shipped chooser, two choices at once",
        **tables(3),
        length=5,
        num_texts=2,
        num_draft_tokens=2,
        rounds_ahead=1,
        max_branches=1,
        network={"times": replace(slow_after(5), to_gateway_s=0.003)},
        chooser=partial(taught, 29, {None: 3.2, DraftSource.DRAFTER: 6.0, DraftSource.AHEAD: 5.0}),
        work=both,
        happens=frozenset({"asked as begun", "plain: does_not_pay", "miss", "rejection"}),
    ),
    Scene(
        name="the shipped chooser, a request beside two of one seed",
        **tables(3),
        length=5,
        num_draft_tokens=2,
        network={"times": slow_after(5), "warm_up": ((2, 0.010), (64, 0.020))},
        chooser=partial(taught, 7, dict.fromkeys((None, DraftSource.DRAFTER, DraftSource.AHEAD), 4.0)),
        work=beside_equal_seeds,
        happens=frozenset({"rejection", "whole block"}),
    ),
    Scene(
        name="the shipped chooser, which knows the warm-up alone",
        **tables(6, 7),
        length=9,
        num_draft_tokens=2,
        network={"times": slow_after(5), "warm_up": ((2, 0.010), (64, 0.011))},
        chooser=partial(Pairs, 2, 2),
        happens=frozenset({"rejection", "whole block"}),
    ),
    *OUTCOME_CASES,
    *UNSURE_CASES,
]
