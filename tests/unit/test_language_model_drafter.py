"""A language model drafts what it would have drafted had it read the committed tokens and nothing else."""

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from session_specs import salted
from tiny_models import ExtendsByReading, save_tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from draftwire.drafting import drawing
from draftwire.drafting.language_model import LanguageModelDrafter, LanguageModelSequence
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.errors import UnavailableError
from draftwire.method.distributions import QuantizedRows, draw, quantize, race
from draftwire.method.distributions import rows_of as decoded_rows
from draftwire.method.encoding import TOTAL_WEIGHT, Claim, DraftDistributions, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.options.model_free.continued_chains import ContinuedDrafter
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.verification import RULES
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB_SIZE = 11
CONTEXT_LENGTH = 128
KEY = bytes(range(16))
PROMPT = [1, 5, 9, 2]
GREEDY = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=1)]
TEXTUAL = SamplingParams(
    1.2,
    min_p=0.01,
    repetition_penalty=1.6,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((0, -1.5), (8, 2.0)),
    min_tokens=7,
)
SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=5, top_p=0.9),
    TEXTUAL,
    SamplingParams(temperature=1.8, allowed_token_ids=(0, 1, 3, 6, 9)),
]
STOP_TOKENS = frozenset({1, 6})
DENSE = Quantization(Encoding.DENSE_FLOAT32)
"""Sends the model's own distributions, which can be compared."""
SPARSE = Quantization(mass=0.8, max_support=6)
"""Leaves something out of nearly every distribution."""
MakeDrafter = Callable[..., LanguageModelDrafter]


class CountingModel(ExtendsByReading, CachedModel):
    """Notes how many tokens each call reads for each sequence."""

    def __init__(self, model: PreTrainedModel, cache_tokens: int) -> None:
        super().__init__(TorchEngine(decoder_of(model)), cache_tokens)
        self.calls: list[list[int]] = []

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        self.calls.append([len(reading.token_ids) for reading in readings])
        return super().read(readings, fuzzily)


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, PreTrainedModel]:
    folder = save_tiny_model(tmp_path_factory.mktemp("drafter"), VOCAB_SIZE, 4, CONTEXT_LENGTH)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    return {dtype: LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in dtypes}


@pytest.fixture(scope="module")
def reference(networks: dict[torch.dtype, PreTrainedModel]) -> PreTrainedModel:
    """A copy with transformers' own attention."""
    copied = copy.deepcopy(networks[torch.float64])
    copied.set_attn_implementation("sdpa")
    return copied


@pytest.fixture
def make_drafter(networks: dict[torch.dtype, PreTrainedModel]) -> MakeDrafter:
    def make(
        substitute_id: int = 0, dtype: torch.dtype = torch.float64, quantization: Quantization = DENSE
    ) -> LanguageModelDrafter:
        return LanguageModelDrafter(CountingModel(networks[dtype], 4096), CONTEXT_LENGTH, substitute_id, quantization)

    return make


@pytest.fixture
def drafter(make_drafter: MakeDrafter) -> LanguageModelDrafter:
    """In float64, so that drafts of differently filled caches can be compared closely."""
    return make_drafter()


@pytest.fixture
def continued(networks: dict[torch.dtype, PreTrainedModel]) -> ContinuedDrafter:
    """The same, which takes guesses of how its chains go on."""
    return ContinuedDrafter(CountingModel(networks[torch.float64], 4096), CONTEXT_LENGTH, quantization=DENSE)


def request(
    num_tokens: int = 5,
    sampling: SamplingParams = SAMPLED[0],
    round: int = 0,
    vocab_size: int = VOCAB_SIZE,
    rule: str = "block",
) -> DraftRequest:
    """Asks for a block. Whatever the prompt really is, two tokens of it count as one."""
    return DraftRequest(
        num_tokens,
        sampling,
        DrawKey(KEY, 0, round),
        vocab_size,
        is_coupled=RULES[rule].is_coupled,
        needs_probs=RULES[rule].needs_draft_probs,
        prompt_len=2,
        stop_token_ids=STOP_TOKENS,
    )


def cut_after(num_drawn: int) -> Callable[[], bool]:
    """Cuts a block after so many tokens, by counting how often it is asked."""

    def is_cut() -> bool:
        is_cut.num_asked += 1  # type: ignore[attr-defined]
        return is_cut.num_asked >= num_drawn  # type: ignore[attr-defined]

    is_cut.num_asked = 0  # type: ignore[attr-defined]
    return is_cut


salts = itertools.count()


def started(drafter: LanguageModelDrafter, committed: list[int]) -> LanguageModelSequence:
    """A sequence that shares nothing and knows the committed tokens and nothing else."""
    return drafter.open(committed, salted(f"alone {next(salts)}"))


def drafted(drafter: LanguageModelDrafter, sequence: LanguageModelSequence, wanted: DraftRequest) -> Draft:
    """What a step for one sequence drafts."""
    (draft,) = drafter.step([Drafting(sequence, wanted)]).drafts
    check_integrity(drafter.model.cache)
    assert draft is not None
    return draft


def fresh(drafter: LanguageModelDrafter, committed: list[int], wanted: DraftRequest) -> Draft:
    """What is drafted after the committed tokens without any history."""
    sequence = started(drafter, committed)
    draft = drafted(drafter, sequence, wanted)
    sequence.close()
    return draft


def rows_of(draft: Draft, vocab_size: int = VOCAB_SIZE) -> Tensor:
    assert draft.distributions.encoding is not Encoding.NONE
    return decoded_rows(decode_one(Claim(draft.token_ids, draft.distributions), vocab_size)).dense()


def assert_equal(draft: Draft | None, expected: Draft, vocab_size: int = VOCAB_SIZE) -> None:
    assert draft is not None
    assert draft.token_ids == expected.token_ids
    assert draft.distributions.encoding is expected.distributions.encoding
    assert draft.distributions.vocab_size == expected.distributions.vocab_size
    if expected.distributions.encoding is Encoding.NONE:
        return
    assert (rows_of(draft, vocab_size) - rows_of(expected, vocab_size)).abs().max() <= 1e-6


@torch.inference_mode()
def true_logits(reference: PreTrainedModel, ids: list[int]) -> Tensor:
    """The logits after `ids`, `[vocab]`, from the bare model."""
    return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def true_probs(
    reference: PreTrainedModel, ids: list[int], sampling: SamplingParams, vocab_size: int = VOCAB_SIZE
) -> Tensor:
    """The law after `ids` over the first `vocab_size` tokens, `[vocab_size]`, from the bare model."""
    logits = true_logits(reference, ids)[:vocab_size]
    return probabilities_of_spans(logits[None].clone(), [Span(sampling, 1, ids, 2, STOP_TOKENS)])[0]


def test_tiny_drafter_depends_on_its_context(drafter: LanguageModelDrafter) -> None:
    # Otherwise the tests below would prove nothing.
    rows = [rows_of(fresh(drafter, [first, 2, 3], request(1))) for first in range(VOCAB_SIZE)]
    assert all((rows[0] - row).abs().max() > 1e-3 for row in rows[1:])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("sampling", [GREEDY[0], *SAMPLED[:3]], ids=str)
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_after_any_rounds_a_draft_equals_that_of_a_fresh_sequence(
    make_drafter: MakeDrafter, sampling: SamplingParams, rule: str, seed: int
) -> None:
    """Of any number of accepted tokens, drafted again, and after ids that are read as a substitute, which it drafts."""
    generator = random.Random(seed)
    substitute_id, wide = generator.randrange(VOCAB_SIZE), VOCAB_SIZE + 2
    drafter = make_drafter(substitute_id)
    committed = PROMPT[: generator.choice([1, 4])]
    sequence = started(drafter, committed)
    assert drafter.context_length == CONTEXT_LENGTH
    for number in range(11):
        wanted = request(generator.randint(1, 5), sampling, number, vocab_size=wide, rule=rule)
        while sequence.num_unread > 3:
            assert drafter.step([Drafting(sequence, wanted, max_read=3)]).drafts == [None]
        for is_again in generator.choice([[False], [False], [False, True]]):
            if is_again:
                sequence.calibrate(len(committed), [])
            draft = drafted(drafter, sequence, wanted)
            readable = [token if token < VOCAB_SIZE else substitute_id for token in committed]
            assert_equal(draft, fresh(drafter, readable, wanted), wide)
            assert max(draft.token_ids) < VOCAB_SIZE
        accepted = draft.token_ids[: generator.randint(0, len(draft.token_ids))]
        new = [*accepted, generator.randrange(wide)]
        if generator.random() < 0.3:  # rounds that the verifier decoded alone
            new += [generator.randrange(wide) for _ in range(generator.randint(1, 6))]
        told = generator.randint(1, len(new))
        for part in (new[:told], new[told:])[: 1 + (told < len(new))]:
            sequence.calibrate(len(committed), part)
            committed += part
    assert sequence.cached.num_published > 0, "long enough to have published blocks"


def test_accepted_tokens_are_not_read_again(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    guessed = drafted(drafter, sequence, request(5)).token_ids
    other = (guessed[3] + 1) % VOCAB_SIZE
    sequence.calibrate(len(PROMPT), [*guessed[:3], other])
    drafter.model.calls.clear()
    assert sequence.num_unread == 1
    step = drafter.step([Drafting(sequence, request(3))])
    assert step.num_read == 1
    assert drafter.model.calls == [[1], [1], [1]]


@pytest.mark.parametrize("sampling", [*GREEDY, *SAMPLED], ids=str)
@pytest.mark.parametrize("target_vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 5, VOCAB_SIZE - 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_from_exactly_the_rows_that_are_sent(
    make_drafter: MakeDrafter, dtype: torch.dtype, sampling: SamplingParams, target_vocab_size: int
) -> None:
    drafter = make_drafter(dtype=dtype)
    wanted = [request(1 + number % 5, sampling, number, vocab_size=target_vocab_size) for number in range(20)]
    draftings = [Drafting(started(drafter, [number % VOCAB_SIZE, *PROMPT]), one) for number, one in enumerate(wanted)]
    for one, draft in zip(wanted, drafter.step(draftings).drafts, strict=True):
        rows = rows_of(draft, target_vocab_size)
        assert len(draft.token_ids) == one.num_tokens
        assert draw(rows, uniforms([one.key], one.num_tokens)[0]).tolist() == draft.token_ids


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_that_are_drawn_from_are_those_that_are_sent_to_the_bit(
    make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A row that is rounded after the draw gives the same token nearly always, so the rows themselves are compared."""
    drawn_from = []

    def watched(weights: Tensor, numbers: Tensor) -> Tensor:
        drawn_from.append(weights.clone())
        return draw(weights, numbers)

    monkeypatch.setattr(drawing, "draw", watched)
    draft = fresh(make_drafter(dtype=dtype), PROMPT, request(5))
    rows = torch.cat(drawn_from)
    assert rows.dtype == torch.float32
    assert draft.distributions.data == rows.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_that_are_drawn_from_are_those_that_are_sent(
    make_drafter: MakeDrafter, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    drawn = []

    def watched(rows: QuantizedRows, numbers: Tensor) -> Tensor:
        drawn.append((rows, numbers))
        return draw_weights(rows, numbers)

    draw_weights = QuantizedRows.draw
    monkeypatch.setattr(QuantizedRows, "draw", watched)
    wanted = request(5)
    draft = fresh(make_drafter(dtype=dtype, quantization=SPARSE), PROMPT, wanted)
    assert draft.distributions.encoding is Encoding.SPARSE_UINT16
    assert [float(numbers) for _, numbers in drawn] == uniforms([wanted.key], 5)[0].tolist()
    sent = rows_of(draft) * TOTAL_WEIGHT
    for row, token, (rows, numbers) in zip(sent, draft.token_ids, drawn, strict=True):
        expected = torch.zeros(VOCAB_SIZE).scatter_add_(0, rows.token_ids[0], rows.weights[0].float())
        assert torch.equal(row, expected)
        assert int(draw_weights(rows, numbers)) == token


@pytest.mark.parametrize("sampling", [*GREEDY, *SAMPLED], ids=str)
@pytest.mark.parametrize("quantization", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 4])
def test_rows_are_the_models_distributions_over_the_targets_vocabulary(
    make_drafter: MakeDrafter,
    reference: PreTrainedModel,
    sampling: SamplingParams,
    quantization: Quantization,
    vocab_size: int,
) -> None:
    """Of a greedy draft, they are certain of the argmax, and take no bytes."""
    drafter = make_drafter(quantization=quantization)
    for first in range(vocab_size):
        draft = fresh(drafter, [first, 2], request(6, sampling, first, vocab_size=vocab_size))
        is_one_hot = draft.distributions.encoding is Encoding.ONE_HOT
        assert is_one_hot == (sampling in GREEDY) == (draft.distributions.data == b"")
        assert (draft.distributions.vocab_size, len(draft.token_ids)) == (vocab_size, 6)
        for position, row in enumerate(rows_of(draft, vocab_size)):
            probs = true_probs(reference, [first, 2, *draft.token_ids[:position]], sampling, vocab_size)
            if quantization is DENSE or is_one_hot:
                assert (row - probs).abs().max() <= 1e-6
                continue
            expected = quantize(probs[None].float(), SPARSE)
            weights = torch.zeros(vocab_size).scatter_add_(0, expected.token_ids[0], expected.weights[0].float())
            assert (row - weights / TOTAL_WEIGHT).abs().max() <= 2 * vocab_size / TOTAL_WEIGHT


@pytest.mark.parametrize("sampling", [*GREEDY, *SAMPLED], ids=str)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 4, VOCAB_SIZE + 5])
def test_coupled_tokens_win_the_races_of_their_places_in_the_text(
    drafter: LanguageModelDrafter, reference: PreTrainedModel, sampling: SamplingParams, vocab_size: int
) -> None:
    limit = min(vocab_size, VOCAB_SIZE)
    sequence, committed = started(drafter, PROMPT), list(PROMPT)
    for number in range(3):
        wanted = request(5, sampling, number, vocab_size=vocab_size, rule="coupled")
        draft = drafted(drafter, sequence, wanted)
        assert draft.distributions == DraftDistributions(Encoding.NONE, limit)
        for position, token in enumerate(draft.token_ids):
            text = committed + draft.token_ids[:position]
            probs = true_probs(reference, text, sampling, limit)
            times = exponentials(torch.tensor([wanted.key.text_words]), torch.tensor([len(text)]), limit)
            assert token == int(race(probs[None], times).winners)
        new = [*draft.token_ids[: 2 * number], 3]
        sequence.calibrate(len(committed), new)
        committed += new


def test_coupled_draft_is_the_same_in_every_round(drafter: LanguageModelDrafter) -> None:
    expected = fresh(drafter, PROMPT, request(rule="coupled"))
    for round_number in (1, 3, 7):
        again = fresh(drafter, PROMPT, request(round=round_number, rule="coupled"))
        assert again.token_ids == expected.token_ids
        other = fresh(drafter, PROMPT, request(round=round_number))
        assert other.token_ids != fresh(drafter, PROMPT, request()).token_ids
    another = replace(request(rule="coupled"), key=DrawKey(KEY, 1, 0))
    assert fresh(drafter, PROMPT, another).token_ids != expected.token_ids


@pytest.mark.parametrize("sampling", [*GREEDY, *SAMPLED], ids=str)
def test_rule_without_distributions_gets_the_same_tokens(
    drafter: LanguageModelDrafter, sampling: SamplingParams
) -> None:
    for number in range(5):
        told, untold = (
            fresh(drafter, PROMPT, request(5, sampling, number, rule=rule)) for rule in ("block", "typical")
        )
        assert untold.token_ids == told.token_ids
        assert untold.distributions == DraftDistributions(Encoding.NONE, VOCAB_SIZE)


def test_penalties_see_drafted_tokens_and_stop_tokens_wait_for_min_tokens(
    drafter: LanguageModelDrafter, reference: PreTrainedModel
) -> None:
    """By hand, from the logits of the model."""
    params = SamplingParams(5.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.4, min_tokens=5)
    draft = fresh(drafter, PROMPT, request(6, params))
    for position, row in enumerate(rows_of(draft)):
        text = PROMPT + draft.token_ids[:position]
        values = true_logits(reference, text).clone()
        for token in range(VOCAB_SIZE):
            count = text[2:].count(token)
            if token in text:
                values[token] = values[token] * 1.6 if values[token] < 0.0 else values[token] / 1.6
            values[token] -= 0.7 * (count > 0) + 0.4 * count
        if position + 2 < 5:
            values[list(STOP_TOKENS)] = -torch.inf
        assert (row - (values / 5.0).softmax(-1)).abs().max() < 1e-6
        assert all((row[token] > 0.0) == (position >= 3) for token in STOP_TOKENS)


def test_block_continued_only_by_tokens_the_drafter_lacks_is_not_drafted(
    drafter: LanguageModelDrafter,
) -> None:
    """A request may allow tokens that this drafter lacks: the target decodes it alone, and others go on."""
    params = SamplingParams(allowed_token_ids=(VOCAB_SIZE, VOCAB_SIZE + 1))
    wanted = [request(sampling=params, vocab_size=VOCAB_SIZE + 5), request()]
    sequences = [started(drafter, PROMPT) for _ in wanted]
    drafts = drafter.step([Drafting(*pair) for pair in zip(sequences, wanted, strict=True)]).drafts
    assert isinstance(drafts[0], UnavailableError)
    assert_equal(drafts[1] if isinstance(drafts[1], Draft) else None, fresh(drafter, PROMPT, request()))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_sequences_of_a_step_draft_what_each_would_draft_alone(drafter: LanguageModelDrafter, seed: int) -> None:
    generator = random.Random(seed)
    sequences, texts = [], []
    for _ in range(9):
        text = [generator.randrange(VOCAB_SIZE) for _ in range(generator.choice([1, 2, 9, 30, 47]))]
        texts.append(text)
        sequences.append(started(drafter, text))
    for number in range(4):
        wanted = [
            request(
                generator.randint(1, 6),
                generator.choice([*GREEDY, *SAMPLED]),
                number,
                generator.choice([4, VOCAB_SIZE - 1, VOCAB_SIZE]),
                generator.choice(list(RULES)),
            )
            for _ in sequences
        ]
        draftings = [
            Drafting(sequence, one if generator.random() < 0.8 else None)
            for sequence, one in zip(sequences, wanted, strict=True)
        ]
        generator.shuffle(draftings)
        step = drafter.step(draftings)
        check_integrity(drafter.model.cache)
        for drafting, draft in zip(draftings, step.drafts, strict=True):
            index = sequences.index(drafting.sequence)
            new = [generator.randrange(VOCAB_SIZE)]
            if drafting.request is None:
                assert draft is None
                assert drafting.sequence.num_unread == 0
            else:
                assert_equal(draft, fresh(drafter, texts[index], drafting.request))
                new = draft.token_ids[: generator.randint(0, len(draft.token_ids))] + new
            sequences[index].calibrate(len(texts[index]), new)
            texts[index] += new


def test_step_takes_one_pass_for_each_position_of_the_longest_block(drafter: LanguageModelDrafter) -> None:
    counts = [2, 5, 1, 3]
    draftings = [Drafting(started(drafter, PROMPT), request(count)) for count in counts]
    step = drafter.step(draftings)
    assert step.num_read == 4 * len(PROMPT)
    assert [len(call) for call in drafter.model.calls] == [4, 3, 2, 1, 1], "the last token of a block is never read"
    assert drafter.model.calls[0] == [len(PROMPT)] * 4
    assert step.calibration_s > 0.0
    assert step.draft_s > 0.0


def test_tokens_beyond_max_read_are_read_in_parts_before_any_draft(drafter: LanguageModelDrafter) -> None:
    prompt = [number % VOCAB_SIZE for number in range(23)]
    sequence, other = started(drafter, prompt), started(drafter, PROMPT)
    expected = [fresh(drafter, prompt, request()), fresh(drafter, PROMPT, request())]
    drafter.model.calls.clear()
    unread = []
    for _ in range(2):
        step = drafter.step([Drafting(sequence, request(), max_read=10), Drafting(other, request(), max_read=10)])
        assert step.drafts[0] is None
        assert_equal(step.drafts[1], expected[1])
        other.calibrate(len(PROMPT), [])
        unread.append(sequence.num_unread)
    assert unread == [13, 3]
    step = drafter.step([Drafting(sequence, request(), max_read=3)])
    assert step.num_read == 3
    assert_equal(step.drafts[0], expected[0])


def test_step_with_nothing_to_do_reads_nothing(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    drafter.step([Drafting(sequence, None)])
    step = drafter.step([Drafting(sequence, None)])
    assert (step.drafts, step.num_read, len(drafter.model.calls)) == ([None], 0, 1)
    assert drafter.step([]).drafts == []


def test_beginning_that_another_session_has_read_is_not_read_again(drafter: LanguageModelDrafter) -> None:
    prompt = [number % VOCAB_SIZE for number in range(3 * BLOCK_SIZE + 2)]
    first = drafter.open(prompt, salted("tenant"))
    expected = fresh(drafter, prompt, request())
    assert_equal(drafted(drafter, first, request()), expected)
    second, stranger = drafter.open(prompt, salted("tenant")), drafter.open(prompt, salted("other tenant"))
    assert (first.num_reused, second.num_reused, stranger.num_reused) == (0, 3 * BLOCK_SIZE, 0)
    assert second.num_unread == 2
    drafter.model.calls.clear()
    assert_equal(drafted(drafter, second, request()), expected)
    assert drafter.model.calls[0] == [2]
    assert_equal(drafted(drafter, stranger, request()), expected)
    first.close()
    assert drafter.open(prompt[: 5 * BLOCK_SIZE // 2], salted("tenant")).num_reused == 2 * BLOCK_SIZE


def test_drafted_tokens_are_never_offered_to_other_sequences(drafter: LanguageModelDrafter) -> None:
    prompt = [1] * (BLOCK_SIZE - 2)
    sequence = drafter.open(prompt, ALONE)
    guessed = drafted(drafter, sequence, request(6)).token_ids
    drafter.step([Drafting(sequence, None)])
    assert drafter.open([*prompt, *guessed, 1, 1], ALONE).num_reused == 0
    sequence.calibrate(len(prompt), [(guessed[0] + 1) % VOCAB_SIZE])
    drafter.step([Drafting(sequence, request())])
    assert drafter.open([*prompt, *guessed, 1, 1], ALONE).num_reused == 0


def test_committed_block_is_published_once_its_last_token_is_not_reread(
    drafter: LanguageModelDrafter,
) -> None:
    prompt = [number % VOCAB_SIZE for number in range(BLOCK_SIZE)]
    sequence = drafter.open(prompt, ALONE)
    for _ in range(3):  # each draft reads the last token again, which must not be shared by then
        draft = drafted(drafter, sequence, request())
        assert drafter.open([*prompt, 1], ALONE).num_reused == 0
        sequence.calibrate(len(prompt), [])
    sequence.calibrate(len(prompt), draft.token_ids[:2])
    drafted(drafter, sequence, request(round=1))
    assert drafter.open([*prompt, 1], ALONE).num_reused == BLOCK_SIZE


def test_draft_before_a_calibration_is_a_bug_of_the_caller(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    drafter.step([Drafting(sequence, request())])
    with pytest.raises(AssertionError, match="calibrate comes first"):
        drafter.step([Drafting(sequence, request(round=1))])


@pytest.mark.parametrize("quantization", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("rule", ["block", "coupled", "typical"])
@pytest.mark.parametrize("sampling", [GREEDY[0], SAMPLED[0], TEXTUAL], ids=str)
def test_cut_block_begins_the_whole_one_and_others_of_the_step_are_whole(
    make_drafter: MakeDrafter, sampling: SamplingParams, rule: str, quantization: Quantization
) -> None:
    drafter = make_drafter(quantization=quantization)
    whole = request(5, sampling, rule=rule)
    prompts = [PROMPT, [7, 3], [2, 2, 8], PROMPT, [4]]
    cuts = [1, 99, 3, 4, 5]
    sequences = [started(drafter, prompt) for prompt in prompts]
    wanted = [replace(whole, is_cut=cut_after(cut)) for cut in cuts]
    drafter.model.calls.clear()
    step = drafter.step([Drafting(*each) for each in zip(sequences, wanted, strict=True)])
    check_integrity(drafter.model.cache)
    assert [len(call) for call in drafter.model.calls] == [5, 4, 4, 3, 2], "no pass for a token that is not drawn"
    for sequence, prompt, cut, draft in zip(sequences, prompts, cuts, step.drafts, strict=True):
        assert isinstance(draft, Draft)
        assert_equal(draft, fresh(drafter, prompt, request(min(cut, 5), sampling, rule=rule)))
        assert draft.is_whole == (cut >= 5)
        new = [*draft.token_ids, 3]
        sequence.calibrate(len(prompt), new)
        following = request(5, sampling, 1, rule=rule)
        assert_equal(drafted(drafter, sequence, following), fresh(drafter, prompt + new, following))


def test_cut_is_asked_for_once_after_each_token_but_the_last(drafter: LanguageModelDrafter) -> None:
    asked = []
    for length in (1, 2, 5):
        count = cut_after(99)
        drafted(drafter, started(drafter, PROMPT), replace(request(length), is_cut=count))
        asked.append(count.num_asked)  # type: ignore[attr-defined]
    assert asked == [0, 1, 4]


class FailingModel(CountingModel):
    """Gives no finite logits for one sequence from one of its calls on."""

    failing: tuple[LanguageModelSequence, int] | None = None

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        logits = super().read(readings)
        if self.failing is not None:
            sequence, call = self.failing
            rows = itertools.accumulate((reading.keep for reading in readings), initial=0)
            for row, reading in zip(rows, readings, strict=False):
                if reading.sequence is sequence.cached and len(self.calls) >= call and reading.keep:
                    logits[row] = torch.nan
        return logits


@pytest.mark.parametrize("call", [1, 2, 4])
def test_logits_that_are_not_finite_end_the_block_of_their_sequence_alone(
    networks: dict[torch.dtype, PreTrainedModel], call: int
) -> None:
    """Whether a token is drawn is decided before it is drawn; what was drawn before is sent."""
    healthy, ill = (
        LanguageModelDrafter(model, CONTEXT_LENGTH, quantization=DENSE)
        for model in (CountingModel(networks[torch.float64], 4096), FailingModel(networks[torch.float64], 4096))
    )
    prompts = [PROMPT, [7, 3], [2, 2, 8]]
    drafts = []
    for drafter in (healthy, ill):
        sequences = [drafter.open(prompt, ALONE) for prompt in prompts]
        assert isinstance(drafter.model, CountingModel)
        if isinstance(drafter.model, FailingModel):
            drafter.model.failing = sequences[1], call
        wanted = [Drafting(sequence, request(round=number)) for number, sequence in enumerate(sequences)]
        drafts.append(drafter.step(wanted).drafts)
        check_integrity(drafter.model.cache)
    whole, cut = drafts[0][1], drafts[1][1]
    for expected, draft in zip(drafts[0][::2], drafts[1][::2], strict=True):
        assert isinstance(draft, Draft)
        assert draft == expected
    assert isinstance(whole, Draft)
    if call == 1:
        assert isinstance(cut, UnavailableError)
    else:
        assert isinstance(cut, Draft)
        assert cut.token_ids == whole.token_ids[: call - 1]
        assert cut.is_whole, "time has not cut it"
        assert cut.distributions.data == whole.distributions.data[: len(cut.distributions.data)]


# Read ahead


@dataclass(frozen=True, slots=True)
class Guesser:
    """Guesses what follows drawn tokens: what will be drawn, another thing, or a part of it."""

    kind: str
    true_ids: list[int]

    def takes_over(self, drawn: list[int]) -> bool:
        return False

    def may_follow(self, drawn: list[int]) -> list[int]:
        following = self.true_ids[len(drawn) :]
        wrong = [(token + 1) % VOCAB_SIZE for token in following]
        return {
            "right": following,
            "wrong": wrong,
            "the first alone": following[:1],
            "right and then wrong": [*following[:2], *wrong[2:]],
            "too much": [*following, *following, 1, 2, 3],
            "nothing": [],
        }[self.kind]


PASSES = {"right": 0, "too much": 0, "right and then wrong": 1, "wrong": 4, "the first alone": 2, "nothing": 4}
"""Of a block of five tokens, after the committed ones are read."""


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("sampling", [GREEDY[0], SAMPLED[0], TEXTUAL], ids=str)
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_what_is_drawn_does_not_depend_on_what_is_read_ahead(
    continued: ContinuedDrafter, sampling: SamplingParams, rule: str, kind: str
) -> None:
    """Nor do the following rounds: what was read ahead and not drawn is forgotten."""
    committed = [*PROMPT]
    sequence, plain = started(continued, committed), started(continued, committed)
    for number in range(6):
        wanted = request(5, sampling, number, rule=rule)
        expected = drafted(continued, plain, wanted)
        guesser = Guesser(kind, expected.token_ids)
        (draft,) = (step := continued.step([Drafting(sequence, replace(wanted, continuation=guesser))])).drafts
        assert isinstance(draft, Draft)
        assert_equal(draft, expected)
        assert step.num_passes == PASSES[kind]
        assert sequence.cached.length <= len(sequence.ids)
        new = [*expected.token_ids[: number % 6], (number * 5) % VOCAB_SIZE]
        for one in (sequence, plain):
            one.calibrate(len(committed), new)
        committed += new


def test_members_of_a_step_read_ahead_each_for_itself(continued: ContinuedDrafter) -> None:
    """Beside others that do not, and end at other lengths."""
    wanted = [request(1 + number % 5, SAMPLED[number % 2], number) for number in range(12)]
    texts = [[number % VOCAB_SIZE, *PROMPT] for number in range(12)]
    expected = [fresh(continued, text, one) for text, one in zip(texts, wanted, strict=True)]
    kinds = [*PASSES] * 2
    asked = [
        replace(one, continuation=Guesser(kind, draft.token_ids)) if number % 3 else one
        for number, (one, kind, draft) in enumerate(zip(wanted, kinds, expected, strict=True))
    ]
    draftings = [Drafting(started(continued, text), one) for text, one in zip(texts, asked, strict=True)]
    for draft, one in zip(continued.step(draftings).drafts, expected, strict=True):
        assert isinstance(draft, Draft)
        assert_equal(draft, one)


def test_block_that_is_cut_forgets_what_it_read_ahead(continued: ContinuedDrafter) -> None:
    wanted = request(5)
    expected = fresh(continued, PROMPT, wanted)
    sequence = started(continued, PROMPT)
    cut = replace(wanted, continuation=Guesser("right", expected.token_ids), is_cut=cut_after(2))
    draft = drafted(continued, sequence, cut)
    assert draft.token_ids == expected.token_ids[:2]
    assert sequence.cached.length <= len(sequence.ids)
