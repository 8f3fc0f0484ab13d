"""GGUF files: of tiny models, by llama.cpp's own writer; and broken ones."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from draftwire.models.lean_model import head_size

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FLOATS = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
}
CONTROL, NORMAL = 3, 1


def gguf_name(name: str) -> str:
    """Returns llama.cpp's name of a weight of transformers."""
    inner, _, kind = name.rpartition(".")
    if inner in OUTER_NAMES:
        return f"{OUTER_NAMES[inner]}.{kind}"
    layer, _, part = inner.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleaved(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns rows of rotated heads as llama.cpp has them: what transformers has half a head apart, side by side."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_gguf(
    file: Path,
    network: PreTrainedModel,
    tokens: Sequence[str],
    merges: Sequence[str] = ("a b",),
    stored: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    split: str = "gpt-2",
    more: dict[str, Any] | None = None,
    rope_factors: Sequence[float] = (),
) -> Path:
    """Writes a model of the Llama family, as llama.cpp's converter does.

    Args:
        file: to be written.
        network: the model.
        tokens: its vocabulary, byte-level; the last one ends a text.
        merges: of the vocabulary.
        stored: type of the matrices; vectors are in float32.
        split: kind of the tokenizer.
        more: further metadata, or other values of it.
        rope_factors: of Llama 3's position embeddings.
    """
    config: Any = network.config
    kind = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(file, kind)
    facts: dict[str, Any] = {
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": head_size(config),
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    for key, value in {**facts, **(more or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    writer.add_token_list(list(tokens))
    writer.add_token_types([NORMAL] * (len(tokens) - 1) + [CONTROL])
    writer.add_token_merges(list(merges))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in network.state_dict().items():
        weights = parameter.float().numpy()
        rotated = heads.get(name.split(".")[-2], 0)
        if kind == "llama" and rotated:
            weights = interleaved(weights, rotated)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if weights.ndim == 1 or stored in FLOATS:
            writer.add_tensor(gguf_name(name), weights.astype(np.float32 if weights.ndim == 1 else FLOATS[stored]))
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weights, stored), raw_dtype=stored)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_vocabulary(num_more: int = 0) -> list[str]:
    """Returns the 256 bytes as byte-level tokenizers write them, two of them joined, others, and an end of texts."""
    return [*sorted(ByteLevel.alphabet()), "ab", *(f"<{number}>" for number in range(num_more)), "<|end|>"]


def read_ids(folder: Path, text: str) -> list[int]:
    """Returns the tokens of a text by the tokenizer of a folder."""
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def broken(generator: random.Random, whole: bytes, header_bytes: int) -> bytes:
    """Returns a file with something else in its header: bits, numbers, lengths, or parts of it twice or not at all."""
    content, place = bytearray(whole), generator.randrange(header_bytes)
    manner = generator.randrange(7)
    if manner == 0:
        return bytes(content[: generator.randrange(len(content))])
    if manner == 1:
        for _ in range(generator.randint(1, 8)):
            content[generator.randrange(header_bytes)] ^= 1 << generator.randrange(8)
    elif manner == 2:  # a count, a length or a size
        number = generator.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, generator.getrandbits(64)))
        content[place : place + 8] = struct.pack("<Q", number)
    elif manner == 3:
        content[8:24] = struct.pack("<QQ", *(generator.choice((0, 1, 7, 2**20, 2**60)) for _ in range(2)))
    elif manner == 4:
        content[place : place + 4] = struct.pack("<I", generator.choice((*range(16), 2**31)))
    elif manner == 5:
        del content[place : place + generator.randint(1, 64)]
    else:
        content[place:place] = content[place : place + generator.randint(1, 64)]
    return bytes(content)
