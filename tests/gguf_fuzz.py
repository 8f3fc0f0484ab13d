"""Feeds broken GGUF files to what checks them: each is refused in a line, within limits of time and memory, or not."""

import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from draftwire.errors import InvalidRequestError
from draftwire.models.gguf.cache import checked_header
from draftwire.models.gguf.header import read_header
from tests.gguf_files import broken, byte_vocabulary, write_gguf
from tests.tiny_models import family_network

SECONDS = 2.0
MEMORY_BYTES = 200 * 2**20
"""What a file may take, beside the process as it was."""
SHOWN = 60
"""Characters of a refusal by which refusals are counted, without the file's name."""


class ReadingFaultError(Exception):
    """A file was not refused as it should have been."""


def small_file(folder: Path) -> Path:
    """Writes a file of a tiny model."""
    tokens = byte_vocabulary(3)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = family_network("llama", vocab_size=len(tokens), num_key_value_heads=1, head_dim=16, **shape)
    return write_gguf(folder / "model.gguf", network, tokens)


def run(num_files: int, seed: int) -> Counter[str]:
    """Checks so many broken files; returns the number of each refusal, and of those taken as whole.

    Raises:
        ReadingFaultError: a file took too long, or too much memory, or was refused by another exception or in several
            lines.
    """
    generator, refused = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        file = small_file(Path(folder))
        whole = file.read_bytes()
        header_bytes = min(tensor.start for tensor in read_header(file).tensors.values())
        before = resource.getrlimit(resource.RLIMIT_AS)
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_BYTES, before[1]))
        try:
            for _ in range(num_files):
                content = broken(generator, whole, header_bytes)
                file.write_bytes(content)
                refused[_refusal(file, content)] += 1
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return refused


def _refusal(file: Path, content: bytes) -> str:
    """Returns how a refusal begins; "whole" if there is none."""
    started = time.process_time()
    try:
        checked_header(file)
        said = "whole"
    except InvalidRequestError as error:
        said = str(error).replace(str(file), "FILE")
    except Exception as error:
        raise ReadingFaultError(f"{type(error).__name__}: {error}: {content[:4096].hex()}") from error
    if len(said.splitlines()) != 1 or time.process_time() - started > SECONDS:
        raise ReadingFaultError(f"{said!r} after {time.process_time() - started:.1f} s: {content[:4096].hex()}")
    return "".join("N" if letter.isdigit() else letter for letter in said)[:SHOWN]
