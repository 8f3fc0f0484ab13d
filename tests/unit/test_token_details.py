"""Where tokens came from and what the drafter gave them, from the verifier's verdict to the text that is shown."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases import every
from gateway_fakes import LETTERS, STOP_TOKEN, STORY, FakeDrafter, FakeTarget, LetterTokenizer, make_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verifier_scheduler import complete, first_fence, make_block, make_scheduler, make_spec, next_step, offer
from virtual_time import run

from draftwire.method.encoding import DenseProbs, Supports
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import LogprobsPart
from draftwire.method.token_source import TokenSource
from draftwire.options.logprobs.draft_logprobs import log_probs
from draftwire_gateway.session.committed_text import Delta
from draftwire_gateway.session.loop import GenerationLoop

ACCEPTED, RECOVERED, BONUS, PLAIN = TokenSource


# What the drafter gave a token


def test_sparse_law_gives_a_token_its_weight_and_all_others_nothing() -> None:
    supports = Supports(np.array([[7, 3, 0], [5, 0, 0]]), np.array([[2**15, 2**14, 2**14], [2**16, 0, 0]]), 100)
    assert log_probs(supports, [3, 5]) == [math.log(0.25), 0.0]
    assert log_probs(supports, [0]) == [math.log(0.25)]
    assert log_probs(supports, [9, 0]) == [-math.inf, -math.inf], "an unused place says nothing of its id"


def test_dense_law_gives_nothing_to_tokens_that_the_drafter_does_not_have() -> None:
    dense = DenseProbs(np.array([[0.25, 0.75], [0.0, 1.0000001]], dtype=np.float32), vocab_size=5)
    assert log_probs(dense, [1, 1]) == [pytest.approx(math.log(0.75)), 0.0]
    assert log_probs(dense, [4, 0]) == [-math.inf, -math.inf]


ASKED = {"reports_draft_logprobs": True}


@every(
    ("changes", "draft", "decided", "given", "last"),
    [
        (ASKED, [10, 11, 12], [20], [-math.inf], RECOVERED),
        (ASKED, [10, 11, 12], [10, 20], [0.0, -math.inf], RECOVERED),
        (ASKED, [10, 11], [10, 11, 20], [0.0, 0.0, math.nan], BONUS),
        (ASKED | {"plain_rounds": 1}, [], [20], [math.nan], PLAIN),  # nobody drafted
        (ASKED | {"rule": "coupled"}, [10, 11], [10, 20], [math.nan] * 2, RECOVERED),  # by ids alone
        ({}, [10, 11], [10, 20], [], RECOVERED),  # nobody asks
    ],
)
def test_verdict_reports_the_draft_probability_and_source_of_each_token(
    changes: dict[str, object], draft: list[int], decided: list[int], given: list[float], last: TokenSource
) -> None:
    scheduler = make_scheduler()
    scheduler.open(make_spec(**changes), lease_id=0)
    if draft:  # each token was certain
        encoding = Encoding.NONE if "rule" in changes else Encoding.ONE_HOT
        offer(scheduler, make_block(first_fence(), draft, encoding))
    verdict = complete(scheduler, next_step(scheduler), decided)
    assert verdict is not None
    assert (verdict.logprobs or LogprobsPart()).draft == pytest.approx(given, nan_ok=True)
    assert verdict.sources == [*[ACCEPTED] * (len(decided) - 1), last]


# What of it is shown


async def deltas_of(loop: GenerationLoop) -> list[Delta]:
    return [event async for event in loop.run() if isinstance(event, Delta)]


def test_deltas_are_rounds_and_name_the_source_of_each_token() -> None:
    target = FakeTarget(accepts=[4, 0, 2, 4])
    deltas = run(deltas_of(make_loop(target, FakeDrafter(target), max_tokens=14)))
    drafted = [delta for delta in deltas if delta.num_draft_tokens]
    assert [delta.sources for delta in drafted[:4]] == [
        [ACCEPTED] * 4 + [BONUS],
        [RECOVERED],
        [ACCEPTED] * 2 + [RECOVERED],
        [ACCEPTED] * 3 + [BONUS],  # a token less was drafted: max_tokens leaves no room
    ]
    assert deltas[0].sources == [PLAIN]
    assert all(len(delta.sources) == len(delta.token_ids) for delta in deltas)
    assert all((delta.draft_logprobs, delta.text_lengths) == ([], []) for delta in deltas), "nobody asked"


@settings(max_examples=150)
@given(
    place=st.integers(0, 15),
    length=st.integers(1, 4),
    max_tokens=st.integers(1, 20),
    stop_place=st.none() | st.integers(0, 15),
    stops=st.booleans(),
    accepts=st.lists(st.integers(0, 4), max_size=10),
)
def test_details_are_cut_with_their_tokens_and_lengths_make_up_the_text(
    place: int, length: int, max_tokens: int, stop_place: int | None, stops: bool, accepts: list[int]
) -> None:
    """At a stop string, which may begin tokens before the one that completes it, a stop token, and the budget."""
    story = list(STORY)
    if stop_place is not None:
        story[stop_place] = STOP_TOKEN
    stop = "".join((*LETTERS, "?")[token] for token in story[place : place + length])
    target = FakeTarget(story, accepts=accepts)
    wanted = {"max_tokens": max_tokens, "stop": (stop,) if stops else (), "token_details": True}
    deltas = run(deltas_of(make_loop(target, FakeDrafter(target), **wanted)))
    for delta in deltas:
        assert len(delta.sources) == len(delta.text_lengths) == len(delta.token_ids)
        assert delta.draft_logprobs == [-float(token) for token in delta.token_ids]
        assert sum(delta.text_lengths) == len(delta.text)
    if not stops:  # then nothing is held back, and every token but a stop token is one letter
        ids = [token for delta in deltas for token in delta.token_ids]
        lengths = [length for delta in deltas for length in delta.text_lengths]
        assert lengths == [int(token != STOP_TOKEN) for token in ids]


class HoldingTokenizer(LetterTokenizer):
    """Says of every text's last letter that it could still become another one, as an unfinished character does."""

    def decode(self, *args: object, **options: object) -> str:
        text = super().decode(*args, **options)
        return text[:-1] + "\ufffd" if text else text


def test_text_that_is_held_back_to_the_end_counts_with_the_last_token() -> None:
    target = FakeTarget(accepts=[1])
    loop = make_loop(target, FakeDrafter(target), tokenizer=HoldingTokenizer(), max_tokens=3, token_details=True)
    deltas = run(deltas_of(loop))
    assert sum(sum(delta.text_lengths) for delta in deltas) == len("".join(delta.text for delta in deltas))
    assert deltas[-1].text.endswith("\ufffd")
    assert deltas[-1].text_lengths[-1] >= 1


def test_verifier_that_leaves_out_what_the_drafter_gave_is_given_up() -> None:
    forgetful, good = FakeTarget(address="forgetful:1"), FakeTarget(address="good:1")
    decide = forgetful._verdict
    forgetful._verdict = lambda *given: replace(decide(*given), logprobs=None)  # type: ignore[method-assign]
    deltas = run(deltas_of(make_loop([forgetful, good], None, max_tokens=4, token_details=True)))
    assert sum(len(delta.draft_logprobs) for delta in deltas) == 4
    assert (len(forgetful.attempts), len(good.attempts)) == (1, 1)
