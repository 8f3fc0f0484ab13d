"""Any causal language model in a Hugging Face folder can be loaded and served exactly, or is refused."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    ARCHITECTURES,
    FAMILY_SHAPE,
    FAMILY_WINDOW,
    LLAMA3,
    WINDOW,
    family_network,
    randomize,
    save_tiny_model,
    tiny_network,
    tiny_shape,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from draftwire.errors import InvalidRequestError
from draftwire.models import loading
from draftwire.models.card import load_card
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import LoadedModel, load_lean_model, load_model
from draftwire.models.sequence_model import Reading
from draftwire.models.tokenizer import load_tokenizer, tokenizer_files
from draftwire.models.torch_models import torch_model

torch.set_num_threads(1)

VOCAB_SIZE = 12


def save(model: PreTrainedModel, folder: Path) -> str:
    save_tiny_model(folder, VOCAB_SIZE)  # for its tokenizer
    model.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rolled_back_cache_gives_the_logits_of_a_fresh_forward(architecture: str, tmp_path: Path) -> None:
    path = save(tiny_network(architecture, VOCAB_SIZE, 64, dtype=torch.float32), tmp_path)
    loaded = load_model(path)
    assert loaded.description.vocab_size == VOCAB_SIZE
    assert loaded.description.context_length == 64
    attention = "eager" if architecture == "gemma2" else "sdpa"  # only eager bounds the scores
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    model = torch_model(decoder_of(loaded.model), 64)
    ids = [3, 5, 7, 2, 8, 9, 4, 6, 2, 3]
    sequence = model.cache.open(ids)
    model.read([Reading(sequence, ids, 1)])
    for length, more in ((7, [11, 10, 1]), (4, [2, 2, 5, 5, 9]), (9, [7]), (3, [6, 8])):
        model.cache.truncate(sequence, length)
        ids = ids[:length] + more
        logits = model.read([Reading(sequence, more, len(more))])
        fresh = reference(input_ids=torch.tensor([ids])).logits[0, -len(more) :]
        assert (logits - fresh).abs().max() < 2e-4, "float32 rounding of logits of about 10"


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 16}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=2)), "roll back"),
        (BloomForCausalLM(BloomConfig(**SMALL, n_layer=2, n_head=2)), "in its own way"),
        (FalconForCausalLM(FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=2)), "in its own way"),
    ],
    ids=["mamba", "bloom", "falcon"],
)
def test_model_that_is_recurrent_or_computes_attention_itself_is_refused(
    model: PreTrainedModel, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        load_model(save(model, tmp_path))


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention", "conv", "mamba", "anything_new"])
def test_layers_of_an_unknown_kind_are_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tiny_network("qwen3", VOCAB_SIZE), tmp_path)
    make = AutoModelForCausalLM.from_config

    def make_with_layer(*args: object, **kwargs: object) -> PreTrainedModel:
        model = make(*args, **kwargs)
        model.config.layer_types = ["full_attention", kind]
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", make_with_layer)
    with pytest.raises(InvalidRequestError, match=kind):
        load_model(path)


def test_attention_to_chunks_is_refused(tmp_path: Path) -> None:
    model = tiny_network("llama", VOCAB_SIZE)
    model.config.attention_chunk_size = 8
    with pytest.raises(InvalidRequestError, match="chunks"):
        load_model(save(model, tmp_path))


def read_alone_and_among_others(loaded: LoadedModel, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last logits after `ids`, alone and in a step with a sequence that fills the context."""
    context_length = loaded.description.context_length
    model = torch_model(decoder_of(loaded.model), 2 * context_length + 64)
    first, second, long = (model.cache.open() for _ in range(3))
    alone = model.read([Reading(first, ids, 1)])
    among = model.read([Reading(second, ids, 1), Reading(long, [1] * context_length, 0)])
    return alone[0], among[0]


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
def test_long_neighbour_does_not_change_the_positions_of_a_short_text(kind: str, tmp_path: Path) -> None:
    positions = {
        "rope_type": kind,
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": [1.0, 1.0],
        "long_factor": [8.0, 8.0],
    }
    needed = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    }[kind]
    rope = {name: positions[name] for name in ("rope_type", "rope_theta", *needed)}
    config = LlamaConfig(**tiny_shape(VOCAB_SIZE, 64), rope_parameters=rope)
    path = save(randomize(LlamaForCausalLM(config)), tmp_path)
    try:
        loaded = load_model(path)
    except InvalidRequestError:
        return  # refusing such a model is right as well
    alone, among = read_alone_and_among_others(loaded, [3, 5, 7, 2, 8, 9, 4, 6])
    assert (alone - among).abs().max() < 2e-4


@torch.inference_mode()
def test_sliding_window_known_to_the_mask_alone_is_kept_or_refused(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(
        **tiny_shape(VOCAB_SIZE, 64),
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    path = save(randomize(Qwen2MoeForCausalLM(config)), tmp_path)
    ids = [3, 5, 7, 2, 8, 9, 4, 6, 2, 3]
    fresh = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(input_ids=torch.tensor([ids]))
    try:
        model = torch_model(decoder_of(load_model(path).model), 64)
        logits = model.read([Reading(model.cache.open(), ids, 1)])
    except InvalidRequestError:
        return
    assert (logits[0] - fresh.logits[0, -1]).abs().max() < 2e-4


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("instructions", [set(), {"avx512_bf16"}, {"amx_bf16"}])
def test_a_cpu_runs_large_models_in_bfloat16_if_both_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, instructions: set[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True} | dict.fromkeys(instructions, True))
    folder = save_tiny_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder)
    assert load_model(str(folder)).description.dtype == "float32", "a small one"
    monkeypatch.setattr(loading, "LARGE_PARAMETERS", 0)
    found = load_model(str(folder)).description.dtype
    assert found == ("bfloat16" if stored is torch.bfloat16 and instructions else "float32")
    assert load_model(str(folder), dtype="float32").description.dtype == "float32"


def test_missing_folder_and_unknown_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no model folder"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(InvalidRequestError, match="bfloat16"):
        load_model(str(save_tiny_model(tmp_path)), dtype="fp32")


def test_sent_tokenizer_gives_the_same_ids_and_keeps_its_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    travelled = load_tokenizer(tokenizer_files(tokenizer))
    text = "def f(x):\n    return 'é😀' + x  # ok\n"
    assert travelled(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert travelled.decode(travelled(text)["input_ids"]) == text
    assert travelled.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_tokenizer_file_with_a_path_in_its_name_is_refused() -> None:
    with pytest.raises(ValueError, match="plain file name"):
        load_tokenizer({"../evil.json": b"{}"})


QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq, 4 bits"),
    "awq": ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "bits": 4}}, "awq, 4 bits"),
    "fp8": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}},
        "bitsandbytes, 4 bits",
    ),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    "compressed-tensors": ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    "unknown": ({"quantization_config": {"weights": "small"}}, "of an unknown method"),
}
"""Entries of configurations, and what is said of them."""


def configured(folder: Path, **entries: Any) -> str:
    """Writes a model whose configuration has some more entries, and whose weights cannot be read."""
    path = Path(save(tiny_network("llama", VOCAB_SIZE), folder))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))
    header = json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(36))
    return str(path)


@pytest.mark.parametrize("load", [load_model, load_lean_model])
@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_model_is_refused_unread_and_pointed_to_its_engine(
    tmp_path: Path, case: str, load: Callable[[str], object]
) -> None:
    entries, method = QUANTISED[case]
    with pytest.raises(InvalidRequestError) as refused:
        load(configured(tmp_path, **entries))
    assert str(refused.value) == (
        f"{tmp_path} is quantised ({method}), and this engine reads dense float weights: `--engine vllm` of the "
        "verifier serves quantised ones"
    )


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "is a LoRA adapter of org/base (adapter_config"),
        ({"peft_type": "IA3"}, "is an adapter (adapter_config"),
    ],
)
@pytest.mark.parametrize("is_beside_weights", [False, True])
def test_adapter_is_refused_alone_and_beside_weights(
    tmp_path: Path, entries: dict[str, str], said: str, is_beside_weights: bool
) -> None:
    """Beside weights, transformers would apply it or not, depending on whether peft is installed."""
    if is_beside_weights:
        save(tiny_network("llama", VOCAB_SIZE), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(entries))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for load in (load_model, load_lean_model, load_card):
        with pytest.raises(InvalidRequestError, match=re.escape(said)) as refused:
            load(str(tmp_path))
        assert "merge_and_unload" in str(refused.value)


# Mixtures of experts

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
"""Of attention whose keys and values are compressed, of other sizes each."""
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": MLA
    | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "afmoe": {"num_experts": 4, "num_local_experts": 4},
    **{key: {"num_local_experts": 4} for key in ("phimoe", "granitemoe")},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v2": MLA | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
}


def mixture(kind: str, folder: Path, **entries: Any) -> str:
    config = AutoConfig.for_model(kind, **(tiny_shape(VOCAB_SIZE, 64) | EXPERTS | entries))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return save(randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32)), folder)


@torch.inference_mode()
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_of_experts_is_served_exactly_rolled_back_and_among_others(kind: str, tmp_path: Path) -> None:
    """Each token is routed by itself, so neither its neighbours in a step nor a cut block change its experts."""
    path = mixture(kind, tmp_path, **MIXTURES[kind])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model = torch_model(decoder_of(load_model(path).model), 256)
    other, ids = [(7 * place) % VOCAB_SIZE for place in range(50)], [3, 5, 7, 2, 8, 9, 4, 6, 2, 3]
    sequence = model.cache.open(ids)
    model.read([Reading(sequence, ids, 1)])
    for length, more in ((7, [11, 10, 1]), (4, [2, 2, 5, 5, 9]), (9, [7])):
        model.cache.truncate(sequence, length)
        ids, beside = ids[:length] + more, model.cache.open()
        logits = model.read([Reading(sequence, more, len(more)), Reading(beside, other, 3)])
        model.cache.close(beside)
        fresh = [reference(input_ids=torch.tensor([text])).logits[0] for text in (ids, other)]
        assert (logits - torch.cat([fresh[0][-len(more) :], fresh[1][-3:]])).abs().max() < 2e-4


@pytest.mark.parametrize(
    ("kind", "entries", "reason"),
    [
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 8}, "attention sinks"),
        ("qwen3_next", {"num_experts": 4}, "roll back"),
        ("llama4_text", {"num_local_experts": 2, "head_dim": 8}, "chunked_attention"),
    ],
)
def test_mixture_with_unsupported_attention_is_refused_unread(
    kind: str, entries: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mixture(kind, tmp_path, **entries)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(InvalidRequestError, match=reason):
        load_model(path)


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "meta"])
def test_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    path = save(tiny_network("llama", VOCAB_SIZE), tmp_path)
    for load in (load_model, load_lean_model):
        with pytest.raises(InvalidRequestError, match=f"device '{device}' cannot be used: "):
            load(path, device=device)


HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
READ_ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2 with windows, yarn": (
        "qwen2",
        FAMILY_WINDOW | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen3, linear": (
        "qwen3",
        FAMILY_WINDOW | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ),
}


def family_member(case: str, folder: Path, **changes: Any) -> str:
    kind, shape = READ_ALIKE[case]
    return save(family_network(kind, **(FAMILY_SHAPE | HEADS | {"vocab_size": VOCAB_SIZE} | shape | changes)), folder)


@torch.inference_mode()
@pytest.mark.parametrize("case", READ_ALIKE)
def test_model_that_is_read_without_transformers_is_the_same(case: str, tmp_path: Path) -> None:
    path = family_member(case, tmp_path)
    theirs, own = load_model(path), load_lean_model(path)
    assert own is not None
    assert own.description == theirs.description, "fingerprint, type, context and stop tokens too"
    weights, expected = own.model.state_dict(), theirs.model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    ids = [3, 5, 7, 2, 8]
    logits = []
    for loaded in (theirs, own):
        model = torch_model(decoder_of(loaded.model), 64)
        logits.append(model.read([Reading(model.cache.open(ids), ids, len(ids))]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("has_whole", [False, True])
def test_weights_in_several_files_are_read_as_transformers_reads_them(has_whole: bool, tmp_path: Path) -> None:
    path = family_member("llama", tmp_path)
    other = family_network("llama", 6, **(FAMILY_SHAPE | HEADS | {"vocab_size": VOCAB_SIZE}))
    if not has_whole:
        (tmp_path / "model.safetensors").unlink()
    other.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    for file in (tmp_path / "parts").glob("model*"):
        file.rename(tmp_path / file.name)
    assert (tmp_path / "model.safetensors.index.json").exists()
    own, theirs = load_lean_model(path), load_model(path)
    assert own is not None
    assert own.description.weights_fingerprint == theirs.description.weights_fingerprint


def test_what_cannot_be_read_alike_is_left_to_transformers(tmp_path: Path) -> None:
    assert load_lean_model(save(tiny_network("gemma2", VOCAB_SIZE), tmp_path / "gemma2")) is None
    assert load_lean_model(family_member("llama", tmp_path / "gelu", hidden_act="gelu")) is None
    path = family_member("llama", tmp_path / "more")
    weights = load_file(tmp_path / "more" / "model.safetensors")
    save_file(weights | {"model.extra": torch.zeros(1)}, tmp_path / "more" / "model.safetensors")
    assert load_lean_model(path) is None
    assert load_lean_model("some/model-on-the-hub") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_dtype_of_a_model_that_is_read_is_the_one_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    path = family_member("llama", tmp_path, tie_word_embeddings=True)
    own = load_lean_model(path, dtype)
    assert own is not None
    assert own.description.dtype == ("float32" if dtype == "auto" else dtype)
    assert len({weight.data_ptr() for weight in own.model.state_dict().values()}) == len(list(own.model.parameters()))


@pytest.mark.slow
def test_services_of_the_family_import_no_modelling_code() -> None:
    program = (
        "import sys; import draftwire_verifier.core, draftwire_drafter.core;"
        "from draftwire.models.loading import load_lean_model;"
        "assert load_lean_model('models/target') is not None;"
        "print([name for name in sys.modules if name in ('transformers.modeling_utils', 'transformers.trainer')])"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert ended.stdout == "[]\n"
