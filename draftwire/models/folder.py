"""Names what is missing or broken in a model's folder. Reads no tensors, and imports no torch."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.models.gguf.cache import checked_header
from draftwire.models.model_names import is_gguf

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
"""File of an adapter's configuration. Beside whole weights it would change them, wherever peft is installed."""
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of the weights: transformers reads the first one if both are there."""
NAMED_WEIGHTS = "transformers_weights"
"""Entry of a configuration that names another file."""
CHAT_TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files that hold a chat template, the second one as an entry."""
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
"""Files of which a tokenizer needs at least one."""
POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has not fetched."""
LENGTH_BYTES = 8
"""Size of the header's length, at the start of a safetensors file."""
MOST_HEADER_BYTES = 100_000_000
"""Limit of the header of a safetensors file, by its format."""


def check_model(name: str, *, needs_weights: bool = True) -> None:
    """Checks the folder of a model, unless its name is one of the model hub; see `check_folder`. A name within a folder
    of models is none of the hub. Of a GGUF file, checks what it says of itself.
    """
    folder = Path(name).expanduser()
    if is_gguf(name):
        checked_header(folder)
        return
    if folder.is_dir() or name.startswith((".", "/", "~")) or _models_beside(folder):
        check_folder(folder, needs_weights=needs_weights)


def check_folder(folder: Path, *, needs_weights: bool = True) -> None:
    """Checks that a folder has what a model is loaded from, or without weights what its tokenizer is, as far as that
    shows without reading all of it.

    Raises:
        InvalidRequestError: a file is missing, a git-lfs pointer, cut short or no JSON, or cannot be read; the message
            names it.
    """
    if not folder.is_dir():
        alike = get_close_matches(folder.name, _models_beside(folder), 1)
        meant = f"; did you mean {folder.parent / alike[0]}?" if alike else ""
        raise InvalidRequestError(f"no model folder at {folder}{meant}")
    try:
        _check_files(folder, needs_weights)
    except OSError as error:
        raise InvalidRequestError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _models_beside(folder: Path) -> list[str]:
    """Returns the names of the models' folders in the same folder, which is not the current one."""
    parent = folder.parent
    if parent == Path() or not parent.is_dir():
        return []
    try:
        return sorted(other.name for other in parent.iterdir() if (other / CONFIG).is_file())
    except OSError:
        return []


def weights_files(folder: Path) -> list[Path]:
    """Returns the files that a model's weights are read from; those that an index lists may be missing.

    Raises:
        InvalidRequestError: there are none, or the index cannot be read.
        OSError: the folder cannot be read.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).exists():
        places = json_of(folder / WEIGHTS_INDEX).get("weight_map")
        if isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values()):
            return [folder / name for name in sorted(set(places.values()))]
        raise InvalidRequestError(f"{folder / WEIGHTS_INDEX} has no weight_map from tensors to files")
    others = sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern))
    has = f" ({', '.join(others[:3])} cannot be read: convert it to safetensors)" if others else ""
    if files := [name for name in others if is_gguf(name)]:
        has = f"; it has {files[0]}, which is served if it is named itself: {folder / files[0]}"
    raise InvalidRequestError(f"{folder} has no weights: {WEIGHTS} is missing{has}")


def _check_files(folder: Path, needs_weights: bool) -> None:
    if not any(folder.iterdir()):
        raise InvalidRequestError(f"{folder} is empty")
    if (folder / ADAPTER).exists():
        raise InvalidRequestError(_adapter_fault(folder))
    if not (folder / CONFIG).exists():
        raise InvalidRequestError(f"{folder} has no {CONFIG}, the configuration of a Hugging Face model")
    config = json_of(folder / CONFIG)
    found = [name for name in TOKENIZERS if (folder / name).exists()]
    if not found:
        raise InvalidRequestError(f"{folder} has no tokenizer: {TOKENIZERS[0]} is missing")
    for name in found:
        _check_pointer(folder / name)
    if not needs_weights or NAMED_WEIGHTS in config:
        return
    for path in weights_files(folder):
        if not path.exists():
            raise InvalidRequestError(f"{folder} lacks {path.name}, which {WEIGHTS_INDEX} lists")
        _check_pointer(path)
        _check_length(path)


def _adapter_fault(folder: Path) -> str:
    """Returns why the folder of an adapter is refused."""
    values = json_of(folder / ADAPTER)
    base = values.get("base_model_name_or_path")
    kind = "a LoRA adapter" if values.get("peft_type") == "LORA" else "an adapter"
    return (
        f"{folder} is {kind}{f' of {base}' if base else ''} ({ADAPTER}), and every engine here serves whole models: "
        "merge it into its base with peft's merge_and_unload, and name the merged folder"
    )


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


def has_chat_template(folder: Path) -> bool:
    """Whether a model's folder has a template by which it holds conversations; not for one that does not exist.

    Raises:
        InvalidRequestError: its tokenizer's configuration is no JSON object.
    """
    if (folder / CHAT_TEMPLATE).is_file():
        return True
    return (folder / TOKENIZER_CONFIG).is_file() and bool(json_of(folder / TOKENIZER_CONFIG).get("chat_template"))


def json_of(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file that exists.

    Raises:
        InvalidRequestError: it is none, or a pointer to one that was not fetched.
    """
    _check_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} is no JSON object")
    return value


def _check_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise InvalidRequestError(f"{path} is a git-lfs pointer: run git lfs pull")
