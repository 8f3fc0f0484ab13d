"""Speed and memory of the three processes on one machine, by threads and CPU affinity.

    python -m benchmarks.placement --target DIR/target --drafter DIR/drafter --output benchmarks/results/placement.json

Each placement is restarted in every repetition, one after the other, and measured with one session and with several,
plain and speculative. Reported are medians over repetitions, ratios to the first placement, and the memory of each
process after the load.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.load import Ask, run_load
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options

WAITING = {
    "": {},
    "sleeping": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "infinite"},
}
"""Variables of the services."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How the processes share the cores."""

    verifier_threads: int
    drafter_threads: int
    is_pinned: bool = False
    """Drafter and gateway on the last core, the verifier on the others."""
    waiting: str = ""
    """How OpenMP's threads wait, if not as in the services: a key of `WAITING`."""

    @property
    def name(self) -> str:
        """Short description."""
        threads = f"verifier {self.verifier_threads}, drafter {self.drafter_threads}"
        return ", ".join(filter(None, [threads, "pinned" * self.is_pinned, self.waiting]))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One placement under one load in one repetition."""

    placement: str
    load: str
    tokens_per_second: float
    """Of all sessions together."""
    megabytes: dict[str, int]
    """Resident memory by process."""


def placements(cores: int) -> list[Placement]:
    """Returns the placements for a number of cores."""
    chosen = [
        Placement(cores, cores),
        Placement(cores, 1),
        Placement(max(1, cores - 1), 1),
        Placement(max(1, cores - 1), 1, is_pinned=True),
        Placement(cores, cores, waiting="sleeping"),
        Placement(cores, cores, waiting="spinning"),
    ]
    return list(dict.fromkeys(chosen))


def measure(placement: Placement, arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Starts the services and yields a measurement for each load."""
    options = stack_options(arguments.target, arguments.drafter, arguments.num_speculative_tokens)
    cache = {"kv_cache_tokens": 16_384}
    options["verifier"].update(threads=placement.verifier_threads, **cache)
    options["drafter"].update(threads=placement.drafter_threads, **cache)
    with patch.dict(os.environ, WAITING[placement.waiting]), LocalStack(options) as stack:
        if placement.is_pinned:
            pin(stack)
        prompts = [prompt[:120] for prompt in load_prompts()]
        run_load(stack.address, [Ask(prompts[0], 8, arguments.num_speculative_tokens)], 1)
        # Spinning is twenty times slower already with one session.
        for concurrency in arguments.concurrencies[: 1 if placement.waiting == "spinning" else None]:
            for kind, block_length in (("plain", 0), ("speculative", arguments.num_speculative_tokens)):
                asks = [
                    Ask(prompt, arguments.max_tokens, block_length, seed)
                    for seed, prompt in enumerate(prompts[: 2 * concurrency])
                ]
                answers = run_load(stack.address, asks, concurrency)
                seconds = max(answer.delta_times[-1] for answer in answers) - min(answer.sent_at for answer in answers)
                tokens = sum(answer.statistics.num_generated_tokens for answer in answers)
                yield Measurement(placement.name, f"{kind} at {concurrency}", tokens / seconds, memory(stack))


def speeds_of(measurements: list[Measurement], placement: Placement, load: str) -> list[float]:
    """Returns the tokens per second of all repetitions."""
    name = placement.name
    return [each.tokens_per_second for each in measurements if (each.placement, each.load) == (name, load)]


def pin(stack: LocalStack) -> None:
    """Puts the verifier on all cores but the last, and the other processes on that."""
    *others, last = sorted(os.sched_getaffinity(0))
    for name, service in stack.services.items():
        for thread in Path(f"/proc/{service.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), set(others or [last]) if name == "verifier" else {last})


def memory(stack: LocalStack) -> dict[str, int]:
    """Returns the resident memory of each process, MB."""
    pages = {
        name: Path(f"/proc/{one.process.pid}/statm").read_text().split()[1] for name, one in stack.services.items()
    }
    return {name: int(count) * os.sysconf("SC_PAGE_SIZE") // 10**6 for name, count in pages.items()}


def main() -> None:
    """Measures, prints medians and ratios, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--drafter", help="default: the embedded one, beside the embedded target")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tried = placements(os.cpu_count() or 1)
    measurements = [
        measurement
        for placement in progress(tried * arguments.repetitions, "placements")
        for measurement in measure(placement, arguments)
    ]
    loads = list(dict.fromkeys(each.load for each in measurements))
    rates = {
        placement.name: {load: speeds for load in loads if (speeds := speeds_of(measurements, placement, load))}
        for placement in tried
    }
    first = rates[tried[0].name]
    write_report(
        arguments,
        {
            "median_tokens_per_second": {
                name: {load: statistics.median(speeds) for load, speeds in own.items()} for name, own in rates.items()
            },
            "ratio_to_the_first": {
                name: {load: ratio_of(speeds, first[load]) for load, speeds in own.items()}
                for name, own in rates.items()
            },
            "megabytes": {each.placement: each.megabytes for each in measurements},
            "measurements": [asdict(measurement) for measurement in measurements],
        },
    )


if __name__ == "__main__":
    main()
