"""Training corpus of the embedded pair: sources of Python's standard library and of packages; and its tokenizer."""

import hashlib
import importlib.metadata
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

HELD_OUT_PERCENT = 2
"""Share of the files, chosen by the hash of their path, that no training step ever reads."""

EXCLUDED_TOP_LEVEL = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"})
"""Installed packages, and two folders of generated tables that teach nothing about Python."""

MAX_FILE_BYTES = 400_000
"""Larger files are generated data (grammar tables, test vectors)."""

PACKAGES = {
    "aiohttp": "Apache-2.0 AND MIT",
    "anyio": "MIT",
    "click": "BSD-3-Clause",
    "fastapi": "MIT",
    "huggingface_hub": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "jsonschema": "MIT",
    "networkx": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pydantic": "MIT",
    "pytest": "MIT",
    "rich": "MIT",
    "structlog": "MIT OR Apache-2.0",
    "typer": "MIT",
    "urllib3": "MIT",
}
"""Dependencies of this project, pinned in constraints.txt, that are written in Python, and their licences."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library or of a package."""

    path: str
    """Relative to the library's or the packages' root, with forward slashes: the same on every machine."""
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept for evaluation. Depends on the path alone, so that every Python agrees."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "little") % 100 < HELD_OUT_PERCENT


def standard_library(root: Path | None = None) -> Iterator[SourceFile]:
    """Yields every usable source file below `root` (default: the running interpreter's library), sorted by path."""
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(base.rglob("*.py")):
        if path.relative_to(base).parts[0] not in EXCLUDED_TOP_LEVEL:
            yield from _usable(path, base)


def packages(names: Iterable[str] = PACKAGES) -> Iterator[SourceFile]:
    """Yields every usable source file of installed packages, in the order in which each lists its files."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for listed in distribution.files or ():
            if listed.suffix == ".py" and ".." not in listed.parts:
                path = Path(str(distribution.locate_file(listed)))
                yield from _usable(path, Path(str(distribution.locate_file(""))))


def _usable(path: Path, base: Path) -> Iterator[SourceFile]:
    if path.stat().st_size > MAX_FILE_BYTES:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return  # a handful of test files are badly encoded on purpose
    if text.strip():
        yield SourceFile(path.relative_to(base).as_posix(), text)


def encode_texts(tokenizer: Tokenizer, texts: list[str], end_of_text: int) -> NDArray[np.uint16]:
    """Returns all texts as one array of ids, each text preceded by `end_of_text` (which is also the BOS token)."""
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([end_of_text, *encoding.ids], dtype=np.uint16) for encoding in encodings])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer with `vocab_size` entries; entry 0 is `END_OF_TEXT`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int, chat_template: str) -> None:
    """Writes the tokenizer to a model's folder in the form that `AutoTokenizer.from_pretrained` reads."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    ).save_pretrained(folder)
