"""A cached sequence gives the logits of a fresh forward pass, however it was extended and rolled back."""

import random
from collections.abc import Iterator

import pytest
import torch
from tiny_models import save_tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from draftwire.models import cached_model
from draftwire.models.cached_model import CachedSequence

torch.set_num_threads(1)

VOCAB_SIZE = 11
CONTEXT_LENGTH = 64
TOLERANCE = 1e-5
"""In float64, because rounding errors of the tiny models' float32 logits come close to it."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("llama"), VOCAB_SIZE, 1, CONTEXT_LENGTH)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def sliding_window_model() -> PreTrainedModel:
    """A model whose layers see the last four positions only."""
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_LENGTH,
        sliding_window=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = MistralForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.6)
    return model.double().eval()


@pytest.fixture(params=["llama", "sliding_window_model"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=[1, 3, 512])
def prefill_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", request.param)
    return request.param


@torch.inference_mode()
def fresh_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits after every position, without any cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def test_tiny_model_depends_on_its_whole_context(llama: PreTrainedModel) -> None:
    # Otherwise the tests below would prove nothing.
    ids = [1, 2, 3, 4, 5, 6]
    for position in range(len(ids)):
        changed = ids.copy()
        changed[position] = 9
        assert (fresh_logits(llama, ids)[-1] - fresh_logits(llama, changed)[-1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("seed", range(6))
def test_any_extensions_and_truncations_give_the_logits_of_a_fresh_pass(
    model: PreTrainedModel, prefill_chunk: int, seed: int
) -> None:
    generator = random.Random(seed)
    sequence, ids = CachedSequence(model), []
    for _ in range(14):
        new = random_ids(generator, generator.randint(1, min(12, CONTEXT_LENGTH - len(ids))))
        keep = generator.randint(1, len(new))
        ids += new
        assert_equal(sequence.extend(new, keep), fresh_logits(model, ids)[-keep:])
        assert sequence.length == len(ids)
        length = generator.randint(0 if generator.random() < 0.2 else max(0, len(ids) - 6), len(ids) - 1)
        sequence.truncate(length)
        del ids[length:]
        assert sequence.length == length


@pytest.mark.parametrize("keep", range(1, 11))
def test_kept_positions_may_span_chunks(llama: PreTrainedModel, prefill_chunk: int, keep: int) -> None:
    ids = random_ids(random.Random(3), 14)
    sequence = CachedSequence(llama)
    sequence.extend(ids[:4])
    assert_equal(sequence.extend(ids[4:], keep), fresh_logits(llama, ids)[-keep:])


def test_one_position_is_kept_by_default(llama: PreTrainedModel) -> None:
    assert_equal(CachedSequence(llama).extend([1, 2, 3]), fresh_logits(llama, [1, 2, 3])[-1:])


def test_long_prompt_is_read_in_chunks(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 4)
    widths: list[int] = []
    hook = llama.get_input_embeddings().register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    try:
        CachedSequence(llama).extend([1] * 10)
    finally:
        hook.remove()
    assert widths == [4, 4, 2]


def test_truncation_to_the_present_length_changes_nothing(llama: PreTrainedModel) -> None:
    sequence = CachedSequence(llama)
    sequence.extend([1, 2, 3])
    sequence.truncate(3)
    assert_equal(sequence.extend([4]), fresh_logits(llama, [1, 2, 3, 4])[-1:])


def test_sequence_truncated_to_nothing_starts_again(llama: PreTrainedModel) -> None:
    sequence = CachedSequence(llama)
    sequence.extend([5, 6, 7])
    sequence.truncate(0)
    assert_equal(sequence.extend([1, 2], keep=2), fresh_logits(llama, [1, 2]))


def test_sequences_of_one_model_do_not_disturb_each_other(llama: PreTrainedModel) -> None:
    first, second = CachedSequence(llama), CachedSequence(llama)
    first.extend([1, 2, 3])
    second.extend([4, 5, 6, 7])
    second.truncate(1)
    assert_equal(first.extend([8]), fresh_logits(llama, [1, 2, 3, 8])[-1:])
    assert_equal(second.extend([9]), fresh_logits(llama, [4, 9])[-1:])


def test_nothing_to_read_and_lengths_out_of_range_are_bugs_of_the_caller(llama: PreTrainedModel) -> None:
    sequence = CachedSequence(llama)
    sequence.extend([1, 2])
    for ids, keep in (([], 1), ([1], 0), ([1], 2)):
        with pytest.raises(AssertionError):
            sequence.extend(ids, keep)
    for length in (-1, 3):
        with pytest.raises(AssertionError):
            sequence.truncate(length)
