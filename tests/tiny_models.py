"""Very small models made on the spot, whose laws can be enumerated."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny_model(
    folder: Path,
    vocab_size: int = 4,
    seed: int = 0,
    context_length: int = 64,
    sharpness: float = 6.0,
    tokens: list[str] | None = None,
    stop_token_id: int | None = None,
) -> Path:
    """Writes a two-layer Llama with random weights, whose next token depends on its context, and its tokenizer.

    Args:
        folder: where to.
        vocab_size: rows of the model's output.
        seed: of the weights.
        context_length: positions.
        sharpness: scale of the logits; 0 makes every distribution uniform.
        tokens: token strings; by default t0, t1, ...
        stop_token_id: token that ends a generation; by default none does.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
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
