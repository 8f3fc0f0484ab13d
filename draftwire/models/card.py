"""Facts of a Hugging Face model without its weights: description, vocabulary and tokenizer. No torch here."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from draftwire.errors import InvalidRequestError
from draftwire.models.configuration import config_of
from draftwire.models.description import ModelDescription, fingerprint
from draftwire.models.folder import check_model
from draftwire.models.gguf.cache import converted_folder
from draftwire.models.model_names import is_gguf
from draftwire.models.tokenizer import tokenizer_of

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's description with its vocabulary and tokenizer."""

    description: ModelDescription
    vocabulary: list[str]
    """Token strings as the tokenizer stores them, by id."""
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, **facts: Any) -> "ModelCard":
        """Returns a card; `facts` are the fields of `ModelDescription` except the vocabulary's fingerprint."""
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        vocabulary = [token or "" for token in tokens]
        return cls(ModelDescription(vocabulary_fingerprint=fingerprint(vocabulary), **facts), vocabulary, tokenizer)


def load_card(name: str, revision: str | None = None) -> ModelCard:
    """Loads what is known of a model, a folder or one of the hub, without its weights: tokenizer and configuration.

    Raises:
        InvalidRequestError: the folder is missing, or the configuration states no context length.
        OSError: the files cannot be read.
    """
    path = path_of(name, "auto", needs_weights=False)
    config = config_of(path, revision)
    tokenizer = tokenizer_of(path, config, revision)
    try:
        named = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError:  # there is none
        named = config.eos_token_id
    return ModelCard.of(
        tokenizer,
        name=Path(path).name if Path(path).is_dir() else name,
        revision=getattr(config, "_commit_hash", None) or "",
        dtype="none",
        vocab_size=config.get_text_config().vocab_size,
        context_length=context_length_of(config, name),
        stop_token_ids=stop_token_ids_of(named, tokenizer),
    )


def path_of(name: str, dtype: str, *, needs_weights: bool = True) -> str:
    """Returns the folder of a model, which is made of a GGUF file if it names one, or its name on the hub.

    Raises:
        InvalidRequestError: the dtype is unknown, or the folder or the file is missing or lacks something.
        UnavailableError: the file could not be converted.
    """
    if dtype not in DTYPES:
        raise InvalidRequestError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if is_gguf(name):
        import structlog  # which a machine lacks that only computes

        log = structlog.get_logger()
        return str(converted_folder(name, partial(log.info, "models.gguf_converting", file=name)))
    check_model(name, needs_weights=needs_weights)
    return str(Path(name).expanduser()) if name.startswith("~") else name


def context_length_of(whole: PretrainedConfig, name: str) -> int:
    """Returns the number of positions that a model can attend to.

    Raises:
        InvalidRequestError: the model's configuration does not have it.
    """
    config = whole.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not length:
        raise InvalidRequestError(f"the configuration of {name} states no context length")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this the rotation of all positions changes, including cached ones and those of other sessions.
        length = min(length, rope.get("original_max_position_embeddings") or length)
    return int(length)


def stop_token_ids_of(named: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the stop tokens that a generation config names, else the tokenizer's end of text."""
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return ()
    return tuple(named) if isinstance(named, list | tuple) else (int(named),)
