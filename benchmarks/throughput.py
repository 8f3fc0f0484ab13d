"""Throughput by number of sessions: tokens per second at several concurrencies, on the embedded pair.

    python -m benchmarks.throughput --output benchmarks/results/throughput.json

Every repetition measures all settings one after the other, so that a ratio compares runs adjacent in time; reported are
medians over the repetitions, and the mean number of rounds per step.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.load import Ask, run_load
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, read_metric, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model

MODES = {"plain": 0, "speculative": 4}
"""Draft tokens per round."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One setting in one repetition."""

    mode: str
    concurrency: int
    tokens_per_second: float
    """Of all sessions together."""
    rounds_per_step: float
    """Mean number of rounds that a forward pass of the target decided."""
    block_efficiency: float


def measure(stack: LocalStack, prompts: list[str], mode: str, concurrency: int, max_tokens: int) -> Measurement:
    """Keeps `concurrency` sessions running until every prompt is continued."""
    port = stack.services["verifier"].metrics_port
    asks = [Ask(prompt, max_tokens, MODES[mode], seed) for seed, prompt in enumerate(prompts)]
    steps, passes = read_metric(port, "engine_steps_total"), read_metric(port, "target_passes_total")
    started = time.perf_counter()
    answers = run_load(stack.address, asks, concurrency)
    seconds = time.perf_counter() - started
    steps, passes = read_metric(port, "engine_steps_total") - steps, read_metric(port, "target_passes_total") - passes
    return Measurement(
        mode=mode,
        concurrency=concurrency,
        tokens_per_second=sum(answer.statistics.num_generated_tokens for answer in answers) / seconds,
        rounds_per_step=passes / steps,
        block_efficiency=(
            sum(answer.statistics.num_emitted_tokens for answer in answers)
            / sum(answer.statistics.num_rounds for answer in answers)
        ),
    )


def measure_all(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Yields every setting's measurements, repetition by repetition."""
    options = {
        "verifier": {"model": embedded_model("target"), "threads": arguments.threads},
        "drafter": {"model": embedded_model("drafter"), "threads": 1},
        "gateway": {},
    }
    prompts = load_prompts()
    settings = list(product(MODES, arguments.concurrencies))
    with LocalStack(options) as stack:
        measure(stack, prompts[:8], "speculative", 8, 16)
        for mode, concurrency in progress(settings * arguments.repetitions, "throughput"):
            # As many prompts as keep the concurrency up for three rounds of completions.
            yield measure(stack, prompts[: max(4, 3 * concurrency)], mode, concurrency, arguments.max_tokens)


def main() -> None:
    """Measures, prints medians and ratios, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the verifier")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measurements = list(measure_all(arguments))
    rates = {
        (mode, concurrency): [
            each.tokens_per_second for each in measurements if (each.mode, each.concurrency) == (mode, concurrency)
        ]
        for mode, concurrency in product(MODES, arguments.concurrencies)
    }
    lowest, highest = min(arguments.concurrencies), max(arguments.concurrencies)
    best = {
        concurrency: max((rates[mode, concurrency] for mode in MODES), key=statistics.median)
        for concurrency in (lowest, highest)
    }
    ratios = {mode: ratio_of(rates[mode, highest], rates[mode, lowest]) for mode in MODES}
    ratios["better of both"] = ratio_of(best[highest], best[lowest])
    write_report(
        arguments,
        {
            "median_tokens_per_second": {
                f"{mode} at {concurrency}": statistics.median(own) for (mode, concurrency), own in rates.items()
            },
            f"ratio_{highest}_to_{lowest}": ratios,
            "measurements": [asdict(measurement) for measurement in measurements],
        },
    )


if __name__ == "__main__":
    main()
