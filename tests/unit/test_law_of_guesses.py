"""Texts that are guessed from other tokens follow the target's law, whatever function of committed ones guesses.

Enumerated in float64 over all verdicts and histories: with the product's own ways to guess, alone, joined and beside
texts of others, and with functions that no text drafter is. What must not be read, what equal random numbers have drawn
before, is planted in `test_law_of_services.py`.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import Law, largest_deviation, law_of_target, outcome_law
from torch import Tensor

from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.options.model_free.prompt_lookup import LookupText
from draftwire.options.model_free.registry import LongestMatchText
from draftwire.options.model_free.retrieval import RetrievalText
from draftwire.options.model_free.retrieval_store import RetrievalStore
from draftwire.options.model_free.shared_texts import SharedTexts
from draftwire.options.model_free.store_building import build_store
from draftwire.options.model_free.suffix import SuffixText
from draftwire.options.model_free.text_drafter import TextDrafter
from draftwire.verification import RULES

LENGTH = 5
"""Tokens of each text."""
MOST = 3
"""Tokens of a guess."""
BOUND = 1e-9
OTHERS = ([0, 1, 1, 0, 1, 0, 0], [2, 1, 0, 2, 2, 1], [1, 1, 1, 0])
"""Texts of others, which are continued if they are shared."""

Guess = Callable[[tuple[int, ...]], list[int]]
PAIRS = (*random_pairs(2), *adversarial_pairs(3)[:4], random_pairs(3)[2])


def shared() -> TextDrafter:
    drafter = partial(SuffixText, least_match=1, shared=SharedTexts(1000))
    for text in OTHERS:
        drafter(text, "").close(0)
    reader = drafter([0], "")
    for _ in range(10):
        reader.guess(1)
    return drafter


@cache
def retrieval(folder: Path) -> TextDrafter:
    build_store(folder, [np.array([*text, 3]) for text in OTHERS], b"", 3)
    return partial(RetrievalText, RetrievalStore.open(folder, b""), least_match=1)


def text_drafter(name: str, folder: Path) -> TextDrafter:
    one_of = {
        "suffix": lambda: partial(SuffixText, least_match=1),
        "lookup": lambda: partial(LookupText, least_match=1, most_match=2),
        "retrieval": lambda: retrieval(folder / "store"),
        "shared": shared,
        "joined": lambda: partial(LongestMatchText, [shared(), retrieval(folder / "store")]),
    }
    return one_of[name]()


def hashed(text: tuple[int, ...]) -> list[int]:
    """Guesses anything: no function of committed tokens can do harm."""
    return [hash((text, place)) % 2 for place in range(hash(text) % (MOST + 1))]


def stubborn(text: tuple[int, ...]) -> list[int]:
    return [1] * MOST


def law_of_texts(pair: Pair, rule: str, guess: Guess) -> Law:
    """Returns the law of texts of `LENGTH` tokens, each round of which has a guess, or is plain without one."""
    certain = torch.eye(pair.vocab_size, dtype=torch.float64)
    finished: Law = defaultdict(float)
    growing: Law = {(): 1.0}
    while growing:
        following: Law = defaultdict(float)
        for text, probability in growing.items():
            tokens = tuple(guess(text)[: LENGTH - len(text) - 1])
            target = pair.target[[text[-1] if text else pair.vocab_size, *tokens]]
            law = outcome_law(RULES[rule], target, certain[list(tokens)], tokens)
            for accepted, extra in torch.nonzero(law).tolist():
                longer = (*text, *tokens[:accepted], extra)
                (finished if len(longer) == LENGTH else following)[longer] += probability * float(law[accepted, extra])
        growing = following
    return finished


def guess_of(drafter: TextDrafter, vocab_size: int) -> Guess:
    def guess(text: tuple[int, ...]) -> list[int]:
        token_ids = drafter([0, 1, *text], "").guess(MOST).token_ids
        return token_ids[: next((place for place, token in enumerate(token_ids) if token >= vocab_size), MOST)]

    return guess


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", ["suffix", "lookup", "retrieval", "shared", "joined"])
def test_guesses_leave_the_law_as_it_is(rule: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    drafter = text_drafter(name, tmp_path_factory.getbasetemp())
    for pair in PAIRS:
        guess = guess_of(drafter, pair.vocab_size)
        assert any(guess(text) for text in law_of_target(pair, LENGTH)), "something is guessed"
        assert largest_deviation(law_of_texts(pair, rule, guess), law_of_target(pair, LENGTH)) < BOUND, pair.name


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("guess", [hashed, stubborn], ids=lambda guess: guess.__name__)
def test_any_function_of_committed_tokens_leaves_the_law_as_it_is(rule: str, guess: Guess) -> None:
    for pair in PAIRS:
        assert largest_deviation(law_of_texts(pair, rule, guess), law_of_target(pair, LENGTH)) < BOUND, pair.name


State = Callable[[int, int, Tensor], Tensor]
"""What a drafter states of a place, from the token that was guessed there, the drawn one, and what that was drawn from.
"""


def as_drawn(guessed: int, drawn: int, row: Tensor) -> Tensor:
    return row


def certain_if_equal(guessed: int, drawn: int, row: Tensor) -> Tensor:
    """Takes the model's token for the guess if they agree, and states it as the guess is stated."""
    return torch.eye(len(row), dtype=torch.float64)[drawn] if drawn == guessed else row


def law_of_cascades(pair: Pair, rule: str, state: State) -> Law:
    """Returns the law of texts whose blocks are the model's up to where the guess takes over: as soon as two tokens,
    committed or drawn, match an earlier place.
    """
    drafter = partial(SuffixText, least_match=1)
    certain = torch.eye(pair.vocab_size, dtype=torch.float64)
    finished: Law = defaultdict(float)
    growing: Law = {(): 1.0}
    while growing:
        following: Law = defaultdict(float)
        for text, probability in growing.items():
            most = min(MOST, LENGTH - len(text) - 1)
            blocks: list[tuple[tuple[int, ...], list[Tensor], float]] = [((), [], 1.0)]
            whole = []
            while blocks:
                tokens, rows, share = blocks.pop()
                guess = drafter(text).guess(max(1, most - len(tokens)), tokens)
                if len(tokens) == most or guess.match_len >= 2:
                    rest = guess.token_ids[: most - len(tokens)]
                    whole.append(((*tokens, *rest), [*rows, *certain[rest]], share))
                    continue
                context = (*text, *tokens)[-1] if text or tokens else pair.vocab_size
                row = pair.drafter[context]
                for token in range(pair.vocab_size):
                    guessed = guess.token_ids[0] if guess.token_ids else -1
                    if (chance := float(row[token])) > 0.0:
                        blocks.append(((*tokens, token), [*rows, state(guessed, token, row)], share * chance))
            for tokens, rows, share in whole:
                target = pair.target[[text[-1] if text else pair.vocab_size, *tokens]]
                stated = torch.stack(rows) if rows else certain[:0]
                law = outcome_law(RULES[rule], target, stated, tokens)
                for accepted, extra in torch.nonzero(law).tolist():
                    longer = (*text, *tokens[:accepted], extra)
                    mass = probability * share * float(law[accepted, extra])
                    (finished if len(longer) == LENGTH else following)[longer] += mass
        growing = following
    return finished


@pytest.mark.parametrize("rule", ["block", "token"])
def test_guess_that_takes_over_is_exact_and_a_token_dependent_one_is_seen(
    rule: str,
) -> None:
    def worst(state: State) -> float:
        return max(
            largest_deviation(law_of_cascades(pair, rule, state), law_of_target(pair, LENGTH)) for pair in PAIRS[:4]
        )

    assert worst(as_drawn) < BOUND
    assert worst(certain_if_equal) > 1e-3
