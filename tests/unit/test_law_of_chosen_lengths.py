"""Texts whose drafts have chosen lengths and shapes follow the target's law, whatever function of past rounds chooses.

Enumerated in float64 over all drafts, verdicts and histories. The mistakes that a chooser can make are planted: it
looks at the tokens that it decides on, at the rows after them, or at what equal random numbers have already done.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from enumeration import Law, largest_deviation, law_of_target, outcome_law
from torch import Tensor

from benchmarks.pair_simulation import round_times
from draftwire.checking.all_trees import AllTrees, all_trees, stated_tree_emissions
from draftwire.checking.cube import integrate
from draftwire.checking.emissions import Emissions, completed_law, num_codes, sequence_law
from draftwire.checking.emissions import largest_deviation as deviation_of
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.checking.whole_round import Round
from draftwire.method.round_parts import StepSize, WatchedGuess
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.traversal import TraversalRule
from draftwire.verification import RULES
from draftwire_gateway.session.policy import Arm
from draftwire_gateway.speculation.accepted_counts import ROUNDS
from draftwire_gateway.speculation.predicted_session import PredictedSession
from draftwire_gateway.speculation.predicting_chooser import PredictingChooser

LENGTH = 4
"""Tokens of each text."""
BOUND = 1e-9

Rounds = tuple[tuple[int, int], ...]
"""Draft tokens and accepted ones of each past round."""
Text = tuple[int, ...]
Choice = Callable[[Rounds, Text], int | TokenTree]
"""Chooses a chain by its length, or a tree."""


def alternating(past: Rounds, text: Text) -> int:
    return (2, 0, 1)[len(past) % 3]


def after_successes(past: Rounds, text: Text) -> int:
    return min(3, 1 + sum(accepted for _, accepted in past))


def after_failures(past: Rounds, text: Text) -> int:
    return 3 if past and past[-1][1] == 0 else 1


def hashed(past: Rounds, text: Text) -> int:
    return hash((past, text)) % 4


@cache
def of_the_product(past: Rounds, text: Text) -> int:
    """What the gateway's chooser says after rounds of another session, by which drafts are about as good as none."""
    pair, now = PredictingChooser(4, 2), 0.0
    other = PredictedSession(pair)
    for number in range(ROUNDS - 1):  # it chooses anew with the next one
        now = observed(other, number, other.next_draft(number, 4, now), (4, 4 if number % 2 else 0), now)
    other.close()
    session = PredictedSession(pair)
    arm = session.next_draft(0, 3, now)
    for number, drafted_and_accepted in enumerate(past):
        now = observed(session, number, arm, drafted_and_accepted, now)
        arm = session.next_draft(number + 1, 3, now)
    return arm.length


def observed(
    session: PredictedSession, number: int, arm: Arm, drafted_and_accepted: tuple[int, int], now: float
) -> float:
    """Has a session observe a round; returns its end."""
    drafted, accepted = (min(arm.length, each) for each in drafted_and_accepted)
    draft_s = 0.025 * drafted
    ended_at, step = now + 0.1 + draft_s, StepSize(1 + drafted, 1, number)
    session.observe(round_times(number, now, ended_at, drafted, accepted, draft_s, 0.09, step=step))
    return ended_at


def tree_after_a_failure(past: Rounds, text: Text) -> int | TokenTree:
    """The two children that one token was not enough for, a chain where it was, and the larger tree at last."""
    if not past or past[-1][1] > 0:
        return 2
    return TokenTree((-1, -1)) if len(past) == 1 else TokenTree((-1, -1, 0))


def hashed_shapes(past: Rounds, text: Text) -> int | TokenTree:
    """Any function of past rounds and of their text."""
    trees = (TokenTree((-1, -1)), TokenTree((-1, -1, 0)), TokenTree((-1, -1, 0, 1)), TokenTree((-1, 0, 0)))
    return (0, 1, 2, *trees)[hash((past, text)) % 7]


def by_a_watched_guess(past: Rounds, text: Text) -> int:
    """Whether the text has gone on as it did after the last token like its own last ones."""
    return 2 if watched_after(text[:-1], text[-1:]).num_right else 1


def watched_after(text: Text, tokens: Text) -> WatchedGuess:
    """How what followed the latest earlier place of the last token would have fared as a guess of some tokens."""
    places = [place for place in range(1, len(text)) if text[place - 1] == text[-1]]
    if not places:
        return WatchedGuess(False)
    return WatchedGuess(True, int(text[places[-1]] == tokens[0]))


CHOICES = (alternating, after_successes, after_failures, hashed, by_a_watched_guess, of_the_product)
TREE_CHOICES = (tree_after_a_failure, hashed_shapes)
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
            chosen, room = choice(past, text), LENGTH - len(text) - 1
            if isinstance(chosen, TokenTree):
                kept = [node for node, depth in enumerate(chosen.depths) if depth <= room]
                for emitted, share in emitted_after(pair, chosen.cut(kept), context):
                    longer = (*text, *emitted)
                    if len(longer) == LENGTH:
                        finished[longer] += probability * share
                    else:
                        following[longer, (*past, (len(kept), len(emitted) - 1))] += probability * share
                continue
            for drawn in product(range(pair.vocab_size), repeat=min(chosen, room)):
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


@cache
def emitted_after(pair: Pair, shape: TokenTree, context: int) -> list[tuple[Text, float]]:
    """Returns what a round commits that drafts trees of a shape, decided by `traversal`, and how likely."""
    found = []
    emissions = stated_tree_emissions(TraversalRule(), all_trees(pair, shape, is_distinct=True))
    for count, masses in enumerate(emissions.of_count, 1):
        texts = product(range(pair.vocab_size), repeat=count)
        found += [(text, mass) for text, mass in zip(texts, masses[context].tolist(), strict=True) if mass > 0.0]
    return found


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


def test_gateways_chooser_chooses_by_what_was_accepted() -> None:
    """Else its law would be that of a fixed length."""
    assert {of_the_product((), ()), of_the_product(((2, 1),), ()), of_the_product(((2, 0),), ())} == {2, 0}
    assert of_the_product(((2, 1),), ()) == 2


@pytest.mark.parametrize("choice", TREE_CHOICES, ids=lambda choice: choice.__name__)
def test_any_function_of_past_rounds_may_choose_between_chains_and_trees(choice: Choice) -> None:
    chosen = set()

    def watched(past: Rounds, text: Text) -> int | TokenTree:
        chosen.add(choice(past, text))
        return choice(past, text)

    for pair in PAIRS:
        law = law_of_texts(pair, RULES["block"], watched, whole)
        assert largest_deviation(law, law_of_target(pair, LENGTH)) < BOUND, pair.name
    assert {type(each) for each in chosen} == {int, TokenTree}


def test_choice_between_chain_and_tree_by_a_token_that_is_dropped_is_seen() -> None:
    """By the first child, which is kept in any case, a second one may be drawn or not."""

    def worst(is_kept: Callable[[AllTrees], Tensor]) -> float:
        deviations = []
        for pair in PAIRS:
            reference = sequence_law(pair.target, 2)
            single, double = (all_trees(pair, TokenTree((-1,) * count), is_distinct=True) for count in (1, 2))
            masses = torch.zeros(len(pair.target) * pair.vocab_size, dtype=torch.float64)
            masses.index_add_(0, double.prefixes(0), double.probs * ~is_kept(double))
            law = torch.zeros_like(reference)
            for trees, probs in ((single, masses[single.prefixes(0)]), (double, double.probs * is_kept(double))):
                emissions = stated_tree_emissions(TraversalRule(), replace(trees, probs=probs))
                law += completed_law(emissions, reference)
            deviations.append(float(deviation_of(law, reference)))
        return max(deviations)

    assert worst(lambda trees: trees.contexts % 2 == 0) < BOUND
    assert worst(lambda trees: trees.tokens[:, 0] == 0) < BOUND
    assert worst(lambda trees: trees.tokens[:, 1] == 0) > 1e-3


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
