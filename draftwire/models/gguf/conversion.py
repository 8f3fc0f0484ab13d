"""The process that makes a folder of safetensors of a GGUF file, whose header `converted_folder` has read.

    python -m draftwire.models.gguf.conversion FILE FOLDER

Entries are multiplied out as llama.cpp does, and kept in the type of `stored_dtype`. Standard output are lines of JSON:
{"share"} of the bytes that were read, or {"fault"}, one line for the user. Memory: a shard, and the largest tensor a
few times.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.torch import save_file
from torch import Tensor

from draftwire.errors import InvalidRequestError
from draftwire.models.folder import CONFIG, WEIGHTS, WEIGHTS_INDEX
from draftwire.models.gguf.family import NamedTensor, configuration, stop_token_ids, tensors_of
from draftwire.models.gguf.header import GgufHeader, StoredTensor, read_header
from draftwire.models.gguf.tokenizer_building import tokenizer_of

SHARD_BYTES = 2**30
BASE_BYTES = 6 * 2**30
"""Address space that Python, torch and a tokenizer take; most of it is never touched."""
ENTRY_BYTES = 24
"""Memory for an entry of the largest tensor: its numbers in float32, and what they are made of."""


def main() -> None:
    """Converts a file."""
    file, folder = (Path(argument) for argument in sys.argv[1:3])
    header = read_header(file)
    largest = max((int(np.prod(tensor.shape)) for tensor in header.tensors.values()), default=0)
    most = BASE_BYTES + SHARD_BYTES + ENTRY_BYTES * largest
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    try:
        convert(header, folder)
    except InvalidRequestError as error:
        _say(fault=str(error))
    except (MemoryError, RuntimeError, ValueError, OSError) as error:
        _say(fault=f"{file} cannot be converted: {(str(error).splitlines() or [type(error).__name__])[0]}")


def convert(header: GgufHeader, folder: Path) -> None:
    """Writes the model of a file into a folder that exists.

    Raises:
        InvalidRequestError: the file's model is not known.
        OSError: nothing can be written.
    """
    config = configuration(header)
    tensors = tensors_of(header, config)
    tokenizer_of(header).save_pretrained(folder)
    write_json(folder / CONFIG, config)
    stops = stop_token_ids(header)
    if stops:
        write_json(folder / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": stops})
    save_weights(header, tensors, getattr(torch, config["dtype"]), folder)


def save_weights(header: GgufHeader, tensors: dict[str, NamedTensor], dtype: torch.dtype, folder: Path) -> None:
    """Writes all tensors, in files of about `SHARD_BYTES`."""
    shards: list[dict[str, Tensor]] = [{}]
    places: dict[str, str] = {}
    size = total = 0
    all_bytes, done = sum(tensor.num_bytes for tensor in header.tensors.values()), 0

    def flush() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for name, stored in sorted(header.tensors.items(), key=lambda item: item[1].start):
        done += stored.num_bytes
        if name not in tensors:
            continue
        wanted = tensors[name]
        tensor = entries_of(header, stored).to(dtype)
        if size and size + tensor.nbytes > SHARD_BYTES:
            flush()
            shards.append({})
            size = 0
        shards[-1][wanted.name] = unpermuted(tensor, wanted.num_heads).contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
        _say(share=done / all_bytes)
    flush()
    if len(shards) == 1:
        (folder / places.popitem()[1]).rename(folder / WEIGHTS)
        return
    write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def entries_of(header: GgufHeader, stored: StoredTensor) -> Tensor:
    """Returns a tensor of a file, float32."""
    content = np.memmap(header.path, np.uint8, "r", stored.start, (stored.num_bytes,))
    kind = GGMLQuantizationType(stored.type_number)
    rows = content.reshape(*stored.shape[:-1], -1)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        rows = rows.view(np.float32 if kind is GGMLQuantizationType.F32 else np.float16)
    return torch.from_numpy(np.array(dequantize(rows, kind), np.float32).reshape(stored.shape))


def unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """Returns rows of rotated heads in the order of transformers, in which the two entries of a pair are half a head
    apart; in llama.cpp's they are neighbours. With no heads, the tensor itself.
    """
    if not num_heads:
        return tensor
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
