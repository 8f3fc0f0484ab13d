"""A head drafts what it would have drafted had it read the committed tokens' hidden states and nothing else."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from enumeration import largest_deviation, law_of_judged_rounds
from tiny_models import tiny_network
from torch import Tensor
from toy_heads import ToyHead, without_rows

from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import NoRoomError, UnavailableError
from draftwire.method.distributions import draw, race, rows_of
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence
from draftwire.models.sequence_model import FeatureSpan, Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.heads import head_drafter
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.options.heads.taps import FeatureSource
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES

torch.set_num_threads(1)

VOCAB_SIZE = 11
KEY = bytes(range(16))
DENSE = Quantization(Encoding.DENSE_FLOAT32)
STOP_TOKENS = frozenset({1, 6})
PENALIZED = SamplingParams(
    1.2, min_p=0.01, repetition_penalty=1.6, frequency_penalty=0.4, logit_bias=((0, -1.5),), min_tokens=7
)
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.6, top_k=5), PENALIZED, SamplingParams(temperature=0.0)]


@dataclass
class Subject:
    """A target with a head, and texts of both."""

    head: ToyHead
    quantization: Quantization = DENSE
    texts: dict[CachedSequence, list[int]] = field(default_factory=dict)
    sequences: dict[CachedSequence, HeadSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = FeatureSource(self.head.config.taps, self.head.fuse)
        network = tiny_network("llama", VOCAB_SIZE)
        self.model = torch_model(decoder_of(network, "lean"), 200 * BLOCK_SIZE, features=source)
        self.drafter = HeadDrafter(self.head, self.model, self.quantization)

    def open(self, text: list[int], salt: str = "") -> CachedSequence:
        """Opens a text, all of whose tokens but the last the target has read."""
        target = self.model.cache.open(text, salt)
        self.texts[target] = text[: target.length]
        self.sequences[target] = self.drafter.open()
        self.commit(target, text[target.length :])
        return target

    def commit(self, target: CachedSequence, token_ids: list[int]) -> None:
        text = self.texts[target] = self.texts[target] + token_ids
        self.model.cache.truncate(target, min(target.length, len(text) - 1))
        unread = text[target.length : -1]
        if unread:
            self.model.read([Reading(target, unread, 0)])

    def drafting(self, target: CachedSequence, request: DraftRequest) -> HeadDrafting:
        return HeadDrafting(self.sequences[target], target, self.texts[target], request)

    def expected_rows(self, target: CachedSequence, tokens: list[int], request: DraftRequest) -> Tensor:
        """Returns the distributions along a block, from a head that has read nothing else."""
        text = self.texts[target]
        features = self.model.features([FeatureSpan(target, 0, len(text) - 1)])
        logits = self.head.rows(features, text, tokens)
        whole = [*text, *tokens[:-1]]
        span = Span(request.sampling, len(tokens), whole, request.prompt_len, request.stop_token_ids, len(whole))
        return probabilities_of_spans(logits, [span]).float()


def request(
    num_tokens: int = 4, sampling: SamplingParams = SAMPLINGS[0], rule: str = "block", **changes
) -> DraftRequest:
    asked = DraftRequest(
        num_tokens,
        sampling,
        DrawKey(KEY, 0, 3),
        VOCAB_SIZE,
        is_coupled=RULES[rule].is_coupled,
        needs_probs=RULES[rule].needs_draft_probs,
        prompt_len=2,
        stop_token_ids=STOP_TOKENS,
    )
    return replace(asked, **changes)


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def stated_rows(draft: Draft) -> Tensor:
    return rows_of(decode_one(Claim(draft.token_ids, draft.distributions), VOCAB_SIZE)).dense()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_drafts_are_drawn_from_a_fresh_heads_rows_after_any_rejections(sampling: SamplingParams, rule: str) -> None:
    """Batches of texts of which any number of drafted tokens was kept. To the bit the tokens that these rows and the
    round's numbers give.
    """
    subject, generator = Subject(ToyHead(VOCAB_SIZE)), random.Random(7)
    targets = [subject.open(random_ids(generator, count)) for count in (2, 5, 19, 40)]
    for number in range(6):
        members = generator.sample(targets, generator.randint(1, 4))
        lengths = [generator.randint(1, 5) for _ in members]
        asked = [request(length, sampling, rule, key=DrawKey(KEY, 0, number)) for length in lengths]
        drafts = subject.drafter.draft([subject.drafting(one, each) for one, each in zip(members, asked, strict=True)])
        for target, each, length, drawn in zip(members, asked, lengths, drafts, strict=True):
            assert isinstance(drawn, Draft)
            assert len(drawn.token_ids) == length
            rows = subject.expected_rows(target, drawn.token_ids, each)
            if rule == "coupled":
                words, first = torch.tensor([each.key.text_words] * length), len(subject.texts[target])
                expected = race(rows, exponentials(words, torch.arange(first, first + length), VOCAB_SIZE)).winners
            else:
                expected = draw(rows, uniforms([each.key], length)[0])
                assert (stated_rows(drawn) - rows).abs().max() < 1e-6
            assert drawn.token_ids == expected.tolist()
            kept = generator.randint(0, length)
            subject.commit(target, [*drawn.token_ids[:kept], *random_ids(generator, 1)])
        assert all(len(states) <= len(subject.texts[target]) - 1 for target, states in _states(subject))


def _states(subject: Subject) -> list[tuple[CachedSequence, list[Tensor]]]:
    return [(target, subject.head.sequences[own.cached]) for target, own in subject.sequences.items()]


def test_each_pair_is_read_once_with_its_true_features() -> None:
    subject = Subject(ToyHead(VOCAB_SIZE))
    target = subject.open([1, 2, 3, 4, 5])
    (drawn,) = subject.drafter.draft([subject.drafting(target, request(3))])
    assert isinstance(drawn, Draft)
    subject.commit(target, [*drawn.token_ids[:2], 9])
    subject.drafter.draft([subject.drafting(target, request(3))])
    assert subject.head.readings == [[4], [3]]
    assert subject.sequences[target].cached.length == 7, "what was drafted is forgotten"
    subject.drafter.draft([subject.drafting(target, request(3))])
    assert subject.head.readings[-1] == [1], "the last pair again, if nothing is new"


def test_what_does_not_fit_into_a_step_is_read_over_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_drafter, "READ_AT_ONCE", 10)
    subject, generator = Subject(ToyHead(VOCAB_SIZE)), random.Random(1)
    long, short = subject.open(random_ids(generator, 30)), subject.open([1, 2])
    results = []
    for _ in range(4):
        drafts = subject.drafter.draft([subject.drafting(one, request(2)) for one in (long, short)])
        results.append([draft is not None for draft in drafts])
        assert isinstance(drafts[1], Draft)
    assert results == [[False, True], [False, True], [False, True], [True, True]]
    assert subject.head.readings == [[9, 1], [9, 1], [9, 1], [2, 1]]
    (drawn,) = subject.drafter.draft([subject.drafting(long, request(2))])
    assert isinstance(drawn, Draft)
    rows = subject.expected_rows(long, drawn.token_ids, request(2))
    assert drawn.token_ids == draw(rows, uniforms([request().key], 2)[0]).tolist()


def test_texts_share_what_is_read_in_a_step_and_short_ones_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_drafter, "READ_AT_ONCE", 10)
    subject = Subject(ToyHead(VOCAB_SIZE))
    targets = [subject.open(random_ids(random.Random(6), count)) for count in (20, 4, 24)]
    read = [0, 0, 0]
    for most in (12, 12, 12, 12, 12):
        drafts = subject.drafter.draft([subject.drafting(target, request()) for target in targets])
        assert isinstance(drafts[1], Draft), "it need not wait for the long ones"
        before, read = read, [subject.sequences[target].num_read for target in targets]
        assert sum(read) - sum(before) <= most
    assert all(isinstance(draft, Draft) for draft in drafts)


def test_drafts_after_a_cached_prompt_are_those_after_a_cold_one() -> None:
    subject, text = Subject(ToyHead(VOCAB_SIZE)), random_ids(random.Random(5), 3 * BLOCK_SIZE + 3)
    cold = subject.open(text)
    subject.model.cache.publish(cold, text[:-1])
    warm = subject.open(text)
    assert warm.num_reused == 3 * BLOCK_SIZE
    drafts = subject.drafter.draft([subject.drafting(one, request(5)) for one in (cold, warm)])
    assert drafts[0] == drafts[1]
    assert isinstance(drafts[0], Draft)


def test_head_of_the_last_pair_reads_it_alone_and_drafts_all_its_tokens() -> None:
    subject = Subject(ToyHead(VOCAB_SIZE, reads_history=False, most_tokens=3))
    target = subject.open([1, 2, 3, 4, 5])
    for new in ([], [7, 8]):
        subject.commit(target, new)
        (drawn,) = subject.drafter.draft([subject.drafting(target, request(5))])
        assert isinstance(drawn, Draft)
        assert len(drawn.token_ids) == 3
        rows = subject.expected_rows(target, drawn.token_ids, request(3))
        assert drawn.token_ids == draw(rows, uniforms([request().key], 3)[0]).tolist()
        assert subject.sequences[target].cached.length == 0, "nothing is kept that is not looked at again"
    assert subject.head.readings[0] == [1]


def test_tokens_that_the_head_cannot_draft_have_no_mass() -> None:
    missing = [0, 3, 4, 10]
    subject = Subject(ToyHead(VOCAB_SIZE, missing=missing), Quantization(mass=1.0))
    target = subject.open([3, 4, 0])  # they may be in the text
    for number in range(40):
        (drawn,) = subject.drafter.draft([subject.drafting(target, request(4, key=DrawKey(KEY, 0, number)))])
        assert isinstance(drawn, Draft)
        assert not set(drawn.token_ids) & set(missing)
        assert float(stated_rows(drawn)[:, missing].sum()) == 0.0


def test_ids_beyond_the_requests_vocabulary_are_never_drawn() -> None:
    subject = Subject(ToyHead(VOCAB_SIZE))
    target = subject.open([1, 2, 3])
    for number in range(40):
        asked = request(4, key=DrawKey(KEY, 0, number), vocab_size=3)
        (drawn,) = subject.drafter.draft([subject.drafting(target, asked)])
        assert isinstance(drawn, Draft)
        assert max(drawn.token_ids) < 3


@pytest.mark.parametrize("depth", [0, 2])
def test_block_ends_where_the_head_has_no_finite_logits(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(ToyHead(VOCAB_SIZE))
    target = subject.open([1, 2, 3])
    state_of = subject.head._state

    def spoilt(sequences: list[CachedSequence], at: int):
        state = state_of(sequences, at)
        return without_rows(state) if at == depth else state

    monkeypatch.setattr(subject.head, "_state", spoilt)
    (drawn,) = subject.drafter.draft([subject.drafting(target, request(4))])
    if depth == 0:
        assert isinstance(drawn, UnavailableError)
        return
    assert isinstance(drawn, Draft)
    assert len(drawn.token_ids) == depth


def test_full_cache_of_the_head_costs_the_draft_and_nothing_else() -> None:
    subject = Subject(ToyHead(VOCAB_SIZE))
    target = subject.open([1, 2, 3, 4, 5])
    subject.head.room = 3
    (drawn,) = subject.drafter.draft([subject.drafting(target, request(4))])
    assert isinstance(drawn, NoRoomError)
    subject.head.room = 6
    (drawn,) = subject.drafter.draft([subject.drafting(target, request(4))])
    assert isinstance(drawn, Draft)
    assert len(drawn.token_ids) == 3, "two were read for two more"
    subject.head.room = 99
    (again,) = subject.drafter.draft([subject.drafting(target, request(3))])
    assert isinstance(again, Draft)
    assert again.token_ids == drawn.token_ids
    subject.drafter.close(subject.sequences[target])
    assert not subject.head.sequences


@pytest.mark.parametrize("rule", ["block", "token"])
def test_texts_that_a_head_drafts_for_follow_the_targets_law(rule: str) -> None:
    """Every block of every round of every text is tried, with the rows that the head drafts it from."""
    vocab_size, length, prompt = 3, 4, [1, 2]
    head = ToyHead(vocab_size, sharpness=1.0)
    network = tiny_network("llama", vocab_size)
    source = FeatureSource(head.config.taps, head.fuse)
    model = torch_model(decoder_of(network, "lean"), 4096 * BLOCK_SIZE, features=source)

    def draft_rows(text: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        whole = [*prompt, *text]
        if not tokens:
            return torch.zeros(0, vocab_size)
        sequence = model.cache.open()
        model.read([Reading(sequence, whole[:-1], 0)])
        features = model.features([FeatureSpan(sequence, 0, len(whole) - 1)])
        model.cache.close(sequence)
        return head.rows(features, whole, list(tokens)).softmax(-1)

    def ended(text: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        return text[:length], len(text) >= length

    def law(block_length: int) -> dict[tuple[int, ...], float]:
        return law_of_judged_rounds(model, RULES[rule], SamplingParams(), block_length, prompt, draft_rows, ended)

    assert largest_deviation(law(2), law(0)) < 1e-9
