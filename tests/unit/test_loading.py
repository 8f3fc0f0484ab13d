"""Any causal language model in a Hugging Face folder can be loaded, and its cache rolled back."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedSequence
from draftwire.models.loading import load_model, load_tokenizer, tokenizer_files

SHAPE = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 4}


def make(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        match name:
            case "gpt2":
                return GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=64, n_embd=16, n_layer=2, n_head=2))
            case "mistral with a sliding window":
                return MistralForCausalLM(MistralConfig(**SHAPE, **WINDOW))
            case "gemma2 with a sliding window":
                return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **WINDOW, head_dim=8))
            case "qwen2":
                return Qwen2ForCausalLM(Qwen2Config(**SHAPE))
            case "qwen3":
                return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))
            case "mamba":
                return MambaForCausalLM(MambaConfig(vocab_size=12, hidden_size=16, num_hidden_layers=2))
    raise AssertionError(name)


def save(name: str, folder: Path) -> Path:
    save_tiny_model(folder, 12)  # for its tokenizer
    make(name).save_pretrained(folder)
    return folder


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["gpt2", "qwen2", "qwen3", "mistral with a sliding window", "gemma2 with a sliding window"]
)
def test_rolled_back_cache_gives_the_logits_of_a_fresh_forward(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loaded = load_model(str(save(name, tmp_path)))
    assert loaded.description.vocab_size == 12
    assert loaded.description.context_length == 64
    sequence = CachedSequence(loaded.model)
    ids = [3, 5, 7, 2, 8, 9, 4, 6, 2, 3]
    sequence.extend(ids)
    for length, more in ((7, [11, 10, 1]), (4, [2, 2, 5, 5, 9]), (9, [7]), (3, [6, 8])):
        sequence.truncate(length)
        ids = ids[:length] + more
        logits = sequence.extend(more, keep=len(more))
        fresh = loaded.model(input_ids=torch.tensor([ids])).logits[0, -len(more) :]
        assert (logits - fresh).abs().max() < 1e-5


def test_recurrent_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="roll back"):
        load_model(str(save("mamba", tmp_path)))


def test_missing_folder_and_unknown_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no model folder"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(InvalidRequestError, match="bfloat16"):
        load_model(str(save_tiny_model(tmp_path)), dtype="fp32")


def test_tokenizer_that_travelled_gives_the_same_ids_and_keeps_its_chat_template(tmp_path: Path) -> None:
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
