"""What a model's steps take on this CPU by engine and weights, how well each predicts a text, and what starting takes.

    python -m benchmarks.cpu_engines --models DIR ... --text FILE --output benchmarks/results/cpu_engines.json

The engines are our own decoder in float32 and in bfloat16, and OpenVINO with weights in float32 and in eight bits. A
step reads so many rows of so many sessions, each with a text of `--context` tokens; all engines are loaded in one
process and take turns, so that ratios compare steps that are adjacent in time. Other figures:

    perplexity  of the first `--tokens` tokens of a text, read in windows of `WINDOW`
    by shape    how far the law of a row parts from that of the same row read alone: the mean and the largest total
                variation at temperature 1, for the first of five rows, and for one of eight sessions
    in turn     what a step takes where steps of several numbers of rows follow each other, with the padding of small
                steps that OpenVINO's have, and without
    start       of a process of its own: seconds until the first step is over, and the memory that it then holds
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.report import progress, write_report
from draftwire.engine.model_loading import load_target
from draftwire.errors import InvalidRequestError
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.openvino import openvino_engine
from draftwire.models.sequence_model import Reading, SequenceModel
from draftwire.runtime.settings import EngineSettings, ModelSettings

ENGINES: dict[str, dict[str, str]] = {
    "float32": {"engine": "draftwire", "dtype": "float32"},
    "bfloat16": {"engine": "draftwire", "dtype": "bfloat16"},
    "openvino f32": {"engine": "openvino", "weights": "f32"},
    "openvino u8": {"engine": "openvino", "weights": "u8"},
}
SHAPES = ((1, 1), (1, 5), (4, 1), (8, 1), (4, 5), (8, 5))
"""Sessions, and rows of each."""
IN_TURN = ((1,), (5,), (1, 2), (1, 5), (1, 1, 1, 1, 1, 3))
"""Rows of one session's steps, in turn."""
WINDOW = 512
"""Tokens that are read in one pass, each predicted from those before it."""
NUM_COMPARED = 128
"""Rows whose laws are compared."""
STARTED = """
import json, sys, time
started = time.perf_counter()
from benchmarks.cpu_engines import first_step
print(json.dumps(first_step(*sys.argv[1:], started)))
"""


def load(folder: str, engine: str, threads: int, num_tokens: int) -> SequenceModel:
    """Returns a model by one of `ENGINES`.

    Raises:
        InvalidRequestError: the engine cannot run it here.
    """
    settings = ModelSettings(folder, threads=threads, **ENGINES[engine])  # type: ignore[arg-type]
    return load_target(settings, EngineSettings(kv_cache_tokens=num_tokens)).model


def first_step(folder: str, engine: str, threads: str, started: float) -> dict[str, float]:
    """Returns what it takes until a model has made its first step, in this process."""
    model = load(folder, engine, int(threads), 2048)
    model.read([Reading(model.cache.open(), [1, 2, 3], 1)])
    seconds = time.perf_counter() - started
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"seconds": seconds, "private_mib": int(status["RssAnon"].split()[0]) / 1024}


class Texts:
    """Sessions of one model, all of one length, which they keep."""

    def __init__(self, model: SequenceModel, num_sessions: int, length: int) -> None:
        self._model = model
        self._length = length
        self._sequences: list[CachedSequence] = [model.cache.open() for _ in range(num_sessions)]
        for number, sequence in enumerate(self._sequences):
            model.read([Reading(sequence, [(7 * place + number) % 97 + 5 for place in range(length)], 0)])

    def step_ms(self, num_rows: int) -> float:
        """Returns the milliseconds of a step."""
        readings = [Reading(sequence, [*range(11, 11 + num_rows)], num_rows) for sequence in self._sequences]
        started = time.perf_counter()
        self._model.read(readings)
        seconds = time.perf_counter() - started
        for sequence in self._sequences:
            self._model.cache.truncate(sequence, self._length)
        return 1e3 * seconds

    def close(self) -> None:
        """Frees them."""
        for sequence in self._sequences:
            self._model.cache.close(sequence)


def steps(models: dict[str, SequenceModel], context: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of steps, by shape and engine."""
    medians = {}
    for num_sessions, num_rows in progress(SHAPES, "steps"):
        texts = {name: Texts(model, num_sessions, context) for name, model in models.items()}
        taken: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(num_steps + 2):
            for name, own in texts.items():
                milliseconds = own.step_ms(num_rows)
                if turn >= 2:  # the first ones warm up
                    taken[name].append(milliseconds)
        medians[f"{num_sessions} x {num_rows}"] = {name: statistics.median(own) for name, own in taken.items()}
        for own in texts.values():
            own.close()
    return medians


@torch.inference_mode()
def perplexity(model: SequenceModel, ids: Sequence[int]) -> float:
    """Returns the perplexity of a text, of which each window is predicted from itself alone."""
    total, count = 0.0, 0
    for start in range(0, len(ids) - WINDOW, WINDOW):
        window = list(ids[start : start + WINDOW])
        sequence = model.cache.open()
        logits = model.read([Reading(sequence, window[:-1], WINDOW - 1)]).float()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
        count += WINDOW - 1
        model.cache.close(sequence)
    return math.exp(total / count)


@contextmanager
def padding_up_to(num_rows: int) -> Iterator[None]:
    """Pads small steps of OpenVINO up to so many rows; 0 pads none."""
    usual, openvino_engine.MOST_PADDED = openvino_engine.MOST_PADDED, num_rows
    try:
        yield
    finally:
        openvino_engine.MOST_PADDED = usual


def in_turn(model: SequenceModel, context: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Returns the mean over a pattern's steps of their median milliseconds, by padding and pattern."""
    found: dict[str, dict[str, float]] = {}
    for name, most in (("padded", openvino_engine.MOST_PADDED), ("as they are", 0)):
        with padding_up_to(most):
            text = Texts(model, 1, context)
            for pattern in IN_TURN:
                rounds = [[text.step_ms(num_rows) for num_rows in pattern] for _ in range(num_steps + 4)][4:]
                medians = [statistics.median(own) for own in zip(*rounds, strict=True)]
                found.setdefault(name, {})[" ".join(map(str, pattern))] = statistics.mean(medians)
            text.close()
    return found


@torch.inference_mode()
def by_shape(model: SequenceModel, ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns the mean and the largest total variation between a row's laws, by the shape that it is compared with."""
    found: dict[str, list[float]] = {"first of 5 rows": [], "one of 8 sessions": []}
    main, others = model.cache.open(), [model.cache.open() for _ in range(7)]
    for number, other in enumerate(others):
        model.read([Reading(other, list(ids[number : number + 50]), 0)])
    model.read([Reading(main, list(ids[:100]), 0)])
    for place in range(100, 100 + NUM_COMPARED):

        def law(*readings: Reading) -> torch.Tensor:
            row = model.read(list(readings)).float()[0].softmax(dim=0)
            for reading in readings:
                model.cache.truncate(reading.sequence, reading.sequence.length - len(reading.token_ids))
            return row

        token = ids[place]
        alone = law(Reading(main, [token], 1))
        block = law(Reading(main, list(ids[place : place + 5]), 5))
        beside = law(Reading(main, [token], 1), *(Reading(other, [token], 1) for other in others))
        for name, row in zip(found, (block, beside), strict=True):
            found[name].append(float((row - alone).abs().sum() / 2))
        model.read([Reading(main, [token], 0)])
    return {name: [statistics.mean(own), max(own)] for name, own in found.items()}


def measure(folder: str, text: Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one model by all engines that can run it, and prints tables."""
    models: dict[str, SequenceModel] = {}
    for name in arguments.engines:
        try:
            models[name] = load(folder, name, arguments.threads, 8 * (arguments.context + 64) + 2 * WINDOW)
        except InvalidRequestError as error:
            print(f"{name}: {error}")
    result: dict[str, Any] = {"milliseconds": steps(models, arguments.context, arguments.steps)}
    result["in_turn"] = {
        name: in_turn(model, arguments.context, arguments.steps) for name, model in models.items() if "openvino" in name
    }
    print(f"\n{folder}\nsessions x rows{'':5}" + "".join(f"{name:>16}" for name in models))
    for shape, row in result["milliseconds"].items():
        print(f"{shape:<20}" + "".join(f"{row[name]:>16.1f}" for name in models))
    for name, kinds in result["in_turn"].items():
        for kind, patterns in kinds.items():
            shown = ", ".join(f"{pattern}: {value:.1f}" for pattern, value in patterns.items())
            print(f"{name}, {kind}, ms of a step by the rows of steps in turn: {shown}")
    if text is not None:
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        ids = tokenizer.encode(text.read_text(encoding="utf-8")[: 8 * arguments.tokens]).ids[: arguments.tokens]
        result["perplexity"] = {name: perplexity(model, ids) for name, model in models.items()}
        with padding_up_to(0):
            result["by_shape"] = {name: by_shape(model, ids) for name, model in models.items()}
        print(f"perplexity of {len(ids)} tokens", {name: round(own, 4) for name, own in result["perplexity"].items()})
        for name, shapes in result["by_shape"].items():
            print(f"{name:<16}", {shape: [f"{each:.1e}" for each in own] for shape, own in shapes.items()})
    models.clear()
    result["start"] = {}
    for name in arguments.engines:
        command = [sys.executable, "-c", STARTED, folder, name, str(arguments.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            result["start"][name] = json.loads(done.stdout.splitlines()[-1])
            print(f"start, {name}:", {key: round(value, 1) for key, value in result["start"][name].items()})
    return result


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", required=True, metavar="DIR")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="in UTF-8; one for all models, or one for each"
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=tuple(ENGINES))
    parser.add_argument("--context", type=int, default=100, help="tokens of each session's text")
    parser.add_argument("--steps", type=int, default=15, help="of each engine and shape")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    texts = arguments.text * len(arguments.models) if len(arguments.text) == 1 else arguments.text
    texts = texts or [None] * len(arguments.models)
    results = {folder: measure(folder, text, arguments) for folder, text in zip(arguments.models, texts, strict=True)}
    write_report(arguments, results)


if __name__ == "__main__":
    main()
