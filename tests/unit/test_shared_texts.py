"""Texts that go on as others of their salt did, and never as those of another salt or of a repeated seed."""

import random
from functools import partial
from typing import Any

import pytest
from gateway_fakes import PROMPT, describe
from hypothesis import given
from hypothesis import strategies as st

from draftwire.errors import InvalidRequestError
from draftwire.options.model_free.names import are_text_drafters
from draftwire.options.model_free.registry import TextDrafters
from draftwire.options.model_free.shared_texts import INDEXED_AT_ONCE, SharedTexts
from draftwire.options.model_free.suffix import SuffixText
from draftwire.options.model_free.text_drafter import NOTHING, TextDrafter
from draftwire.requests.parameters import SamplingParams
from draftwire_gateway.requested_generation import (
    GeneratedChoice,
    RequestedGeneration,
    SpeculationDefaults,
    complete_request,
)
from draftwire_gateway.session.session_state import SessionState

STORY = list(range(100, 140))
NEW = [7, 8]
"""A text that says nothing twice."""


def write(drafter: TextDrafter, salt: str | None, token_ids: list[int], prompt_len: int = 0) -> None:
    """Has a text generated and ended, and all of it indexed."""
    drafter(token_ids, salt).close(prompt_len)
    reader = drafter(NEW, salt or "")
    for _ in range(len(token_ids) // INDEXED_AT_ONCE + 2):
        reader.guess(1)


def drafter_of(max_tokens: int = 10_000) -> TextDrafter:
    return partial(SuffixText, shared=SharedTexts(max_tokens))


def test_text_goes_on_as_an_earlier_one_of_its_salt_did() -> None:
    drafter = drafter_of()
    write(drafter, "a", STORY)
    followed = drafter([*NEW, *STORY[:3]], "a")
    assert followed.guess(4).token_ids == STORY[3:7]
    assert followed.guess(4).match_len == 3
    followed.commit(STORY[3:6])
    assert followed.guess(4).token_ids == STORY[6:10]


@pytest.mark.parametrize(
    ("writer", "reader"), [("a", "b"), ("a", ""), ("", "a"), (None, "a"), ("a", None), (None, None)]
)
def test_nothing_is_read_under_another_salt_or_without_sharing(writer: str | None, reader: str | None) -> None:
    """Neither a guess nor the time of one: the other texts are not even looked up."""
    drafter = drafter_of()
    write(drafter, writer, STORY)
    followed = drafter([*NEW, *STORY[:3]], reader)
    for token in STORY[3:]:
        assert followed.guess(4) == NOTHING
        followed.commit([token])


def test_own_earlier_place_beats_an_equal_match_in_another_text() -> None:
    drafter = drafter_of()
    write(drafter, "", STORY)
    assert drafter([*STORY[:2], 1, 2, *STORY[:2]], "").guess(2).token_ids == [1, 2]
    assert drafter([STORY[1], STORY[2], 1, 2, *STORY[:3]], "").guess(2).token_ids == STORY[3:5]


def test_prompts_are_not_shared() -> None:
    drafter = drafter_of()
    write(drafter, "", STORY, prompt_len=30)
    assert drafter(STORY[:10], "").guess(4) == NOTHING
    assert drafter(STORY[30:33], "").guess(4).token_ids == STORY[33:37]


def test_guess_does_not_run_from_one_text_into_the_next() -> None:
    drafter = drafter_of()
    write(drafter, "", STORY[:5])
    write(drafter, "", STORY[20:])
    assert drafter(STORY[:4], "").guess(4).token_ids == [STORY[4]]
    assert drafter(STORY[:5], "").guess(4) == NOTHING


def test_memory_is_bounded_and_the_oldest_are_forgotten() -> None:
    shared = SharedTexts(60)
    drafter = partial(SuffixText, shared=shared)
    for salt in ("a", "b", "c"):
        write(drafter, salt, STORY[:25])
        assert shared.num_tokens <= 60
    assert drafter(STORY[:3], "a").guess(2) == NOTHING, "it was used longest ago"
    assert drafter(STORY[:3], "c").guess(2).token_ids == STORY[3:5]
    for first in range(0, 1000, 25):
        write(drafter, "c", list(range(first, first + 25)))
        assert shared.num_tokens <= 60
    assert drafter([990, 991], "c").guess(2).token_ids == [992, 993]
    assert drafter([10, 11], "c").guess(2) == NOTHING
    assert drafter_of(max_tokens=10)(NEW, "").guess(1) == NOTHING


def test_text_that_is_longer_than_all_that_is_kept_is_left_out() -> None:
    shared = SharedTexts(30)
    write(partial(SuffixText, shared=shared), "", STORY)
    assert shared.num_tokens == 0


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=5), st.lists(st.integers(0, 3), max_size=30))
def test_guess_is_read_from_the_longest_match_in_any_text(texts: list[list[int]], text: list[int]) -> None:
    drafter = partial(SuffixText, least_match=1, shared=SharedTexts(10_000))
    for each in texts:
        write(drafter, "", each)
    alone = SuffixText(text, least_match=1)
    guess, own = drafter(text, "").guess(3), alone.guess(3)

    def matches(other: list[int]) -> list[int]:
        """Lengths of the text's suffixes that end before another token of a text."""
        lengths = range(1, min(32, len(text)) + 1)
        return [
            length
            for length in lengths
            for end in range(length, len(other))
            if other[end - length : end] == text[-length:]
        ]

    longest = max((length for other in texts for length in matches(other)), default=0)
    ends_at_end = any(other and text[-length:] == other[-length:] for other in texts for length in range(1, 33))
    if not ends_at_end:  # else the longest match may have nothing after it
        assert guess.match_len == max(own.match_len, longest)


def requested(**changes: Any) -> RequestedGeneration:
    return RequestedGeneration(
        [list(PROMPT)], **{"sampling": SamplingParams(), "caller": "", "max_tokens": 20, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, (True, False)),
        ({"seed": 5}, (False, False)),
        ({"seed": 5, "sampling": SamplingParams(0.0)}, (True, True)),
        ({"seed": 5, "rule": "coupled"}, (True, True)),
        ({"generated_choices": (GeneratedChoice(0, (1, 2)),)}, (True, False)),
    ],
)
def test_text_with_numbers_perhaps_drawn_before_shares_nothing(
    changes: dict[str, Any], shares: tuple[bool, bool]
) -> None:
    """In the second epoch, since a verifier that was lost may have drawn more than was received."""
    defaults = SpeculationDefaults(4, 16, "block")
    (generation,) = complete_request(requested(**changes), describe("target"), defaults)
    session = SessionState(generation)
    for session.epoch, expected in enumerate(shares):
        assert session.parameters.shares_text is expected


def test_drafters_are_named_alone_or_joined() -> None:
    drafters = TextDrafters()
    assert drafters.names == ("suffix", "lookup")
    text = drafters.named("lookup+suffix")([1, 2, 3, 1, 2])
    assert text.guess(1).token_ids == [3]
    assert text.length == 5
    assert are_text_drafters("suffix+retrieval")
    assert not are_text_drafters("suffix+")
    assert not are_text_drafters("suffix+suffix")
    with pytest.raises(InvalidRequestError, match="needs a store"):
        drafters.named("suffix+retrieval")
    with pytest.raises(InvalidRequestError, match="nothing drafts by the name 'x'; known: suffix, lookup"):
        drafters.named("suffix+x")


def test_of_joined_drafters_the_longest_match_counts() -> None:
    rng = random.Random(3)
    drafters = TextDrafters()
    text = [rng.randrange(3) for _ in range(200)]
    joined, alone = (drafters.named(name)([]) for name in ("lookup+suffix", "suffix"))
    for token in text:
        joined.commit([token])
        alone.commit([token])
        assert joined.guess(3).match_len == alone.guess(3).match_len


def completed(*drafter: str, **changes: Any) -> tuple[Any, tuple[str, ...]]:
    target = describe("target")
    defaults = SpeculationDefaults(
        4, 16, "block", local_strategies=("suffix",), drafter_names=lambda: ("tiny", "a+b", "suffix", "lookup")
    )
    (generation,) = complete_request(requested(drafter=drafter, **changes), target, defaults)
    return generation.draft_models, generation.local_strategies


def test_request_says_what_may_draft() -> None:
    assert completed() == (None, ("suffix",))
    assert completed("tiny") == ({"tiny"}, ("tiny",)), "a verifier drafts by what it has of these"
    assert completed("lookup", "suffix") == ({"lookup", "suffix"}, ("lookup", "suffix"))
    assert completed("suffix+lookup") == ({"lookup", "suffix"}, ("suffix", "lookup"))
    assert completed("a+b", "suffix") == ({"a+b", "suffix"}, ("a+b", "suffix")), "a model may have such a name"
    with pytest.raises(InvalidRequestError, match="drafter: nothing drafts by the name 'huge'; there are tiny, a"):
        completed("tiny", "huge")
