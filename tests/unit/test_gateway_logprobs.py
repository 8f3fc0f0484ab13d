"""Log-probabilities travel with their tokens through the gateway's loop, whatever is cut, lost or resumed."""

from typing import Any

import pytest
from gateway_fakes import (
    LETTERS,
    PROMPT,
    STOP_TOKEN,
    STORY,
    FakeDrafter,
    FakeTarget,
    Fate,
    Result,
    collect,
    make_loop,
    said_of,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from draftwire.errors import CompletionInterruptedError
from draftwire.requests.logprobs import NO_LOGPROBS, LogprobsMode, LogprobsRequest, PromptPart, TokenLogprob
from draftwire_gateway.session.committed_text import FinishReason

WANTED = LogprobsRequest(2, 3, LogprobsMode.PROCESSED)


def said(ids: list[int], start: int, num_top: int) -> list[TokenLogprob]:
    """What is to be said of tokens from position `start` on."""
    return [said_of(position, token, num_top) for position, token in enumerate(ids, start)]


def check(result: Result, num_top: int = 2, num_before: int = 0) -> None:
    for delta in result.deltas:
        assert [token.token_id for token in delta.logprobs] == delta.token_ids
    assert result.logprobs == said(result.ids, len(PROMPT) + num_before, num_top)


async def test_deltas_have_log_probabilities_after_those_of_the_prompt() -> None:
    for wanted in (WANTED, NO_LOGPROBS):
        target = FakeTarget(accepts=[4, 0, 2, 1, 3])
        result = await collect(make_loop(target, FakeDrafter(target), logprobs=wanted))
        result.assert_whole()
        assert [spec.logprobs for spec in target.attempts] == [wanted]
        if wanted == WANTED:
            check(result)
            assert result.prompt == said(PROMPT[1:], 1, 3)
        else:
            assert (result.logprobs, result.prompt) == ([], [])


@settings(max_examples=60)
@given(
    place=st.integers(0, 15),
    length=st.integers(1, 4),
    max_tokens=st.integers(1, 20),
    stop_place=st.none() | st.integers(0, 15),
    accepts=st.lists(st.integers(0, 4), max_size=10),
)
def test_log_probabilities_are_cut_with_their_tokens(
    place: int, length: int, max_tokens: int, stop_place: int | None, accepts: list[int]
) -> None:
    """At a stop string, which may begin tokens before the one that completes it, a stop token, and the budget."""
    story = list(STORY)
    if stop_place is not None:
        story[stop_place] = STOP_TOKEN
    stop = "".join((*LETTERS, "?")[token] for token in story[place : place + length])
    target = FakeTarget(story, accepts=accepts)
    loop = make_loop(target, FakeDrafter(target), max_tokens=max_tokens, stop=(stop,), logprobs=LogprobsRequest(1))
    result = run(collect(loop))
    check(result, num_top=1)
    assert result.ids == story[: len(result.ids)]
    ends = [max_tokens, place + length, *([] if stop_place is None else [stop_place + 1])]
    assert len(result.ids) == min(ends)


@settings(max_examples=60)
@given(fates=st.lists(st.sampled_from(Fate), max_size=8), accepts=st.lists(st.integers(0, 4), max_size=10))
def test_session_that_moves_loses_nothing_and_has_its_prompt_computed_once(
    fates: list[Fate], accepts: list[int]
) -> None:
    targets = [FakeTarget(accepts=list(accepts), address=f"target:{number}") for number in range(9)]
    left = list(fates)
    for target in targets:
        target.next_fate = lambda: left.pop(0) if left else Fate.TOLD
    loop = make_loop(targets, [FakeDrafter(*targets)], logprobs=WANTED)
    result = Result()
    try:
        run(collect(loop, result))
    except CompletionInterruptedError:
        assert sum(fate is not Fate.TOLD for fate in fates) > 3
    check(result)
    assert result.prompt == said(PROMPT[1:], 1, 3)
    specs = [spec for target in targets for spec in target.attempts]
    assert sorted(spec.logprobs.prompt_logprobs is not None for spec in specs) == [False] * (len(specs) - 1) + [True]
    assert all(spec.logprobs.logprobs == 2 for spec in specs)


PARTS = {
    "a token left out": [PromptPart(2, said(PROMPT[2:], 2, 3))],
    "its end left out": [PromptPart(1, said(PROMPT[1:2], 1, 3))],
    "all of it left out": [],
    "other tokens": [PromptPart(1, said([9, 9], 1, 3))],
    "more tokens than there are": [PromptPart(1, said([*PROMPT[1:], 5], 1, 3))],
    "tokens far behind it": [PromptPart(2**32 - 1, said([5], 1, 3))],
}


@pytest.mark.parametrize("name", PARTS)
async def test_verifier_that_reports_another_prompt_is_given_up(name: str) -> None:
    wrong, right = FakeTarget(address="wrong:1"), FakeTarget(address="right:1")
    wrong.prompt_parts = PARTS[name]
    result = await collect(make_loop([wrong, right], None, logprobs=WANTED))
    check(result)
    assert (result.prompt, len(wrong.attempts), len(right.attempts)) == (said(PROMPT[1:], 1, 3), 1, 1)
    assert result.finish.statistics.num_verifiers_lost == 1


async def test_parts_of_a_prompt_that_come_twice_are_told_once() -> None:
    target = FakeTarget()
    first, both = PromptPart(1, said(PROMPT[1:2], 1, 3)), PromptPart(1, said(PROMPT[1:], 1, 3))
    target.prompt_parts = [first, first, both, both]
    result = await collect(make_loop(target, None, logprobs=WANTED))
    assert result.prompt == said(PROMPT[1:], 1, 3)
    check(result)


async def test_verifier_that_leaves_log_probabilities_out_is_given_up() -> None:
    silent, good = FakeTarget(address="silent:1"), FakeTarget(address="good:1")
    silent.leaves_out = True
    result = await collect(make_loop([silent, good], None, logprobs=LogprobsRequest(0)))
    check(result, num_top=0)
    assert (result.ids, len(silent.attempts)) == (STORY[:20], 1)


async def test_prompt_of_one_token_has_nothing_to_report() -> None:
    target = FakeTarget()
    target.prompt_len = 1
    loop = make_loop(target, None, prompt_ids=[3], logprobs=LogprobsRequest(prompt_logprobs=2))
    result = await collect(loop)
    assert (result.prompt, result.ids, result.logprobs) == ([], STORY[:20], [])


async def test_resumed_completion_goes_on_behind_the_tokens_that_came() -> None:
    changes: dict[str, Any] = {"generated_ids": tuple(STORY[:7]), "logprobs": LogprobsRequest(2)}
    result = await collect(make_loop(FakeTarget(), None, **changes))
    check(result, num_before=7)
    assert (result.ids, result.text) == (STORY[7:20], text_of(STORY[7:20]))
    assert result.reason is FinishReason.LENGTH
