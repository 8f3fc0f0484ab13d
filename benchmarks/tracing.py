"""Cost of tracing: rounds per second, and CPU time of a round in each service, with tracing off and on.

    python -m benchmarks.tracing --output benchmarks/results/tracing.json

Runs the embedded pair through the three processes on loopback, once without tracing and once with every request traced,
their spans sent to a collector in this process that only counts them. Both stacks stand side by side, and load goes to
one after the other, many times over, so that a ratio compares runs adjacent in time; reported are medians, and the
CPU time of all rounds together. Another checkout's services can be measured as a third stack: `--baseline FOLDER`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.load import Ask, run_load
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model

SERVICES = ("gateway", "verifier", "drafter")
OFF, ON, BASELINE = "off", "on", "baseline"


class CountingCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans and only counts them."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Counts the received spans."""
        self.num_spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One stack under load, once."""

    mode: str
    concurrency: int
    rounds: int
    rounds_per_second: float
    tokens_per_second: float
    cpu_s: dict[str, float]
    """CPU time of each service, all threads."""
    median_gap_ms: float
    """Between two deltas of a completion."""


@contextmanager
def collecting() -> Iterator[tuple[CountingCollector, str]]:
    """Runs a collector and yields it with its endpoint."""
    collector, server = CountingCollector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1.0).wait()


def start_stacks(exits: ExitStack, endpoint: str, baseline: Path | None) -> dict[str, LocalStack]:
    """Starts the stacks that are compared."""
    models = {name: str(Path(embedded_model(name)).resolve()) for name in ("target", "drafter")}
    plain: dict[str, dict[str, object]] = {
        "verifier": {"model": models["target"]},
        "drafter": {"model": models["drafter"]},
        "gateway": {},
    }
    traced = {name: {**options, "otlp_endpoint": endpoint} for name, options in plain.items()}
    stacks = {OFF: exits.enter_context(LocalStack(plain)), ON: exits.enter_context(LocalStack(traced))}
    if baseline is not None:
        with chdir(baseline), patch.dict(os.environ, {"PYTHONPATH": str(baseline)}):
            stacks[BASELINE] = exits.enter_context(LocalStack(plain))
    return stacks


def measure(mode: str, stack: LocalStack, asks: list[Ask], concurrency: int) -> Measurement:
    """Loads a stack until every completion is done."""
    before = _cpu_seconds(stack)
    started = time.perf_counter()
    answers = run_load(stack.address, asks, concurrency)
    seconds, used = time.perf_counter() - started, _cpu_seconds(stack)
    rounds = sum(answer.statistics.num_rounds for answer in answers)
    return Measurement(
        mode=mode,
        concurrency=concurrency,
        rounds=rounds,
        rounds_per_second=rounds / seconds,
        tokens_per_second=sum(answer.statistics.num_generated_tokens for answer in answers) / seconds,
        cpu_s={name: used[name] - before[name] for name in used},
        median_gap_ms=1e3 * statistics.median(gap for answer in answers for gap in answer.gaps),
    )


def _cpu_seconds(stack: LocalStack) -> dict[str, float]:
    """Returns the CPU time of each service, user and system, all threads."""
    used = {}
    for name in SERVICES:
        text = Path(f"/proc/{stack.services[name].process.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def summary(measurements: list[Measurement], concurrency: int) -> dict[str, Any]:
    """Returns medians of each mode at a concurrency, and its CPU time.

    Ratios are to the same repetition with tracing off.
    """
    of_mode: dict[str, list[Measurement]] = {}
    for each in measurements:
        if each.concurrency == concurrency:
            of_mode.setdefault(each.mode, []).append(each)
    return {
        mode: {
            "rounds_per_second": statistics.median(each.rounds_per_second for each in own),
            "tokens_per_second": statistics.median(each.tokens_per_second for each in own),
            "median_gap_ms": statistics.median(each.median_gap_ms for each in own),
            "cpu_us_per_round": {
                name: 1e6 * sum(each.cpu_s[name] for each in own) / sum(each.rounds for each in own)
                for name in SERVICES
            },
            "rounds_per_second_over_off": ratio_of(
                [each.rounds_per_second for each in own], [off.rounds_per_second for off in of_mode[OFF]]
            ),
        }
        for mode, own in of_mode.items()
    }


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="completions of a repetition")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--baseline", type=Path, help="another checkout, whose services are measured too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    asks = [Ask(text, arguments.max_tokens, 4, seed) for seed, text in enumerate(load_prompts()[: arguments.prompts])]
    measurements: list[Measurement] = []
    with ExitStack() as exits:
        collector, endpoint = exits.enter_context(collecting())
        stacks = start_stacks(exits, endpoint, arguments.baseline)
        for stack in stacks.values():
            run_load(stack.address, asks, max(arguments.concurrency))
        for repetition in range(arguments.repeat):
            for concurrency in arguments.concurrency:
                turns = list(stacks.items())
                shift = repetition % len(turns)
                for mode, stack in turns[shift:] + turns[:shift]:  # rotates the order
                    measurements.append(measure(mode, stack, asks, concurrency))
    results = {
        f"concurrency {concurrency}": summary(measurements, concurrency) for concurrency in arguments.concurrency
    }
    write_report(arguments, {**results, "spans": collector.num_spans, "measurements": measurements})


if __name__ == "__main__":
    main()
