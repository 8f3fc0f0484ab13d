"""Leak test over a long time: memory, sessions, cache rows, threads, open files.

    python -m benchmarks.soak --minutes 20 --output benchmarks/results/soak.json

Completions of all kinds run without a pause, a tenth of them cancelled before their end; every few seconds the resident
memory of each process is read. The slope is that of a straight line through what was read after the warm-up.
"""

import argparse
import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import load_prompts
from benchmarks.report import read_metric, write_report
from draftwire.cli.local_stack import LocalStack, ServiceProcess
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client

SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Resource use of a process at one time."""

    minutes: float
    resident_mib: float
    num_threads: int
    num_files: int

    @classmethod
    def of(cls, process: ServiceProcess, minutes: float) -> "Sample":
        """Reads /proc."""
        folder = Path(f"/proc/{process.process.pid}")
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split()[0] for name, _, value in lines if value.split()}
        num_files = len(list((folder / "fd").iterdir()))
        return cls(minutes, int(status["VmRSS"]) / 1024, int(status["Threads"]), num_files)


@dataclass(slots=True)
class Load:
    """Completions, one after the other, from several clients."""

    address: str
    completed: int = 0
    left: int = 0
    tokens: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_for_ever(self, seed: int) -> None:
        """Sends requests until `stopping` is set."""
        generator, prompts = random.Random(seed), load_prompts()
        with Client(self.address) as client:
            while not self.stopping.is_set():
                stream = client.stream(
                    generator.choice(prompts),
                    temperature=generator.choice((0.0, 0.7, 1.0)),
                    max_tokens=generator.randrange(1, 200),
                    num_speculative_tokens=generator.choice((0, 2, 4, 8)),
                    rejection_sample_method=generator.choice(("block", "token", "coupled")),
                    stop=generator.choice(((), ("\n\n", "return"))),
                )
                leaves = generator.random() < 0.1
                num_tokens = 0
                for piece in stream:
                    num_tokens += len(piece.token_ids)
                    if leaves and num_tokens > 10:
                        stream.cancel()
                        break
                with self._lock:
                    self.tokens += num_tokens
                    self.completed += stream.completion is not None
                    self.left += stream.completion is None


def slope(samples: list[Sample], after_minutes: float) -> float:
    """Returns how fast the memory grows after the warm-up, MiB a minute."""
    kept = [sample for sample in samples if sample.minutes >= after_minutes]
    return float(np.polyfit([one.minutes for one in kept], [one.resident_mib for one in kept], 1)[0])


def growth(samples: list[Sample]) -> dict[str, float]:
    """Returns by how much the memory grew, MiB, and in how many minutes 95 % of that was reached."""
    first, largest = samples[0].resident_mib, max(one.resident_mib for one in samples)
    nearly = first + 0.95 * (largest - first)
    return {
        "grown_mib": largest - first,
        "minutes_until_grown": next(one.minutes for one in samples if one.resident_mib >= nearly),
    }


def soak(minutes: float, warm_up_minutes: float, concurrency: int) -> dict[str, Any]:
    """Runs the services under load and returns their resource use."""
    options = {
        "verifier": {"model": embedded_model("target")},
        "drafter": {"model": embedded_model("drafter")},
        "gateway": {},
    }
    samples: dict[str, list[Sample]] = {name: [] for name in options}
    with LocalStack(options) as stack:
        load = Load(stack.address)
        clients = [threading.Thread(target=load.ask_for_ever, args=(number,)) for number in range(concurrency)]
        started = time.monotonic()
        for client in clients:
            client.start()
        with contextlib.suppress(KeyboardInterrupt):
            while (elapsed := (time.monotonic() - started) / 60) < minutes:
                for name, process in stack.services.items():
                    samples[name].append(Sample.of(process, elapsed))
                time.sleep(SAMPLE_SECONDS)
        load.stopping.set()
        for client in clients:
            client.join()
        time.sleep(SETTLE_SECONDS)
        left = {
            f"{name} {metric}": read_metric(stack.services[name].metrics_port, metric)
            for name in ("verifier", "drafter")
            for metric in ("num_sessions", "kv_cache_usage_perc")
        }
    return {
        "minutes": minutes,
        "concurrency": concurrency,
        "completed": load.completed,
        "left_early": load.left,
        "tokens": load.tokens,
        "still_held": left,
        "processes": {
            name: {
                "slope_mib_per_minute": slope(seen, warm_up_minutes),
                **growth(seen),
                "resident_mib": [one.resident_mib for one in seen[:: max(1, len(seen) // 20)]],
                "threads": [min(one.num_threads for one in seen), max(one.num_threads for one in seen)],
                "open_files": [min(one.num_files for one in seen), max(one.num_files for one in seen)],
            }
            for name, seen in samples.items()
        },
    }


def main() -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up-minutes", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    write_report(arguments, soak(arguments.minutes, arguments.warm_up_minutes, arguments.concurrency))


if __name__ == "__main__":
    main()
