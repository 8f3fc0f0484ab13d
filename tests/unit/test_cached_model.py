"""Whatever was read, forgotten, shared and left lying about: logits are those of a fresh forward pass."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
import torch
from cached_subjects import SUBJECTS, TOLERANCE, VOCAB_SIZE, Subject, assert_equal, layers_of, make, network, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import WINDOW, randomize, read_in_place, tiny_shape
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.models import packing
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, blocks_for, slots_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.packing import pack
from draftwire.models.paged_attention import AttentionShape, PackedStep
from draftwire.models.sequence_model import Reading, Segment
from draftwire.models.torch_models import torch_model
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

LENGTHS = [1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 100, 151]


@pytest.fixture
def llama() -> Subject:
    return make("llama")


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    if request.param.endswith("in place"):
        read_in_place(monkeypatch)
    return make(request.param)


def test_tiny_models_depend_on_all_that_they_see_and_nothing_else(subject: Subject) -> None:
    # Otherwise the tests below would prove nothing.
    ids = random_ids(random.Random(1), 20)
    windows = {"mistral": 2 * (WINDOW - 1) + 1}  # two layers; the others have a layer that sees everything
    reach = windows.get(subject.reference.config.model_type, len(ids))
    for position in range(len(ids)):
        changed = ids.copy()
        changed[position] = (ids[position] + 1) % VOCAB_SIZE
        difference = (subject.fresh(ids)[-1] - subject.fresh(changed)[-1]).abs().max()
        assert (difference > 10 * TOLERANCE) == (position >= len(ids) - reach)


@pytest.mark.parametrize(
    ("architecture", "setting"), [("gemma2", "attn_logit_softcapping"), ("gemma2", "query_pre_attn_scalar")]
)
def test_peculiarities_of_the_tiny_models_matter(architecture: str, setting: str) -> None:
    # Otherwise the tests below would not notice if they were left out.
    reference = network(architecture)[1]
    other = copy.deepcopy(reference)
    for layer in other.model.layers:
        layer.self_attn.attn_logit_softcapping = None if setting == "attn_logit_softcapping" else 1.5
        layer.self_attn.scaling *= 2.0 if setting == "query_pre_attn_scalar" else 1.0
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert (reference(input_ids=ids).logits - other(input_ids=ids).logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_many_sequences_of_very_different_lengths_are_read_in_one_call(subject: Subject, seed: int) -> None:
    generator = random.Random(seed)
    texts = [random_ids(generator, length) for length in LENGTHS]
    generator.shuffle(texts)
    sequences = [subject.open([]) for _ in texts]
    first = [generator.randint(0, len(text) - 1) for text in texts]
    parts = [(text[:cut], text[cut:]) for text, cut in zip(texts, first, strict=True)]
    for half in (0, 1):
        readings = [
            Reading(sequence, part[half], generator.choice([0, 1, len(part[half])]))
            for sequence, part in zip(sequences, parts, strict=True)
            if part[half]
        ]
        generator.shuffle(readings)
        subject.read(*readings)


def test_sequence_may_be_cut_to_any_length_and_go_on(subject: Subject) -> None:
    ids = random_ids(random.Random(5), 40)
    for length in range(41):
        sequence, other = subject.open([]), subject.open([])
        subject.read(Reading(sequence, ids, 1), Reading(other, ids[::-1], 1))
        subject.truncate(sequence, length)
        subject.read(Reading(sequence, [7, 1, 9], 3), Reading(other, [2], 1))
        subject.close(sequence)
        subject.close(other)


def play(subject: Subject, generator: random.Random, num_steps: int) -> None:
    """Carries out random steps, each of which checks every logit that it gives, in too little room for all."""
    cache = subject.model.cache
    texts = [random_ids(generator, 120) for _ in range(3)]
    texts += [texts[0][: 5 * BLOCK_SIZE // 2] + random_ids(generator, 120 - 5 * BLOCK_SIZE // 2)]
    for _ in range(num_steps):
        live = list(subject.texts)
        if len(live) < 5 and generator.random() < 0.5:
            subject.open(generator.choice(texts)[: generator.randint(1, 120)], generator.choice(["", "tenant"]))
        chosen = generator.sample(live, generator.randint(0, len(live)))
        readings = []
        for sequence in chosen:
            length = sequence.length
            agreeing = [text for text in texts if text[:length] == subject.texts[sequence] and length < 120]
            count = generator.choice([1, 1, 2, 5, 16, 40])
            more = agreeing[0][length : length + count] if agreeing else random_ids(generator, count)
            if generator.random() < 0.3:
                more = random_ids(generator, count)
            readings.append(Reading(sequence, more, generator.randint(0, len(more))))
        too_long = any(reading.sequence.length + len(reading.token_ids) > 250 for reading in readings)
        missing = sum(
            blocks_for(reading.sequence.length + len(reading.token_ids)) - len(reading.sequence.blocks)
            for reading in readings
        )
        is_full = missing > cache.num_free_blocks
        if is_full:
            lengths = [sequence.length for sequence in live]
            with pytest.raises(NoRoomError):
                subject.model.read(readings)
            assert lengths == [sequence.length for sequence in live]
        elif readings and not too_long:
            subject.read(*readings)
        for sequence in live:
            action = generator.random()
            if action < 0.15 or too_long or is_full:
                subject.close(sequence)
            elif action < 0.4:
                final = sequence.num_published * BLOCK_SIZE
                subject.truncate(sequence, generator.randint(max(final, sequence.length - 20), sequence.length))
            elif action < 0.7:
                subject.publish(sequence)
        check_integrity(cache)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_schedule_gives_the_logits_of_a_fresh_pass(subject: Subject, seed: int) -> None:
    subject.model = CachedModel(subject.model._engine, 9 * BLOCK_SIZE)
    play(subject, random.Random(seed), 25)


@settings(max_examples=12)
@given(generator=st.randoms(use_true_random=False), num_blocks=st.integers(3, 10))
def test_any_schedule_in_any_room_gives_the_logits_of_a_fresh_pass(generator: random.Random, num_blocks: int) -> None:
    play(make("llama", num_blocks), generator, 12)


def test_sequence_that_gives_nan_spoils_no_other(llama: Subject) -> None:
    sick, sound, later = llama.open([]), llama.open([]), llama.open([])
    llama.read(Reading(sick, [1] * 20, 0), Reading(sound, [2] * 20, 0))
    with torch.inference_mode():
        for tensor in layers_of(llama.model):
            tensor[torch.from_numpy(slots_of([sick], 20)[0])] = torch.nan
    logits = llama.model.read([Reading(sick, [1], 1), Reading(sound, [3, 4], 2)])
    assert bool(logits[0].isnan().all())
    assert_equal(logits[1:], llama.fresh([2] * 20 + [3, 4])[-2:], llama.tolerance)
    llama.texts[sound] += [3, 4]
    llama.close(sick)
    llama.read(Reading(later, [5] * 40, 40), Reading(sound, [1], 1))


def stored(subject: Subject, sequence: CachedSequence) -> list[Tensor]:
    places = torch.from_numpy(slots_of([sequence], sequence.length)[0])
    return [tensor[places] for tensor in layers_of(subject.model)]


@pytest.mark.parametrize("path", [[], [0], [4], [0, 1, 2], [0, 2, 5], [1, 4, 8, 19], [3, 16, 17, 18], list(range(20))])
def test_kept_path_moves_the_nodes_keys_and_values_and_nothing_else(subject: Subject, path: list[int]) -> None:
    generator = random.Random(3)
    sequence, other = subject.open([]), subject.open([])
    for _ in range(2):  # in turn, so that places are not simply consecutive
        subject.read(Reading(sequence, random_ids(generator, 11), 0), Reading(other, random_ids(generator, 11), 0))
    parents = [-1] * 20
    for parent, node in itertools.pairwise(path):
        parents[node] = parent
    subject.model.read([Reading(sequence, random_ids(generator, 20), 0, tuple(parents))])
    before, others = stored(subject, sequence), stored(subject, other)
    kept = [*range(22), *(22 + index for index in path)]
    subject.model.keep_path(sequence, path)
    check_integrity(subject.model.cache)
    assert sequence.length == len(kept)
    for tensor, expected in zip(stored(subject, sequence), before, strict=True):
        assert torch.equal(tensor, expected[kept])
    for tensor, expected in zip(stored(subject, other), others, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("num_published", [0, 16])
@pytest.mark.parametrize("length", [16, 22, 31])
def test_forked_sequence_goes_on_as_if_it_had_read_the_beginning_itself(
    subject: Subject, num_published: int, length: int
) -> None:
    ids = random_ids(random.Random(8), 31)
    sequence = subject.open([])
    subject.read(Reading(sequence, ids, 1))
    subject.model.cache.publish(sequence, ids[:num_published])
    before = stored(subject, sequence)
    fork = subject.model.fork(sequence, length)
    check_integrity(subject.model.cache)
    subject.texts[fork] = ids[:length]
    subject.read(Reading(fork, [1, 2], 2), Reading(sequence, [3], 1))
    for tensor, expected in zip(stored(subject, sequence), before, strict=True):
        assert torch.equal(tensor[:31], expected)
    subject.close(fork)
    subject.read(Reading(sequence, [4], 1))


def test_forward_pass_that_fails_anywhere_changes_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = make("llama by transformers")
    ids = random_ids(random.Random(6), 50)
    first, second = llama.open(ids), llama.open([])
    llama.read(Reading(first, ids, 1), Reading(second, ids[:5], 1))
    llama.publish(first)
    third = llama.open(ids[:40])
    free = llama.model.cache.num_free_blocks

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of memory")

    taken, _ = network("llama")
    for module in (taken, taken.model.layers[0].mlp, taken.model.layers[1].self_attn, taken.lm_head):
        with monkeypatch.context() as patch:
            patch.setattr(module, "forward", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                llama.model.read([Reading(one, random_ids(random.Random(0), 30), 1) for one in (first, second, third)])
        check_integrity(llama.model.cache)
        assert [one.length for one in (first, second, third)] == [50, 5, 32]
        assert llama.model.cache.num_free_blocks == free
    llama.read(Reading(first, [1], 1), Reading(second, [2], 1), Reading(third, ids[32:40], 8))


def test_model_with_attention_sinks_is_refused_when_it_reads() -> None:
    config = GptOssConfig(**tiny_shape(VOCAB_SIZE, 64), head_dim=8, num_local_experts=2)
    model = torch_model(decoder_of(randomize(GptOssForCausalLM(config)).eval()), 64)
    sequence = model.cache.open()
    with pytest.raises(InvalidRequestError, match="attention sinks"):
        model.read([Reading(sequence, [1, 2], 1)])
    assert sequence.length == 0


@pytest.mark.parametrize(("ids", "keep"), [([], 0), ([1], 2), ([1], -1)])
def test_nothing_to_read_and_too_much_to_keep_are_bugs_of_the_caller(llama: Subject, ids: list[int], keep: int) -> None:
    first, second = llama.open([]), llama.open([])
    with pytest.raises(AssertionError):
        llama.model.read([Reading(first, [1], 1), Reading(second, ids, keep)])
    assert (first.length, second.length) == (0, 0)
    check_integrity(llama.model.cache)


def packed(subject: Subject, sizes: list[tuple[int, int]]) -> tuple[list[Segment], PackedStep]:
    """Packs sequences of so many tokens, of which so many are new."""
    segments = []
    for length, num_tokens in sizes:
        segments.append(Segment(subject.open([]), num_tokens))
        subject.model.cache.append(segments[-1].sequence, length)
    return segments, pack(segments, KvStorage(subject.model.cache.num_slots), torch.device("cpu"))


def test_padding_at_most_doubles_a_rows_queries_and_keys(llama: Subject) -> None:
    generator = random.Random(2)
    lengths = (1, 2, 3, 4, 5, 9, 17, 30, 33, 40, 60, 61, 62, 64, 100, 150)
    segments, step = packed(llama, [(length, generator.randint(1, length)) for length in lengths])
    starts = {sum(one.num_tokens for one in segments[:index]): one for index, one in enumerate(segments)}
    for lone in step.lone:
        one = starts.pop(lone.tokens.start)
        assert lone.tokens.stop - lone.tokens.start == one.num_tokens
    for group in step.groups:
        for row, tokens in enumerate(group.tokens):
            one = starts.pop(int(tokens[0]))
            assert len(tokens) < 2 * one.num_tokens
            assert group.slots.shape[1] < 2 * one.sequence.length
            real = torch.ones(len(tokens), dtype=torch.bool) if group.real is None else group.real[row]
            assert int(real.sum()) == one.num_tokens
    assert not starts, "each is in one group, or alone"
    assert len(step.groups) > 2


def test_steps_of_equal_shape_are_not_padded_at_all(llama: Subject) -> None:
    _, step = packed(llama, [(37, 5)] * 8)
    (group,) = step.groups
    assert group.real is None
    assert group.tokens.shape == (8, 5)
    assert group.slots.shape == (8, 37)


@pytest.mark.parametrize("window", [None, 200, 60])
def test_single_tokens_of_texts_in_one_run_are_attended_to_one_by_one(
    llama: Subject, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LEAST_BYTES", 0)
    segments = [Segment(llama.open([]), 1) for _ in range(3)]
    for segment, first, length in zip(segments, (9, 30, 50), (150, 150, 161), strict=True):
        segment.sequence.blocks[:] = range(first, first + 6)
        segment.sequence.length = length
    storage = KvStorage(llama.model.cache.num_slots)
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(3, heads, 8, generator=generator) for heads in (4, 2, 2))
    for stored in storage.layer(0, keys, values):
        stored.normal_(generator=generator)
    step = pack(segments, storage, torch.device("cpu"))
    assert step.spans == [(288, 150), (960, 150), (1600, 161)]
    shape = AttentionShape(window=window)
    attended = step.attend(0, shape, queries, keys, values)
    expected = replace(step, spans=[]).attend(0, shape, queries, keys, values)
    assert (attended - expected).abs().max() <= 1e-6
    segments.append(Segment(segments[0].sequence, 2))
    assert not pack(segments, storage, torch.device("cpu")).spans


def test_long_texts_are_read_in_place_if_they_are_in_few_runs(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of three texts: in one run, in two, and scattered over the memory."""
    monkeypatch.setattr(packing, "LEAST_BYTES", 0)
    cache = llama.model.cache
    segments = [Segment(llama.open([]), 1) for _ in range(3)]
    tables = ([*range(9, 14)], [*range(20, 22), *range(30, 33)], [*range(40, 50, 2)])
    for segment, blocks in zip(segments, tables, strict=True):
        segment.sequence.blocks[:], segment.sequence.length = blocks, 150
    step = pack(segments, KvStorage(cache.num_slots), torch.device("cpu"))
    assert [lone.runs for lone in step.lone] == [[slice(288, 438)], [slice(640, 704), slice(960, 1046)]]
    (group,) = step.groups
    assert group.slots[0, [0, 31, 32, 149]].tolist() == [1280, 1311, 1344, 1557]
    assert step.slots.tolist() == [437, 1045, 1557]


@pytest.mark.parametrize("blocks", [[*range(9, 14)], [*range(20, 22), *range(30, 33)], [*range(40, 50, 2)]])
@pytest.mark.parametrize("length", [129, 150, 160])
def test_step_of_one_token_is_laid_out_as_any_other(
    llama: Subject, blocks: list[int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose text is in one run, in two, or scattered; at the beginning of a block, within and at its end."""
    segment = Segment(llama.open([]), 1)
    segment.sequence.blocks[:], segment.sequence.length = blocks, length
    storage, device = KvStorage(llama.model.cache.num_slots), torch.device("cpu")
    step = pack([segment], storage, device)
    monkeypatch.setattr(packing, "_of_one_token", lambda *_: None)
    expected = pack([segment], storage, device)
    assert (step.slots, step.positions, step.spans) == (expected.slots, expected.positions, expected.spans)
    assert step.slots.shape == step.positions.shape == (1,)
    assert len(step.groups) == len(expected.groups)
    assert [(each.tokens, each.runs) for each in step.lone] == [(each.tokens, each.runs) for each in expected.lone]
    for own, other in zip(step.lone, expected.lone, strict=True):
        assert torch.equal(own.masks.positions, other.masks.positions)
        assert (own.masks.num_keys, own.masks.sees_all) == (other.masks.num_keys, other.masks.sees_all)


def test_other_devices_read_one_text_in_place_and_gather_several(llama: Subject) -> None:
    """There, a call for each text costs more than to copy all of them."""
    segments = [Segment(llama.open([]), 1) for _ in range(2)]
    for segment in segments:
        llama.model.cache.append(segment.sequence, 150)
    storage, elsewhere = KvStorage(llama.model.cache.num_slots), torch.device("meta")
    storage.token_bytes = 2**20
    alone, together = pack(segments[:1], storage, elsewhere), pack(segments, storage, elsewhere)
    assert (len(alone.lone), len(alone.groups)) == (1, 0)
    assert (len(together.lone), len(together.groups)) == (0, 1)


@pytest.mark.parametrize("subject", ["llama by transformers", "llama by the lean decoder"], indirect=True)
def test_tokens_that_the_host_does_not_know_are_read_like_others(subject: Subject) -> None:
    first, second = subject.open([]), subject.open([])
    subject.read(Reading(first, [3, 1, 4], 0), Reading(second, [1] * 40, 0))
    logits = subject.model.extend([second, first], torch.tensor([5, 9]))
    assert (first.length, second.length) == (4, 41)
    assert_equal(logits[0], subject.fresh([1] * 40 + [5])[-1], subject.tolerance)
    assert_equal(logits[1], subject.fresh([3, 1, 4, 9])[-1], subject.tolerance)
    check_integrity(subject.model.cache)


def test_full_cache_is_not_extended() -> None:
    subject = make("llama", num_blocks=1)
    sequence = subject.open([])
    subject.read(Reading(sequence, [1] * BLOCK_SIZE, 1))
    with pytest.raises(NoRoomError):
        subject.model.extend([sequence], torch.tensor([1]))
    assert sequence.length == BLOCK_SIZE
