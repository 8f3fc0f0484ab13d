"""The target of the tests on vLLM, whose attention on CPUs needs heads of 32 or more."""

import json
import os
from pathlib import Path

import torch
from tiny_models import with_ordinary_weights
from transformers import LlamaConfig, LlamaForCausalLM

from draftwire.models.script import _byte_tokenizer
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_verifier.config import VerifierConfig, VllmSettings
from draftwire_verifier.vllm.vllm_engine import LoadedVllm, load_vllm

VOCAB_SIZE = 320
"""As scripted models have, so that their tests can be run on vLLM too."""
CONTEXT_LENGTH = 512
STOP_TOKEN = 3
"""Ends a form; engines emit it like any other."""
ENGINE = EngineSettings(max_sessions=64, kv_cache_tokens=16_384, max_draft_tokens=8)
RANKS = int(os.environ.get("TEST_VLLM_RANKS", "1"))
"""Tensor-parallel ranks of vLLM: `make test-vllm` runs the decisions with two as well."""
ARGUMENTS = json.dumps({"enforce_eager": True} | ({"tensor_parallel_size": RANKS} if RANKS > 1 else {}))


def save_target(folder: Path, sharpness: float = 1.0) -> Path:
    """Writes a Llama of two layers in float32, and a tokenizer of bytes."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=STOP_TOKEN,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = with_ordinary_weights(LlamaForCausalLM(config))
        with torch.no_grad():
            model.lm_head.weight.mul_(sharpness)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def vllm_config(folder: Path, engine: EngineSettings = ENGINE, arguments: str = ARGUMENTS) -> VerifierConfig:
    """Returns the configuration of a verifier on vLLM."""
    loading = ModelSettings(str(folder), dtype="float32", engine="vllm")
    return VerifierConfig(loading, engine=engine, vllm=VllmSettings(arguments))


def load_shared(folder: Path, engine: EngineSettings = ENGINE, arguments: str = ARGUMENTS) -> LoadedVllm:
    """Loads vLLM in this process."""
    return load_vllm(vllm_config(folder, engine, arguments))
