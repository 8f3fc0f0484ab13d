"""Guesses from a text's own earlier places, against a search through the whole text."""

import random
import time
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_compiler

from draftwire.options.model_free.possible import following
from draftwire.options.model_free.prompt_lookup import LookupText
from draftwire.options.model_free.suffix import SuffixText
from draftwire.options.model_free.suffix_index import SuffixIndex, SuffixMatch
from draftwire.options.model_free.text_drafter import TextDrafter, continued
from draftwire.requests.structured_output import StructuredOutput

TEXTS = st.lists(st.integers(0, 2), max_size=60)
DRAFTERS = {"suffix": partial(SuffixText, least_match=1), "lookup": partial(LookupText, least_match=1, most_match=3)}


def longest_match(text: list[int], most: int) -> int:
    """Returns the length of the longest suffix, up to a length, that ends at an earlier place too."""
    lengths = (
        length
        for length in range(min(most, len(text) - 1), 0, -1)
        if any(text[end - length : end] == text[-length:] for end in range(length, len(text)))
    )
    return next(lengths, 0)


@given(TEXTS)
def test_suffix_index_finds_the_longest_repeated_suffix_at_every_place(text: list[int]) -> None:
    index = SuffixIndex()
    for place, token in enumerate(text, 1):
        index.append(token)
        assert index.match_len == longest_match(text[:place], place)
        if index.match_len:
            assert index.match_end < place
            assert text[index.match_end - index.match_len : index.match_end] == text[place - index.match_len : place]


@given(TEXTS, TEXTS, TEXTS)
def test_match_is_the_longest_suffix_of_another_text_while_the_index_grows(
    indexed: list[int], text: list[int], later: list[int]
) -> None:
    index, known, places = SuffixIndex(), list(indexed), iter(later)
    for token in indexed:
        index.append(token)
    match = SuffixMatch(index)
    for place, token in enumerate(text, 1):
        match.extend([token])
        suffixes = (text[start:place] for start in range(place))
        ends = {tuple(known[start:end]): end for end in range(len(known) + 1) for start in range(end)}
        longest = next((suffix for suffix in suffixes if tuple(suffix) in ends), [])
        assert match.length == len(longest)
        length, end = match.after(())
        assert (length, known[end - length : end]) == (match.length, longest)
        if (new := next(places, None)) is not None:  # the index grows between two tokens of the text
            index.append(new)
            known.append(new)


@pytest.mark.parametrize("name", DRAFTERS)
@given(text=TEXTS, num_tokens=st.integers(1, 8))
def test_guess_is_what_followed_an_earlier_place_like_the_end(name: str, text: list[int], num_tokens: int) -> None:
    followed = DRAFTERS[name](text)
    guess = followed.guess(num_tokens)
    expected = longest_match(text, len(text) if name == "suffix" else 3)
    assert guess.match_len == expected
    assert followed.length == len(text)
    if not expected:
        assert guess.token_ids == []
        return
    places = [end for end in range(expected, len(text)) if text[end - expected : end] == text[-expected:]]
    assert guess.token_ids in [continued(text, place, num_tokens) for place in places]
    assert len(guess.token_ids) == num_tokens


@pytest.mark.parametrize("name", DRAFTERS)
@given(text=TEXTS, drafted=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_guess_behind_drafted_tokens_continues_their_end_without_commit(
    name: str, text: list[int], drafted: list[int]
) -> None:
    followed = DRAFTERS[name](text)
    before, guess = followed.guess(5), followed.guess(5, drafted)
    assert followed.guess(5) == before
    whole = [*text, *drafted]
    assert (len(guess.token_ids) == 5) is (guess.match_len > 0)
    if guess.match_len:
        end = whole[len(whole) - guess.match_len :]
        places = [at for at in range(guess.match_len, len(whole)) if whole[at - guess.match_len : at] == end]
        assert guess.token_ids in [continued(whole, at, 5) for at in places]
    else:
        assert drafted[-1] not in text


@pytest.mark.parametrize("name", DRAFTERS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_guess_does_not_depend_on_how_the_text_arrived(name: str, text: list[int], cuts: list[int]) -> None:
    followed = DRAFTERS[name](())
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(borders):
        followed.commit(text[start:end])
        followed.guess(3)
    assert followed.guess(5) == DRAFTERS[name](text).guess(5)


def test_repetition_that_has_just_begun_goes_on() -> None:
    assert continued([1, 2, 3, 4], 2, 5) == [3, 4, 3, 4, 3]
    assert SuffixText([9, 1, 2, 3, 1, 2, 3]).guess(7).token_ids == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    "drafter", [partial(SuffixText, least_match=3), partial(LookupText, least_match=3, most_match=4)]
)
def test_matches_that_are_too_short_are_no_ground_for_a_guess(drafter: TextDrafter) -> None:
    assert drafter([1, 2, 7, 1, 2]).guess(4).token_ids == []
    assert drafter([1, 2, 3, 7, 1, 2, 3]).guess(4).token_ids == [7, 1, 2, 3]


def test_latest_place_is_read() -> None:
    text = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2]
    assert SuffixText(text).guess(1).token_ids == [4]
    assert LookupText(text).guess(1).token_ids == [4]


def test_token_of_a_long_text_takes_microseconds() -> None:
    """A bound that only a search through the text would miss: 8,192 tokens, 200 guesses and commits."""
    generator = random.Random(0)
    followed = SuffixText([generator.randrange(200) for _ in range(8192)])
    started = time.perf_counter()
    for _ in range(200):
        followed.guess(8)
        followed.commit([generator.randrange(200)])
    assert (time.perf_counter() - started) / 200 < 1e-3


@pytest.mark.parametrize(
    ("generated", "guessed", "allowed"),
    [
        ([], [0, 1, 2, 0], [0, 1, 2, 0]),
        ([0], [1, 0, 2], [1]),
        ([0, 1], [1, 2, 2], [1, 2]),
        ([0], [2, 1], []),
        ([], [4, 0], [4, 0]),  # what follows the end is never read
        ([], [0, 900], [0]),
    ],
)
def test_guess_ends_before_a_token_that_a_form_does_not_allow(
    generated: list[int], guessed: list[int], allowed: list[int]
) -> None:
    automaton = tiny_compiler(["a", "b", "c", "d", "<e>"], 5, [4]).compile(StructuredOutput.regex("(ab+c)*"))
    assert following(guessed, generated, automaton) == allowed
