"""Blocks of constrained texts have the law of constrained plain decoding, by enumeration of all rounds in float64."""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cases import every
from definitions import defined_law
from enumeration import Law, largest_deviation, law_of_judged_rounds
from numpy.typing import NDArray
from tiny_models import tiny_compiler, tiny_network, with_exact_norms
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.verification import RULES, LawRule
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import judge
from tests.judged import judging_of

torch.set_num_threads(1)

TOKENS = ["a", "b", "ab", "c", ""]
"""The last one ends a text; the model has one id more, which no text has."""
STOP, VOCAB_SIZE = 4, 6
PROMPT = [0, 5]
FORM = StructuredOutput.regex("[ab]{2}(c|ab)?")
TEXTS = {first + second + end for first in "ab" for second in "ab" for end in ("", "c", "ab")}
"""All texts of the form."""
PLAIN = SamplingParams(structured_output=FORM)
PROCESSED = SamplingParams(
    0.7, presence_penalty=1.1, repetition_penalty=1.3, logit_bias=((1, 1.2),), structured_output=FORM
)
Seen = tuple[CachedModel, PreTrainedModel]


def compiled(form: StructuredOutput = FORM) -> Automaton:
    return tiny_compiler([token or "<e>" for token in TOKENS], VOCAB_SIZE, [STOP]).compile(form)


def allowed(text: Sequence[int]) -> list[int]:
    """Returns which tokens can go on, found without any automaton."""
    written = "".join(TOKENS[token] if token < len(TOKENS) else "?" for token in text)
    longer = [token for token in range(STOP) if any(full.startswith(written + TOKENS[token]) for full in TEXTS)]
    return longer + [STOP] * (written in TEXTS)


@torch.inference_mode()
def plain_rows(reference: PreTrainedModel, params: SamplingParams, text: Sequence[int]) -> list[list[float]]:
    """Returns the laws after the prompt and after each token of a text, as far as it has the form."""
    logits = reference(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, len(PROMPT) - 1 :]
    rows = []
    for place, row in enumerate(logits.tolist()):
        possible = replace(params, structured_output=None, allowed_token_ids=tuple(allowed(text[:place])) or None)
        rows.append(defined_law(row, possible, [*PROMPT, *text[:place]], len(PROMPT)))
    return rows


def plain_law(reference: PreTrainedModel, params: SamplingParams) -> Law:
    """Returns the law of texts that are decoded token by token, each of which ends with the stop token."""
    law: Law = {}
    growing: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for text, mass in growing:
        for token, prob in enumerate(plain_rows(reference, params, text)[-1]):
            if token == STOP and prob:
                law[(*text, STOP)] = mass * prob
            elif prob:
                growing.append(((*text, token), mass * prob))
    return law


def draft_rows(text: tuple[int, ...], tokens: tuple[int, ...], is_masked: bool) -> Tensor:
    """Returns what a drafter that knows two laws draws from; a masked one keeps to the form while it can."""
    tables = torch.tensor([[4.0, 2.0, 1.0, 3.0, 2.0, 4.0], [1.0, 4.0, 4.0, 3.0, 3.0, 1.0]], dtype=torch.float64)
    rows = []
    for place in range(len(tokens)):
        before = (*text, *tokens[:place])
        row = tables[(before[-1] if before else 0) % 2].clone()
        is_over = any(token not in allowed(before[:i]) for i, token in enumerate(before)) or STOP in before
        if is_masked and not is_over:
            row[[token for token in range(VOCAB_SIZE) if token not in allowed(before)]] = 0.0
        rows.append(row / row.sum())
    return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE, dtype=torch.float64)


def blocked_law(
    model: CachedModel, rule: str, params: SamplingParams, block_length: int, is_masked: bool, automaton: Automaton
) -> Law:
    """Returns the law of texts that are all judged with one automaton, which has to find its way between them."""

    def ended(emitted: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        if STOP in emitted:
            emitted = emitted[: emitted.index(STOP) + 1]
        return emitted, emitted[-1] == STOP or not allowed(emitted)  # which only a mistake leads to

    chosen = RULES[rule]
    assert isinstance(chosen, LawRule)
    return law_of_judged_rounds(
        model,
        chosen,
        params,
        block_length,
        PROMPT,
        lambda text, tokens: draft_rows(text, tokens, is_masked),
        ended,
        automaton=automaton,
    )


@pytest.fixture(scope="module")
def small() -> Seen:
    network = tiny_network("llama", VOCAB_SIZE, 32, seed=8)
    reference = with_exact_norms(copy.deepcopy(network))
    return torch_model(decoder_of(network, "lean"), 16 * 6_000), reference


CASES = [(PROCESSED, "block", 2, False), (PLAIN, "token", 2, True), (PROCESSED, "token", 1, False)]
CASES += [(PLAIN, "block", 0, False)]
MORE_CASES = [
    (params, rule, length, is_masked)
    for params in (PLAIN, PROCESSED)
    for rule in ("block", "token")
    for length, is_masked in product(range(4), (False, True))
]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text does not fail because the machine had other things to do while one of its masks was made."""
    for limit in ("TEXT_MASKS_CREDIT_S", "MAX_PLACE_S"):
        monkeypatch.setattr(f"draftwire.options.structured_output.grammar_automaton.{limit}", 100.0)


def law_is_that_of_plain_decoding(
    small: Seen, params: SamplingParams, rule: str, block_length: int, is_masked: bool
) -> None:
    model, reference = small
    law = blocked_law(model, rule, params, block_length, is_masked, compiled())
    expected = plain_law(reference, params)
    assert largest_deviation(law, expected) < 1e-11
    assert {"".join(TOKENS[token] for token in text) for text in law} == TEXTS
    assert sum(mass > 1e-3 for mass in expected.values()) > 5
    assert all(re.fullmatch("[ab]{2}(c|ab)?", text) for text in TEXTS)
    assert len({tuple(allowed(text)) for text in [(), (0,), (2,), (2, 0), (2, 3)]}) == 5, "masks differ by place"


@every(("params", "rule", "block_length", "is_masked"), CASES)
def test_blocks_have_the_law_of_constrained_plain_decoding(
    small: Seen, params: SamplingParams, rule: str, block_length: int, is_masked: bool
) -> None:
    """Drafts break the form, or go on beyond its end, which two tokens more than once do."""
    law_is_that_of_plain_decoding(small, params, rule, block_length, is_masked)


@pytest.mark.slow
@every(("params", "rule", "block_length", "is_masked"), MORE_CASES)
def test_blocks_of_every_length_have_the_law_of_constrained_plain_decoding(
    small: Seen, params: SamplingParams, rule: str, block_length: int, is_masked: bool
) -> None:
    law_is_that_of_plain_decoding(small, params, rule, block_length, is_masked)


@every("rule", RULES)
def test_every_rule_sees_masked_rows_as_far_as_a_block_has_the_form(small: Seen, rule: str) -> None:
    """Which is all that `coupled` needs: it emits the winners of races that these rows decide."""
    model, reference = small
    tokens = [2, 0, 1, STOP]
    sequence = model.cache.open(PROMPT)
    draft, key = DenseRows(draft_rows((), tuple(tokens), is_masked=False)), DrawKey(bytes(16), 0, 0)
    place = sequence, PROMPT, tokens, draft
    judging = judging_of(*place, PROCESSED, RULES[rule], key, len(PROMPT), automaton=compiled())
    (decided,) = judge(model, [judging]).decided
    model.cache.close(sequence)
    rows = decided.blocks.padded_target_probs()[0]
    expected = torch.tensor(plain_rows(reference, PROCESSED, tokens), dtype=torch.float64)
    assert (rows - expected)[:-1].abs().max() < 1e-11
    assert (rows[-1] > 0.0).all(), "after the end of the form every token has a law"


def right_masks(automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> NDArray[np.uint8]:
    """Returns masks also after texts that only a mistake leads to."""
    try:
        return automaton.masks(generated_ids, draft_tokens)
    except InvalidRequestError:
        return np.full((len(draft_tokens) + 1, 4), 255, dtype=np.uint8)


class Mistaken:
    """An automaton that has a mistake: it changes masks, knowing those of the call before."""

    def __init__(self, mistake: Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
        self._right = compiled()
        self._mistake = mistake
        self._before: NDArray[np.uint8] | None = None

    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> BlockMasks:
        masks = right_masks(self._right, generated_ids, draft_tokens)
        before, self._before = self._before, masks.copy()
        masks = self._mistake(masks, masks if before is None else before)
        return BlockMasks(masks)


FREE = np.full((1, 4), 255, dtype=np.uint8)
MISTAKES: dict[str, Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "only the first place": lambda masks, _: np.concatenate([masks[:1], FREE.repeat(len(masks) - 1, axis=0)]),
    "only what comes after acceptance": lambda masks, _: np.concatenate([FREE.repeat(len(masks) - 1, 0), masks[-1:]]),
    "a free bonus": lambda masks, _: np.concatenate([masks[:-1], FREE]),
    "the place before": lambda masks, _: np.concatenate([masks[:1], masks[:-1]]),
    "the place after": lambda masks, _: np.concatenate([masks[1:], masks[-1:]]),
    "no rollback": lambda masks, before: np.concatenate([before[-1:], masks[1:]]),
}


@every("name", MISTAKES)
def test_enumeration_sees_masks_in_the_wrong_place(small: Seen, name: str) -> None:
    model, reference = small
    automaton: Automaton = Mistaken(MISTAKES[name])  # type: ignore[assignment]
    law = blocked_law(model, "block", PLAIN, 1, False, automaton)
    assert not largest_deviation(law, plain_law(reference, PLAIN)) < 1e-3


@every("rule", ["block", "token", "coupled"])
def test_text_fails_where_its_form_cannot_go_on_as_in_plain_decoding(small: Seen, rule: str) -> None:
    """After "a" the form wants what no token has. A draft "a" that is rejected fails nothing. False alarm: 6e-7,
    the odds of five standard deviations.
    """
    model, reference = small
    automaton = compiled(StructuredOutput.regex("a?[!]|b"))
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1].double()
    probability = float(logits[[0, 1]].softmax(0)[0])
    assert 0.1 < probability < 0.9
    draft, count, judgings = DenseRows(torch.eye(VOCAB_SIZE)[[0]]), 150, []
    for number in range(count):
        key = DrawKey(bytes(16), 0, number) if rule != "coupled" else DrawKey(bytes(16), number, 0)
        place = model.cache.open(PROMPT), PROMPT, [0], draft
        stops = frozenset({STOP})
        judgings.append(judging_of(*place, PLAIN, RULES[rule], key, len(PROMPT), stops, automaton=automaton))
    failed = 0
    for judging, outcome in zip(judgings, judge(model, judgings).outcomes, strict=True):
        assert outcome.token_ids == [1] if isinstance(outcome, Judgement) else isinstance(outcome, InvalidRequestError)
        assert judging.sequence.length <= len(PROMPT)
        failed += not isinstance(outcome, Judgement)
        model.cache.close(judging.sequence)
    assert abs(failed - count * probability) < 5.0 * (count * probability * (1.0 - probability)) ** 0.5
