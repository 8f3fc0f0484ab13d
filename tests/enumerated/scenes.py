"""What is enumerated: a network, what happens in it, and the law that the texts must have."""

import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from definitions import defined_law
from enumeration import FAILED, Law
from torch import Tensor

from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.rule import facts_of
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.statistics import Statistics
from tests.enumerated.intervals import all_runs
from tests.enumerated.network import LETTERS, Ids, Network, Times, run_virtually
from tests.enumerated.tables import POSITIONS, Speed, certain_at, random_rows

PROMPT = [0]
BOUND = 1e-9

VOCAB = 3

Run = tuple[Ids, frozenset[str]]
"""A text, and what was seen to happen."""


@dataclass(frozen=True, slots=True)
class Enumerated:
    """Result of a scene."""

    num_runs: int
    deviation: float
    """Total variation between the law of the text and the target's."""
    shown: frozenset[str]
    """All that was seen to happen in some run."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One case."""

    name: str
    target: Tensor
    drafts: tuple[Tensor, ...]
    length: int
    """Tokens of the text."""
    num_texts: int = 1
    """Texts whose joint law is that of independent ones, one after the other."""
    happens: frozenset[str]
    """What has to be seen in some run, of `seen_in`: else the case shows nothing."""
    num_draft_tokens: int = 1
    rounds_ahead: int = 0
    max_branches: int = 0
    num_draft_nodes: int = 0
    rule: str = "block"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    chooser: Callable[[], Any] | None = None
    """Makes what chooses lengths; None: they are fixed."""
    network: dict[str, Any] = field(default_factory=dict)
    """Further fields of the network."""
    plot: Callable[[Network], None] = lambda network: None
    """Arranges what happens, when the services have started."""
    work: "Callable[[Scene, Network], Coroutine[Any, Any, tuple[Ids, Statistics]]] | None" = None
    """Generates the text; None: as one request. It may generate others before."""
    possible: Callable[[list[int]], tuple[int, ...]] | None = None
    """Returns the tokens after a text that its form allows; None if it has no form."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the generation."""
    is_slow: bool = False
    """Whether it takes long."""

    def generation(self, **changes: Any) -> Generation:
        given: dict[str, Any] = {
            "prompt_ids": PROMPT,
            "sampling": self.sampling,
            "max_tokens": self.length,
            "stop": (),
            "stop_token_ids": self.stop_token_ids,
            "seed": 5,
            "num_speculative_tokens": self.num_draft_tokens,
            "rule": facts_of(RULES[self.rule]),
            "rounds_ahead": self.rounds_ahead,
            "max_branches": self.max_branches,
            "num_draft_nodes": self.num_draft_nodes,
            "adapts_length": self.chooser is not None,
        }
        return Generation(**(given | self.fields | changes))

    def run(self) -> Run:
        return run_virtually(self._run)

    async def _run(self) -> Run:
        network = Network(self.target, self.drafts, **self.network)
        if self.chooser is not None:
            network.pairs = self.chooser()
        async with network.running():
            self.plot(network)
            if self.work is not None:
                ids, statistics = await self.work(self, network)
            else:
                ids, statistics = await network.generate(self.generation())
        return ids, seen_in(network, statistics)

    def enumerate(self) -> Enumerated:
        law: Law = {}
        shown: set[str] = set()
        num_runs, total = 0, 0.0
        for probability, (ids, seen) in all_runs(self.run):
            law[ids] = law.get(ids, 0.0) + probability
            num_runs, total = num_runs + 1, total + probability
            shown |= seen
        assert abs(total - 1.0) < BOUND, "the runs are all there are"
        return Enumerated(num_runs, total_variation(law, self.law()), frozenset(shown))

    def law(self) -> Law:
        """Returns the law of the texts, one after the other, that plain decoding defines."""
        law, one = {(): 1.0}, self._law_of_one()
        for _ in range(self.num_texts):
            law = {(*before, *text): mass * more for before, mass in law.items() for text, more in one.items()}
        return law

    def _law_of_one(self) -> Law:
        law: Law = {}
        growing: Law = {(): 1.0}
        bad = self.network.get("bad_targets", frozenset())
        ending = self.stop_token_ids | {LETTERS.index(letter) for letter in self.fields.get("stop", ())}
        while growing:
            longer: Law = {}
            for text, mass in growing.items():
                if len(text) == self.length or (text and text[-1] in ending):
                    law[text] = mass
                    continue
                whole = [*PROMPT, *text]
                if (len(whole) - 1, whole[-1]) in bad:
                    law[(*text, FAILED)] = mass
                    continue
                for token, chance in enumerate(self.row_after(whole)):
                    if chance:
                        longer[(*text, token)] = mass * chance
            growing = longer
        return law

    def row_after(self, text: list[int]) -> list[float]:
        """Returns the law of the token after a text."""
        logits, sampling = self.target[len(text), text[-1]].log().tolist(), self.sampling
        if self.possible is not None:
            sampling = replace(sampling, structured_output=None, allowed_token_ids=self.possible(text[len(PROMPT) :]))
        return defined_law(logits, sampling, text, len(PROMPT), self.stop_token_ids)


def total_variation(law: Law, expected: Law) -> float:
    return 0.5 * sum(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in law.keys() | expected.keys())


def seen_in(network: Network, statistics: Statistics) -> frozenset[str]:
    """Returns what happened in a run, in words."""
    rounds = network.rounds
    why = {times.why_plain.value for times in rounds if times.why_plain is not None}
    allowed = list(itertools.accumulate((c.fence.round + c.max_rounds_ahead for c in network.asked), max, initial=-1))
    pairs = zip(network.asked, allowed, strict=False)
    found = {
        "hit": statistics.num_ahead_hits,
        "late ahead": statistics.num_ahead_late,
        "miss": statistics.num_ahead_misses,
        "drafter lost": statistics.num_drafters_lost,
        "verifier lost": statistics.num_verifiers_lost,
        "wasted": statistics.num_ahead_wasted_tokens,
        "whole block": any(times.verdict.num_accepted_tokens == times.verdict.num_draft_tokens > 0 for times in rounds),
        "rejection": any(times.verdict.num_accepted_tokens < times.verdict.num_draft_tokens for times in rounds),
        "asked as begun": any(c.max_rounds_ahead == 0 and c.fence.round <= until for c, until in pairs),
        "tree": statistics.num_trees,
        "unsure": any(times.verdict.ended_unsure and times.verdict.num_draft_tokens for times in rounds),
        "guess": any(times.verdict.is_of_verifier for times in rounds),
        "flush": network.seen["flush"],
        "reply": network.seen["sent"],
        "outcome": network.seen["outcome"],
        "block ahead": network.seen["block ahead"],
        "long run": any(count > 1 for count in network.runs),
        "failure": network.seen["failure"],
        **{f"plain: {reason}": True for reason in why},
    }
    return frozenset(name for name, count in found.items() if count)


class Chosen:
    """Stands for the choosers of a gateway: it wants an arm for each round, and plain decoding for all others."""

    def __init__(self, arms: dict[int, Arm], first: Arm = PLAIN) -> None:
        self._arms = {0: first} | arms
        self._arm = next(iter(arms.values()))

    def session_length(self, pair: Any, warm_up: Any) -> "Chosen":
        return self

    def preferred(self, pairs: Any, session_id: int) -> Any:
        return pairs[0]

    def uses_drafter(self, now: float) -> bool:
        return self._arm.uses_drafter

    def next_draft(self, round_number: int, most: int, now: float) -> Arm:
        self._arm = self._arms.get(round_number, PLAIN)
        length = min(most, self._arm.length)
        return self._arm._replace(length=length) if length > 0 else PLAIN

    def replace_arm(self, round_number: int, arm: Arm) -> None:
        """Learns nothing."""

    def next_own_length(self, round_number: int, most: int, now: float) -> int:
        return 0

    def num_plain_rounds(self, most: int, now: float) -> int:
        return 1

    def observe(self, times: Any) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Is none's."""


def ahead(length: int) -> Arm:
    return Arm(DraftSource.AHEAD, length)


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


def slow_after(position: int, seconds: float = 0.050) -> Times:
    """Times of a drafter whose pass takes longer after one of the tokens that it may draw at a position."""
    return Times(drafter=Speed(0.001, frozenset({(position, 1)}), seconds))
