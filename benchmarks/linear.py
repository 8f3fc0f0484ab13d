"""Time of a matrix product of a few rows, with weights as models store them, packed, and packed with repeated rows.

python -m benchmarks.linear --output benchmarks/results/linear.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paired import ratio_of
from benchmarks.report import write_report
from draftwire.models.linear import Linear

NUM_LAYERS = 24
"""Layers used in turn, together far larger than the CPU caches."""
NUM_REPEATED = 6
"""Rows that fewer ones are repeated to, in the third arrangement; `draftwire.models.linear` does it on some CPUs."""


@torch.inference_mode()
def milliseconds(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor) -> float:
    """Returns the time of one product, the mean over all layers in turn."""
    started = time.perf_counter()
    for layer in layers:
        layer(rows)
    return (time.perf_counter() - started) / len(layers) * 1e3


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 5, 9, 17])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stored = [torch.nn.Linear(arguments.inputs, arguments.outputs, bias=False) for _ in range(NUM_LAYERS)]
    arranged = [Linear.of(layer, streamed=True) for layer in stored]
    as_of_six = [copy(layer) for layer in arranged]
    for alone, repeating in zip(arranged, as_of_six, strict=True):
        alone.least_rows, repeating.least_rows = 1, NUM_REPEATED
    results = {}
    for count in arguments.rows:
        rows = torch.randn(count, arguments.inputs)
        turns = [
            tuple(milliseconds(layers, rows) for layers in (stored, arranged, as_of_six))
            for _ in range(arguments.repetitions)
        ]
        of_stored, of_arranged, of_repeating = map(list, zip(*turns, strict=True))
        results[f"{count} rows"] = {
            "stored_ms": statistics.median(of_stored),
            "arranged_ms": statistics.median(of_arranged),
            "ratio": ratio_of(of_stored, of_arranged),
            "as_of_six_ms": statistics.median(of_repeating),
            "ratio_as_of_six": ratio_of(of_arranged, of_repeating),
        }
    write_report(arguments, {"products": results})


if __name__ == "__main__":
    main()
