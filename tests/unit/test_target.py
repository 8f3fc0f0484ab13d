"""A block is judged the same whatever else is in the step, and bad logits harm nobody but their sequence."""

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest
import torch
from cases import every
from host_reads import host_reads
from tiny_models import tiny_network
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.errors import NoRoomError, UnavailableError
from draftwire.method.distributions import DenseRows, DraftRows, SparseRows, draw, no_rows, quantize, rows_of
from draftwire.method.encoding import TOTAL_WEIGHT, Claim, DraftDistributions, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, KvCache
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, BlockBatch, KeyedNoise, TypicalRule, verify
from draftwire.verification.deciding import NEAR_TIE, Decided, Judgement, StillReading
from draftwire.verification.target import Judging, judge
from draftwire_verifier.auditing import audits_of
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

torch.set_num_threads(1)

VOCAB_SIZE = 11
KEY = bytes(range(16))
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.0),
    SamplingParams(0.7, 4, 0.9),
    SamplingParams(5.0),
    SamplingParams(3.0, min_p=0.2, logit_bias=((3, 2.0), (7, -5.0))),
    SamplingParams(2.0, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4),
    SamplingParams(4.0, allowed_token_ids=(0, 1, 4, 5, 9, 10), min_tokens=8, frequency_penalty=-0.3),
]
STOP_TOKENS = frozenset({4, 9})
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


def fresh_model() -> WatchedModel:
    """Returns one with an empty cache."""
    return WatchedModel(torch_model(decoder_of(NETWORK), 4096))


model = pytest.fixture(fresh_model)


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def certain(tokens: list[int], encoding: Encoding = Encoding.ONE_HOT) -> DraftRows:
    """Returns the distributions of tokens that could not be others, or of which nothing is told."""
    return rows_of(decode_one(Claim(tokens, DraftDistributions(encoding, VOCAB_SIZE)), VOCAB_SIZE))


def block(generator: random.Random, length: int, encoding: Encoding) -> tuple[list[int], DraftRows | None]:
    """Returns tokens drawn from random distributions, and these, as far as they are told."""
    if length == 0:
        return [], None
    if encoding in (Encoding.ONE_HOT, Encoding.NONE):
        tokens = random_ids(generator, length)
        return tokens, certain(tokens, encoding)
    noise = torch.Generator().manual_seed(generator.randrange(2**32))
    rows = torch.randn(length, VOCAB_SIZE, generator=noise).softmax(-1)
    numbers = torch.rand(length, generator=noise, dtype=torch.float64)
    if encoding is Encoding.DENSE_FLOAT32:
        return draw(rows, numbers).tolist(), DenseRows(rows)
    quantized = quantize(rows, Quantization(mass=0.8))
    probs = quantized.weights.float() / TOTAL_WEIGHT
    return quantized.draw(numbers).tolist(), SparseRows(quantized.token_ids, probs, VOCAB_SIZE)


def judging(
    model: WatchedModel,
    generator: random.Random,
    committed: list[int],
    length: int,
    number: int = 0,
    sequence: CachedSequence | None = None,
    encoding: Encoding | None = None,
) -> Judging:
    """Makes a random part of a step, for a sequence that shares nothing unless one is given."""
    rule = generator.choice(list(RULES.values()))
    encodings = [Encoding.DENSE_FLOAT32, Encoding.SPARSE_UINT16, Encoding.ONE_HOT]
    if not rule.needs_draft_probs:
        encodings.append(Encoding.NONE)
    tokens, draft = block(generator, length, encoding or generator.choice(encodings))
    return judging_of(
        model.cache.open(committed, f"alone {next(salts)}") if sequence is None else sequence,
        committed,
        tokens,
        draft,
        generator.choice(SAMPLINGS),
        rule,
        DrawKey(KEY, generator.randrange(100), number),
        prompt_len=generator.randint(0, len(committed)),
        stop_token_ids=generator.choice([frozenset(), STOP_TOKENS]),
    )


def alone(model: WatchedModel, one: Judging) -> Judgement:
    """Judges the same by a fresh sequence that reads all at once."""
    sequence = model.cache.open(one.committed, f"alone {next(salts)}")
    step = judge(model, [replace(one, sequence=sequence, max_read=None)])
    model.cache.close(sequence)
    (outcome,), (decided,) = step.outcomes, step.decided
    assert isinstance(outcome, Judgement)
    assert decided.members == [0]
    return outcome


def by_hand(reference: PreTrainedModel, one: Judging) -> tuple[Judgement, BlockBatch]:
    """Judges by a pass of the bare model over everything, and each of its rows by itself."""
    text = one.committed + one.draft_tokens
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        rows = [
            probabilities_of_spans(
                logits[end - 1 : end].clone(), [Span(one.sampling, 1, text[:end], one.prompt_len, one.stop_token_ids)]
            )
            for end in range(len(one.committed), len(text) + 1)
        ]
    draft = one.draft if one.draft is not None else no_rows(VOCAB_SIZE)
    blocks = BlockBatch.packed(torch.cat(rows), [draft], [one.draft_tokens], [0])
    outcome = verify(one.rule, blocks, KeyedNoise([one.key], [len(one.committed)], torch.device("cpu")))
    count = int(outcome.num_accepted[0])
    near_ties = outcome.num_near_ties(NEAR_TIE / max(one.sampling.temperature, 1e-30))
    token_ids = [*one.draft_tokens[:count], int(outcome.extra_tokens[0])]
    return Judgement(token_ids, count, int(near_ties[0])), blocks


def row_of(decided: list[Decided], index: int) -> tuple[Tensor, Tensor]:
    """Returns what a rule saw of the block of a judging: target's and drafter's rows."""
    ((blocks, row),) = [(one.blocks, one.members.index(index)) for one in decided if index in one.members]
    length = int(blocks.lengths[row])
    return blocks.padded_target_probs()[row, : length + 1], blocks.padded_draft_probs()[row, :length]


@every("seed", range(6))
def test_blocks_of_a_mixed_step_are_judged_as_if_each_were_alone(seed: int) -> None:
    model = fresh_model()
    generator = random.Random(seed)
    texts = [
        random_ids(generator, generator.choice([1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 40, 90]))
        for _ in range(10)
    ]
    sequences = [model.cache.open(text, f"alone {next(salts)}") for text in texts]
    counts = set()
    for number in range(5):
        parts = [
            judging(model, generator, text, generator.choice([0, 0, 1, 2, 5, 8]), number, sequence)
            for text, sequence in zip(texts, sequences, strict=True)
        ]
        model.num_calls = 0
        step = judge(model, parts)
        check_integrity(model.cache)
        assert model.num_calls == 1
        assert step.num_tokens == sum(len(reading.token_ids) for reading in model.readings)
        groups = {(part.rule.name, isinstance(part.draft, DenseRows)) for part in parts}
        assert len(step.decided) == len(groups)
        assert sorted(member for one in step.decided for member in one.members) == list(range(len(parts)))
        for one in step.decided:
            assert (
                len({(parts[member].rule.name, isinstance(parts[member].draft, DenseRows)) for member in one.members})
                == 1
            )
            assert one.blocks.batch_size == len(one.members)
        for index, (part, text, outcome) in enumerate(zip(parts, texts, step.outcomes, strict=True)):
            assert isinstance(outcome, Judgement)
            expected, blocks = by_hand(REFERENCE, part)
            assert outcome == expected == alone(model, part)
            target, draft = row_of(step.decided, index)
            assert (target - blocks.target_probs).abs().max() < 1e-4
            assert torch.equal(draft, blocks.draft.dense())
            assert part.sequence.length == len(text) + outcome.num_accepted
            assert part.sequence.num_published == len(text) // BLOCK_SIZE
            text += outcome.token_ids
            counts.add((len(part.draft_tokens), outcome.num_accepted))
    assert len(counts) >= 8, "blocks were accepted in full, in part and not at all"


def test_dense_and_sparse_blocks_share_the_models_rows_without_a_copy(model: WatchedModel) -> None:
    generator = random.Random(30)
    kinds = [Encoding.DENSE_FLOAT32, Encoding.ONE_HOT, Encoding.DENSE_FLOAT32, Encoding.SPARSE_UINT16] * 2
    parts = [
        replace(judging(model, generator, random_ids(generator, 9), 3, encoding=encoding), rule=RULES["block"])
        for encoding in kinds
    ]
    first, second = judge(model, parts).decided
    assert (first.members, second.members) == ([0, 2, 4, 6], [1, 3, 5, 7])
    assert first.blocks.target_probs is second.blocks.target_probs


def test_rules_of_one_name_and_other_thresholds_are_decided_apart(model: WatchedModel) -> None:
    generator = random.Random(31)
    part = replace(judging(model, generator, random_ids(generator, 9), 4), sampling=SamplingParams(1.0))
    rules = [TypicalRule(0.0, 0.0), TypicalRule(0.999, 1e9)]
    parts = [
        replace(part, rule=rule, sequence=model.cache.open(part.committed, f"alone {next(salts)}")) for rule in rules
    ]
    step = judge(model, parts)
    assert [one.members for one in step.decided] == [[0], [1]]
    assert [outcome.num_accepted for outcome in step.outcomes if isinstance(outcome, Judgement)] == [4, 0]


@every("seed", range(4))
def test_unused_block_is_decided_as_an_empty_one_and_audited_as_a_used_one(seed: int) -> None:
    """With the random numbers of a plain round, beside blocks that are used, also where a row after it is bad."""
    model, generator = fresh_model(), random.Random(seed)
    count = 12
    used = [judging(model, generator, random_ids(generator, 9), generator.choice([1, 2, 5, 8])) for _ in range(count)]

    def beside(one: Judging) -> Judging:
        return replace(one, sequence=model.cache.open(one.committed, f"alone {next(salts)}"))

    aside = [replace(beside(one), is_used=False) for one in used]
    plain = [replace(beside(one), draft_tokens=[], draft=None) for one in used]
    for one in (*used[::3], *aside[::3]):
        model.bad[one.sequence] = (0, torch.nan)
    parts = [*used, *aside, *plain]
    step = judge(model, parts)
    outcomes = [outcome for outcome in step.outcomes if isinstance(outcome, Judgement)]
    sums = audits_of(step.decided, [part.rule for part in parts])
    for index, one in enumerate(used):
        assert outcomes[count + index] == outcomes[2 * count + index]
        assert aside[index].sequence.length == len(one.committed), "nothing of it is left in the cache"
        own, others = sums[count + index], sums[index]
        assert (own is not None) is (others is not None) is one.rule.needs_draft_probs
        if own is not None and others is not None:
            assert astuple(own) == pytest.approx(astuple(others))
    assert any(outcome.num_accepted > 0 for outcome in outcomes[:count]), "where they are used, some are accepted"
    assert any(own.num_positions > 0 for own in sums[count : 2 * count] if own is not None)


@every("name", ["block", "token", "coupled"])
@every("encoding", [Encoding.ONE_HOT, Encoding.SPARSE_UINT16])
@every("sampling", SAMPLINGS[:5])
def test_step_waits_for_the_device_as_often_for_many_blocks_as_for_one(
    name: str, encoding: Encoding, sampling: SamplingParams
) -> None:
    """What was decided comes back together."""
    generator, model, found = random.Random(32), fresh_model(), list[list[str]]()
    for count in (1, 9):
        parts = [
            replace(
                judging(model, generator, random_ids(generator, 9), 4, encoding=encoding),
                rule=RULES[name],
                sampling=sampling,
            )
            for _ in range(count)
        ]
        with host_reads() as reads:
            judge(model, parts)
        found.append(reads)
    assert found[0] == found[1]
    assert 1 < len(found[0]) < 9


def test_near_ties_are_told_by_sequence(model: WatchedModel) -> None:
    """Two tokens are possible, and a bias brings the one that would lose in front by as much as is wanted."""
    generator = random.Random(33)
    base = replace(judging(model, generator, [1, 2, 3], 0), rule=RULES["coupled"], stop_token_ids=frozenset())
    parts = []
    noise = KeyedNoise([base.key], [3], torch.device("cpu"))
    times = noise.exponentials(torch.tensor([0]), torch.tensor([0]), VOCAB_SIZE)[0]
    with torch.inference_mode():
        logits = REFERENCE(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1].double()
    scores = logits / 0.5 - times.log()
    for lead in (1.5 * NEAR_TIE, 10 * NEAR_TIE):  # the bound is 2 * NEAR_TIE at this temperature
        bias = 0.5 * float(scores[0] + lead - scores[1])
        sampling = SamplingParams(0.5, logit_bias=((1, bias),), allowed_token_ids=(0, 1))
        parts.append(
            replace(base, sampling=sampling, sequence=model.cache.open(base.committed, f"alone {next(salts)}"))
        )
    parts.append(replace(parts[0], rule=RULES["block"], sequence=model.cache.open([1, 2, 3], f"alone {next(salts)}")))
    outcomes = judge(model, parts).outcomes
    assert [outcome.num_near_ties for outcome in outcomes if isinstance(outcome, Judgement)] == [1, 0, 0]
    assert [outcome.token_ids for outcome in outcomes[:2] if isinstance(outcome, Judgement)] == [[1], [1]]


def test_text_before_the_block_and_in_it_is_penalized_row_by_row(model: WatchedModel) -> None:
    """By hand, from the logits of the model: each row sees the draft tokens before it, and no other."""
    committed, tokens = [1, 2, 3, 2], [5, 2, 5]
    params = SamplingParams(2.0, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4, min_tokens=4)
    one = judging_of(
        model.cache.open(committed, f"alone {next(salts)}"),
        committed,
        tokens,
        certain(tokens),
        params,
        RULES["block"],
        DrawKey(KEY, 0, 0),
        prompt_len=2,
        stop_token_ids=STOP_TOKENS,
    )
    seen, _ = row_of(judge(model, [one]).decided, 0)
    with torch.inference_mode():
        logits = REFERENCE(input_ids=torch.tensor([committed + tokens]), use_cache=False).logits[0, 3:]
    for row in range(4):
        text = committed + tokens[:row]
        expected = logits[row].clone()
        if len(text) - 2 < 4:
            expected[list(STOP_TOKENS)] = -torch.inf
        for token in set(text):
            expected[token] *= 1.5 if expected[token] < 0.0 else 1 / 1.5
            count = text[2:].count(token)
            expected[token] -= 0.6 * (count > 0) + 0.4 * count
        assert (seen[row] - (expected / 2.0).softmax(-1)).abs().max() < 1e-5
        assert (seen[row, 4] == 0.0) == (row < 2)


def test_empty_step_reads_nothing(model: WatchedModel) -> None:
    step = judge(model, [])
    assert (step.outcomes, step.decided, step.num_tokens, model.num_calls) == ([], [], 0, 0)


def test_long_prompt_is_read_in_parts_while_others_are_decided(model: WatchedModel) -> None:
    generator, part_len = random.Random(4), BLOCK_SIZE + 4
    prompt, other = random_ids(generator, 2 * part_len + 5), random_ids(generator, 6)
    reading = replace(judging(model, generator, prompt, 3), max_read=part_len)
    sequence = model.cache.open(other)
    for number, length in enumerate((part_len, 2 * part_len)):
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


def test_unread_tokens_within_the_limit_are_decided_and_beyond_it_read() -> None:
    generator = random.Random(5)
    for max_read, num_tokens in ((20, 22), (19, 19)):
        model = fresh_model()
        parts = [replace(judging(model, generator, random_ids(generator, 20), 2), max_read=max_read) for _ in range(3)]
        step = judge(model, parts)
        assert step.num_tokens == 3 * num_tokens
        if max_read == 20:
            assert step.outcomes == [by_hand(REFERENCE, part)[0] for part in parts]
        else:
            assert (step.outcomes, step.decided) == ([StillReading()] * 3, [])


@every("number", [float("nan"), float("inf")])
@every("place", range(3))
def test_logits_that_are_not_finite_after_the_text_fail_it_alone(number: float, place: int) -> None:
    model = fresh_model()
    generator = random.Random(9)
    num_tokens = 5 * BLOCK_SIZE // 2
    parts = [judging(model, generator, random_ids(generator, num_tokens), 3) for _ in range(3)]
    parts.append(replace(judging(model, generator, random_ids(generator, num_tokens), 3), max_read=4))
    sick = parts[place].sequence
    judge(model, [replace(parts[place], max_read=BLOCK_SIZE + 4)])
    before = (sick.length, sick.num_published, sick.blocks.copy())
    model.bad = {sick: (3, number)}
    step = judge(model, parts)
    check_integrity(model.cache)
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
    model.bad = {part.sequence: (2, float("nan")) for part in parts}
    step = judge(model, parts)
    assert all(isinstance(outcome, UnavailableError) for outcome in step.outcomes)
    assert step.decided == []
    assert [part.sequence.length for part in parts] == [0, 0]


def test_impossible_token_is_no_failure_of_the_model(model: WatchedModel) -> None:
    part = judging(model, random.Random(11), [1, 2, 3], 2)
    model.bad = {part.sequence: (0, float("-inf"))}
    assert isinstance(judge(model, [part]).outcomes[0], Judgement)


def test_committed_beginning_is_published_to_sessions_of_the_same_salt(model: WatchedModel) -> None:
    generator = random.Random(12)
    prompt = random_ids(generator, 3 * BLOCK_SIZE + 2)
    first = judging(model, generator, prompt, 4, sequence=model.cache.open(prompt, "tenant"))
    judge(model, [first])
    for salt, reused in (("tenant", 3 * BLOCK_SIZE), ("other tenant", 0)):
        sequence = model.cache.open(prompt, salt)
        assert sequence.num_reused == reused
        second = replace(first, sequence=sequence)
        step = judge(model, [second])
        assert step.num_tokens == len(prompt) - reused + 4
        assert step.outcomes == [by_hand(REFERENCE, second)[0]]


@every("rule", RULES)
def test_draft_tokens_are_never_offered_before_they_are_committed(rule: str) -> None:
    model = fresh_model()
    prompt = [1] * (BLOCK_SIZE - 2)
    greedy = SamplingParams(0.0)
    sequence = model.cache.open(prompt)
    tokens: list[int] = []
    for _ in range(6):  # what a greedy target accepts in full
        with torch.inference_mode():
            logits = REFERENCE(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    one = judging_of(sequence, prompt, tokens, certain(tokens), greedy, RULES[rule], DrawKey(KEY, 0, 0))
    (outcome,) = judge(model, [one]).outcomes
    assert isinstance(outcome, Judgement)
    assert outcome.num_accepted == 6
    committed = prompt + outcome.token_ids
    assert sequence.length == len(committed) - 1
    assert model.cache.open(committed).num_reused == 0
    plain = replace(one, committed=committed, num_committed=len(committed), draft_tokens=[], draft=None)
    assert judge(model, [plain]).num_tokens == 1, "accepted tokens are not read again"
    assert model.cache.open(committed).num_reused == BLOCK_SIZE


def test_step_without_room_changes_no_sequence() -> None:
    model = WatchedModel(torch_model(decoder_of(NETWORK), 4 * BLOCK_SIZE))
    generator = random.Random(13)
    parts = [
        judging(model, generator, random_ids(generator, count), 2) for count in (BLOCK_SIZE + 4, 2 * BLOCK_SIZE + 8)
    ]
    with pytest.raises(NoRoomError):
        judge(model, parts)
    check_integrity(model.cache)
    assert [part.sequence.length for part in parts] == [0, 0]
    model.cache.close(parts[1].sequence)
    assert judge(model, parts[:1]).outcomes == [by_hand(REFERENCE, parts[0])[0]]
