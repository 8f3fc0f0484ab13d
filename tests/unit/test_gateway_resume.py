"""Resumed completions: wherever a stream was cut, what came before and what comes after are one completion."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import PROMPT, STOP_TOKEN, STORY, FakeDrafter, FakeTarget, Result, collect, make_loop, text_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from virtual_time import run

from draftwire_gateway.session.committed_text import FinishReason
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.text.text import REPLACEMENT, TextStream

TOKENIZER_FOLDER = Path(__file__).parents[2] / "models" / "target"
TRICKY_TEXT = st.text(st.sampled_from([*"ab \n.éüßñ你好漢字ऄ😀🎉👩", "\u200d", REPLACEMENT]), min_size=1, max_size=14)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)


@dataclass(frozen=True)
class Request:
    """A completion whose story is known."""

    tokenizer: Any
    prompt_ids: list[int]
    story: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    accepts: list[int]

    def generate(self, generated_ids: list[int]) -> tuple[Result, FakeTarget]:
        target = FakeTarget(self.story, accepts=list(self.accepts))
        target.description = replace(target.description, vocab_size=2**20)  # the tokenizer's, not that of letters
        target.prompt_len = len(self.prompt_ids)
        changes = {"prompt_ids": self.prompt_ids, "max_tokens": self.max_tokens, "generated_ids": tuple(generated_ids)}
        ends = {"stop": self.stop, "stop_token_ids": self.stop_token_ids}
        limits = LoopSettings(plain_run_rounds=3)
        loop = make_loop(target, FakeDrafter(target), limits, self.tokenizer, **changes, **ends)
        return run(collect(loop)), target

    def shown_after(self, whole: Result, num_tokens: int) -> str:
        """Returns the text that was shown with the first tokens of a completion."""
        if num_tokens == len(whole.ids):
            return whole.text
        stream = TextStream(self.tokenizer, self.prompt_ids, self.stop)
        return "".join(stream.push([token])[0] for token in whole.ids[:num_tokens])


@st.composite
def requests(draw: st.DrawFn, tokenizer: Any) -> Request:
    """Stories of whole and broken characters, with ends that they often reach."""
    prompt_ids = tokenizer(draw(TRICKY_TEXT))["input_ids"][: draw(st.integers(1, 9))]
    text = draw(TRICKY_TEXT)
    story = tokenizer(text)["input_ids"]
    story = story[draw(st.integers(0, 2)) :] + draw(st.lists(st.integers(1, 4095), max_size=6))
    start = draw(st.integers(0, len(text) - 1))
    near = text[start : start + draw(st.integers(1, 4))]
    stop = draw(st.sampled_from([(), (), (near,), (near, "a" + REPLACEMENT), (REPLACEMENT,)]))
    stop_tokens = draw(st.sampled_from([frozenset(), frozenset(story[-1:]), frozenset(story[len(story) // 2 :][:1])]))
    max_tokens = draw(st.integers(1, max(1, len(story))))
    story += [260] * 10  # beyond the budget, where a block may look
    return Request(tokenizer, prompt_ids, story, max_tokens, stop, stop_tokens, draw(st.lists(st.integers(0, 4))))


@settings(max_examples=150)
@given(data=st.data())
def test_parts_of_a_resumed_completion_are_the_whole_wherever_it_was_cut(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    """Behind any of its rounds, behind any of its tokens, and where nothing but the finish was lost."""
    request = data.draw(requests(tokenizer))
    whole, _ = request.generate([])
    num_deltas = data.draw(st.integers(0, len(whole.deltas)))
    shown = whole.deltas[:num_deltas]
    ids = [token for delta in shown for token in delta.token_ids]
    rest, target = request.generate(ids)
    assert (ids + rest.ids, rest.reason, target.violations) == (whole.ids, whole.reason, [])
    assert "".join(delta.text for delta in shown) + rest.text == whole.text
    assert all(spec.first_round >= num_deltas for spec in target.attempts), "a delta is a round"
    num_tokens = data.draw(st.integers(0, len(whole.ids)))
    rest, _ = request.generate(whole.ids[:num_tokens])
    assert (whole.ids[:num_tokens] + rest.ids, rest.reason) == (whole.ids, whole.reason)
    assert request.shown_after(whole, num_tokens) + rest.text == whole.text
    rest, target = request.generate(whole.ids)
    assert (rest.deltas, rest.reason, target.attempts) == ([], whole.reason, [])


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 30), max_size=4).map(sorted), accepts=st.lists(st.integers(0, 4), max_size=10))
@example(cuts=[0, 0], accepts=[])
@example(cuts=[29, 30], accepts=[])
def test_numbers_of_a_round_serve_one_place_of_a_text_resumed_often(cuts: list[int], accepts: list[int]) -> None:
    """Each time, less of what the verifier decided may have arrived than it decided: its later rounds are not used."""
    ids: list[int] = []
    rounds_used: list[int] = []
    for cut in [*cuts, 30]:
        target = FakeTarget(accepts=list(accepts))
        loop = make_loop(target, FakeDrafter(target), max_tokens=30, generated_ids=tuple(ids))
        result = run(collect(loop))
        fences = [verdict.fence for verdict in target.verdicts]
        rounds_used += [fence.round for fence in fences if fence.prefix_len - len(PROMPT) < cut]
        ids = (ids + result.ids)[: max(cut, len(ids))]
    assert (ids, len(rounds_used)) == (STORY[:30], len(set(rounds_used)))


@pytest.mark.parametrize("num_generated", [17, 18, 19])
def test_drafter_reads_no_text_that_is_over_before_it_could_draft(num_generated: int) -> None:
    """Its first draft comes after a plain round, and leaves a token for the verifier."""
    target = FakeTarget(accepts=[4] * 10)
    drafter = FakeDrafter(target)
    run(collect(make_loop(target, drafter, generated_ids=tuple(STORY[:num_generated])))).assert_whole(
        start=num_generated
    )
    assert drafter.opened == (num_generated <= 17)
    assert target.spec.plain_rounds == (1 if num_generated <= 17 else 20 - num_generated)


@pytest.mark.parametrize("num_generated", [0, 1, 7, 17])
def test_resumed_session_says_what_is_prompt_and_what_was_generated(num_generated: int) -> None:
    """Penalties and min_tokens count what was generated before."""
    target = FakeTarget(accepts=[4] * 10)
    drafter = FakeDrafter(target)
    result = run(collect(make_loop(target, drafter, generated_ids=tuple(STORY[:num_generated]))))
    for spec in (target.spec, drafter.spec):
        before = spec.token_ids[: len(PROMPT) + num_generated]
        assert (before, spec.parameters.prompt_len) == ([*PROMPT, *STORY[:num_generated]], len(PROMPT))
    opened, numbers = target.spec, result.statistics
    assert (opened.max_len, opened.first_round, opened.plain_rounds) == (len(PROMPT) + 20, num_generated, 1)
    result.assert_whole(start=num_generated)
    assert (numbers.num_generated_tokens, numbers.num_prompt_tokens) == (20 - num_generated, len(PROMPT))
    assert target.violations == drafter.violations == []


def test_resumed_completion_without_a_drafter_requests_only_rounds_left() -> None:
    target = FakeTarget()
    run(collect(make_loop(target, None, generated_ids=tuple(STORY[:17]))))
    assert target.spec.plain_rounds == 3


@pytest.mark.parametrize(
    ("generated_ids", "stop", "reason"),
    [
        (STORY[:20], [], FinishReason.LENGTH),
        ([*STORY[:4], STOP_TOKEN], [], FinishReason.STOP),
        ([*STORY[:19], STOP_TOKEN], [], FinishReason.STOP),
        (STORY[:6], STORY[3:6], FinishReason.STOP),
        (STORY[:20], STORY[18:20], FinishReason.STOP),
        (STORY[:20], STORY[18:21], FinishReason.LENGTH),
    ],
)
def test_complete_completion_is_finished_without_a_verifier(
    generated_ids: list[int], stop: list[int], reason: FinishReason
) -> None:
    stops = (text_of(stop),) if stop else ()
    result = run(collect(make_loop(None, None, generated_ids=tuple(generated_ids), stop=stops)))
    assert (result.deltas, result.reason, result.statistics.num_generated_tokens) == ([], reason, 0)
