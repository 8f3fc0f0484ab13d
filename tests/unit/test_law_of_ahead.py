"""Texts whose blocks were drafted before their text was known follow the target's law.

Two rounds are enumerated jointly, in float64: all drafts and verdicts of the first, all guesses of how it ends, and all
cells of the uniform numbers of the second, which a draft ahead and one that is requested share. Mistakes are
planted: a guess drawn with the numbers of the round that is drafted for, a block that is sent again or kept for
what is in it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from math import prod

import pytest
import torch
from enumeration import Law, largest_deviation, law_of_target, outcome_law

from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.method.rounds import Fence
from draftwire.verification import RULES
from draftwire_drafter.ahead import Branch, Endings, GuessedEnding

FIRST, SECOND = 1, 2
"""Draft tokens of the two rounds."""
LENGTH = FIRST + SECOND + 2
BOUND = 1e-9
PAIRS = (*random_pairs(2), *adversarial_pairs(3)[:4], random_pairs(3)[2])
UNLIKELY = 0.4

Text = tuple[int, ...]
Numbers = tuple[float, ...]
Block = tuple[Text, bool]
"""Tokens, and whether they are judged: else the round is plain."""


def row_after(table: torch.Tensor, text: Text) -> torch.Tensor:
    return table[text[-1] if text else table.shape[1]]


def draw(pair: Pair, text: Text, number: float) -> int:
    row = row_after(pair.drafter, text).cumsum(0)
    return min(int((row <= number).sum()), pair.vocab_size - 1)


def drawn(pair: Pair, text: Text, numbers: Numbers) -> Text:
    tokens: Text = ()
    for number in numbers:
        tokens += (draw(pair, (*text, *tokens), number),)
    return tokens


def cells(pair: Pair) -> list[tuple[float, float]]:
    """Returns the middle and the width of each interval within which a number draws the same tokens after any text."""
    borders = sorted({0.0, 1.0, *pair.drafter.cumsum(1)[:, :-1].flatten().tolist()})
    return [((low + high) / 2, high - low) for low, high in pairwise(borders) if high > low]


def guessed(pair: Pair, block: Text) -> list[GuessedEnding]:
    """Returns the endings of the first round for which the product drafts ahead, two of them."""
    branch = Branch(Fence(1, 0, 1, 1, 0), [], block=list(block))
    for place, token in enumerate(block):
        order = row_after(pair.drafter, block[:place]).argsort(descending=True).tolist()
        branch.guesses.append([other for other in order if other != token])
    branch.next_guesses = row_after(pair.drafter, block).argsort(descending=True).tolist()
    return Endings().likeliest(branch, 2)


Second = Callable[[Pair, Text, Text, Numbers], Iterator[tuple[float, Text]]]
"""Yields the blocks of the second round with their probabilities: of the pair, the first block, the text after it, and
the numbers of the second round."""


def is_hit(pair: Pair, first: Text, text: Text) -> bool:
    return any((*first[: end.num_kept], end.token_id) == text for end in guessed(pair, first))


def of_the_product(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """A hit was drawn with the numbers of its round after the guessed text, and a miss is drawn with the same."""
    yield 1.0, drawn(pair, text, numbers)


def with_a_drawn_guess(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """The extra token is guessed with the second round's first number; a miss draws with it again."""
    if text == (*first, draw(pair, first, numbers[0])):
        yield 1.0, drawn(pair, text, numbers[1:])
    else:
        yield 1.0, drawn(pair, text, numbers)


def sent_again(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """A hit whose first token is unlikely is sent again, drawn with other numbers."""
    tokens = drawn(pair, text, numbers)
    if not is_hit(pair, first, text) or float(row_after(pair.drafter, text)[tokens[0]]) >= UNLIKELY:
        yield 1.0, tokens
        return
    for others in product(range(pair.vocab_size), repeat=len(numbers)):
        shares = [float(row_after(pair.drafter, (*text, *others[:place]))[token]) for place, token in enumerate(others)]
        yield prod(shares), others


def kept_by_value(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """A held block is dropped if its first token is unlikely, and the round is plain."""
    tokens = drawn(pair, text, numbers)
    is_kept = not is_hit(pair, first, text) or float(row_after(pair.drafter, text)[tokens[0]]) >= UNLIKELY
    yield 1.0, tokens if is_kept else ()


def dropped_by_arrival(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """There is room for one block: that of the second guess is dropped, and its round is plain."""
    endings = guessed(pair, first)
    late = (*first[: endings[1].num_kept], endings[1].token_id) if len(endings) > 1 else None
    yield 1.0, () if text == late else drawn(pair, text, numbers)


def left_out_by_the_past(pair: Pair, first: Text, text: Text, numbers: Numbers) -> Iterator[tuple[float, Text]]:
    """For how many texts is drafted depends on the first round's block; the round of another text is plain."""
    many = guessed(pair, first)[: 1 + first[0] % 2]
    is_drafted = any((*first[: end.num_kept], end.token_id) == text for end in many)
    yield 1.0, drawn(pair, text, numbers) if is_drafted else ()


def rounds(pair: Pair, rule: str, text: Text, block: Text) -> Iterator[tuple[float, Text]]:
    """Yields what a round with a block may emit, with the probability."""
    contexts = [text[-1] if text else pair.vocab_size, *block]
    law = outcome_law(RULES[rule], pair.target[contexts], pair.drafter[contexts[:-1]], block)
    for kept, extra in product(range(len(block) + 1), range(pair.vocab_size)):
        if (mass := float(law[kept, extra])) > 0.0:
            yield mass, (*block[:kept], extra)


def law_of_texts(pair: Pair, rule: str, second: Second) -> Law:
    growing: dict[Text, float] = defaultdict(float)
    numbers = list(product(cells(pair), repeat=SECOND))
    for first in product(range(pair.vocab_size), repeat=FIRST):
        share = prod(float(row_after(pair.drafter, first[:place])[token]) for place, token in enumerate(first))
        for mass, text in rounds(pair, rule, (), first):
            blocks: dict[Text, float] = defaultdict(float)
            for cell in numbers:
                width = prod(size for _, size in cell)
                for chance, block in second(pair, first, text, tuple(middle for middle, _ in cell)):
                    blocks[block] += width * chance
            for block, chance in blocks.items():
                for later, more in rounds(pair, rule, text, block):
                    growing[(*text, *more)] += share * mass * chance * later
    finished: Law = defaultdict(float)
    while growing:
        longer: dict[Text, float] = defaultdict(float)
        for text, mass in growing.items():
            if len(text) == LENGTH:
                finished[text] += mass
                continue
            for token, chance in enumerate(row_after(pair.target, text).tolist()):
                longer[(*text, token)] += mass * chance
        growing = longer
    return finished


def worst(rule: str, second: Second) -> float:
    return max(largest_deviation(law_of_texts(pair, rule, second), law_of_target(pair, LENGTH)) for pair in PAIRS)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    "second", [of_the_product, dropped_by_arrival, left_out_by_the_past], ids=lambda second: second.__name__
)
def test_two_rounds_leave_the_law_as_it_is(rule: str, second: Second) -> None:
    assert any(is_hit(pair, first, (*first, 0)) for pair in PAIRS for first in product(range(pair.vocab_size)))
    assert worst(rule, second) < BOUND


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("second", [with_a_drawn_guess, sent_again, kept_by_value], ids=lambda second: second.__name__)
def test_what_depends_on_the_second_rounds_numbers_is_seen(rule: str, second: Second) -> None:
    assert worst(rule, second) > 1e-3
