"""Texts whose drafts have chosen lengths follow the target's law, whatever function of past rounds chooses them.

Enumerated in float64 over all drafts, verdicts and histories. The mistakes that a chooser can make are planted: it
looks at the tokens that it decides on, at the rows after them, or at what equal random numbers have already done.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from enumeration import Law, largest_deviation, law_of_target, outcome_law
from torch import Tensor

from benchmarks.simulated_pair import round_times
from draftwire.checking.cube import integrate
from draftwire.checking.emissions import Emissions, completed_law, num_codes
from draftwire.checking.emissions import largest_deviation as deviation_of
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.checking.whole_round import Round
from draftwire.method.rounds import WatchedGuess
from draftwire.verification import RULES
from draftwire_gateway.speculation.arms import DraftSource
from draftwire_gateway.speculation.pair_chooser import PairChooser
from draftwire_gateway.speculation.session_length import SessionLength

LENGTH = 4
"""Tokens of each text."""
BOUND = 1e-9

Rounds = tuple[tuple[int, int], ...]
"""Draft tokens and accepted ones of each past round."""
Text = tuple[int, ...]
Choice = Callable[[Rounds, Text], int]


def alternating(past: Rounds, text: Text) -> int:
    return (2, 0, 1)[len(past) % 3]


def after_successes(past: Rounds, text: Text) -> int:
    return min(3, 1 + sum(accepted for _, accepted in past))


def after_failures(past: Rounds, text: Text) -> int:
    return 3 if past and past[-1][1] == 0 else 1


def hashed(past: Rounds, text: Text) -> int:
    return hash((past, text)) % 4


def of_the_product(past: Rounds, text: Text) -> int:
    """What the gateway's chooser says, with windows so short that it tries everything, drafts of the verifier too: what
    it guesses in place of a draft is a length as well here.
    """
    pair = PairChooser(3, 2, (DraftSource.DRAFTER, DraftSource.VERIFIER))
    session = SessionLength(pair)

    def next_length(number: int) -> int:
        return session.next_length(number, 3, now) or session.next_own_length(number, 3, now)

    now, begun = 0.0, 0
    length = next_length(0)
    for number, (drafted, accepted) in enumerate(past):
        took, tokens = 0.5 + 0.1 * accepted, text[begun : begun + accepted + 1]
        watched = watched_after(text[:begun], tokens)
        session.observe(round_times(number, now, now + took, drafted, accepted, 0.1 * drafted, 0.1, watched=watched))
        now, begun = now + took, begun + len(tokens)
        length = next_length(number + 1)
    return length


def by_a_watched_guess(past: Rounds, text: Text) -> int:
    """Whether the text has gone on as it did after the last token like its own last ones."""
    return 2 if watched_after(text[:-1], text[-1:]).num_right else 1


def watched_after(text: Text, tokens: Text) -> WatchedGuess:
    """How what followed the latest earlier place of the last token would have fared as a guess of some tokens."""
    places = [place for place in range(1, len(text)) if text[place - 1] == text[-1]]
    if not places:
        return WatchedGuess(False)
    return WatchedGuess(True, int(text[places[-1]] == tokens[0]))


CHOICES = (alternating, after_successes, after_failures, hashed, of_the_product, by_a_watched_guess)
PAIRS = (*random_pairs(2), *adversarial_pairs(3)[:4], random_pairs(3)[2])


def rows_after(table: Tensor, context: int, tokens: tuple[int, ...]) -> Tensor:
    """Returns the rows along a block, one more than it has tokens."""
    return table[[context, *tokens]]


def law_of_texts(pair: Pair, rule: Any, choice: Choice, cut: Callable[[Pair, int, tuple[int, ...]], int]) -> Law:
    """Returns the law of texts of `LENGTH` tokens. `cut` may shorten a draft that was drawn."""
    finished: Law = defaultdict(float)
    growing: dict[tuple[tuple[int, ...], Rounds], float] = {((), ()): 1.0}
    while growing:
        following: dict[tuple[tuple[int, ...], Rounds], float] = defaultdict(float)
        for (text, past), probability in growing.items():
            context = text[-1] if text else pair.vocab_size
            chosen = min(choice(past, text), LENGTH - len(text) - 1)
            for drawn in product(range(pair.vocab_size), repeat=chosen):
                drafts = rows_after(pair.drafter, context, drawn)
                share = prod(float(drafts[place, token]) for place, token in enumerate(drawn))
                tokens = drawn[: cut(pair, context, drawn)]
                target = rows_after(pair.target, context, tokens)
                law = outcome_law(rule, target, drafts[: len(tokens)], tokens)
                for accepted in range(len(tokens) + 1):
                    for extra in range(pair.vocab_size):
                        mass = probability * share * float(law[accepted, extra])
                        if mass > 0.0:
                            longer = (*text, *tokens[:accepted], extra)
                            if len(longer) == LENGTH:
                                finished[longer] += mass
                            else:
                                following[longer, (*past, (len(tokens), accepted))] += mass
        growing = following
    return finished


def whole(pair: Pair, context: int, drawn: tuple[int, ...]) -> int:
    return len(drawn)


def until_an_unlikely_token(pair: Pair, context: int, drawn: tuple[int, ...]) -> int:
    """Stops before a token that the drafter itself thinks unlikely: its own probability decides on it."""
    for place, token in enumerate(drawn):
        if float(pair.drafter[drawn[place - 1] if place else context, token]) < 0.5:
            return place
    return len(drawn)


def if_the_next_row_is_sure(pair: Pair, context: int, drawn: tuple[int, ...]) -> int:
    """Keeps the first token only if the row after it is sure, which depends on the token."""
    return len(drawn) if not drawn or float(pair.drafter[drawn[0]].max()) > 0.7 else 0


def after_an_unsure_row(pair: Pair, context: int, drawn: tuple[int, ...]) -> int:
    """Stops before drawing where the row is unsure: it depends on the tokens before alone."""
    for place in range(len(drawn)):
        if float(pair.drafter[drawn[place - 1] if place else context].max()) < 0.6:
            return place
    return len(drawn)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.__name__)
def test_any_function_of_past_rounds_leaves_the_law_as_it_is(rule: str, choice: Choice) -> None:
    for pair in PAIRS:
        law = law_of_texts(pair, RULES[rule], choice, whole)
        assert largest_deviation(law, law_of_target(pair, LENGTH)) < BOUND, pair.name


@pytest.mark.parametrize("rule", ["block", "token"])
def test_stop_before_a_draw_is_exact_and_one_that_knows_the_token_is_seen(rule: str) -> None:
    def worst(cut: Callable[[Pair, int, tuple[int, ...]], int]) -> float:
        return max(
            largest_deviation(law_of_texts(pair, RULES[rule], after_successes, cut), law_of_target(pair, LENGTH))
            for pair in PAIRS
        )

    assert worst(after_an_unsure_row) < BOUND
    assert worst(until_an_unlikely_token) > 1e-3
    assert worst(if_the_next_row_is_sure) > 1e-3


class AfterAnEqualSeed(Round):
    """The first round of a request whose length was chosen by the outcome of another one's first round.

    With `is_equal` both have the same seed, so the same random numbers: what must never choose.
    """

    is_equal: bool

    def __init__(self, pair: Pair, *, is_equal: bool) -> None:
        self.is_equal = is_equal
        super().__init__(RULES["block"], pair, 1)
        self.plain = Round(RULES["block"], pair, 0)

    @property
    def num_uniforms(self) -> int:
        return super().num_uniforms * (1 if self.is_equal else 2)

    def law(self) -> float:
        """Returns the largest deviation of the second text's law from the target's, and the drafts' share."""
        contexts, codes = self.vocab_size + 1, num_codes(self.vocab_size, self.most_emitted)
        own = super().num_uniforms

        def decision(cases: Tensor, uniforms: Tensor) -> Tensor:
            first = self.run(cases, uniforms[:, :own])
            second = uniforms[:, -own:]
            drafted = self.run(cases, second)
            plain = self.plain.run(cases, second[:, self.num_drafting :])
            # Codes of one token come first: a longer one says that the draft was accepted.
            was_accepted = first.codes >= self.vocab_size
            chosen = torch.where(was_accepted, plain.codes, drafted.codes)
            everything = first.drafted * codes + first.codes
            everything = (everything * self.vocab_size + drafted.drafted) * codes + drafted.codes
            return (everything * codes + plain.codes) * codes + chosen

        most = (self.vocab_size * codes) ** 2 * codes * codes
        measure = integrate(decision, contexts, self.num_uniforms, most)
        probs = measure.probs.reshape(contexts, -1, codes).sum(dim=1)
        reference = self.reference()
        completed = completed_law(Emissions.from_codes(probs, self.vocab_size), reference)
        return float(deviation_of(completed, reference))


def test_lengths_chosen_by_what_equal_random_numbers_did_are_seen() -> None:
    """Which is why requests with a seed of their own have fixed lengths, and teach nobody."""
    pair = random_pairs(2)[1]
    assert AfterAnEqualSeed(pair, is_equal=False).law() < BOUND
    assert AfterAnEqualSeed(pair, is_equal=True).law() > 1e-3
