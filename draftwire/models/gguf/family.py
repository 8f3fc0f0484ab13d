"""Models of the Llama family in GGUF files: their configuration, and which tensor is which. No torch here.

A file's metadata must say all that the configuration needs, and its tensors must be those of the configuration, by name
and shape, or it is refused: what a file has beyond that would change the model, if it were left out.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.models.gguf.header import GgufHeader

ARCHITECTURE, TOKENS = "general.architecture", "tokenizer.ggml.tokens"
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Classes of transformers, by architecture; Mistral's models are of the first one."""
MOST_LAYERS = 1000
DEFAULT_THETA = 10_000.0
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the factors by which Llama 3's position embeddings are slower."""
LLAMA3_FACTORS = (8.0, 32.0)
"""Factors of Llama 3.1 and 3.2."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTOR_ERROR = 1e-4
"""Relative, of factors in a file."""
STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Tokens that end a text, a turn, or a message."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a model."""

    name: str
    """Its name in transformers."""
    shape: tuple[int, ...]
    num_heads: int = 0
    """Number of rotated heads that its rows are of, whose halves llama.cpp interleaves; 0 if they are not."""


class _Metadata:
    """Values of a header, checked."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._architecture = architecture

    def number(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Returns a whole number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self._refusal(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0, stored with seven digits, as it was before it was stored."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0.0 < value < math.inf):
            raise self._refusal(key, value)
        return float(f"{value:.7g}")

    def plain(self, key: str) -> Any:
        """Returns a value, or None."""
        return self.header.metadata.get(f"{self._architecture}.{key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.plain(key)
        if value is None and default is None:
            raise InvalidRequestError(f"{self.header.path} does not say {self._architecture}.{key}")
        return default if value is None else value

    def _refusal(self, key: str, value: Any) -> InvalidRequestError:
        shown = repr(value) if isinstance(value, int | float | str) else type(value).__name__
        return InvalidRequestError(f"{self.header.path}: {self._architecture}.{key} is {shown[:40]}")


def configuration(header: GgufHeader) -> dict[str, Any]:
    """Returns the configuration of a file's model, as transformers has it.

    Raises:
        InvalidRequestError: the model is of another family, or the file says too little, or something that this
            family's models do not have.
    """
    architecture = header.metadata.get(ARCHITECTURE)
    if architecture not in CLASSES:
        known = ", ".join(CLASSES)
        raise InvalidRequestError(
            f"{header.path} is a model of architecture {str(architecture)[:40]!r}; read from GGUF files: {known}. "
            "Serve it from its folder of safetensors"
        )
    facts = _Metadata(header, architecture)
    tokens = header.metadata.get(TOKENS)
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise InvalidRequestError(f"{header.path} has no vocabulary: {TOKENS}")
    for key, what in (("expert_count", "experts"), ("attention.sliding_window", "sliding windows")):
        if facts.plain(key):
            raise InvalidRequestError(f"{header.path} is a model with {what}, which are not read from GGUF files")
    size, num_heads = facts.number("embedding_length"), facts.number("attention.head_count", most=2**16)
    head_size = facts.number("attention.key_length", facts.plain("rope.dimension_count") or size // num_heads or 1)
    if facts.number("rope.dimension_count", head_size) != head_size or head_size % 2:
        raise InvalidRequestError(f"{header.path} rotates part of each head, which this family's models do not")
    if facts.number("attention.value_length", head_size) != head_size:
        raise InvalidRequestError(f"{header.path} has keys and values of different sizes")
    num_key_heads = facts.number("attention.head_count_kv", num_heads, most=2**16)
    if num_heads % num_key_heads:
        raise InvalidRequestError(f"{header.path} has {num_heads} heads of queries, {num_key_heads} of keys")
    return {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": facts.number("feed_forward_length"),
        "num_hidden_layers": facts.number("block_count", most=MOST_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_heads,
        "head_dim": head_size,
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(facts, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": len(tokens),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_token_ids(header),
        "dtype": stored_dtype(header),
    }


def _rope(facts: _Metadata, head_size: int) -> dict[str, Any]:
    """Returns the configuration of position embeddings."""
    theta, kind = facts.real("rope.freq_base", DEFAULT_THETA), facts.plain("rope.scaling.type")
    if ROPE_FACTORS in facts.header.tensors:
        factors = _rope_factors(facts.header, head_size // 2)
        for factor in LLAMA3_FACTORS:
            expected = llama3_factors(theta, head_size, factor)
            if all(abs(own / other - 1.0) <= FACTOR_ERROR for own, other in zip(factors, expected, strict=True)):
                return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_ROPE}
        raise InvalidRequestError(f"{facts.header.path} has {ROPE_FACTORS} of a kind that is not known")
    if kind in (None, "none"):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": facts.real("rope.scaling.factor")}
    raise InvalidRequestError(f"{facts.header.path} has position embeddings scaled by {str(kind)[:40]!r}")


def _rope_factors(header: GgufHeader, number: int) -> Sequence[float]:
    """Returns the entries of `ROPE_FACTORS`."""
    stored = header.tensors[ROPE_FACTORS]
    if stored.stored_type.name != "F32" or stored.shape != (number,):
        raise InvalidRequestError(f"{header.path} has {ROPE_FACTORS} of another kind")
    with header.path.open("rb") as file:
        file.seek(stored.start)
        return struct.unpack(f"<{number}f", file.read(stored.num_bytes))


def llama3_factors(theta: float, head_size: int, factor: float) -> list[float]:
    """Returns by what Llama 3's position embeddings are slower than plain ones, by pair of a head's entries.

    Source: `_compute_llama3_parameters` of transformers.
    """
    context = LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    found = []
    for index in range(head_size // 2):
        wavelength = 2.0 * math.pi * theta ** (2 * index / head_size)
        smoothness = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        found.append(1.0 / ((1.0 - smoothness) / factor + smoothness))
    return found


def stored_dtype(header: GgufHeader) -> str:
    """Returns the type in which a file's weights are kept: their own, or bfloat16 where they were quantised."""
    kinds = {tensor.stored_type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return plain[kinds.pop()] if len(kinds) == 1 and kinds <= set(plain) else "bfloat16"


def stop_token_ids(header: GgufHeader) -> list[int]:
    """Returns the tokens that end a completion."""
    found = [header.metadata[key] for key in STOPS if key in header.metadata]
    return sorted({one for one in found if isinstance(one, int) and 0 <= one < len(header.metadata[TOKENS])})


def tensors_of(header: GgufHeader, config: dict[str, Any]) -> dict[str, NamedTensor]:
    """Returns what each tensor of a file is, by its name there.

    Raises:
        InvalidRequestError: one is missing, too many or of another shape than the configuration's.
    """
    expected = _expected(config)
    own = {name: tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS}
    for name, wanted in expected.items():
        if name not in own:
            raise InvalidRequestError(f"{header.path} lacks tensor {name!r}")
        if own[name].shape != wanted.shape:
            shapes = f"{list(own[name].shape)}, not of {list(wanted.shape)}"
            raise InvalidRequestError(f"{header.path}: tensor {name!r} is of shape {shapes}")
    others = sorted(own.keys() - expected.keys())
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InvalidRequestError(
            f"{header.path} has tensor {others[0]!r}{more}, which models of type {config['model_type']} do not have"
        )
    return expected


def _expected(config: dict[str, Any]) -> dict[str, NamedTensor]:
    """Returns a model's tensors by their names in a file."""
    size, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    rotated = (queries, keys) if kind == "llama" else (0, 0)
    layer = {
        "attn_norm.weight": NamedTensor("input_layernorm.weight", (size,)),
        "attn_q.weight": NamedTensor("self_attn.q_proj.weight", (queries * head, size), rotated[0]),
        "attn_k.weight": NamedTensor("self_attn.k_proj.weight", (keys * head, size), rotated[1]),
        "attn_v.weight": NamedTensor("self_attn.v_proj.weight", (keys * head, size)),
        "attn_output.weight": NamedTensor("self_attn.o_proj.weight", (size, queries * head)),
        "ffn_norm.weight": NamedTensor("post_attention_layernorm.weight", (size,)),
        "ffn_gate.weight": NamedTensor("mlp.gate_proj.weight", (inner, size)),
        "ffn_up.weight": NamedTensor("mlp.up_proj.weight", (inner, size)),
        "ffn_down.weight": NamedTensor("mlp.down_proj.weight", (size, inner)),
    }
    if kind == "qwen2":
        for name, rows in (("q", queries * head), ("k", keys * head), ("v", keys * head)):
            layer[f"attn_{name}.bias"] = NamedTensor(f"self_attn.{name}_proj.bias", (rows,))
    if kind == "qwen3":
        for name in ("q", "k"):
            layer[f"attn_{name}_norm.weight"] = NamedTensor(f"self_attn.{name}_norm.weight", (head,))
    found = {
        "token_embd.weight": NamedTensor("model.embed_tokens.weight", (config["vocab_size"], size)),
        "output_norm.weight": NamedTensor("model.norm.weight", (size,)),
    }
    if not config["tie_word_embeddings"]:
        found["output.weight"] = NamedTensor("lm_head.weight", (config["vocab_size"], size))
    for index in range(config["num_hidden_layers"]):
        for name, one in layer.items():
            found[f"blk.{index}.{name}"] = NamedTensor(f"model.layers.{index}.{one.name}", one.shape, one.num_heads)
    return found
