"""Runs in which the verifier drafts by itself: what it drafts, and how they end."""

from collections.abc import Sequence
from typing import Any

import pytest
from test_verifier_scheduler import (
    PROMPT,
    STOP_TOKEN,
    Engine,
    Scheduler,
    Step,
    TargetSession,
    first_fence,
    make_scheduler,
    make_spec,
    opened,
)

from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import Supports
from draftwire.method.round_parts import GuessPart, WatchedGuess
from draftwire.method.rounds import LocalDraft, PlainRun, ReceivedBlock, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.options.model_free.local_texts import LocalText
from draftwire.options.model_free.text_drafter import READ_AT_ONCE
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime import messages
from draftwire.v1 import session_pb2, verifier_pb2
from tests.unit.verdict_parts import strategy_of, watched_of

REPEATING = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def repeating(text: list[int] = REPEATING, **changes: Any) -> tuple[Scheduler, TargetSession]:
    scheduler = make_scheduler(context_length=2 * READ_AT_ONCE)
    return opened(scheduler, **{"token_ids": text, "prompt_len": len(text), "max_len": READ_AT_ONCE + 100, **changes})


def run(scheduler: Scheduler, session: TargetSession, num_rounds: int = 3, **changes: Any) -> None:
    draft = LocalDraft(**{"strategy": "suffix", "num_draft_tokens": 3, **changes})
    scheduler.run_plain(PlainRun(session.fence, num_rounds, draft))


def local(scheduler: Scheduler) -> tuple[Step, ReceivedBlock | None]:
    step = scheduler.next_step()
    assert step is not None
    (item,) = step.items
    return step, item.block


def decide(scheduler: Scheduler, step: Step, token_ids: Sequence[int]) -> Verdict:
    ((_, verdict),) = scheduler.complete(step, Engine().run(step, lambda item: list(token_ids)))
    assert isinstance(verdict, Verdict)
    return verdict


def test_rounds_of_a_run_have_the_guesses_of_the_committed_text() -> None:
    scheduler, session = repeating()
    run(scheduler, session)
    step, block = local(scheduler)
    assert block is not None
    assert (block.token_ids, block.local_strategy) == ([3, 4, 1], "suffix")
    assert isinstance(block.draft, Supports)
    assert block.draft.weights.tolist() == [[65536]] * 3, "one-hot: a guess is no draw"
    verdict = decide(scheduler, step, [3, 4, 9])
    assert (verdict.num_draft_tokens, verdict.num_accepted_tokens, strategy_of(verdict)) == (3, 2, "suffix")
    assert verdict.plain_rounds_left == 2
    step, block = local(scheduler)
    assert block is None, "nothing like the end of the text"
    verdict = decide(scheduler, step, [1])
    assert (verdict.num_draft_tokens, strategy_of(verdict), verdict.plain_rounds_left) == (0, "", 1)
    step, block = local(scheduler)
    assert block is None
    assert decide(scheduler, step, [2]).plain_rounds_left == 0
    assert scheduler.next_step() is None


def test_plain_run_after_a_drafted_one_is_plain_and_what_was_read_is_kept() -> None:
    scheduler, session = repeating()
    run(scheduler, session, 1)
    step, _ = local(scheduler)
    decide(scheduler, step, [3])
    scheduler.run_plain(PlainRun(session.fence, 1))
    step, block = local(scheduler)
    assert block is None
    decide(scheduler, step, [4])
    read = text_of(session)
    run(scheduler, session, 1)
    step, block = local(scheduler)
    assert block is not None
    assert block.token_ids == [1, 2, 3]
    assert text_of(session) is read
    decide(scheduler, step, [1])
    run(scheduler, session, 1, strategy="lookup")
    _, block = local(scheduler)
    assert block is not None
    assert block.local_strategy == "lookup"


@pytest.mark.parametrize("tokens", [[STOP_TOKEN, 9], [9, STOP_TOKEN, 9], [9, 9, 9, STOP_TOKEN]])
def test_stop_token_anywhere_in_a_round_ends_the_run(tokens: list[int]) -> None:
    scheduler, session = repeating()
    run(scheduler, session)
    step, _ = local(scheduler)
    assert decide(scheduler, step, tokens).plain_rounds_left == 0
    assert scheduler.next_step() is None


def test_run_ends_where_the_text_does_and_no_draft_reaches_beyond() -> None:
    scheduler, session = repeating(max_len=len(REPEATING) + 5)
    run(scheduler, session, 5)
    step, block = local(scheduler)
    assert block is not None
    decide(scheduler, step, [3, 4, 1])
    step, block = local(scheduler)
    assert block is not None
    assert block.token_ids == [2], "one place is left beside the verifier's own token"
    assert decide(scheduler, step, [2, 3]).plain_rounds_left == 0
    assert scheduler.next_step() is None


@pytest.mark.parametrize(
    ("sampling", "drafted"),
    [
        (SamplingParams(allowed_token_ids=frozenset({1, 3, STOP_TOKEN})), [3]),
        (SamplingParams(min_tokens=2), [3, 4, 1]),
        (SamplingParams(allowed_token_ids=frozenset({1})), None),
    ],
)
def test_guess_ends_before_a_token_that_the_request_does_not_allow(
    sampling: SamplingParams, drafted: list[int] | None
) -> None:
    scheduler, session = repeating(sampling=sampling)
    run(scheduler, session)
    _, block = local(scheduler)
    assert (block.token_ids if block else None) == drafted


def test_stop_token_is_not_guessed_where_it_is_masked() -> None:
    text = [1, 2, STOP_TOKEN, 1, 2]
    for min_tokens, drafted in ((0, [STOP_TOKEN, 1, 2]), (1, None)):
        sampling = SamplingParams(min_tokens=min_tokens)
        scheduler, session = repeating(text, sampling=sampling)
        run(scheduler, session)
        _, block = local(scheduler)
        assert (block.token_ids if block else None) == drafted


def test_long_prompt_is_read_over_several_rounds() -> None:
    text = [1, 2, 3, 4] * READ_AT_ONCE
    scheduler, session = repeating(text[: READ_AT_ONCE + 8])
    run(scheduler, session)
    assert text_of(session).length == READ_AT_ONCE
    step, block = local(scheduler)
    assert block is None, "what is not read yet may be what comes next"
    decide(scheduler, step, [1])
    assert text_of(session).length == READ_AT_ONCE + 9
    _, block = local(scheduler)
    assert block is not None
    assert block.token_ids == [2, 3, 4]


def text_of(session: TargetSession) -> Any:
    """Returns what was read of a session's text."""
    (source,) = session.local.values()
    assert isinstance(source, LocalText)
    return source.text


def watching(text: list[int] = REPEATING, **changes: Any) -> tuple[Scheduler, TargetSession]:
    return repeating(text, watched=LocalDraft("suffix", 3), **changes)


def test_verdict_tells_how_a_guess_would_have_fared() -> None:
    scheduler, session = watching()
    fared = []
    for tokens in ([3, 4, 1], [9], [1]):
        scheduler.run_plain(PlainRun(session.fence, 1))
        step, block = local(scheduler)
        assert block is None, "it is not drafted"
        fared.append(watched_of(decide(scheduler, step, tokens)))
    assert fared == [WatchedGuess(True, 3), WatchedGuess(True, 0), WatchedGuess(False, 0)]
    scheduler, session = watching()
    scheduler.run_plain(PlainRun(session.fence, 1))
    step, _ = local(scheduler)
    assert watched_of(decide(scheduler, step, [3, 4, 9])) == WatchedGuess(True, 2)


def test_guess_that_was_drafted_or_not_asked_for_is_not_watched() -> None:
    scheduler, session = watching()
    run(scheduler, session, 2)
    step, block = local(scheduler)
    assert block is not None
    assert watched_of(decide(scheduler, step, [3, 4, 9])) is None
    step, block = local(scheduler)
    assert block is None
    assert watched_of(decide(scheduler, step, [8])) == WatchedGuess(False), "nothing was guessed"
    scheduler, session = repeating()
    scheduler.run_plain(PlainRun(session.fence, 1))
    step, _ = local(scheduler)
    assert watched_of(decide(scheduler, step, [3])) is None
    assert not session.local, "and costs nothing"


def test_guess_of_a_text_that_is_still_being_read_says_nothing() -> None:
    scheduler, session = watching([1, 2, 3, 4] * (READ_AT_ONCE // 4 + 2))
    told = []
    for _ in range(2):
        scheduler.run_plain(PlainRun(session.fence, 1))
        step, _ = local(scheduler)
        told.append(watched_of(decide(scheduler, step, [7])))
    assert told == [None, WatchedGuess(False, 0)]


def test_longer_texts_are_not_watched_since_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.options.model_free.local_texts.MAX_WATCHED", len(REPEATING) + 1)
    scheduler, session = watching()
    told = []
    for token in (3, 4, 1):
        scheduler.run_plain(PlainRun(session.fence, 1))
        step, _ = local(scheduler)
        told.append(watched_of(decide(scheduler, step, [token])))
    assert told == [WatchedGuess(True, 1), WatchedGuess(True, 1), None]
    assert text_of(session).length == len(REPEATING) + 1
    run(scheduler, session, 1)
    step, block = local(scheduler)
    assert block is not None
    decide(scheduler, step, [9])
    run(scheduler, session, 1)
    step, block = local(scheduler)
    assert block is None
    assert watched_of(decide(scheduler, step, [9])) == WatchedGuess(False), (
        "it is read anyway where drafts are asked for"
    )


@pytest.mark.parametrize("watched", [LocalDraft("clairvoyance", 3), LocalDraft("suffix", 0), LocalDraft("suffix", 4)])
def test_session_that_has_something_impossible_watched_is_refused(watched: LocalDraft) -> None:
    with pytest.raises(InvalidRequestError, match=r"nothing drafts by the name|1 to 3 tokens"):
        opened(watched=watched)


@pytest.mark.parametrize("watched", [None, WatchedGuess(False), WatchedGuess(True, 2)])
def test_what_is_watched_survives_the_wire(watched: WatchedGuess | None) -> None:
    verdict = Verdict(
        first_fence(),
        [1, 2],
        1,
        1,
        TokenSource.BONUS,
        0,
        guess=None if watched is None else GuessPart(watched=watched),
    )
    sent = messages.verdict_to_proto(verdict).SerializeToString()
    assert messages.verdict_from_proto(session_pb2.Verdict.FromString(sent)) == verdict
    spec = make_spec(watched=None if watched is None else LocalDraft("eagle3", 3, instead="suffix"))
    opening = messages.target_spec_to_proto(spec, 1).SerializeToString()
    assert messages.target_spec_from_proto(verifier_pb2.OpenTargetSessionRequest.FromString(opening)) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "clairvoyance"}, "nothing drafts by the name"),
        ({"num_draft_tokens": 0}, "1 to 3 tokens"),
        ({"num_draft_tokens": 4}, "1 to 3 tokens"),
    ],
)
def test_draft_that_the_verifier_cannot_make_is_refused(changes: dict[str, Any], message: str) -> None:
    scheduler, session = opened()
    with pytest.raises(InvalidRequestError, match=message):
        run(scheduler, session, **changes)
    assert session.fence == first_fence()
    assert len(session.committed) == len(PROMPT)
    assert scheduler.next_step() is None, "nothing was begun"
