"""Layers that run at the same time compute what EasySpec says, and what they leave in the cache is made good again."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from session_specs import salted
from strategy_loading import load_drafter
from tiny_models import (
    FAMILY_SHAPE,
    FAMILY_WINDOW,
    LLAMA3,
    family_network,
    ragged_reads,
    read_in_place,
    save_tiny_model,
    scatter,
    tiny_network,
)
from torch import Tensor
from transformers import PreTrainedModel, Qwen2ForCausalLM

from draftwire.drafting.language_model import LanguageModelDrafter, LanguageModelSequence
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import rows_of as decoded_rows
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import CachedSequence, slots_of
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.loading import load_model
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.layer_parallel.layer_groups import (
    LayerGroups,
    LayerParallelism,
    groups_of_size,
    holders_of,
    runs_in_parallel,
    written,
)
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_drafter.config import DraftSettings
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB_SIZE = 97
NUM_LAYERS = 8
SHAPE = FAMILY_SHAPE | {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": 6, "num_key_value_heads": 2}
GROUPS: dict[str, LayerGroups] = {
    "pairs": groups_of_size(2, NUM_LAYERS),
    "of three": groups_of_size(3, NUM_LAYERS),
    "of five": groups_of_size(5, NUM_LAYERS),
    "all": (tuple(range(NUM_LAYERS)),),
    "by list": ((0, 1), (2,), (3, 4, 5), (6, 7)),
}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with all biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", SHAPE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", SHAPE | {"sliding_window": 24}),
    "qwen2, some layers with windows": ("qwen2", SHAPE | FAMILY_WINDOW | {"max_window_layers": 4}),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 12}),
}


def make(name: str) -> PreTrainedModel:
    architecture, shape = MODELS[name]
    return family_network(architecture, **shape)


@torch.inference_mode()
def by_definition(model: PreTrainedModel, groups: LayerGroups, ids: list[int]) -> Tensor:
    """Returns the logits after each token, by the modules of transformers and the equations of the paper."""
    base: Any = model.model
    hidden = base.embed_tokens(torch.tensor([ids]))
    positions = base.rotary_emb(hidden, torch.arange(len(ids)).unsqueeze(0))
    for group in groups:
        attended = []
        for index in group:
            layer = base.layers[index]
            window = base.config.sliding_window if model.config.model_type == "mistral" else None
            window = window or getattr(layer.self_attn, "sliding_window", None) or len(ids)
            distance = torch.arange(len(ids)).unsqueeze(1) - torch.arange(len(ids))
            mask = torch.zeros(1, 1, len(ids), len(ids), dtype=hidden.dtype)
            mask.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
            normalized = layer.input_layernorm(hidden)
            attended.append(layer.self_attn(normalized, position_embeddings=positions, attention_mask=mask)[0])
        for index, output in zip(group, attended, strict=True):
            hidden = hidden + output
            hidden = hidden + base.layers[index].mlp(base.layers[index].post_attention_layernorm(hidden))
    return model.lm_head(base.norm(hidden))[0]


def cached(model: PreTrainedModel, groups: LayerGroups, is_static: bool = False) -> CachedModel:
    base = LeanDecoder(model)
    return torch_model(base, 4096, is_static, LayerParallelDecoder(base, groups))


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["", "static", "in pieces"])
@pytest.mark.parametrize(
    ("name", "grouping"),
    [
        pytest.param(name, grouping, marks=[] if index == place else pytest.mark.slow)
        for index, name in enumerate(MODELS)
        for place, grouping in enumerate(GROUPS)
    ],
)
def test_fuzzy_logits_are_those_of_the_definition(
    name: str, grouping: str, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, in batches of ragged lengths, with ends forgotten and read again: at most 1e-4 apart."""
    reference, groups = make(name), GROUPS[grouping]
    model = cached(make(name), groups, manner == "static")
    if manner == "in pieces":
        read_in_place(monkeypatch)
        scatter(model.cache)
    largest, from_exact = 0.0, 0.0
    for text, rows in ragged_reads(model, fuzzily=True):
        if len(rows):
            expected = by_definition(reference, groups, text)[-len(rows) :]
            exact = by_definition(reference, groups_of_size(1, NUM_LAYERS), text)[-len(rows) :]
            largest = max(largest, float((rows - expected).abs().max()))
            from_exact = max(from_exact, float((rows - exact).abs().max()))
    assert 0.0 < largest <= 1e-4
    assert from_exact > 0.05, "the approximation is one"


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_one_are_the_ordinary_decoder_to_the_bit(name: str) -> None:
    model = cached(make(name), groups_of_size(1, NUM_LAYERS))
    generator = random.Random(1)
    sequences = [model.cache.open() for _ in range(6)]
    texts = [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 40))] for _ in sequences]
    results = []
    for fuzzily in (False, True):
        readings = [Reading(sequence, text, len(text)) for sequence, text in zip(sequences, texts, strict=True)]
        results.append(model.read(readings, fuzzily).clone())
        for sequence in sequences:
            model.cache.truncate(sequence, 0)
    assert torch.equal(*results)


def test_lower_precision_differs_by_rounding_alone() -> None:
    """Weights that are scaled by those of the norm before are rounded once more than others."""
    groups, ids = GROUPS["of five"], [random.Random(1).randrange(VOCAB_SIZE) for _ in range(50)]
    reference = make("qwen3")
    expected = by_definition(reference, groups, ids)
    rounded: Any = make("qwen3").to(torch.bfloat16)
    own = by_definition(rounded, groups, ids).float()
    model = cached(rounded, groups)
    logits = model.read([Reading(model.cache.open(), ids, len(ids))], fuzzily=True).float()
    assert (logits - expected).abs().mean() <= 1.3 * (own - expected).abs().mean()


@pytest.mark.parametrize(("layers", "heads"), [(24, 14), (28, 12)], ids=["0.5B", "1.5B and 7B"])
@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 5))])
def test_layers_of_the_qwen2_5_family_are_grouped(layers: int, heads: int, size: int) -> None:
    """With the layers and heads of those models, which have two key heads, and narrow heads."""
    shape = SHAPE | {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * 8}
    reference = family_network("qwen2", 2, **shape)
    groups = groups_of_size(size, layers)
    assert max(len(group) for group in groups) == size
    model = cached(reference, groups)
    ids = list(range(20))
    sequence = model.cache.open()
    model.read([Reading(sequence, ids[:12], 0)], fuzzily=True)
    rows = torch.cat([model.extend([sequence], torch.tensor([token])) for token in ids[12:]])
    assert (rows - by_definition(reference, groups, ids)[12:]).abs().max() <= 1e-4


def test_groups_are_those_of_the_paper() -> None:
    assert written(groups_of_size(4, 32)) == "0 1-3 4-7 8-11 12-15 16-19 20-23 24-27 28-30 31"
    assert written(groups_of_size(4, 8)) == "0 1-3 4-6 7"
    assert written(groups_of_size(2, 8)) == "0 1 2-3 4-5 6 7"
    assert written(groups_of_size(1, 4)) == "0 1 2 3"
    assert written(groups_of_size(5, 3)) == "0 1 2"
    assert written(groups_of_size(5, 1)) == "0"
    for size, layers in [(size, layers) for size in range(1, 9) for layers in range(1, 20)]:
        groups = groups_of_size(size, layers)
        assert [index for group in groups for index in group] == list(range(layers))
        assert len(groups[0]) == len(groups[-1]) == 1
        assert max(map(len, groups)) <= size
        assert runs_in_parallel(groups) == (max(map(len, groups)) > 1)
        if runs_in_parallel(groups):
            assert LayerParallelism(size).of(layers) == LayerParallelism(groups=written(groups)).of(layers) == groups


NO_GROUPS: list[tuple[dict[str, Any], int, str]] = [  # of a model of so many layers; 0 is of any
    ({"size": 2}, 4, "none run at the same time"),
    ({"groups": "0 1 2 3"}, 4, "none run at the same time"),
    ({"size": 0}, 0, "at least 1"),
    *(({"groups": text}, 8, "group") for text in ("", "0 1-3 4-6", "0 1-3 3-7", "1-7 0", "0 1-3 4-8", "0 3-1 4-7")),
    *(({"groups": text}, 0, "is written as") for text in ("a", "0 1-", "-1", "0 1..3", "0 1--3", "٣")),
]


def test_groups_can_be_listed_and_what_lists_none_of_the_model_is_refused() -> None:
    for text in ("0 1-3 4-7", "0,1-3,4-7", " 0, 1-3 4-7\n"):
        assert LayerParallelism(groups=text).of(8) == ((0,), (1, 2, 3), (4, 5, 6, 7))
    for options, num_layers, message in NO_GROUPS:
        with pytest.raises(InvalidRequestError, match=message):
            LayerParallelism(**options).of(num_layers) if num_layers else LayerParallelism(**options)


def test_layers_that_run_together_are_divided_and_others_are_everywhere() -> None:
    assert holders_of(((0,), (1, 2, 3), (4, 5), (6,)), 2) == [None, 0, 1, 0, 0, 1, None]
    assert holders_of(((0,), (1, 2)), 4) == [None, 0, 1]


# What a drafter's cache holds from round to round.

PROMPT = [3, 1, 4, 1, 5]
KEY = bytes(range(KEY_BYTES))
CONTEXT_LENGTH = 512


def drafter_of(
    model: PreTrainedModel, groups: LayerGroups, calibrates: bool = True, is_static: bool = False
) -> LanguageModelDrafter:
    quantization = Quantization(Encoding.DENSE_FLOAT32)
    return LanguageModelDrafter(cached(model, groups, is_static), CONTEXT_LENGTH, 0, quantization, calibrates)


def request(num_tokens: int, round: int, is_cut: Any = None) -> DraftRequest:
    key = DrawKey(KEY, 0, round)
    return DraftRequest(num_tokens, SamplingParams(), key, VOCAB_SIZE, is_cut=is_cut or (lambda: False))


def stored(model: CachedModel, sequence: CachedSequence, length: int) -> list[Tensor]:
    """Returns the keys and values of a sequence's first tokens, layer by layer."""
    slots = torch.from_numpy(slots_of([sequence], length)[0])
    return [tensor[:, slots] for index in range(NUM_LAYERS) for tensor in model._storage._layers[index]]


def from_fresh(reference: CachedModel, model: CachedModel, sequence: LanguageModelSequence) -> float:
    """Returns how far the committed part of a cache is from one into which the text is read in one pass."""
    ids = sequence.ids[: sequence._num_committed]
    own = reference.cache.open()
    reference.read([Reading(own, ids, 0)])
    pairs = zip(stored(model, sequence.cached, len(ids)), stored(reference, own, len(ids)), strict=True)
    difference = max(float((mine - theirs).abs().max()) for mine, theirs in pairs)
    reference.cache.close(own)
    return difference


def draft(drafter: LanguageModelDrafter, sequence: LanguageModelSequence, wanted: DraftRequest) -> Draft:
    (result,) = drafter.step([Drafting(sequence, wanted)]).drafts
    assert isinstance(result, Draft)
    return result


KINDS = ["judged", "judged", "judged", "cut", "drafted twice", "lost", "moved", "plain", "in parts"]


def live(drafter: LanguageModelDrafter, reference: CachedModel, seed: int) -> float:
    """Lets a session live through rounds of all kinds; returns how far from exact its cache was in any, at most."""
    generator = random.Random(seed)
    sequence = drafter.open(PROMPT, salted(f"session {seed}"))
    committed, furthest = list(PROMPT), 0.0
    for round in range(14):
        kind = generator.choice(KINDS)
        is_cut = (lambda: True) if kind == "cut" else None
        proposed = draft(drafter, sequence, request(generator.randint(1, 6), round, is_cut)).token_ids
        if kind == "drafted twice":
            sequence.calibrate(len(committed), [])
            proposed = draft(drafter, sequence, request(4, round)).token_ids
        check_integrity(drafter.model.cache)
        assert sequence.ids == committed + proposed
        furthest = max(furthest, from_fresh(reference, drafter.model, sequence))
        base_len = len(committed)
        committed += proposed[: 0 if kind in ("lost", "plain") else generator.randint(0, len(proposed))]
        committed += [generator.randrange(VOCAB_SIZE) for _ in range(20 if kind in ("plain", "in parts") else 1)]
        if kind == "moved":
            sequence.close()
            sequence = drafter.open(committed, salted(f"session {seed}"))
        else:
            sequence.calibrate(base_len, [])  # the last word counts
            sequence.calibrate(base_len, committed[base_len:])
        while kind == "in parts" and (num_unread := sequence.num_unread) > 3:
            drafter.step([Drafting(sequence, None, max_read=3)])
            sequence.calibrate(len(committed), [])  # as it is told before every part
            assert sequence.num_unread < num_unread
    sequence.close()
    return furthest


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return make("llama with all biases")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("grouping", "is_static"),
    [
        ("of five", False),
        ("of five", True),
        *(pytest.param(one, is_static, marks=pytest.mark.slow) for one in ("pairs", "all") for is_static in (0, 1)),
    ],
)
def test_calibrated_cache_is_that_of_a_fresh_prefill(
    network: PreTrainedModel, grouping: str, seed: int, is_static: bool
) -> None:
    """After rounds of all kinds; in float32, at most 1e-5 apart."""
    reference = torch_model(LeanDecoder(network), 4096)
    assert live(drafter_of(network, GROUPS[grouping], is_static=is_static), reference, seed) <= 1e-5


def test_cache_without_calibration_is_not(network: PreTrainedModel) -> None:
    """The test above can fail."""
    reference = torch_model(LeanDecoder(network), 4096)
    assert all(live(drafter_of(network, GROUPS["of five"], False), reference, seed) > 1e-2 for seed in range(3))


@pytest.mark.slow
def test_embedded_drafter_of_eight_layers_is_calibrated_too() -> None:
    """In float64: its keys are so large that float32 rounds them by more than the bound of the test above."""
    model = load_model("models/drafter-8-layers", "float32").model.double()
    groups = groups_of_size(4, NUM_LAYERS)
    drafter, reference = drafter_of(model, groups), torch_model(LeanDecoder(model), 4096)
    assert live(drafter, reference, 0) <= 1e-12


def rows_of(proposed: Draft) -> Tensor:
    return decoded_rows(decode_one(Claim(proposed.token_ids, proposed.distributions), VOCAB_SIZE)).dense()


def test_first_token_is_drawn_exactly_and_others_on_an_exact_cache(network: PreTrainedModel) -> None:
    """What is sent is what the model says after the committed tokens, and approximately after those drafted since."""
    drafter, groups = drafter_of(network, GROUPS["of five"]), GROUPS["of five"]
    sequence, committed = drafter.open(PROMPT, ALONE), list(PROMPT)
    for round in range(5):
        proposed = draft(drafter, sequence, request(4, round))
        model = cached(network, groups)
        own = model.cache.open()
        rows = [model.read([Reading(own, committed, 1)])]
        rows += [model.extend([own], torch.tensor([token])) for token in proposed.token_ids[:-1]]
        expected = torch.cat(rows).softmax(dim=-1)
        assert (rows_of(proposed) - expected).abs().max() <= 1e-5
        exact = torch_model(LeanDecoder(network), 4096)
        text = committed + proposed.token_ids[:-1]
        whole = exact.read([Reading(exact.cache.open(), text, 4)]).softmax(dim=-1)
        assert (rows_of(proposed)[0] - whole[0]).abs().max() <= 1e-5
        assert (rows_of(proposed)[1:] - whole[1:]).abs().max() > 1e-3
        committed += [*proposed.token_ids[: round % 4], 7]
        sequence.calibrate(len(committed) - round % 4 - 1, committed[len(committed) - round % 4 - 1 :])


def test_groups_of_one_draft_what_the_ordinary_drafter_drafts_to_the_bit(network: PreTrainedModel) -> None:
    ordinary = LanguageModelDrafter(
        torch_model(LeanDecoder(network), 4096), CONTEXT_LENGTH, 0, Quantization(Encoding.DENSE_FLOAT32)
    )
    alone = drafter_of(network, groups_of_size(1, NUM_LAYERS))
    assert alone.model.extends_exactly, "nothing has to be computed again"
    sequences = [drafter.open(PROMPT, ALONE) for drafter in (ordinary, alone)]
    committed, generator = list(PROMPT), random.Random(2)
    for round in range(8):
        drafts = [
            draft(drafter, sequence, request(5, round))
            for drafter, sequence in zip((ordinary, alone), sequences, strict=True)
        ]
        assert drafts[0].token_ids == drafts[1].token_ids
        assert torch.equal(rows_of(drafts[0]), rows_of(drafts[1]))
        base_len = len(committed)
        committed += [*drafts[0].token_ids[: generator.randint(0, 5)], generator.randrange(VOCAB_SIZE)]
        for sequence in sequences:
            sequence.calibrate(base_len, committed[base_len:])


@pytest.mark.parametrize("calibrates", [True, False])
def test_sequences_of_a_step_draft_what_each_would_draft_alone(network: PreTrainedModel, calibrates: bool) -> None:
    """Prompts and rounds together: without calibration, the former are read exactly and the latter are not."""
    prompts = [PROMPT, [9, 8, 7], [5] * 40]
    together, apart = (drafter_of(network, GROUPS["of three"], calibrates) for _ in range(2))
    sequences = [[drafter.open(prompt, ALONE) for prompt in prompts] for drafter in (together, apart)]
    for round in range(4):
        members = range(1 + round % 3)  # others come later
        steps = together.step([Drafting(sequences[0][member], request(3, round)) for member in members])
        for member, proposed in zip(members, steps.drafts, strict=True):
            alone = draft(apart, sequences[1][member], request(3, round))
            assert isinstance(proposed, Draft)
            assert proposed.token_ids == alone.token_ids
            assert (rows_of(proposed) - rows_of(alone)).abs().max() <= 1e-5
            for own in (sequences[0][member], sequences[1][member]):
                own.calibrate(len(own.ids) - 2, [proposed.token_ids[1], member])


@pytest.mark.parametrize("calibrates", [True, False])
def test_what_others_take_over_is_exact(network: PreTrainedModel, calibrates: bool) -> None:
    drafter, reference = drafter_of(network, GROUPS["all"], calibrates), torch_model(LeanDecoder(network), 4096)
    first = drafter.open(list(range(40)), ALONE)
    for round in range(12):
        proposed = draft(drafter, first, request(4, round)).token_ids
        first.calibrate(len(first.ids) - 4, [*proposed, 11])
    draft(drafter, first, request(4, 12))
    text = first.ids[: first._num_committed]
    second = drafter.open([*text, 3], ALONE)
    assert second.num_reused >= 32, "the prompt was offered"
    assert second.num_reused >= 80 or not calibrates, "and what came to it"
    draft(drafter, second, request(1, 0))
    assert from_fresh(reference, drafter.model, second) <= 1e-5


@pytest.mark.parametrize("layers", [LayerParallelSettings(4), LayerParallelSettings(layer_groups="0 1-6 7-22 23")])
def test_qwen2_5_checkpoint_is_loaded_by_path_and_drafts(tmp_path: Path, layers: LayerParallelSettings) -> None:
    """With the layers, heads and tied embeddings of the 0.5B one, in bfloat16 on disk."""
    folder = save_tiny_model(tmp_path, VOCAB_SIZE)  # for its tokenizer
    shape = SHAPE | {"num_hidden_layers": 24, "num_attention_heads": 14, "hidden_size": 14 * 8}
    model: Any = family_network("qwen2", 2, **shape, tie_word_embeddings=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    drafts = DraftSettings(draft_encoding=Encoding.DENSE_FLOAT32)
    settings = ModelSettings(str(folder), dtype="float32")
    loaded = load_drafter(settings, EngineSettings(kv_cache_tokens=1024), drafts, layers)
    sequence = loaded.strategy.open(PROMPT, ALONE)
    (proposed,) = loaded.strategy.step([Drafting(sequence, request(5, 0))]).drafts
    assert isinstance(proposed, Draft)
    groups = LayerParallelism(layers.layer_parallel_size, layers.layer_groups).of(24)
    expected = drafter_of(Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), groups)
    assert (
        rows_of(proposed) - rows_of(draft(expected, expected.open(PROMPT, ALONE), request(5, 0)))
    ).abs().max() <= 1e-5


def test_models_that_the_lean_decoder_does_not_run_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, VOCAB_SIZE)
    tiny_network("gpt2", VOCAB_SIZE).save_pretrained(folder)
    with pytest.raises(InvalidRequestError, match="lean decoder alone, not here: models of type gpt2"):
        load_drafter(ModelSettings(str(folder)), layers=LayerParallelSettings(4))
