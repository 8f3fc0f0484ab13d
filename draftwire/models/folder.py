"""What is missing or broken in a model's folder, in words. Reads no tensors, and imports no torch."""

import json
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
"""Files of which a tokenizer needs at least one."""
POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has not fetched."""
LENGTH_BYTES = 8
"""Of the header's length, at the start of a safetensors file."""
MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format."""


def check_model(name: str, *, needs_weights: bool = True) -> None:
    """Checks the folder of a model, unless its name is one of the model hub; see `check_folder`."""
    folder = Path(name).expanduser()
    if folder.is_dir() or name.startswith((".", "/", "~")):
        check_folder(folder, needs_weights=needs_weights)


def check_folder(folder: Path, *, needs_weights: bool = True) -> None:
    """Checks that a folder has what a model is loaded from, as far as that shows without reading all of it.

    Args:
        folder: of the model.
        needs_weights: whether its weights are read too, and not its tokenizer alone.

    Raises:
        InvalidRequestError: a file is missing, a git-lfs pointer, cut short or no JSON; the message names it.
    """
    if not folder.is_dir():
        raise InvalidRequestError(f"no model folder at {folder}")
    if not any(folder.iterdir()):
        raise InvalidRequestError(f"{folder} is empty")
    _check_json(folder, "config.json", "the configuration of a Hugging Face model")
    found = [name for name in TOKENIZERS if (folder / name).exists()]
    if not found:
        raise InvalidRequestError(f"{folder} has no tokenizer: {TOKENIZERS[0]} is missing")
    for name in found:
        _check_pointer(folder / name)
    if needs_weights:
        _check_weights(folder)


def _check_weights(folder: Path) -> None:
    names = [WEIGHTS]
    if (folder / WEIGHTS_INDEX).exists():
        index = _check_json(folder, WEIGHTS_INDEX, "the list of the weights' files")
        names = sorted(set(index.get("weight_map", {}).values()))
    elif not (folder / WEIGHTS).exists():
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        others = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)]
        has = f" ({', '.join(sorted(others)[:3])} cannot be read: convert it to safetensors)" if others else ""
        raise InvalidRequestError(f"{folder} has no weights: {WEIGHTS} is missing{has}")
    for name in names:
        path = folder / name
        if not path.exists():
            raise InvalidRequestError(f"{folder} lacks {name}, which {WEIGHTS_INDEX} lists")
        _check_pointer(path)
        _check_length(path)


def _check_length(path: Path) -> None:
    """Compares a safetensors file's length with what its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 2 <= header_bytes <= MOST_HEADER_BYTES:
            raise InvalidRequestError(f"{path} is no safetensors file")
        text = file.read(header_bytes)
    expected = LENGTH_BYTES + header_bytes
    if len(text) == header_bytes:
        try:
            tensors = [value for name, value in json.loads(text).items() if name != "__metadata__"]
            expected += max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
            raise InvalidRequestError(f"{path} is no safetensors file: its header cannot be read") from error
    if size < expected:
        raise InvalidRequestError(f"{path} is cut short: it has {size:,} of at least {expected:,} bytes")


def _check_json(folder: Path, name: str, what: str) -> dict[str, Any]:
    path = folder / name
    if not path.exists():
        raise InvalidRequestError(f"{folder} has no {name}, {what}")
    _check_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} is no JSON object")
    return value


def _check_pointer(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(POINTER)) == POINTER
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    if is_pointer:
        raise InvalidRequestError(f"{path} is a git-lfs pointer: run git lfs pull")
