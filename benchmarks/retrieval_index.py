"""What a retrieval store costs: building it, keeping it, and looking up where a text goes on.

    python -m benchmarks.retrieval_index --megabytes 30 100 --output benchmarks/results/retrieval_index.json

The text is made of sources of Python's standard library and of this repository, as far as they go up to a share of it,
and of generated files: lines of words that are as frequent as Zipf's law has it. A store is built of it with the
embedded target's tokenizer, in a process of its own, whose peak memory is that of the build and of what it imports.
Look-ups are of the last 16 tokens at random places of the text, all of which match, and of 16 random tokens, of which
few do. Cold ones are the first after the store's files were dropped from the system's cache, and opened; warm ones
follow. A guess is a look-up and eight tokens of the continuation.
"""

import argparse
import resource
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from os import POSIX_FADV_DONTNEED, fsync, posix_fadvise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.report import write_report
from draftwire.cli.named_models import embedded_model
from draftwire.models.card import load_card
from draftwire.options.model_free.retrieval import RetrievalText
from draftwire.options.model_free.retrieval_store import MAX_MATCH, SUFFIXES, TOKENS, RetrievalStore
from draftwire.options.model_free.store_building import build_store, read_tokens

NUM_GUESSED = 8
NUM_COLD, NUM_WARM = 200, 5_000
NUM_WORDS, WORDS_PER_LINE = 50_000, 12
FILE_BYTES = 50_000
"""Of a generated file."""
ZIPF_EXPONENT = 1.1
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class BuildCost:
    """Of one store."""

    build_seconds: float
    tokenize_seconds: float
    """Of these: until the last token was there."""
    peak_megabytes: float
    imported_megabytes: float
    """Of these: before the build."""
    tokens: int
    store_megabytes: float


def generated(generator: np.random.Generator) -> Iterator[str]:
    """Yields texts of random words, without end."""
    lengths = generator.integers(2, 10, NUM_WORDS)
    words = ["".join(generator.choice(list(LETTERS), length)) for length in lengths]
    shares = 1 / np.arange(1, NUM_WORDS + 1) ** ZIPF_EXPONENT
    shares /= shares.sum()
    while True:
        drawn = [words[number] for number in generator.choice(NUM_WORDS, FILE_BYTES // 6, p=shares)]
        lines = (" ".join(drawn[at : at + WORDS_PER_LINE]) for at in range(0, len(drawn), WORDS_PER_LINE))
        yield "\n".join(lines) + "\n"


def real() -> Iterator[str]:
    """Yields sources of this repository and of the standard library that are UTF-8."""
    folders = [*(ROOT / name for name in ("draftwire", "services", "benchmarks", "docs", "tests"))]
    for folder in (*folders, Path(sysconfig.get_path("stdlib"))):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".md") and "site-packages" not in path.parts and path.is_file():
                try:
                    yield path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue


def write_texts(folder: Path, num_bytes: int, real_share: float, seed: int) -> list[Path]:
    """Writes so many bytes of text, and returns the files."""
    written = 0
    files: list[Path] = []
    for texts, limit in ((real(), real_share * num_bytes), (generated(np.random.default_rng(seed)), num_bytes)):
        for text in texts:
            if written >= limit:
                break
            files.append(folder / f"{len(files)}.txt")
            written += files[-1].write_bytes(text.encode())
    return files


def build(files: Sequence[Path], out: Path) -> BuildCost:
    """Builds a store, in a process that has done nothing else."""
    card = load_card(embedded_model("target"))
    vocab_size = card.description.vocab_size
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = tokenized = time.perf_counter()

    def tokens() -> Iterator[Any]:
        nonlocal tokenized
        yield from read_tokens(files, card.tokenizer.backend_tokenizer, vocab_size)
        tokenized = time.perf_counter()

    index = build_store(out, tokens(), card.description.vocabulary_fingerprint, vocab_size)
    ended = time.perf_counter()
    return BuildCost(
        build_seconds=ended - started,
        tokenize_seconds=tokenized - started,
        peak_megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        imported_megabytes=imported / 1024,
        tokens=index.num_tokens,
        store_megabytes=index.num_bytes / 1e6,
    )


def contexts(folder: Path, store: RetrievalStore, seed: int) -> dict[str, list[list[int]]]:
    """Returns contexts by their kind."""
    generator = np.random.default_rng(seed)
    tokens = np.fromfile(folder / TOKENS, store.index.token_dtype)
    count, num_tokens = NUM_COLD + NUM_WARM, store.index.num_tokens
    ends = generator.integers(MAX_MATCH, num_tokens, count)
    return {
        "of_the_text": [tokens[end - MAX_MATCH : end].tolist() for end in ends],
        "random": generator.integers(0, store.index.vocab_size, (count, MAX_MATCH)).tolist(),
    }


def drop_from_cache(folder: Path) -> None:
    """Makes the next look-ups read a store from disk; it must be open nowhere."""
    for name in (TOKENS, SUFFIXES):
        with (folder / name).open("rb") as file:
            fsync(file.fileno())
            posix_fadvise(file.fileno(), 0, 0, POSIX_FADV_DONTNEED)


def microseconds(look_up: Callable[[list[int]], object], given: Sequence[list[int]]) -> dict[str, float]:
    """Returns the median and the 99th percentile of the time of a look-up."""
    times = []
    for context in given:
        started = time.perf_counter()
        look_up(context)
        times.append(1e6 * (time.perf_counter() - started))
    return {"median": float(np.median(times)), "p99": float(np.percentile(times, 99))}


def timed(folder: Path, fingerprint: bytes, name: str, given: Sequence[list[int]]) -> dict[str, Any]:
    """Opens a store that nothing has cached, and measures look-ups by their name. It is closed afterwards."""
    drop_from_cache(folder)
    store = RetrievalStore.open(folder, fingerprint)
    drafter = partial(RetrievalText, store)

    def guess(context: list[int]) -> object:
        return drafter(context).guess(NUM_GUESSED)

    look_up = {"find": store.find, "guess": guess}[name]
    return {"cold": microseconds(look_up, given[:NUM_COLD]), "warm": microseconds(look_up, given[NUM_COLD:])}


def look_ups(folder: Path, seed: int) -> dict[str, Any]:
    """Returns what look-ups take, in microseconds, by context, by what is measured, and by whether they are cold."""
    fingerprint = load_card(embedded_model("target")).description.vocabulary_fingerprint
    given_by_kind = contexts(folder, RetrievalStore.open(folder, fingerprint), seed)
    return {
        kind: {name: timed(folder, fingerprint, name, given) for name in ("find", "guess")}
        for kind, given in given_by_kind.items()
    }


def main() -> None:
    """Builds a store of each size, looks up in it, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[30.0, 100.0], help="of text")
    parser.add_argument("--real-share", type=float, default=0.5, help="of the text, that is of real files at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for texts and stores, on the disk that is to be measured")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    for megabytes in arguments.megabytes:
        with TemporaryDirectory(dir=arguments.folder) as temporary:
            texts, out = Path(temporary) / "texts", Path(temporary) / "store"
            texts.mkdir()
            files = write_texts(texts, int(1e6 * megabytes), arguments.real_share, arguments.seed)
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                cost = pool.submit(build, files, out).result()
            results[f"{megabytes:g} MB"] = {
                "files": len(files),
                "text_megabytes": sum(file.stat().st_size for file in files) / 1e6,
                **asdict(cost),
                "bytes_per_token": 1e6 * cost.store_megabytes / cost.tokens,
                "look_up_microseconds": look_ups(out, arguments.seed),
            }
    write_report(arguments, results)


if __name__ == "__main__":
    main()
