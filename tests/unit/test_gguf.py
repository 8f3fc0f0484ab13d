"""GGUF files are read once into folders whose models are the same, and refused where they are broken or not known."""

import json
import os
import re
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models.card import load_card, path_of
from draftwire.models.folder import check_model
from draftwire.models.gguf import cache
from draftwire.models.gguf.cache import SOURCE, checked_header, converted_folder, source_types
from draftwire.models.gguf.conversion import convert
from draftwire.models.gguf.family import LLAMA3_FACTORS, configuration, llama3_factors
from draftwire.models.gguf.header import STORED_TYPES, read_header
from draftwire.models.loading import load_lean_model
from tests import gguf_fuzz
from tests.gguf_files import byte_vocabulary, read_ids, write_gguf
from tests.tiny_models import FAMILY, family_network

TOKENS = byte_vocabulary(3)
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PROMPT = torch.tensor([[5, 77, 200, 3, 14, 15, 92, 65]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def converted_here(file: Path) -> Path:
    """Converts a file in this process, which is quicker, into a folder beside it."""
    folder = file.with_suffix("")
    folder.mkdir()
    convert(checked_header(file), folder)
    return folder


def network_of(architecture: str, **more: Any) -> Any:
    shape = {**SHAPE, **more}
    if architecture == "qwen2":  # its heads have the size of their share
        shape["hidden_size"] = shape["num_attention_heads"] * shape.pop("head_dim")
    return family_network(architecture, **shape)


@pytest.mark.parametrize("architecture", FAMILY)
@pytest.mark.parametrize("is_tied", [False, True])
def test_model_of_a_file_computes_what_the_model_that_was_written_does(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    network = network_of(architecture, tie_word_embeddings=is_tied)
    file = write_gguf(tmp_path / "Some-Model.f32.gguf", network, TOKENS)
    folder = converted_here(file)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own, others = network.state_dict(), loaded.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, network(PROMPT).logits)
    assert load_lean_model(str(folder)) is not None, "the lean decoder takes it"
    card = load_card(str(folder))
    assert (card.description.name, card.description.context_length) == ("Some-Model.f32", 512)
    assert card.description.stop_token_ids == (len(TOKENS) - 1,)
    assert card.tokenizer.chat_template.startswith("{% for m in messages %}")


@pytest.mark.parametrize("stored", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_entries_are_what_the_blocks_say(stored: str, tmp_path: Path) -> None:
    kind, network = GGMLQuantizationType[stored], network_of("llama")
    folder = converted_here(write_gguf(tmp_path / "m.gguf", network, TOKENS, stored=kind))
    dtype = torch.float16 if stored == "F16" else torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    weights = network.state_dict()[name].numpy()
    expected = gguf.dequantize(gguf.quantize(weights, kind), kind)
    assert torch.equal(loaded[name], torch.from_numpy(expected.copy()).to(dtype))
    assert np.abs(expected - weights).max() < 0.15, "and near what was written"
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert read_header(tmp_path / "m.gguf").quantised_types == ([] if stored == "F16" else [stored])


def test_table_of_types_is_that_of_llama_cpp() -> None:
    for number, kind in STORED_TYPES.items():
        own = GGMLQuantizationType(number)
        assert (own.name, GGML_QUANT_SIZES[own]) == (kind.name, (kind.block_entries, kind.block_bytes))


@pytest.mark.parametrize("factor", LLAMA3_FACTORS)
def test_llama_3_is_known_by_its_factors(factor: float, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, max_position_embeddings=131_072, rope_parameters=rope)
    slower, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    assert llama3_factors(500_000.0, 128, factor) == pytest.approx((plain / slower).tolist(), rel=1e-5)
    network = network_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    factors = llama3_factors(500_000.0, 32, factor)
    file = write_gguf(tmp_path / "m.gguf", network, TOKENS, rope_factors=factors)
    assert configuration(read_header(file))["rope_parameters"] == rope
    with pytest.raises(InvalidRequestError, match=r"rope_freqs\.weight of a kind that is not known"):
        checked_header(write_gguf(tmp_path / "n.gguf", network, TOKENS, rope_factors=[1.0] * 16))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"llama.expert_count": 4}, "a model with experts"),
        ({"llama.attention.sliding_window": 64}, "a model with sliding windows"),
        ({"llama.rope.scaling.type": "yarn"}, "position embeddings scaled by 'yarn'"),
        ({"llama.rope.dimension_count": 16}, "rotates part of each head"),
        ({"llama.attention.value_length": 16}, "keys and values of different sizes"),
        ({"llama.block_count": 3}, r"lacks tensor 'blk\.2\."),
        ({"llama.block_count": 1}, r"has tensor 'blk\.1\.\S+' and 8 more, which models of type llama do not have"),
        ({"llama.block_count": 0}, r"llama\.block_count is 0"),
        ({"llama.feed_forward_length": 97}, r"'blk\.0\.ffn_gate\.weight' is of shape \[96, 64\], not of \[97, 64\]"),
        ({"llama.attention.head_count_kv": 3}, "4 heads of queries, 3 of keys"),
        ({"llama.context_length": "many"}, r"llama\.context_length is 'many'"),
        ({"general.architecture": "mamba"}, "architecture 'mamba'; read from GGUF files: llama, qwen2, qwen3"),
        ({"split.count": 3}, "part 1 of 3: join them with llama-gguf-split --merge"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    kind = more.get("general.architecture", "llama")
    facts = {key: value for key, value in more.items() if not key.startswith("general")}
    file = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS, more=facts)
    file.write_bytes(file.read_bytes().replace(b"llama", kind.encode()))
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        check_model(str(file))
    assert len(str(refused.value).splitlines()) == 1


def test_tokenizer_that_is_not_known_is_refused_by_the_process(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS, split="viking")
    with pytest.raises(InvalidRequestError, match="a tokenizer of kind 'viking'; known: default, gpt-2, smollm"):
        converted_folder(str(file))
    assert not [path for path in own_cache.rglob("*") if path.name.startswith("unfinished")], "nothing is left over"


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    file = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS)
    with pytest.raises(InvalidRequestError, match="cannot be written: Not a directory; XDG_CACHE_HOME names"):
        converted_folder(str(file))


def test_digits_are_tokens_of_their_own_where_the_model_was_trained_so(tmp_path: Path) -> None:
    network, tokens = network_of("llama"), TOKENS
    merges = ["1 2", "a b"]
    known = [*tokens[:-4], "12", *tokens[-3:]]
    together, apart = (
        read_ids(converted_here(write_gguf(tmp_path / f"{split}.gguf", network, known, merges, split=split)), "ab12")
        for split in ("gpt-2", "smollm")
    )
    assert together == [known.index("ab"), known.index("12")]
    assert apart == [known.index("ab"), known.index("1"), known.index("2")]


def test_file_is_converted_once_for_each_of_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, shares = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS), list[float]()

    def report(*, share: float) -> None:
        shares.append(share)

    first = converted_folder(str(file), report)
    assert shares[0] == 0.0
    assert sorted(shares) == shares
    assert shares[-1] >= 0.75
    assert path_of(str(file), "auto") == str(first)
    assert (source_types(first), source_types(tmp_path)) == ([], [])
    assert converted_folder(str(file), report) == first
    assert json.loads((first / SOURCE).read_text())["file"] == str(file)
    monkeypatch.setattr(cache, "SPARE_BYTES", 2**60)
    os.utime(file, ns=(1, 1))  # another state, which wants a folder of its own
    with pytest.raises(InvalidRequestError, match=r"GiB to be converted, .* free: XDG_CACHE_HOME names another"):
        converted_folder(str(file))


def _convert(file: str) -> tuple[str, int]:
    shares = list[float]()

    def report(*, share: float) -> None:
        shares.append(share)

    return str(converted_folder(file, report)), len(shares)


def test_processes_that_want_a_file_at_once_convert_it_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS)
    with ThreadPoolExecutor(2) as threads:  # whose locks are as apart as those of processes
        found = list(threads.map(_convert, [str(file)] * 2))
    assert len({folder for folder, _ in found}) == 1
    assert Counter(bool(shares) for _, shares in found) == {True: 1, False: 1}


def test_conversion_that_dies_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", network_of("llama"), TOKENS)
    monkeypatch.setattr(cache, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(cache, "LEAST_BYTES_PER_S", 2**40)
    with pytest.raises(UnavailableError, match="could not be converted: its process ended with status -9"):
        converted_folder(str(file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(64), "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is of version 1; known: version 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "in the byte order of other machines"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "1,152,921,504,606,846,976 tensors in 24 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "it has 5 entries in 24 bytes"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "cut short"),
    ],
)
def test_file_that_is_none_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=reason):
        check_model(str(file))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"no file at {tmp_path}/none.gguf")):
        check_model(f"{tmp_path}/none.gguf")


def test_broken_headers_are_refused_quickly_in_one_line() -> None:
    refused = gguf_fuzz.run(200, seed=7)
    assert 0 < refused.pop("whole") < 60, "some changes are of texts, which may be others"
    assert len(refused) > 12, "in many words"
