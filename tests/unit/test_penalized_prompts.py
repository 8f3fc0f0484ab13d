"""Penalties that do not look at the prompt are not given it, and give the same distributions to the bit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from draftwire.drafting.places import span_of_next
from draftwire.drafting.strategy import DraftRequest
from draftwire.method import sampling
from draftwire.method.keys import DrawKey
from draftwire.method.sampling import Span, TokenEdits, first_penalized, probabilities_of_spans
from draftwire.options.logprobs.reported_logprobs import of_prompt
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_drafting import GrowingTree
from draftwire.requests.logprobs import LogprobsMode
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.deciding import Case

VOCAB_SIZE = 8
STOPS = frozenset({2, 5})
KEY = DrawKey(bytes(16), 0, 0)
NO_REPETITION = SamplingParams(0.8, presence_penalty=0.7, frequency_penalty=-0.3, min_tokens=4)
GENERATED = [1, 3, 3]
DRAFTED = [3, 6, 1]
SHAPE = TokenTree((-1, 0, 0))
PROMPT_LENS = (0, 1, 40, 4000)


def prompt_of(length: int) -> list[int]:
    return [(3 * place) % (VOCAB_SIZE + 1) for place in range(length)]


def of_case(params: SamplingParams, prompt: list[int], tree: TokenTree | None = None) -> Span:
    committed = [*prompt, *GENERATED]
    case = Case(DRAFTED, None, params, RULES["coupled"], KEY, len(committed), committed, len(prompt), STOPS, tree=tree)
    return case.span


def of_tree_case(params: SamplingParams, prompt: list[int]) -> Span:
    return of_case(params, prompt, SHAPE)


def request_of(params: SamplingParams, prompt: Sequence[int]) -> DraftRequest:
    return DraftRequest(3, params, KEY, VOCAB_SIZE, prompt_len=len(prompt), stop_token_ids=STOPS)


def of_draft(params: SamplingParams, prompt: list[int]) -> Span:
    committed, edits = [*prompt, *GENERATED], TokenEdits(params, STOPS)
    drawer: Any = SimpleNamespace(token_ids=lambda _: DRAFTED, position=lambda _: len(committed) + len(DRAFTED))
    return span_of_next(drawer, 0, request_of(params, prompt), committed, lambda _: edits)


def of_growing_tree(params: SamplingParams, prompt: list[int]) -> Span:
    start = SimpleNamespace(request=request_of(params, prompt), committed=[*prompt, *GENERATED], edits=None)
    tree: Any = SimpleNamespace(start=start, path=lambda node: DRAFTED[: node + 1])
    (span,) = GrowingTree.spans(tree, [-1, 0, 1], 1)
    return span


def same(spans: list[Span], seed: int) -> None:
    """Checks that spans have the same distributions to the bit, also where tokens are impossible."""
    logits = torch.randn(spans[0].num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[:, 4] = -math.inf
    first, *others = (probabilities_of_spans(logits.clone(), [span]) for span in spans)
    for other in others:
        assert_close(other, first, rtol=0.0, atol=0.0, equal_nan=True)


@every("make", [of_case, of_tree_case, of_draft, of_growing_tree])
def test_prompt_is_looked_at_for_a_repetition_penalty_alone(make: Any) -> None:
    repetition = replace(NO_REPETITION, repetition_penalty=1.3)
    for length in PROMPT_LENS:
        prompt = prompt_of(length)
        span, whole = make(NO_REPETITION, prompt), make(repetition, prompt)
        assert span.text == whole.text[length:], "however long the prompt is"
        assert len(span.text) <= len(GENERATED) + len(DRAFTED)
        assert (span.prompt_len, whole.prompt_len) == (0, length)
        assert span.num_generated == whole.num_generated
        assert [span.rows_below(most) for most in range(9)] == [whole.rows_below(most) for most in range(9)]
        same([span, replace(whole, params=NO_REPETITION, edits=None)], length)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Spans with the whole text and no repetition penalty, of chains and of trees."""
    penalties = st.floats(-2.0, 2.0)
    params = SamplingParams(0.7, presence_penalty=draw(penalties), frequency_penalty=draw(penalties))
    params = replace(params, min_tokens=draw(st.integers(0, 3)))
    ids = st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=8)
    prompt, generated = draw(ids), draw(ids)
    paths = draw(st.one_of(st.none(), st.lists(ids, min_size=1, max_size=4)))
    num_rows = draw(st.integers(1, len(generated) + 1)) if paths is None else len(paths)
    return Span(params, num_rows, [*prompt, *generated], len(prompt), STOPS, paths=paths)


@given(spans(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_span_without_its_prompt_has_the_same_distributions_to_the_bit(span: Span, seed: int) -> None:
    first = first_penalized(span.params, span.prompt_len)
    assert first == span.prompt_len
    same([span, replace(span, text=span.text[first:], prompt_len=0)], seed)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_reported_prompt_is_penalized_for_repetition_alone(penalty: float) -> None:
    """In which no token counts as generated."""
    params, text = replace(NO_REPETITION, repetition_penalty=penalty), prompt_of(7)
    logits = torch.randn(6, VOCAB_SIZE + 1, generator=torch.Generator().manual_seed(1))
    whole = probabilities_of_spans(logits.clone(), [Span(params, 6, text[:-1], 6, STOPS)]).log()
    case = Case([], None, params, RULES["coupled"], KEY, len(text), text, len(text), STOPS)
    with patch.object(sampling, "_penalize", wraps=sampling._penalize) as penalize:
        reported = of_prompt(case, 0, logits, 0, LogprobsMode.PROCESSED)
    assert penalize.called is (penalty != 1.0)
    assert [one.logprob for one in reported] == [float(row[token]) for row, token in zip(whole, text[1:], strict=True)]
