"""A model's drafts that a guess continues: where it takes over, what is stated, and which passes it saves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from session_specs import salted
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.method.encoding import Claim, DraftDistributions, Supports, decode_one, encode_dense, encode_sparse
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.options.logprobs.draft_logprobs import log_probs
from draftwire.options.model_free.cascade_drafter import LEAST_MATCH, LEAST_READ_AHEAD, CascadeDrafter, with_certain
from draftwire.options.model_free.continued_chains import ContinuedDrafter
from draftwire.options.model_free.suffix import SuffixText
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE

torch.set_num_threads(1)

VOCAB_SIZE = 24
STORY = list(range(1, 12))
OTHER = [20, 21]
RETURNING = [*STORY, *OTHER, *STORY[: LEAST_MATCH - 1]]
"""One token of the story more, and it probably goes on."""
OFTEN_BACK = SamplingParams(logit_bias=((STORY[LEAST_MATCH - 1], 5.0),))
"""With which the model often draws that token."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CachedModel:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("model"), VOCAB_SIZE, 3)
    return torch_model(decoder_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), 256)


def request(number: int = 0, num_tokens: int = 6, **changes: object) -> DraftRequest:
    key = DrawKey(bytes(KEY_BYTES), 0, number)
    return replace(DraftRequest(num_tokens, SamplingParams(), key, VOCAB_SIZE, prompt_len=2), **changes)


def drafted(strategy: LanguageModelDrafter | CascadeDrafter, text: list[int], asked: DraftRequest) -> DraftStep:
    sequence = strategy.open(text, ALONE)
    step = strategy.step([Drafting(sequence, asked)])
    sequence.close()
    return step


def draft_of(step: DraftStep) -> Draft:
    (draft,) = step.drafts
    assert isinstance(draft, Draft)
    return draft


def stated(draft: Draft) -> list[float]:
    """Returns the log-probabilities that a draft states of its tokens."""
    return log_probs(decode_one(Claim(draft.token_ids, draft.distributions), VOCAB_SIZE), draft.token_ids)


def strategies(model: CachedModel, encoding: Encoding) -> tuple[LanguageModelDrafter, CascadeDrafter]:
    quantization = Quantization(encoding)
    continued = ContinuedDrafter(model, 256, quantization=quantization)
    return LanguageModelDrafter(model, 256, quantization=quantization), CascadeDrafter(continued, SuffixText)


ENCODINGS = [Encoding.SPARSE_UINT16, Encoding.DENSE_FLOAT32, Encoding.DENSE_FLOAT16]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_guess_takes_over_after_a_drawn_token_that_extends_the_match(model: CachedModel, encoding: Encoding) -> None:
    alone, cascade = strategies(model, encoding)
    taken = 0
    for number in range(60):
        asked = request(number, sampling=OFTEN_BACK)
        by_model, step = draft_of(drafted(alone, RETURNING, asked)), drafted(cascade, RETURNING, asked)
        draft = draft_of(step)
        if by_model.token_ids[0] != STORY[LEAST_MATCH - 1]:
            if draft.token_ids == by_model.token_ids:  # several rows in a pass are rounded otherwise than one
                assert stated(draft) == pytest.approx(stated(by_model), abs=1e-2 if encoding is ENCODINGS[2] else 1e-4)
            continue
        taken += 1
        assert draft.token_ids == [*STORY[LEAST_MATCH - 1 :], *OTHER, *STORY][:6]
        assert step.num_passes == 0, "the pass that reads gave the only drawn token"
        own = stated(draft)
        assert own[0] == pytest.approx(stated(by_model)[0], abs=1e-3), "stated as the model drew it"
        assert own[1:] == [0.0] * 5
    assert 0 < taken < 60


def test_block_that_is_cut_where_a_guess_takes_over_is_whole(model: CachedModel) -> None:
    """The guess takes no time; where there is none, the block ends where it was cut."""
    _, cascade = strategies(model, Encoding.SPARSE_UINT16)
    seen = set()
    for number in range(60):
        asked = request(number, sampling=OFTEN_BACK)
        whole = draft_of(drafted(cascade, RETURNING, asked))
        cut = draft_of(drafted(cascade, RETURNING, replace(asked, is_cut=lambda: True)))
        is_guessed = len(cut.token_ids) > 1
        assert cut.token_ids == (whole.token_ids if is_guessed else whole.token_ids[:1])
        assert (whole.is_whole, cut.is_whole) == (True, is_guessed)
        seen.add(is_guessed)
    assert seen == {False, True}


def test_text_that_goes_on_already_is_read_by_the_model_and_guessed(model: CachedModel) -> None:
    _, cascade = strategies(model, Encoding.SPARSE_UINT16)
    text = [*RETURNING, STORY[LEAST_MATCH - 1]]
    step = drafted(cascade, text, request())
    draft = draft_of(step)
    assert draft.token_ids == [*STORY[LEAST_MATCH:], *OTHER, *STORY][:6]
    assert draft.distributions == DraftDistributions(Encoding.ONE_HOT, VOCAB_SIZE)
    assert step.num_read > 0
    assert step.num_passes == 0
    assert draft_of(drafted(cascade, text, request(needs_probs=False))).distributions.encoding is Encoding.NONE


def test_new_text_is_the_models(model: CachedModel) -> None:
    alone, cascade = strategies(model, Encoding.SPARSE_UINT16)
    for number in range(5):
        text = [*STORY, *OTHER]
        expected, step = drafted(alone, text, request(number)), drafted(cascade, text, request(number))
        assert step.drafts == expected.drafts
        assert step.num_passes == expected.num_passes


def test_what_was_guessed_wrongly_is_forgotten_by_both(model: CachedModel) -> None:
    alone, cascade = strategies(model, Encoding.SPARSE_UINT16)
    text = [*RETURNING, STORY[LEAST_MATCH - 1]]
    sequence, expected = cascade.open(list(text), ALONE), alone.open([*text, 5], ALONE)
    cascade.step([Drafting(sequence, request())])
    sequence.calibrate(len(text), [5])
    assert sequence.num_unread >= 1
    asked = request(1)
    assert cascade.step([Drafting(sequence, asked)]).drafts == alone.step([Drafting(expected, asked)]).drafts
    sequence.close()
    expected.close()


def test_form_and_number_bound_a_guess_too(model: CachedModel) -> None:
    _, cascade = strategies(model, Encoding.SPARSE_UINT16)
    text = [*RETURNING, STORY[LEAST_MATCH - 1]]
    assert draft_of(drafted(cascade, text, request(num_tokens=2))).token_ids == STORY[LEAST_MATCH:][:2]
    allowed = frozenset(range(VOCAB_SIZE)) - {STORY[LEAST_MATCH + 1]}
    barred = request(sampling=SamplingParams(allowed_token_ids=allowed))
    assert draft_of(drafted(cascade, text, barred)).token_ids == STORY[LEAST_MATCH:][:1]


def test_text_is_guessed_once_read_and_a_reading_step_drafts_nothing(model: CachedModel) -> None:
    _, cascade = strategies(model, Encoding.SPARSE_UINT16)
    text = [*RETURNING, STORY[LEAST_MATCH - 1]]
    sequence = cascade.open(text, salted("read by nobody before"))
    assert cascade.step([Drafting(sequence, request(), max_read=4)]).drafts == [None]
    assert sequence.num_unread == len(text) - 4
    assert draft_of(cascade.step([Drafting(sequence, request())])).token_ids[0] == STORY[LEAST_MATCH]
    sequence.close()


def test_certain_rows_are_added_to_every_encoding() -> None:
    ids = np.array([[3, 1, 0], [2, 0, 0]])
    weights = np.array([[40_000, 25_000, 536], [65_536, 0, 0]])
    rows = np.array([[0.25, 0.25, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]])
    for distributions in (
        encode_sparse(Supports(ids, weights, 4), [2])[0],
        encode_dense(Encoding.DENSE_FLOAT32, rows.astype(np.float32)),
        encode_dense(Encoding.DENSE_FLOAT16, rows.astype(np.float16)),
    ):
        before = Draft([0, 2], distributions)
        after = Draft([0, 2, 1, 3], with_certain(distributions, [1, 3]))
        before_said = log_probs(decode_one(Claim(before.token_ids, before.distributions), 4), before.token_ids)
        said = log_probs(decode_one(Claim(after.token_ids, after.distributions), 4), after.token_ids)
        assert said == [*before_said, 0.0, 0.0]
    for encoding in (Encoding.NONE, Encoding.ONE_HOT):
        assert with_certain(DraftDistributions(encoding, 4), [1]) == DraftDistributions(encoding, 4)


def test_model_reads_a_short_match_ahead_and_draws_what_it_would_draw(model: CachedModel) -> None:
    """Two tokens match, too few for a guess to take over; the model often draws what follows them there."""
    text = [*STORY, *OTHER, *STORY[:LEAST_READ_AHEAD]]
    often = SamplingParams(logit_bias=((STORY[LEAST_READ_AHEAD], 8.0),))
    alone, cascade = strategies(model, Encoding.SPARSE_UINT16)
    num_passes = [0, 0]
    for number in range(40):
        asked = request(number, num_tokens=4, sampling=often)
        steps = [drafted(strategy, text, asked) for strategy in (alone, cascade)]
        drafts = [draft_of(step) for step in steps]
        assert drafts[0].token_ids == drafts[1].token_ids
        assert stated(drafts[0]) == pytest.approx(stated(drafts[1]), abs=1e-3)
        num_passes = [total + step.num_passes for total, step in zip(num_passes, steps, strict=True)]
    assert num_passes[0] == 40 * 3
    assert 40 < num_passes[1] < 40 * 3 - 10
