"""A block is judged the same whatever else is in the step, and a bad one harms nobody but itself."""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_network
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.distributions import DraftDistributions, draw
from draftwire.errors import InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.cached_model import CachedModel, Reading
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, KvCache
from draftwire.randomness import DrawKey
from draftwire.sampling import SamplingParams, probabilities
from draftwire.verification import RULES
from draftwire.verification.rule import BlockBatch, verify
from draftwire.verification.target import Judgement, Judging, StillReading, judge

torch.set_num_threads(1)

VOCAB_SIZE = 11
KEY = bytes(range(16))
SAMPLINGS = [SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, 4, 0.9), SamplingParams(5.0)]
NETWORK = tiny_network("llama", VOCAB_SIZE, 256, dtype=torch.float32)
REFERENCE = copy.deepcopy(NETWORK)
salts = itertools.count()


class WatchedModel:
    """A model that notes what it reads, and can be made to give bad logits for some sequences."""

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.readings: list[Reading] = []
        self.num_calls = 0
        self.bad: dict[CachedSequence, tuple[int, float]] = {}
        """Row counted from the last kept one, and the number that one of its logits is to be."""

    @property
    def cache(self) -> KvCache:
        return self.model.cache

    def read(self, readings: Sequence[Reading]) -> Tensor:
        self.readings, self.num_calls = list(readings), self.num_calls + 1
        logits, end = self.model.read(readings).clone(), 0
        for reading in readings:
            end += reading.keep
            if reading.sequence in self.bad:
                back, number = self.bad[reading.sequence]
                logits[end - 1 - back, 3] = number
        return logits


@pytest.fixture
def model() -> WatchedModel:
    return WatchedModel(CachedModel(NETWORK, 4096))


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def block(generator: random.Random, length: int, greedy: bool) -> tuple[list[int], DraftDistributions | None]:
    """Returns tokens drawn from random distributions, and these."""
    if length == 0:
        return [], None
    if greedy:
        return random_ids(generator, length), DraftDistributions.one_hot(VOCAB_SIZE)
    noise = torch.Generator().manual_seed(generator.randrange(2**32))
    rows = torch.randn(length, VOCAB_SIZE, generator=noise).softmax(-1)
    tokens = draw(rows, torch.rand(length, generator=noise, dtype=torch.float64)).tolist()
    return tokens, DraftDistributions.from_rows(rows)


def judging(
    model: WatchedModel,
    generator: random.Random,
    committed: list[int],
    length: int,
    number: int = 0,
    sequence: CachedSequence | None = None,
) -> Judging:
    """Makes a random part of a step, for a sequence that shares nothing unless one is given."""
    sampling = generator.choice(SAMPLINGS)
    tokens, distributions = block(generator, length, sampling.greedy)
    return Judging(
        model.cache.open(committed, f"alone {next(salts)}") if sequence is None else sequence,
        committed,
        tokens,
        distributions,
        sampling,
        generator.choice(list(RULES.values())),
        DrawKey(KEY, generator.randrange(100), number),
    )


def alone(model: WatchedModel, one: Judging) -> tuple[Judgement, BlockBatch]:
    """Judges the same by a fresh sequence that reads all at once."""
    sequence = model.cache.open(one.committed, f"alone {next(salts)}")
    step = judge(model, [replace(one, sequence=sequence, max_read=None)])
    model.cache.close(sequence)
    (outcome,), (blocks,) = step.outcomes, step.blocks
    assert isinstance(outcome, Judgement)
    return outcome, blocks


def by_hand(reference: PreTrainedModel, one: Judging) -> tuple[Judgement, BlockBatch]:
    """Judges by a pass of the bare model over everything."""
    with torch.inference_mode():
        ids = torch.tensor([one.committed + one.draft_tokens])
        logits = reference(input_ids=ids, use_cache=False).logits[0, len(one.committed) - 1 :]
    draft = one.distributions.rows(one.draft_tokens, VOCAB_SIZE) if one.distributions else torch.zeros(0, VOCAB_SIZE)
    blocks = BlockBatch(
        probabilities(logits, one.sampling)[None],
        draft[None],
        torch.tensor([one.draft_tokens], dtype=torch.int64),
        torch.tensor([len(one.draft_tokens)]),
    )
    outcome = verify(one.rule, blocks, one.key.uniforms(2)[None])
    count = int(outcome.num_accepted[0])
    return Judgement([*one.draft_tokens[:count], int(outcome.extra_tokens[0])], count), blocks


def row_of(blocks: list[BlockBatch], one: Judging) -> tuple[Tensor, Tensor]:
    """Returns what a rule saw of a block, target's and drafter's rows, found by its tokens."""
    length = len(one.draft_tokens)
    for batch in blocks:
        for row, count in enumerate(batch.lengths.tolist()):
            if count == length and batch.draft_tokens[row, :count].tolist() == one.draft_tokens:
                return batch.target_probs[row, : length + 1], batch.draft_probs[row, :length]
    raise AssertionError("no rule saw the block")


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_a_mixed_step_are_judged_as_if_each_were_alone(model: WatchedModel, seed: int) -> None:
    generator = random.Random(seed)
    texts = [random_ids(generator, generator.choice([1, 2, 15, 16, 17, 40, 90])) for _ in range(10)]
    sequences = [model.cache.open(text, f"alone {next(salts)}") for text in texts]
    counts = set()
    for number in range(5):
        parts = [
            judging(model, generator, text, generator.choice([0, 0, 1, 2, 5, 8]), number, sequence)
            for text, sequence in zip(texts, sequences, strict=True)
        ]
        model.num_calls = 0
        step = judge(model, parts)
        model.cache.check_integrity()
        assert model.num_calls == 1
        assert step.num_tokens == sum(len(reading.token_ids) for reading in model.readings)
        assert len(step.blocks) == len({part.rule.name for part in parts})
        assert sum(len(blocks.lengths) for blocks in step.blocks) == len(parts)
        for part, text, outcome in zip(parts, texts, step.outcomes, strict=True):
            assert isinstance(outcome, Judgement)
            assert outcome == by_hand(REFERENCE, part)[0] == alone(model, part)[0]
            assert part.sequence.length == len(text) + outcome.num_accepted
            assert part.sequence.num_published == len(text) // BLOCK_SIZE
            text += outcome.token_ids
            counts.add((len(part.draft_tokens), outcome.num_accepted))
    assert len(counts) >= 8, "blocks were accepted in full, in part and not at all"


def test_rules_see_the_models_rows_and_the_blocks_own(model: WatchedModel) -> None:
    generator = random.Random(3)
    parts = [judging(model, generator, random_ids(generator, 20), length) for length in (3, 7, 1, 5, 4)]
    step = judge(model, parts)
    for part in parts:
        target, draft = row_of(step.blocks, part)
        _, expected = by_hand(REFERENCE, part)
        assert (target - expected.target_probs[0]).abs().max() < 1e-4
        assert torch.equal(draft, expected.draft_probs[0])


def test_plain_decoding_alone_gives_one_token(model: WatchedModel) -> None:
    generator = random.Random(1)
    parts = [judging(model, generator, random_ids(generator, count), 0) for count in (1, 9, 30)]
    for part, outcome in zip(parts, judge(model, parts).outcomes, strict=True):
        assert outcome == by_hand(REFERENCE, part)[0]
        assert isinstance(outcome, Judgement)
        assert (len(outcome.token_ids), outcome.num_accepted) == (1, 0)


def test_empty_step_reads_nothing(model: WatchedModel) -> None:
    step = judge(model, [])
    assert (step.outcomes, step.blocks, step.num_tokens, model.num_calls) == ([], [], 0, 0)


def test_long_prompt_is_read_in_parts_while_others_are_decided(model: WatchedModel) -> None:
    generator = random.Random(4)
    prompt, other = random_ids(generator, 45), random_ids(generator, 6)
    reading = replace(judging(model, generator, prompt, 3), max_read=20)
    sequence = model.cache.open(other)
    for number, length in enumerate((20, 40)):
        deciding = judging(model, generator, other, 2, number, sequence)
        step = judge(model, [reading, deciding])
        assert step.outcomes[0] == StillReading()
        assert step.outcomes[1] == by_hand(REFERENCE, deciding)[0]
        assert reading.sequence.length == length
        assert reading.sequence.num_published == 0, "nothing is offered before it gave finite logits"
        assert model.readings[0].keep == 0
        other += step.outcomes[1].token_ids
    expected, _ = by_hand(REFERENCE, reading)
    step = judge(model, [reading])
    assert step.outcomes == [expected]
    assert reading.sequence.num_published == 2
    assert step.num_tokens == 5 + 3, "max_read limits committed tokens, not the block"


def test_unread_tokens_up_to_the_limit_are_decided_at_once(model: WatchedModel) -> None:
    generator = random.Random(5)
    for max_read, outcome in ((20, Judgement), (19, StillReading)):
        part = replace(judging(model, generator, random_ids(generator, 20), 2), max_read=max_read)
        assert isinstance(judge(model, [part]).outcomes[0], outcome)


def test_step_that_only_reads_decides_nothing(model: WatchedModel) -> None:
    generator = random.Random(6)
    parts = [replace(judging(model, generator, random_ids(generator, 30), 2), max_read=9) for _ in range(3)]
    step = judge(model, parts)
    assert step.outcomes == [StillReading()] * 3
    assert (step.blocks, step.num_tokens) == ([], 27)


BAD_BLOCKS = {
    "wrong size": lambda good: replace(good, data=good.data[:-4]),
    "no distribution": lambda good: replace(good, data=good.data[:-4] + b"\x00\x00\x20\x41"),
    "not a number": lambda good: replace(good, data=b"\x00\x00\xc0\x7f" + good.data[4:]),
    "another vocabulary": lambda good: replace(good, vocab_size=VOCAB_SIZE + 1),
}


@pytest.mark.parametrize("kind", BAD_BLOCKS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_bad_block_is_refused_alone_and_changes_nothing(model: WatchedModel, kind: str, place: int) -> None:
    generator = random.Random(7)
    parts = [replace(judging(model, generator, random_ids(generator, 40), 3), max_read=99) for _ in range(3)]
    tokens, good = block(generator, 3, greedy=False)
    assert good is not None
    parts[place] = replace(parts[place], draft_tokens=tokens, distributions=good)
    # It has read a part before, up to within a block.
    judge(model, [replace(parts[place], max_read=20)])
    sequence = parts[place].sequence
    before = (sequence.length, sequence.num_published, sequence.blocks.copy())
    bad = replace(parts[place], distributions=BAD_BLOCKS[kind](good))
    step = judge(model, [*parts[:place], bad, *parts[place + 1 :]])
    model.cache.check_integrity()
    assert isinstance(step.outcomes[place], InvalidRequestError)
    assert before == (sequence.length, sequence.num_published, sequence.blocks)
    assert sequence not in [reading.sequence for reading in model.readings]
    for index, (part, outcome) in enumerate(zip(parts, step.outcomes, strict=True)):
        if index != place:
            assert outcome == by_hand(REFERENCE, part)[0]
    assert judge(model, [parts[place]]).outcomes == [by_hand(REFERENCE, parts[place])[0]]


def test_step_of_bad_blocks_only_reads_nothing(model: WatchedModel) -> None:
    part = judging(model, random.Random(8), [1, 2], 0)
    bad = replace(part, draft_tokens=[VOCAB_SIZE], distributions=DraftDistributions.one_hot(VOCAB_SIZE))
    step = judge(model, [bad])
    assert isinstance(step.outcomes[0], InvalidRequestError)
    assert (step.blocks, step.num_tokens, model.num_calls, part.sequence.length) == ([], 0, 0, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("place", "back"), [(0, 0), (1, 3), (2, 1)])
def test_logits_that_are_not_finite_fail_their_sequence_alone(
    model: WatchedModel, number: float, place: int, back: int
) -> None:
    generator = random.Random(9)
    parts = [judging(model, generator, random_ids(generator, 40), 3) for _ in range(3)]
    parts.append(replace(judging(model, generator, random_ids(generator, 40), 3), max_read=4))
    sick = parts[place].sequence
    judge(model, [replace(parts[place], max_read=20)])
    before = (sick.length, sick.num_published, sick.blocks.copy())
    model.bad = {sick: (back, number)}
    step = judge(model, parts)
    model.cache.check_integrity()
    assert isinstance(step.outcomes[place], UnavailableError)
    assert before == (sick.length, sick.num_published, sick.blocks)
    assert step.outcomes[3] == StillReading()
    for index, part in enumerate(parts[:3]):
        if index != place:
            assert step.outcomes[index] == by_hand(REFERENCE, part)[0]
    model.bad = {}
    assert judge(model, [parts[place]]).outcomes == [by_hand(REFERENCE, parts[place])[0]]


def test_step_in_which_all_logits_are_bad_decides_nothing(model: WatchedModel) -> None:
    generator = random.Random(10)
    parts = [judging(model, generator, [1, 2, 3], 2) for _ in range(2)]
    model.bad = {part.sequence: (0, float("nan")) for part in parts}
    step = judge(model, parts)
    assert all(isinstance(outcome, UnavailableError) for outcome in step.outcomes)
    assert step.blocks == []
    assert [part.sequence.length for part in parts] == [0, 0]


def test_impossible_token_is_no_failure_of_the_model(model: WatchedModel) -> None:
    part = judging(model, random.Random(11), [1, 2, 3], 2)
    model.bad = {part.sequence: (0, float("-inf"))}
    assert isinstance(judge(model, [part]).outcomes[0], Judgement)


def test_committed_beginning_is_offered_to_the_next_session_of_the_same_salt(model: WatchedModel) -> None:
    generator = random.Random(12)
    prompt = random_ids(generator, 50)
    first = judging(model, generator, prompt, 4, sequence=model.cache.open(prompt, "tenant"))
    judge(model, [first])
    for salt, reused in (("tenant", 48), ("other tenant", 0)):
        sequence = model.cache.open(prompt, salt)
        assert sequence.num_reused == reused
        second = replace(first, sequence=sequence)
        step = judge(model, [second])
        assert step.num_tokens == 50 - reused + 4
        assert step.outcomes == [by_hand(REFERENCE, second)[0]]


@pytest.mark.parametrize("rule", RULES)
def test_draft_tokens_are_never_offered_before_they_are_committed(model: WatchedModel, rule: str) -> None:
    prompt = [1] * (BLOCK_SIZE - 2)
    greedy = SamplingParams(0.0)
    sequence = model.cache.open(prompt)
    tokens: list[int] = []
    for _ in range(6):  # what a greedy target accepts in full
        with torch.inference_mode():
            logits = REFERENCE(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    one = Judging(
        sequence, prompt, tokens, DraftDistributions.one_hot(VOCAB_SIZE), greedy, RULES[rule], DrawKey(KEY, 0, 0)
    )
    (outcome,) = judge(model, [one]).outcomes
    assert isinstance(outcome, Judgement)
    assert outcome.num_accepted == 6
    committed = prompt + outcome.token_ids
    assert sequence.length == len(committed) - 1
    assert model.cache.open(committed).num_reused == 0
    plain = replace(one, committed=committed, draft_tokens=[], distributions=None)
    assert judge(model, [plain]).num_tokens == 1, "accepted tokens are not read again"
    assert model.cache.open(committed).num_reused == BLOCK_SIZE


def test_step_without_room_changes_no_sequence() -> None:
    model = WatchedModel(CachedModel(NETWORK, 4 * BLOCK_SIZE))
    generator = random.Random(13)
    parts = [judging(model, generator, random_ids(generator, count), 2) for count in (20, 40)]
    with pytest.raises(NoRoomError):
        judge(model, parts)
    model.cache.check_integrity()
    assert [part.sequence.length for part in parts] == [0, 0]
    model.cache.close(parts[1].sequence)
    assert judge(model, parts[:1]).outcomes == [by_hand(REFERENCE, parts[0])[0]]
