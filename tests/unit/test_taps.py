"""Features are the hidden states of a fresh forward pass, whatever was read, forgotten, shared, copied or forked; and
the logits do not depend on whether anybody reads them.
"""

import copy
import random
from dataclasses import dataclass, field

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_network, with_exact_norms
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import Decoder
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence
from draftwire.models.lean_model import FAMILY
from draftwire.models.sequence_model import FeatureSpan, Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.tapped_pass import features_and_logits
from draftwire.options.heads.taps import FeatureModel, FeatureSource, check_taps

torch.set_num_threads(1)

TOLERANCE, LEAN_TOLERANCE = 1e-5, 1e-11
"""In float64. Norms of transformers compute in float32, which leaves 1e-6."""
VOCAB_SIZE = 11
HIDDEN = 16
TAPS = (2, 0, 1)
"""Of models with two layers: the last is first, so that their order matters."""
PROJECTION = torch.linspace(-1.0, 1.0, 3 * HIDDEN * 5, dtype=torch.float64).sin().view(3 * HIDDEN, 5)
SUBJECTS = [f"{name} by transformers" for name in ARCHITECTURES]
SUBJECTS += [f"{name} by lean{manner}" for name in FAMILY for manner in ("", " in static shapes")]


def fused(features: Tensor) -> Tensor:
    return features @ PROJECTION


@torch.no_grad()
def fresh(reference: PreTrainedModel, ids: list[int]) -> Tensor:
    """Returns the features of a text, `[len(ids), 3 * HIDDEN]`, by transformers, without any cache."""
    last: list[Tensor] = []
    layers = reference.transformer.h if hasattr(reference, "transformer") else reference.model.layers

    def keep(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        last.append(output if isinstance(output, Tensor) else output[0])

    hook = layers[-1].register_forward_hook(keep)
    states = reference(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([last[0], states[0], states[1]], dim=-1)[0]


@dataclass
class Subject:
    """A model that keeps features, and what they should be."""

    decoder: Decoder
    model: CachedModel
    reference: PreTrainedModel
    tolerance: float
    texts: dict[CachedSequence, list[int]] = field(default_factory=dict)

    def open(self, ids: list[int]) -> CachedSequence:
        sequence = self.model.cache.open(ids)
        self.texts[sequence] = ids[: sequence.length]
        return sequence

    def read(self, *parts: tuple[CachedSequence, list[int]]) -> None:
        self.model.read([Reading(sequence, ids, 1) for sequence, ids in parts])
        for sequence, ids in parts:
            self.texts[sequence] = self.texts[sequence] + ids

    def check(self) -> None:
        """Compares the features of all tokens of all sequences, gathered at once, with a fresh pass."""
        spans = [FeatureSpan(sequence, len(text) // 3, len(text)) for sequence, text in self.texts.items() if text]
        rows = self.model.features(spans).split([each.stop - each.start for each in spans])
        for each, own in zip(spans, rows, strict=True):
            expected = fused(fresh(self.reference, self.texts[each.sequence]))[each.start :]
            assert own.shape == expected.shape
            assert (own - expected).abs().max() <= 100 * self.tolerance  # the projection adds 48 numbers up


def make(subject: str, num_blocks: int = 60, *, has_features: bool = True) -> Subject:
    architecture, _, decoder = subject.partition(" by ")
    network = tiny_network(architecture, VOCAB_SIZE)
    reference = copy.deepcopy(network)
    if architecture == "gemma2":  # the other implementations leave out the bound of the scores
        reference.set_attn_implementation("eager")
    is_lean = decoder.startswith("lean")
    reference = with_exact_norms(reference) if is_lean else reference
    runs = decoder_of(network, "lean" if is_lean else "transformers")
    source = FeatureSource(TAPS, fused) if has_features else None
    model = torch_model(runs, num_blocks * BLOCK_SIZE, decoder.endswith("static shapes"), features=source)
    return Subject(runs, model, reference, LEAN_TOLERANCE if is_lean else TOLERANCE)


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return make(request.param)


def test_features_are_those_of_a_fresh_pass_after_any_read_and_truncation(subject: Subject) -> None:
    generator = random.Random(2)
    sequences = [subject.open([]) for _ in range(5)]
    for _ in range(7):
        members = generator.sample(sequences, generator.randint(1, 5))
        for sequence in members:
            if subject.texts[sequence] and generator.random() < 0.4:
                kept = generator.randrange(len(subject.texts[sequence]))
                subject.model.cache.truncate(sequence, kept)
                del subject.texts[sequence][kept:]
        subject.read(*[(one, random_ids(generator, generator.choice([1, 2, 5, 9, 40]))) for one in members])
        subject.check()


def test_tokens_from_the_prefix_cache_have_the_features_of_a_cold_prompt(subject: Subject) -> None:
    text = random_ids(random.Random(3), 3 * BLOCK_SIZE + 5)
    first = subject.open(text)
    subject.read((first, text))
    cold = subject.model.features([FeatureSpan(first, 0, len(text))])
    subject.model.cache.publish(first, text)
    second = subject.open(text)
    assert second.num_reused == 3 * BLOCK_SIZE
    warm = subject.model.features([FeatureSpan(second, 0, 3 * BLOCK_SIZE)])
    assert torch.equal(warm, cold[: 3 * BLOCK_SIZE]), "the very same numbers: nothing is computed again"
    subject.read((second, text[3 * BLOCK_SIZE :]))
    subject.check()


def test_forks_and_paths_of_trees_carry_their_features(subject: Subject) -> None:
    text = random_ids(random.Random(4), BLOCK_SIZE + 7)
    first = subject.open(text)
    subject.read((first, text))
    fork = subject.model.fork(first, BLOCK_SIZE + 3)
    subject.texts[fork] = text[: BLOCK_SIZE + 3]
    subject.read((fork, [1, 2]), (first, [3]))
    subject.check()
    subject.model.read([Reading(first, [1, 2, 3, 4, 5], 0, (-1, 0, -1, 2, 2))])
    subject.model.keep_path(first, [2, 4])
    subject.texts[first] += [3, 5]
    subject.check()


@pytest.mark.parametrize("name", SUBJECTS)
def test_logits_are_the_same_to_the_bit_with_features_and_without(name: str) -> None:
    rows = []
    for has_features in (True, False):
        subject, generator = make(name, has_features=has_features), random.Random(5)
        sequences = [subject.model.cache.open() for _ in range(3)]
        for count in (20, 1, 4):
            readings = [Reading(one, random_ids(generator, count), count) for one in sequences]
            rows.append(subject.model.read(readings).clone())
    for with_taps, without in zip(rows[:3], rows[3:], strict=True):
        assert torch.equal(with_taps, without)


def test_rows_that_are_repeated_for_the_products_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make("llama by lean")
    monkeypatch.setattr(subject.decoder._head, "least_rows", 6)
    sequence = subject.open([])
    subject.read((sequence, [1, 2, 3]))
    subject.read((sequence, [4]))
    subject.check()


@pytest.mark.parametrize("name", SUBJECTS)
def test_features_and_logits_of_texts_are_those_that_are_served(name: str) -> None:
    subject, generator = make(name), random.Random(6)
    texts = [random_ids(generator, 19) for _ in range(3)]
    features, logits = features_and_logits(subject.decoder, torch.tensor(texts), TAPS)
    assert features.shape == (3, 19, 3 * HIDDEN)
    assert logits.shape == (3, 19, VOCAB_SIZE)
    for text, own, rows in zip(texts, features, logits, strict=True):
        assert (own - fresh(subject.reference, text)).abs().max() <= 10 * subject.tolerance
        sequence = subject.model.cache.open()
        served = subject.model.read([Reading(sequence, text, len(text))])
        assert (rows - served).abs().max() <= 10 * subject.tolerance
    weight = torch.zeros(3 * HIDDEN, requires_grad=True, dtype=torch.float64)
    (features @ weight).sum().backward()  # training may use them


def test_a_pass_that_fails_leaves_the_features_of_what_was_read() -> None:
    subject = make("qwen3 by lean", num_blocks=2)
    sequence = subject.open([])
    subject.read((sequence, list(range(8))))
    with pytest.raises(NoRoomError):
        subject.model.read([Reading(sequence, [1] * 2 * BLOCK_SIZE, 1)])
    subject.check()


def test_what_is_kept_of_tokens_is_counted_as_memory_of_the_cache() -> None:
    with_features, without = make("llama by lean"), make("llama by lean", has_features=False)
    for subject in (with_features, without):
        subject.model.read([Reading(subject.model.cache.open(), [1, 2], 1)])
    assert with_features.model.token_bytes[0] == without.model.token_bytes[0] + 5 * 8  # five numbers in float64
    assert isinstance(with_features.model, FeatureModel)


@pytest.mark.parametrize("layers", [(), (0, 0), (3,), (-1,)])
def test_taps_that_a_model_does_not_have_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="different layers from 0 to 2"):
        check_taps(layers, 2)
    check_taps((2, 0), 2)


def test_a_model_whose_layers_cannot_be_found_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make("gpt2 by transformers")
    monkeypatch.setattr(subject.decoder, "num_layers", 3)
    with pytest.raises(InvalidRequestError, match="no list of layers"):
        subject.model.read([Reading(subject.open([]), [1], 1)])
