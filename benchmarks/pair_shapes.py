"""Predicts how much drafting pays on a pair of given shapes, before anybody trains it.

    python -m benchmarks.pair_shapes --output benchmarks/results/pair_shapes.json

The time of a forward pass depends on the shape alone, so random weights suffice: passes of every candidate target over
one token and over a draft block with the token before it, and of every candidate drafter over one token. With an
assumed acceptance, block length and time that a round takes beside its passes they give tokens per second, and their
ratio to plain decoding.

A token of a draft is assumed to be accepted with the same probability at every position, so that a round of `k` draft
tokens gives `(1 - a**(k + 1)) / (1 - a)` tokens (Leviathan et al. 2023, equation 1; block verification gives more).
"""

import argparse
import statistics
from pathlib import Path

import torch

from benchmarks.decoder import fill, milliseconds
from benchmarks.report import progress, write_report
from draftwire.models.decoders import decoder_of
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from tools.embedded_pair.pair import PairShape

BLOCK_LENGTHS = (2, 3, 4, 5, 6, 8)
ACCEPTANCE = (0.55, 0.65, 0.75, 0.85)
VOCAB_SIZE = 4096
CACHE_TOKENS = 2048
HEAD_DIM = 64
TARGETS = ("8x320x5", "4x448x7", "16x256x4", "20x256x4", "24x192x4", "28x192x4")
DRAFTERS = ("8x128x2", "1x256x4", "2x256x4", "2x192x3")


def shape_of(text: str) -> PairShape:
    """Reads `LAYERSxWIDTH` or `LAYERSxWIDTHxHEADS`, with heads of 64 dimensions and MLPs of three times the width."""
    try:
        layers, width, heads = (int(part) for part in (text if text.count("x") == 2 else f"{text}x0").split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxWIDTH or LAYERSxWIDTHxHEADS") from None
    return PairShape(width, 3 * width, layers, heads or max(1, width // HEAD_DIM), HEAD_DIM)


def written(shape: PairShape) -> str:
    """Returns a shape as `shape_of` reads it."""
    return f"{shape.layers}x{shape.hidden_size}x{shape.heads}"


class TimedModel:
    """A model that extends a text of a given length by some tokens, and forgets them again."""

    def __init__(self, shape: PairShape, length: int, num_threads: int) -> None:
        network = shape.build(VOCAB_SIZE, seed=0)
        network.eval()
        self.million_parameters = sum(weight.numel() for weight in network.parameters()) / 1e6
        self._num_threads, self._length = num_threads, length
        torch.set_num_threads(num_threads)
        self._model = torch_model(decoder_of(network, "lean", consumes=True), CACHE_TOKENS)
        fill(self._model)
        self._text = self._model.cache.open()
        self._model.cache.append(self._text, length)

    @torch.inference_mode()
    def times(self, num_tokens: int, count: int) -> list[float]:
        """Milliseconds of `count` forward passes over `num_tokens` tokens."""
        torch.set_num_threads(self._num_threads)
        ids = [token % 97 for token in range(num_tokens)]

        def step() -> None:
            self._model.read([Reading(self._text, ids, num_tokens)])
            self._model.cache.truncate(self._text, self._length)

        step()
        return milliseconds(step, count)


def tokens_of_a_round(acceptance: float, length: int) -> float:
    """Expected tokens of a round: accepted ones and one from the target."""
    return sum(acceptance**position for position in range(length + 1))


def main() -> None:
    """Measures, predicts, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", nargs="+", type=shape_of, default=[shape_of(each) for each in TARGETS])
    parser.add_argument("--drafters", nargs="+", type=shape_of, default=[shape_of(each) for each in DRAFTERS])
    parser.add_argument("--threads", type=int, default=1, help="of the target")
    parser.add_argument("--drafter-threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of the text that is extended")
    parser.add_argument("--round-ms", type=float, default=6.0, help="time of a round beside its passes")
    parser.add_argument("--plain-ms", type=float, default=1.5, help="time of a plain step beside its pass")
    parser.add_argument("--draw-ms", type=float, default=0.3, help="time of drawing a draft token, beside its pass")
    parser.add_argument("--steps", type=int, default=30, help="per series")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    targets = {written(shape): shape for shape in arguments.targets}
    drafters = {written(shape): shape for shape in arguments.drafters}
    models = {
        f"target {name}": TimedModel(shape, arguments.length, arguments.threads) for name, shape in targets.items()
    }
    models |= {
        f"drafter {name}": TimedModel(shape, arguments.length, arguments.drafter_threads)
        for name, shape in drafters.items()
    }
    rows = {name: [1, *(k + 1 for k in BLOCK_LENGTHS)] if name.startswith("target") else [1] for name in models}
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in models for count in rows[name]}
    for _ in progress(range(arguments.repetitions), "measuring"):
        for name, count in times:
            times[name, count].append(statistics.median(models[name].times(count, arguments.steps)))
    passes = {key: statistics.median(series) for key, series in times.items()}

    def best(target: str, drafter: str, acceptance: float) -> dict[str, float]:
        plain = 1e3 / (passes[target, 1] + arguments.plain_ms)
        draft_ms = passes[drafter, 1] + arguments.draw_ms
        rates = {
            length: 1e3
            * tokens_of_a_round(acceptance, length)
            / (passes[target, length + 1] + length * draft_ms + arguments.round_ms)
            for length in BLOCK_LENGTHS
        }
        length = max(rates, key=lambda each: rates[each])
        return {"length": length, "tokens_per_s": rates[length], "over_plain": rates[length] / plain}

    write_report(
        arguments,
        {
            "passes_ms": {
                name: {
                    "million_parameters": models[name].million_parameters,
                    **{f"{count} tokens": passes[name, count] for count in rows[name]},
                }
                for name in models
            },
            "predictions": {
                f"{target} with {drafter}": {
                    f"acceptance {acceptance}": best(f"target {target}", f"drafter {drafter}", acceptance)
                    for acceptance in ACCEPTANCE
                }
                for target in targets
                for drafter in drafters
            },
        },
    )


if __name__ == "__main__":
    main()
