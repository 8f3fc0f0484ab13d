"""Very small models made on the spot, whose laws can be enumerated."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftwire.models import kv_storage, packing
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.models.sequence_model import Reading
from tests.cache_integrity import check_integrity

if TYPE_CHECKING:
    from draftwire.options.structured_output.grammar_automaton import FormCompiler

ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt2", "qwen2", "qwen3", "granite")
"""What `tiny_network` makes: grouped key heads, sliding windows, bounded or scaled scores, learned positions."""
WINDOW = 4
"""Positions that a layer with a sliding window sees."""

FAMILY_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Of models in float32 that two implementations are compared on, but for their heads."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY_WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


def save_tiny_model(
    folder: Path,
    vocab_size: int = 4,
    seed: int = 0,
    context_length: int = 64,
    sharpness: float = 6.0,
    tokens: list[str] | None = None,
    stop_token_id: int | None = None,
    num_layers: int = 2,
    head_dim: int = 8,
) -> Path:
    """Writes a small Llama with random weights, whose next token depends on its context, and its tokenizer.

    Args:
        folder: where to.
        vocab_size: rows of the model's output.
        seed: of the weights.
        context_length: positions.
        sharpness: scale of the logits; 0 makes every distribution uniform.
        tokens: token strings; by default t0, t1, ...
        stop_token_id: token that ends a generation; by default none does.
        num_layers: as it says.
        head_dim: of its attention; vLLM on CPUs wants 32 or more.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.6)
            model.lm_head.weight.normal_(0.0, sharpness / 16**0.5 / 4)
    model.save_pretrained(folder)
    names = tokens or [f"t{index}" for index in range(vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=names[0]).save_pretrained(folder)
    return folder


def save_spelling_model(
    folder: Path, tokens: list[str], stop_token_id: int | None, seed: int, context_length: int
) -> Path:
    """Writes a tiny model whose tokens are texts, which forms can be made of; one of them may end the text."""
    save_tiny_model(folder, len(tokens), seed, context_length, stop_token_id=stop_token_id)
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    stop_token = None if stop_token_id is None else tokens[stop_token_id]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stop_token).save_pretrained(folder)
    return folder


def tiny_shape(vocab_size: int, context_length: int) -> dict[str, int | None]:
    """Returns what the configurations of most architectures have in common."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def tiny_network(
    architecture: str,
    vocab_size: int = 11,
    context_length: int = 256,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
) -> PreTrainedModel:
    """Returns a model of two layers with random weights, whose next token depends on all that it sees.

    Args:
        architecture: one of `ARCHITECTURES`.
        vocab_size: rows of the output.
        context_length: positions.
        seed: of the weights.
        dtype: of the weights; float64 tells a wrong key from rounding.
    """
    shape = tiny_shape(vocab_size, context_length)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        match architecture:
            case "llama":
                model = LlamaForCausalLM(LlamaConfig(**shape))
            case "mistral":
                model = MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW))
            case "gemma2":  # the first layer has a window, the second has none
                model = Gemma2ForCausalLM(
                    Gemma2Config(**shape, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=1.5)
                )
            case "gpt2":
                model = GPT2LMHeadModel(
                    GPT2Config(
                        vocab_size=vocab_size,
                        n_positions=context_length,
                        n_embd=16,
                        n_layer=2,
                        n_head=4,
                        bos_token_id=None,
                        eos_token_id=None,
                    )
                )
            case "qwen2":  # the first layer sees all, the second has a window
                config = Qwen2Config(**shape, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
                model = Qwen2ForCausalLM(config)
            case "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
            case "granite":
                model = GraniteForCausalLM(GraniteConfig(**shape, attention_multiplier=0.9))
            case _:
                raise AssertionError(architecture)
        return randomize(model).to(dtype).eval()


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Draws a model's weight matrices anew, much larger than they are at the start of training."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.6)
    return model


FAMILY: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def family_network(architecture: str, seed: int = 5, **shape: Any) -> PreTrainedModel:
    """Returns a float32 model of one of `FAMILY` with weights and biases of ordinary size."""
    config, model = FAMILY[architecture]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return with_ordinary_weights(model(config(**shape)))


def with_ordinary_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Draws all weights of a model anew, with those of norms around 1 and biases that matter, and returns it."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3 if parameter.ndim == 1 else 0.15)
    return model.eval()


def with_exact_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Makes the norms of a float64 model compute in float64, which those of transformers do not, and returns it."""
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            exact = torch.nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
            exact.weight = module.weight
            model.set_submodule(name, exact)
    return model


def ragged_reads(model: CachedModel, fuzzily: bool = False) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Reads random texts in batches of ragged lengths, and forgets ends of them.

    Yields a text that was read and the logits after its last tokens, `[0 to its length, vocab]`.
    """
    generator = random.Random(3)
    texts: list[list[int]] = [[] for _ in range(6)]
    sequences = [model.cache.open() for _ in texts]
    for _ in range(12):
        members = generator.sample(range(6), generator.randint(1, 6))
        readings = []
        for index in members:
            if texts[index] and generator.random() < 0.5:
                length = generator.randrange(len(texts[index]))
                del texts[index][length:]
                model.cache.truncate(sequences[index], length)
            ids = [generator.randrange(model.vocab_size) for _ in range(generator.choice([1, 1, 2, 3, 5, 7, 9, 40]))]
            texts[index] += ids
            readings.append(Reading(sequences[index], ids, generator.randint(0, len(ids))))
        logits = model.read(readings, fuzzily).clone()
        check_integrity(model.cache)
        for index, rows in zip(members, logits.split([reading.keep for reading in readings]), strict=True):
            yield list(texts[index]), rows


def read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets segments of any length read their keys where they are, in however many runs, as long ones on a CPU do."""
    for name, value in (("LEAST_BYTES", 0), ("LEAST_RUN", 1), ("MOST_RUNS", 1000), ("MOST_QUERIES", 1000)):
        monkeypatch.setattr(packing, name, value)
    monkeypatch.setattr(kv_storage, "HEADS_FIRST_BYTES", 0)


def scatter(cache: KvCache) -> None:
    """Leaves every second block free, so that texts are in as many runs as they have blocks."""
    sequences = []
    while cache.num_free_blocks:
        sequences.append(cache.open())
        cache.append(sequences[-1], 1)
    for sequence in sorted(sequences, key=lambda one: one.blocks)[::2]:
        cache.close(sequence)


class ExtendsByReading:
    """Lets a model that tests watch or fake read the tokens of `extend` like all others."""

    device = torch.device("cpu")
    extends_exactly = True

    def extend(
        self: Any,
        sequences: Sequence[CachedSequence],
        token_ids: torch.Tensor,
        parents: Sequence[tuple[int, ...]] = (),
    ) -> torch.Tensor:
        nodes = parents or [()] * len(sequences)
        parts = token_ids.split([max(len(own), 1) for own in nodes])
        return self.read(
            [
                Reading(sequence, part.tolist(), len(part), own)
                for sequence, part, own in zip(sequences, parts, nodes, strict=True)
            ]
        )


def tiny_compiler(tokens: list[str], vocab_size: int, stops: list[int]) -> "FormCompiler":
    """Returns a compiler of forms for a tokenizer that cuts nothing into bytes."""
    from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary

    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return FormCompiler(FormVocabulary.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer), vocab_size, stops))
