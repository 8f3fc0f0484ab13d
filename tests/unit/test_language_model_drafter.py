"""A language model drafts what it would have drafted had it read the committed tokens and nothing else."""

import random
from collections.abc import Callable

import pytest
import torch
from tiny_models import save_tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwire.distributions import Encoding, draw
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Draft, DraftRequest, DraftSequence
from draftwire.models import cached_model
from draftwire.randomness import DrawKey
from draftwire.sampling import SamplingParams, probabilities

torch.set_num_threads(1)

VOCAB_SIZE = 11
CONTEXT_LENGTH = 64
KEY = bytes(range(16))
PROMPT = [1, 5, 9, 2]
GREEDY = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=1)]
SAMPLED = [SamplingParams(), SamplingParams(temperature=0.6, top_k=5, top_p=0.9), SamplingParams(temperature=1.8)]
MakeDrafter = Callable[..., LanguageModelDrafter]


@pytest.fixture(scope="module")
def make_drafter(tmp_path_factory: pytest.TempPathFactory) -> MakeDrafter:
    def make(substitute_id: int = 0, dtype: torch.dtype = torch.float64) -> LanguageModelDrafter:
        return LanguageModelDrafter(loaded[dtype], CONTEXT_LENGTH, substitute_id)

    folder = save_tiny_model(tmp_path_factory.mktemp("drafter"), VOCAB_SIZE, 4, CONTEXT_LENGTH)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    loaded = {dtype: LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in dtypes}
    return make


@pytest.fixture
def drafter(make_drafter: MakeDrafter) -> LanguageModelDrafter:
    """In float64, so that drafts of differently filled caches can be compared closely."""
    return make_drafter()


def request(
    num_tokens: int = 5,
    sampling: SamplingParams = SAMPLED[0],
    round: int = 0,
    attempt: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> DraftRequest:
    return DraftRequest(num_tokens, sampling, DrawKey(KEY, 0, round, attempt), vocab_size)


def started(drafter: LanguageModelDrafter, committed: list[int]) -> DraftSequence:
    """A sequence that has read the committed tokens and nothing else."""
    sequence = drafter.new_sequence()
    sequence.calibrate(0, committed)
    return sequence


def rows_of(draft: Draft, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return draft.distributions.rows(draft.token_ids, vocab_size)


def assert_equal(draft: Draft, expected: Draft) -> None:
    assert draft.token_ids == expected.token_ids
    assert draft.distributions.encoding is expected.distributions.encoding
    assert (rows_of(draft) - rows_of(expected)).abs().max() <= 1e-6


@torch.inference_mode()
def true_logits(drafter: LanguageModelDrafter, ids: list[int]) -> Tensor:
    """The logits after `ids`, `[vocab]`, from the bare model."""
    return drafter.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_tiny_drafter_depends_on_its_context(drafter: LanguageModelDrafter) -> None:
    # Otherwise the tests below would prove nothing.
    rows = [rows_of(started(drafter, [first, 2, 3]).draft(request(1))) for first in range(VOCAB_SIZE)]
    assert all((rows[0] - row).abs().max() > 1e-3 for row in rows[1:])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sampling", [GREEDY[0], *SAMPLED[:2]], ids=str)
def test_after_any_rounds_a_draft_equals_that_of_a_fresh_sequence(
    drafter: LanguageModelDrafter, sampling: SamplingParams, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 3)
    generator = random.Random(seed)
    committed = list(PROMPT)
    sequence = started(drafter, committed)
    for number in range(9):
        wanted = request(generator.randint(1, 5), sampling, number)
        draft = sequence.draft(wanted)
        assert_equal(draft, started(drafter, committed).draft(wanted))
        accepted = draft.token_ids[: generator.randint(0, len(draft.token_ids))]
        new = [*accepted, generator.randrange(VOCAB_SIZE)]
        if generator.random() < 0.3:  # rounds that the verifier decoded alone
            new += [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 3))]
        sequence.calibrate(len(committed), new)
        committed += new


@pytest.mark.parametrize("num_accepted", range(6))
def test_every_number_of_accepted_tokens_rolls_back_to_the_committed_ones(
    drafter: LanguageModelDrafter, num_accepted: int
) -> None:
    sequence = started(drafter, PROMPT)
    drafted = sequence.draft(request()).token_ids
    for extra in range(VOCAB_SIZE):
        sequence.calibrate(len(PROMPT), [*drafted[:num_accepted], extra])
        fresh = started(drafter, [*PROMPT, *drafted[:num_accepted], extra])
        assert_equal(sequence.draft(request(round=1)), fresh.draft(request(round=1)))
        sequence.calibrate(len(PROMPT), drafted)


def test_block_that_is_drafted_again_does_not_see_the_discarded_one(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    discarded = sequence.draft(request())
    sequence.calibrate(len(PROMPT), [])
    again = sequence.draft(request(attempt=1))
    assert_equal(again, started(drafter, PROMPT).draft(request(attempt=1)))
    assert again.token_ids != discarded.token_ids


def test_rounds_without_a_draft_are_committed_too(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    sequence.calibrate(len(PROMPT), [3])
    sequence.calibrate(len(PROMPT) + 1, [4, 5])
    assert_equal(sequence.draft(request()), started(drafter, [*PROMPT, 3, 4, 5]).draft(request()))


def test_accepted_tokens_are_not_read_again(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    drafted = sequence.draft(request(5)).token_ids
    widths: list[int] = []
    embeddings = drafter.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    try:
        other = (drafted[3] + 1) % VOCAB_SIZE
        sequence.calibrate(len(PROMPT), [*drafted[:3], other])
    finally:
        hook.remove()
    assert widths == [1]


def test_one_token_prompt_can_be_drafted_from(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, [7])
    sequence.draft(request())
    sequence.calibrate(1, [3])
    assert_equal(sequence.draft(request(round=1)), started(drafter, [7, 3]).draft(request(round=1)))


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
@pytest.mark.parametrize("target_vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 5, VOCAB_SIZE - 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_from_exactly_the_rows_that_are_sent(
    make_drafter: MakeDrafter, dtype: torch.dtype, sampling: SamplingParams, target_vocab_size: int
) -> None:
    drafter = make_drafter(dtype=dtype)
    for number in range(20):
        wanted = request(5, sampling, number, vocab_size=target_vocab_size)
        draft = started(drafter, PROMPT).draft(wanted)
        rows = rows_of(draft, target_vocab_size)
        assert draw(rows, wanted.key.uniforms(5)).tolist() == draft.token_ids


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_rows_are_the_models_distributions_in_the_drafted_context(
    drafter: LanguageModelDrafter, sampling: SamplingParams
) -> None:
    draft = started(drafter, PROMPT).draft(request(5, sampling))
    assert draft.distributions.encoding is Encoding.DENSE_FLOAT32
    for position, row in enumerate(rows_of(draft)):
        logits = true_logits(drafter, PROMPT + draft.token_ids[:position])
        assert (row - probabilities(logits, sampling)).abs().max() <= 1e-6


@pytest.mark.parametrize("sampling", GREEDY, ids=str)
def test_greedy_draft_is_the_argmax_and_travels_as_one_hot(
    drafter: LanguageModelDrafter, sampling: SamplingParams
) -> None:
    draft = started(drafter, PROMPT).draft(request(5, sampling))
    assert draft.distributions.encoding is Encoding.ONE_HOT
    assert draft.distributions.data == b""
    for position, token in enumerate(draft.token_ids):
        assert token == int(true_logits(drafter, PROMPT + draft.token_ids[:position]).argmax())


@pytest.mark.parametrize("sampling", [*GREEDY, *SAMPLED], ids=str)
def test_ids_beyond_a_smaller_target_vocabulary_are_never_drafted(
    drafter: LanguageModelDrafter, sampling: SamplingParams
) -> None:
    target_vocab_size = 4
    for first in range(VOCAB_SIZE):
        draft = started(drafter, [first, 2]).draft(request(6, sampling, first, vocab_size=target_vocab_size))
        assert max(draft.token_ids) < target_vocab_size
        assert draft.distributions.vocab_size == target_vocab_size
        for position, row in enumerate(rows_of(draft, target_vocab_size)):
            logits = true_logits(drafter, [first, 2, *draft.token_ids[:position]])[:target_vocab_size]
            assert (row - probabilities(logits, sampling)).abs().max() <= 1e-6


def test_ids_that_the_drafter_lacks_are_read_as_the_substitute(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter(substitute_id=3)
    wanted = request(vocab_size=VOCAB_SIZE + 100)
    sequence = started(drafter, [1, VOCAB_SIZE, 2])
    draft = sequence.draft(wanted)
    assert_equal_padded(draft, started(drafter, [1, 3, 2]).draft(wanted))
    assert max(draft.token_ids) < VOCAB_SIZE
    sequence.calibrate(3, [draft.token_ids[0], VOCAB_SIZE + 99])
    expected = started(drafter, [1, 3, 2, draft.token_ids[0], 3]).draft(wanted)
    assert_equal_padded(sequence.draft(wanted), expected)


def assert_equal_padded(draft: Draft, expected: Draft) -> None:
    assert draft.token_ids == expected.token_ids
    wide = VOCAB_SIZE + 100
    assert (rows_of(draft, wide) - rows_of(expected, wide)).abs().max() <= 1e-6


def test_drafted_substitute_is_not_mistaken_for_the_committed_id_that_it_stands_for(
    make_drafter: MakeDrafter,
) -> None:
    drafter = make_drafter(substitute_id=3)
    sequence = started(drafter, PROMPT)
    drafted = sequence.draft(request()).token_ids
    committed = [*drafted[:2], VOCAB_SIZE + 1, 4]
    sequence.calibrate(len(PROMPT), committed)
    fresh = started(drafter, [*PROMPT, *drafted[:2], 3, 4])
    assert_equal(sequence.draft(request(round=1)), fresh.draft(request(round=1)))


def test_number_of_wanted_tokens_does_not_change_the_first_ones(drafter: LanguageModelDrafter) -> None:
    long = started(drafter, PROMPT).draft(request(8))
    for count in range(1, 8):
        short = started(drafter, PROMPT).draft(request(count))
        assert short.token_ids == long.token_ids[:count]
        assert len(rows_of(short)) == count


def test_sequences_of_one_drafter_do_not_disturb_each_other(drafter: LanguageModelDrafter) -> None:
    first, second = started(drafter, PROMPT), started(drafter, [3, 3, 3])
    expected = started(drafter, PROMPT).draft(request())
    second.draft(request(round=1))
    assert_equal(first.draft(request()), expected)


def test_draft_before_a_calibration_is_a_bug_of_the_caller(drafter: LanguageModelDrafter) -> None:
    sequence = started(drafter, PROMPT)
    sequence.draft(request())
    with pytest.raises(AssertionError):
        sequence.draft(request(round=1))


def test_drafter_describes_itself(drafter: LanguageModelDrafter) -> None:
    assert (drafter.vocab_size, drafter.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
