"""Tokenizers as files, for services without a model: no torch here."""

import tempfile
from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase


def tokenizer_of(
    path: str | Path, config: PretrainedConfig | None = None, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. No code of its repository is run, and nobody is asked whether it may be.

    Args:
        path: folder, or name on the model hub.
        config: of its model, by `config_of`; None is read from the path, if it is needed.
        revision: commit or branch on the hub.

    Raises:
        OSError: it cannot be read.
        ValueError: transformers does not know it.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, config=config, revision=revision, trust_remote_code=False
    )
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Returns the files that `load_tokenizer` needs, by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def load_tokenizer(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    """Builds a tokenizer from the files of `tokenizer_files`.

    Raises:
        ValueError: a file's name is not a plain name.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if Path(name).name != name:
                raise ValueError(f"tokenizer file {name!r} is not a plain file name")
            (Path(folder) / name).write_bytes(content)
        return tokenizer_of(folder)
