"""Cached models of every kind, each beside a reference that has no cache."""

import copy
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import ARCHITECTURES, tiny_network, with_exact_norms
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, slots_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.lean_model import FAMILY, LeanModel
from draftwire.models.openvino.openvino_engine import OpenVinoEngine, OpenVinoStorage
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB_SIZE = 11
TOLERANCE = 1e-5
"""In float64. Norms of transformers compute in float32, which leaves 1e-6."""
LEAN_TOLERANCE = 1e-11
"""In float64 throughout."""
SUBJECTS = [f"{name} by transformers" for name in ARCHITECTURES] + [
    f"{name} by the lean decoder{manner}" for name in FAMILY for manner in ("", " in static shapes")
]
SUBJECTS += ["gemma2 by transformers in place", "mistral by the lean decoder in place"]
OPENVINO_SUBJECTS = [f"{name} by openvino" for name in FAMILY]
FLOAT32_TOLERANCE = 1e-4


@functools.cache
def network(architecture: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns a network to be taken over, and a copy that keeps transformers' own attention."""
    model = tiny_network(architecture, VOCAB_SIZE)
    reference = copy.deepcopy(model)
    if architecture == "gemma2":  # the other implementations leave out the bound of the scores
        reference.set_attn_implementation("eager")
    return model, reference


@dataclass
class Subject:
    """A model under test, and what it should say."""

    model: CachedModel
    reference: PreTrainedModel
    tolerance: float
    texts: dict[CachedSequence, list[int]] = field(default_factory=dict)
    """What each sequence has read."""
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def fresh(self, ids: list[int]) -> Tensor:
        """Returns the logits after every position, without any cache."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return self.known[key]

    def open(self, ids: list[int], salt: str = "") -> CachedSequence:
        sequence = self.model.cache.open(ids, salt)
        self.texts[sequence] = ids[: sequence.length]
        return sequence

    def read(self, *readings: Reading) -> None:
        """Reads, after spoiling all that nobody may see, and compares each reading's rows with a fresh pass."""
        spoil(self.model)
        logits = self.model.read(readings)
        check_integrity(self.model.cache)
        for tensor in layers_of(self.model):
            assert bool((tensor[:BLOCK_SIZE] == 0.0).all()), "padding reads zeros that nothing ever overwrites"
        assert logits.shape == (sum(reading.keep for reading in readings), VOCAB_SIZE)
        for reading, rows in zip(readings, logits.split([reading.keep for reading in readings]), strict=True):
            text = self.texts[reading.sequence] = self.texts[reading.sequence] + reading.token_ids
            assert reading.sequence.length == len(text)
            assert_equal(rows, self.fresh(text)[len(text) - reading.keep :], self.tolerance)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        self.model.cache.truncate(sequence, length)
        self.texts[sequence] = self.texts[sequence][:length]

    def publish(self, sequence: CachedSequence) -> None:
        self.model.cache.publish(sequence, self.texts[sequence])

    def close(self, sequence: CachedSequence) -> None:
        self.model.cache.close(sequence)
        del self.texts[sequence]


class Slots:
    """A cache of OpenVINO by slot."""

    def __init__(self, cache: Tensor) -> None:
        self._cache = cache

    def _places(self, slots: Any) -> tuple[Any, ...]:
        numbers = torch.arange(len(self._cache) * BLOCK_SIZE)[slots]
        return numbers // BLOCK_SIZE, slice(None), numbers % BLOCK_SIZE

    def __getitem__(self, slots: Any) -> Tensor:
        return self._cache[self._places(slots)]

    def __setitem__(self, slots: Any, value: float) -> None:
        self._cache[self._places(slots)] = value


def layers_of(model: CachedModel) -> Iterator[Tensor | Slots]:
    """Yields keys and values of all layers, `[num_slots, kv_heads, head_dim]`."""
    if isinstance(model._storage, OpenVinoStorage):
        yield from map(Slots, model._storage.caches.values())
        return
    assert isinstance(model._storage, KvStorage)
    for keys, values in model._storage._layers.values():
        yield keys.transpose(0, 1)
        yield values.transpose(0, 1)


@torch.inference_mode()
def spoil(model: CachedModel) -> None:
    """Writes NaN wherever neither a live sequence nor a text kept for reuse lies."""
    used = set(range(BLOCK_SIZE))  # the null block, which padding reads
    for sequence in model.cache.sequences:
        used |= set(slots_of([sequence], sequence.length)[0].tolist())
    for block in model.cache._hashes:
        used |= set(range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))
    unused = torch.tensor(sorted(set(range(model.cache.num_slots)) - used), dtype=torch.int64)
    for tensor in layers_of(model):
        tensor[unused] = torch.nan


def assert_equal(logits: Tensor, expected: Tensor, tolerance: float) -> None:
    assert logits.shape == expected.shape
    if logits.numel():
        assert (logits - expected).abs().max() <= tolerance


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB_SIZE) for _ in range(count)]


def lean_copy(network: PreTrainedModel) -> LeanModel:
    """Returns the model as services read it, in float32."""
    with torch.device("meta"):
        model = LeanModel(network.config)
    model.load_state_dict({name: tensor.float() for name, tensor in network.state_dict().items()}, assign=True)
    return model


def make(subject: str, num_blocks: int = 60) -> Subject:
    architecture, _, decoder = subject.partition(" by ")
    model, reference = network(architecture)
    if decoder.startswith("transformers"):
        return Subject(torch_model(decoder_of(model, "transformers"), num_blocks * BLOCK_SIZE), reference, TOLERANCE)
    exact = with_exact_norms(copy.deepcopy(reference))
    if decoder == "openvino":
        engine = OpenVinoEngine(lean_copy(model), threads=1)
        return Subject(CachedModel(engine, num_blocks * BLOCK_SIZE), exact, FLOAT32_TOLERANCE)
    make_steps = decoder.endswith("static shapes")
    return Subject(torch_model(decoder_of(model, "lean"), num_blocks * BLOCK_SIZE, make_steps), exact, LEAN_TOLERANCE)
