"""What blocks that end where the drafter is not sure gain, and what its confidence costs.

    python -m benchmarks.confidence [--turns 6] [--texts 2] [--only-cost] [--output FILE]

One session of the embedded pair, blocks of fixed lengths: each `stop_below` in turns beside none, with the same prompts
and seeds, in an order that is turned round with every turn. A ratio is tokens/s over those of the same length without,
of the same turn; "off" is none once more, and shows what a difference has to be to mean something. `--only-cost` times
`confidence_of` alone, for a drawn token.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch

from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import AsyncClient
from draftwire.options.confidence.confident_chains import confidence_of

TEMPERATURES = (0.0, 0.6, 1.0)
LENGTHS = (4, 8)
WAYS = {"none": 0.0, "0.3": 0.3, "0.5": 0.5, "0.7": 0.7, "off": 0.0}
"""`stop_below` by the name of a column; 0 does not even ask."""
MAX_TOKENS = 64
VOCABULARIES = (4_096, 128_256)
REPEATS = 400


class Way:
    """What one way of drafting has made so far."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.num_tokens = self.num_rounds = self.num_drafted = self.num_accepted = 0

    async def run(
        self, client: AsyncClient, prompts: Sequence[str], seed: int, length: int, stop: float, temperature: float
    ) -> None:
        """Runs a turn: one text after the other."""
        num_tokens, started = 0, time.perf_counter()
        for place, prompt in enumerate(prompts):
            completion = await client.generate(
                prompt,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                temperature=temperature,
                seed=seed + place,
                num_speculative_tokens=length,
                stop_below=stop,
            )
            statistics = completion.statistics
            num_tokens += statistics.num_emitted_tokens
            self.num_rounds += statistics.num_rounds
            self.num_drafted += statistics.num_draft_tokens
            self.num_accepted += statistics.num_accepted_tokens
        self.num_tokens += num_tokens
        self.rates.append(num_tokens / (time.perf_counter() - started))

    def row(self, base: "Way") -> dict[str, object]:
        """Returns its figures beside those of the way without."""
        return {
            "ratio": asdict(ratio_of(self.rates, base.rates)),
            "tokens_per_second": median(self.rates),
            "tokens_per_round": self.num_tokens / self.num_rounds,
            "drafted_per_round": self.num_drafted / self.num_rounds,
            "acceptance": self.num_accepted / max(1, self.num_drafted),
        }


async def measure(address: str, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Runs all turns; returns the rows by temperature and length."""
    results: dict[str, dict[str, object]] = {}
    prompts = cycle(load_prompts())
    async with AsyncClient(address) as client:
        for temperature in TEMPERATURES:
            cells = {(length, name): Way() for length in LENGTHS for name in WAYS}
            await Way().run(client, list(islice(prompts, 4)), 0, 4, 0.5, temperature)
            for turn in progress(range(arguments.turns), f"temperature {temperature}"):
                own = list(islice(prompts, arguments.texts))
                for length, name in list(cells)[:: 1 if turn % 2 == 0 else -1]:
                    await cells[length, name].run(client, own, 100 * turn, length, WAYS[name], temperature)
            for (length, name), way in cells.items():
                row = way.row(cells[length, "none"])
                results.setdefault(f"temperature {temperature:g}, length {length}", {})[name] = row
                print(f"{temperature:g} {length} {name:5}", {key: row[key] for key in list(row)[:5]}, flush=True)
    return results


def cost() -> dict[str, dict[str, float]]:
    """Returns the time of `confidence_of` for rows of a vocabulary on one thread, microseconds a row."""
    torch.set_num_threads(1)
    costs: dict[str, dict[str, float]] = {}
    for vocab_size in VOCABULARIES:
        for rows in (1, 8):
            logits, times = torch.randn(rows, vocab_size), []
            for _ in range(REPEATS):
                started = time.perf_counter()
                confidence_of(logits).tolist()
                times.append((time.perf_counter() - started) / rows * 1e6)
            costs.setdefault(f"{vocab_size:,} tokens", {})[f"{rows} rows, us a row"] = median(times)
    return costs


def main() -> None:
    """Measures, and writes a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--texts", type=int, default=2, help="in a turn of each way")
    parser.add_argument("--only-cost", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, object] = {"confidence": cost()}
    if not arguments.only_cost:
        options = stack_options(EMBEDDED, None, None)
        options["gateway"] |= {"local_drafts": "none"}
        with LocalStack(options) as stack:
            results["ways"] = asyncio.run(measure(stack.address, arguments))
    write_report(arguments, results)


if __name__ == "__main__":
    main()
