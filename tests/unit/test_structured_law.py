"""Blocks of constrained texts have the law of constrained plain decoding, by enumeration of all rounds in float64."""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from enumeration import largest_deviation
from numpy.typing import NDArray
from tiny_models import tiny_network, with_exact_norms
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftwire.automaton import Automaton, BlockMasks, FormCompiler
from draftwire.distributions import DenseRows
from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import decoder_of
from draftwire.parameters import SamplingParams
from draftwire.randomness import DrawKey
from draftwire.structured_output import StructuredOutput
from draftwire.verification import RULES, LawRule
from draftwire.verification.target import Judgement, Judging, judge

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
Law = dict[tuple[int, ...], float]


def compiled(form: StructuredOutput = FORM) -> Automaton:
    tokenizer = Tokenizer(models.BPE(vocab={t or "<e>": i for i, t in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    compiler = FormCompiler(PreTrainedTokenizerFast(tokenizer_object=tokenizer), VOCAB_SIZE, [STOP])
    return compiler.compile(form)


def allowed(text: Sequence[int]) -> list[int]:
    """Returns which tokens can go on, found without any automaton."""
    written = "".join(TOKENS[token] if token < len(TOKENS) else "?" for token in text)
    longer = [token for token in range(STOP) if any(full.startswith(written + TOKENS[token]) for full in TEXTS)]
    return longer + [STOP] * (written in TEXTS)


def by_hand(logits: list[float], params: SamplingParams, text: Sequence[int]) -> list[float]:
    """Returns the law of the next token: form, bias, penalties, temperature."""
    weights = [0.0] * VOCAB_SIZE
    for token in allowed(text):
        value = logits[token] + dict(params.logit_bias).get(token, 0.0)
        if token in (*PROMPT, *text):
            value = value / params.repetition_penalty if value > 0.0 else value * params.repetition_penalty
        if token in text:
            value -= params.presence_penalty
        weights[token] = float(np.exp(value / params.temperature))
    return [weight / sum(weights) for weight in weights]


@torch.inference_mode()
def plain_law(reference: PreTrainedModel, params: SamplingParams) -> Law:
    """Returns the law of texts that are decoded token by token, each of which ends with the stop token."""
    law: Law = {}
    growing: Law = {(): 1.0}
    while growing:
        following: Law = {}
        for text, mass in growing.items():
            logits = reference(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, -1].tolist()
            for token, prob in enumerate(by_hand(logits, params, text)):
                if prob:
                    (law if token == STOP else following)[(*text, token)] = mass * prob
        growing = following
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
    model: CachedModel,
    rule: LawRule,
    params: SamplingParams,
    block_length: int,
    is_masked: bool,
    automaton: Automaton,
) -> Law:
    """Returns the law of texts that are decoded in rounds of `judge`, every block of which is tried.

    All of them are judged with one automaton, which has to find its way from each to the next.
    """
    finished: Law = defaultdict(float)
    growing: Law = {(): 1.0}
    while growing:
        following: Law = defaultdict(float)
        tries, judgings = [], []
        for text, tokens in product(growing, product(range(VOCAB_SIZE), repeat=block_length)):
            rows = draft_rows(text, tokens, is_masked)
            drawn = float(rows.gather(1, torch.tensor([tokens], dtype=torch.int64).T).prod())
            if drawn == 0.0:
                continue
            tries.append((text, tokens, drawn))
            committed = [*PROMPT, *text]
            judgings.append(
                Judging(
                    model.cache.open(committed),
                    committed,
                    list(tokens),
                    DenseRows(rows),
                    params,
                    rule,
                    DrawKey(bytes(16), 0, 0),
                    prompt_len=len(PROMPT),
                    automaton=automaton,
                )
            )
        (decided,) = judge(model, judgings).decided
        for judging in judgings:
            model.cache.close(judging.sequence)
        assert decided.members == list(range(len(tries)))
        law = rule.stop_law(decided.blocks)
        for accepted in range(block_length + 1):
            weights = rule.extra_weights(decided.blocks, law, torch.full((len(tries),), accepted))
            total = weights.sum(dim=1, keepdim=True)
            outcomes = law.accepted_probs[:, accepted, None] * weights / torch.where(total > 0.0, total, 1.0)
            for (text, tokens, drawn), row in zip(tries, outcomes.tolist(), strict=True):
                for extra, prob in enumerate(row):
                    if prob > 0.0:
                        emitted = (*text, *tokens[:accepted], extra)
                        if STOP in emitted:
                            emitted = emitted[: emitted.index(STOP) + 1]
                        is_over = emitted[-1] == STOP or not allowed(emitted)  # which only a mistake leads to
                        (finished if is_over else following)[emitted] += growing[text] * drawn * prob
        growing = following
    return finished


@pytest.fixture(scope="module")
def small() -> tuple[CachedModel, PreTrainedModel]:
    network = tiny_network("llama", VOCAB_SIZE, 32, seed=8)
    reference = with_exact_norms(copy.deepcopy(network))
    return CachedModel(decoder_of(network, "lean"), 16 * 6_000), reference


def rule_named(name: str) -> LawRule:
    rule = RULES[name]
    assert isinstance(rule, LawRule)
    return rule


def test_the_form_of_these_tests_has_masks_that_differ_by_place() -> None:
    assert all(re.fullmatch("[ab]{2}(c|ab)?", text) for text in TEXTS)
    assert len({tuple(allowed(text)) for text in [(), (0,), (2,), (2, 0), (2, 3)]}) == 5


@pytest.mark.parametrize("params", [PLAIN, PROCESSED], ids=["plain", "processed"])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("block_length", [0, 1, 2, 3])
@pytest.mark.parametrize("is_masked", [False, True], ids=["free drafts", "masked drafts"])
def test_blocks_have_the_law_of_constrained_plain_decoding(
    small: tuple[CachedModel, PreTrainedModel], params: SamplingParams, rule: str, block_length: int, is_masked: bool
) -> None:
    """Drafts break the form, or go on beyond its end, which three tokens more than once do."""
    model, reference = small
    law = blocked_law(model, rule_named(rule), params, block_length, is_masked, compiled())
    expected = plain_law(reference, params)
    assert largest_deviation(law, expected) < 1e-11
    assert {"".join(TOKENS[token] for token in text) for text in law} == TEXTS
    assert sum(mass > 1e-3 for mass in expected.values()) > 5


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_sees_masked_rows_as_far_as_a_block_has_the_form(
    small: tuple[CachedModel, PreTrainedModel], rule: str
) -> None:
    """Which is all that `coupled` needs: it emits the winners of races that these rows decide."""
    model, reference = small
    automaton, tokens = compiled(), [2, 0, 1, STOP]
    sequence = model.cache.open(PROMPT)
    draft = DenseRows(draft_rows((), tuple(tokens), is_masked=False))
    judging = Judging(sequence, PROMPT, tokens, draft, PROCESSED, RULES[rule], DrawKey(bytes(16), 0, 0), len(PROMPT))
    with_form = Judging(**{n: getattr(judging, n) for n in judging.__slots__ if n != "automaton"}, automaton=automaton)
    (decided,) = judge(model, [with_form]).decided
    model.cache.close(sequence)
    rows = decided.blocks.padded_target_probs()[0]
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, 1:].tolist()
    for place in range(len(tokens)):
        expected = torch.tensor(by_hand(logits[place], PROCESSED, tokens[:place]), dtype=torch.float64)
        assert (rows[place] - expected).abs().max() < 1e-11
    assert (rows[-1] > 0.0).all(), "after the end of the form every token has a law"


def right_masks(automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> NDArray[np.uint8]:
    """Returns masks also after texts that only a mistake leads to."""
    try:
        return automaton.masks(generated_ids, draft_tokens)
    except InvalidRequestError:
        return np.full((len(draft_tokens) + 1, 4), 255, dtype=np.uint8)


class Mistaken:
    """An automaton with a mistake that an implementation may have."""

    def __init__(self, mistake: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
        self._right = compiled()
        self._mistake = mistake

    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> BlockMasks:
        masks = self._mistake(right_masks(self._right, generated_ids, draft_tokens))
        return BlockMasks(masks, len(masks))


class NeverRollingBack:
    """Goes on from where the last block ended, if nothing else fits."""

    def __init__(self) -> None:
        self._right = compiled()
        self._stale: NDArray[np.uint8] | None = None

    def along(self, generated_ids: Sequence[int], draft_tokens: Sequence[int]) -> BlockMasks:
        masks = right_masks(self._right, generated_ids, draft_tokens)
        stale, self._stale = self._stale, masks[-1].copy()
        if stale is not None:
            masks[0] = stale
        return BlockMasks(masks, len(masks))


def only(place: int) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    def keep(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        kept = np.full_like(masks, 255)
        kept[place] = masks[place]
        return kept

    return keep


def free_bonus(masks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    masks[-1] = 255
    return masks


MISTAKES: dict[str, Callable[[], object]] = {
    "only the first place": lambda: Mistaken(only(0)),
    "only what comes after acceptance": lambda: Mistaken(only(-1)),
    "a free bonus": lambda: Mistaken(free_bonus),
    "the place before": lambda: Mistaken(lambda masks: np.concatenate([masks[:1], masks[:-1]])),
    "the place after": lambda: Mistaken(lambda masks: np.concatenate([masks[1:], masks[-1:]])),
    "no rollback": NeverRollingBack,
}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", MISTAKES)
def test_enumeration_sees_masks_in_the_wrong_place(
    small: tuple[CachedModel, PreTrainedModel], name: str, rule: str
) -> None:
    model, reference = small
    automaton: Automaton = MISTAKES[name]()  # type: ignore[assignment]
    law = blocked_law(model, rule_named(rule), PLAIN, 2, False, automaton)
    assert not largest_deviation(law, plain_law(reference, PLAIN)) < 1e-3


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_text_fails_where_its_form_cannot_go_on_as_often_as_in_plain_decoding(
    small: tuple[CachedModel, PreTrainedModel], rule: str
) -> None:
    """After "a" the form wants what no token has. A draft "a" that is rejected fails nothing. False alarm: 6e-7,
    the odds of five standard deviations.
    """
    model, reference = small
    automaton = compiled(StructuredOutput.regex("a?[!]|b"))
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1].double()
    probability = float(logits[[0, 1]].softmax(0)[0])
    assert 0.1 < probability < 0.9
    draft = DenseRows(torch.eye(VOCAB_SIZE)[[0]])
    failed, count = 0, 400
    for number in range(count):
        sequence = model.cache.open(PROMPT)
        key = DrawKey(bytes(16), 0, number) if rule != "coupled" else DrawKey(bytes(16), number, 0)
        judging = Judging(
            sequence, PROMPT, [0], draft, PLAIN, RULES[rule], key, len(PROMPT), frozenset({STOP}), automaton=automaton
        )
        (outcome,) = judge(model, [judging]).outcomes
        assert outcome.token_ids == [1] if isinstance(outcome, Judgement) else isinstance(outcome, InvalidRequestError)
        assert sequence.length <= len(PROMPT)
        failed += not isinstance(outcome, Judgement)
        model.cache.close(sequence)
    assert abs(failed - count * probability) < 5.0 * (count * probability * (1.0 - probability)) ** 0.5
