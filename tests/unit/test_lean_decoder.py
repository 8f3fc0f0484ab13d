"""The lean decoder says what transformers says, with the weights of whatever it can run, and leaves the rest to it."""

import copy
import random
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILY_SHAPE,
    FAMILY_WINDOW,
    LLAMA3,
    family_network,
    ragged_reads,
    randomize,
    read_in_place,
    scatter,
    tiny_network,
    tiny_shape,
)
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftwire.errors import InvalidRequestError
from draftwire.models import linear
from draftwire.models.decoders import TransformersDecoder, decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.lean_decoder import LeanDecoder, Norm, why_not_lean
from draftwire.models.linear import Linear
from draftwire.models.sequence_model import Reading
from draftwire.models.static_steps import StaticSteps, StepShape
from draftwire.models.torch_models import torch_model

torch.set_num_threads(1)

VOCAB_SIZE = 97
SHAPE = FAMILY_SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama with all biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", SHAPE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with wide heads, yarn": ("llama", SHAPE | {"head_dim": 16, "rope_parameters": YARN}),
    "mistral": ("mistral", SHAPE | {"sliding_window": 24}),
    "qwen2": ("qwen2", SHAPE | FAMILY_WINDOW),
    "qwen3": ("qwen3", SHAPE | FAMILY_WINDOW | {"head_dim": 12}),
}


def make(name: str) -> PreTrainedModel:
    architecture, shape = MODELS[name]
    return family_network(architecture, **shape)


@torch.inference_mode()
def fresh(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("manner", ["", "static", "in place", "in pieces"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_random_texts_are_those_of_transformers(
    name: str, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, in batches of ragged lengths, with ends forgotten and read again: at most 1e-4 apart."""
    if manner.startswith("in"):
        monkeypatch.setattr(linear, "STREAMED_BYTES", 0)  # as a large model
        monkeypatch.setattr(linear, "LEAST_ROWS", 6)  # whatever this CPU is
    reference = make(name)
    model = torch_model(decoder_of(copy.deepcopy(reference), "lean"), 4096, manner == "static")
    if manner.startswith("in"):
        read_in_place(monkeypatch)
    if manner == "in pieces":
        scatter(model.cache)
    largest = 0.0
    for text, rows in ragged_reads(model):
        if len(rows):
            expected = fresh(reference, text)[-len(rows) :]
            assert expected.std() > 0.1, "logits that say something"
            largest = max(largest, float((rows - expected).abs().max()))
    assert 0.0 < largest <= 1e-4


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_joined_linear_layers_are_the_layers_one_by_one(
    rows: int, dtype: torch.dtype, has_bias: bool, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LEAST_ROWS", 6)
    with torch.random.fork_rng():
        torch.manual_seed(rows)
        layers = [torch.nn.Linear(40, size, bias=has_bias, dtype=dtype) for size in (24, 8, 56)]
        inputs = torch.randn(rows, 40, dtype=dtype)
    with torch.inference_mode():
        expected = torch.cat([layer(inputs) for layer in layers], dim=-1)
        result = Linear.of(*layers, streamed=streamed)(inputs)
    assert result.dtype is dtype
    # Products of lower precision are rounded once, whatever they are summed up in.
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (result - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_norms_are_those_of_torch(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (scale * torch.randn(3, 5, 48, generator=generator)).to(dtype)
    weight = torch.rand(48, generator=generator).to(dtype)
    expected = rms_norm(rows, weight.shape, weight, 1e-6)
    error = (Norm(weight, 1e-6)(rows) - expected).abs().max()
    assert error <= {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.0}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_differs_by_rounding_alone(dtype: torch.dtype) -> None:
    reference, ids = make("qwen3"), [random.Random(1).randrange(VOCAB_SIZE) for _ in range(50)]
    rounded: Any = copy.deepcopy(reference).to(dtype)
    expected, own = fresh(reference, ids), fresh(rounded, ids).float()
    model = torch_model(decoder_of(rounded, "lean"), 64)
    logits = model.read([Reading(model.cache.open(), ids, len(ids))]).float()
    assert (logits - expected).abs().mean() <= 1.2 * (own - expected).abs().mean()


def test_weights_are_given_up_only_where_that_is_allowed() -> None:
    ids = list(range(20))
    kept, given = make("llama"), make("llama")
    expected = fresh(kept, ids)
    for model, consumes in ((kept, False), (given, True)):
        cached = torch_model(decoder_of(model, "lean", consumes), 64)
        assert (cached.read([Reading(cached.cache.open(), ids, 20)]) - expected).abs().max() <= 1e-4
    assert (fresh(kept, ids) - expected).abs().max() == 0.0
    assert not any(isinstance(module, torch.nn.Linear) for module in given.model.layers.modules())


@pytest.mark.parametrize("name", MODELS)
def test_family_is_run_by_the_lean_decoder(name: str) -> None:
    model = make(name)
    assert why_not_lean(model) == ""
    assert isinstance(decoder_of(model), LeanDecoder)
    assert isinstance(decoder_of(model, "transformers"), TransformersDecoder)


class Quantized(torch.nn.Module):
    """Looks like a linear layer and is none."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.layer = layer.weight, layer.bias, layer

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


Quantized.__name__ = "Linear8bit"


def different(name: str) -> PreTrainedModel:
    """Returns a model that the lean decoder cannot run."""
    match name:
        case "of type gpt2" | "of type gemma2" | "of type granite":
            return tiny_network(name.removeprefix("of type "), dtype=torch.float32)
        case "activation is gelu":
            return randomize(LlamaForCausalLM(LlamaConfig(**tiny_shape(11, 64), hidden_act="gelu"))).eval()
        case "of kind dynamic":
            positions = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
            return randomize(LlamaForCausalLM(LlamaConfig(**tiny_shape(11, 64), rope_parameters=positions))).eval()
        case "of kind Linear8bit":
            model: Any = tiny_network("llama", dtype=torch.float32)
            model.model.layers[1].mlp.down_proj = Quantized(model.model.layers[1].mlp.down_proj)
            return model
    raise AssertionError(name)


DIFFERENT = [
    "of type gpt2",
    "of type gemma2",
    "of type granite",
    "activation is gelu",
    "of kind dynamic",
    "of kind Linear8bit",
]


@pytest.mark.parametrize("reason", DIFFERENT)
def test_other_models_are_run_by_transformers_and_the_reason_is_told(reason: str) -> None:
    model = different(reason)
    assert reason in why_not_lean(model)
    with pytest.raises(InvalidRequestError, match=reason):
        decoder_of(model, "lean")
    decoder = decoder_of(model)
    assert isinstance(decoder, TransformersDecoder)
    cached = torch_model(decoder, 64)
    assert cached.read([Reading(cached.cache.open(), [1, 2], 1)]).isfinite().all()


def test_unknown_decoder_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="decoder must be one of auto, lean, transformers, not 'fast'"):
        decoder_of(make("llama"), "fast")


# Static shapes


def test_steps_of_similar_sizes_share_a_shape_and_prompts_have_none() -> None:
    model = torch_model(decoder_of(make("llama"), "lean"), 8192, is_static=True)
    steps = model._exact._static
    assert isinstance(steps, StaticSteps)
    sequences = [model.cache.open() for _ in range(7)]
    model.read([Reading(sequence, [1] * 200, 0) for sequence in sequences])
    assert not steps._steps
    for count in (5, 6, 7):
        model.read([Reading(sequence, [1, 2, 3], 3) for sequence in sequences[:count]])
    model.read([Reading(sequences[0], [1, 2, 3], 3)] + [Reading(one, [1], 1) for one in sequences[1:6]])
    assert list(steps._steps) == [StepShape(8, 3, 256)]
    model.read([Reading(sequences[0], [1] * 32, 3)])
    model.read([Reading(sequences[0], [1] * 32, 3)])
    assert list(steps._steps) == [StepShape(8, 3, 256), StepShape(1, 32, 256), StepShape(1, 32, 512)]


def test_shapes_that_were_not_used_for_longest_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.models.static_steps.MOST_SHAPES", 2)
    model = torch_model(decoder_of(make("llama"), "lean"), 1024, is_static=True)
    sequence = model.cache.open()
    for count in (1, 2, 1, 3):
        model.read([Reading(sequence, [1] * count, 1)])
    assert model._exact._static is not None
    assert [shape.queries for shape in model._exact._static._steps] == [1, 3]


def test_static_steps_write_nothing_but_their_own_tokens() -> None:
    model = torch_model(decoder_of(make("llama"), "lean"), 1024, is_static=True)
    sequences = [model.cache.open() for _ in range(3)]
    model.read([Reading(sequence, [1, 2, 3], 1) for sequence in sequences])
    before = [tensor.clone() for layer in model._storage._layers.values() for tensor in layer]
    model.read([Reading(sequences[0], [4, 5], 1), Reading(sequences[1], [6], 1), Reading(sequences[2], [7], 1)])
    after = [tensor for layer in model._storage._layers.values() for tensor in layer]
    places = [sequences[0].blocks[0] * BLOCK_SIZE + 3, sequences[0].blocks[0] * BLOCK_SIZE + 4]
    places += [sequence.blocks[0] * BLOCK_SIZE + 3 for sequence in sequences[1:]]
    for old, new in zip(before, after, strict=True):
        is_other = (old != new) & ~(old.isnan() & new.isnan())  # what was never written is anything
        changed = is_other.any(dim=0).any(dim=-1).nonzero().flatten().tolist()
        assert changed == sorted(places)


def test_long_text_among_short_ones_is_not_padded_to() -> None:
    """Padded, each of the short ones would read as many keys as the long one."""
    model = torch_model(decoder_of(make("llama"), "lean"), 16_384, is_static=True)
    assert model._exact._static is not None
    sequences = [model.cache.open() for _ in range(16)]
    model.read([Reading(sequence, [1] * 40, 0) for sequence in sequences])
    model.read([Reading(sequences[0], [1] * 900, 0)])
    model.read([Reading(sequence, [1], 1) for sequence in sequences])
    assert list(model._exact._static._steps) == []
    model.read([Reading(sequence, [1], 1) for sequence in sequences[:2]])
    model.read([Reading(sequence, [1], 1) for sequence in sequences[1:]])
    assert [(shape.rows, shape.keys) for shape in model._exact._static._steps] == [(2, 1024), (16, 256)]


def test_logits_of_a_step_are_not_overwritten_by_the_next() -> None:
    model = torch_model(decoder_of(make("llama"), "lean"), 1024, is_static=True)
    sequence = model.cache.open()
    first = model.read([Reading(sequence, [1, 2], 2)])
    before = first.clone()
    model.read([Reading(sequence, [3, 4], 2)])
    assert torch.equal(first, before)


def test_rows_are_repeated_only_where_kernels_wait_for_memory() -> None:
    amd, intel = "processor: 0\nvendor_id\t: AuthenticAMD\n", "processor: 0\nvendor_id\t: GenuineIntel\n"
    found = [linear.least_rows(*given) for given in (("AVX512", amd), ("AVX512", intel), ("AVX2", amd), ("AVX512", ""))]
    assert found == [6, 1, 1, 1]
