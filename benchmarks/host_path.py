"""Host overhead of a round beside the models, its parts, and rounds per second of a gateway.

    python -m benchmarks.host_path --output benchmarks/results/host_path.json

Runs scripted pairs, and the embedded pair, through the three processes on loopback. The host time of a round is the
time between two deltas at the client less the model time that the response reports for a round (reading, drafting and
verifying, as the services measure it). A round has three messages; the latency of a message on a bare stream is
measured for comparison. The gateway's capacity is computed from its CPU time, all threads.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.bare_hop import bare_hop_us
from benchmarks.load import Answer, Ask, run_load
from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from benchmarks.round_profile import Round, read_rounds, read_spans, traced
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import embedded_model

ACCEPTANCE = "acceptance=0.8/0.7/0.6/0.5"
SCRIPTED = f"scripted:{ACCEPTANCE}"
WAITING = f"scripted:verify_ms=5,draft_ms=1,{ACCEPTANCE}"


def options(target: str, drafter: str) -> dict[str, dict[str, object]]:
    """Returns the options of a stack of one-threaded services."""
    return {
        "verifier": {"model": target, "max_sessions": 256, "kv_cache_tokens": 2**20},
        "drafter": {"model": drafter, "max_sessions": 256, "kv_cache_tokens": 2**20},
        "gateway": {},
    }


def host_times(answers: list[Answer]) -> list[float]:
    """Returns the host time of every round after each completion's first tokens, milliseconds.

    The model time that is subtracted is the mean of the completion's rounds; nearly all have the same shape.
    """
    times: list[float] = []
    for answer in answers:
        spent = answer.statistics
        model_us = spent.calibration_duration_us + spent.draft_duration_us + spent.verify_duration_us
        times += [1e3 * gap - model_us / spent.num_rounds / 1e3 for gap in answer.gaps[3:]]
    return times


def measure_round(stack_options: dict[str, dict[str, object]], prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Measures rounds of one session at a time, and the times of their parts."""
    with traced(stack_options) as (stack, folder):
        run_load(stack.address, [Ask(prompts[0], 32, 4)] * 4, 1)
        asks = [Ask(prompt, max_tokens, 4, seed) for seed, prompt in enumerate(prompts)]
        answers = run_load(stack.address, asks, 1)
        stack.stop()  # the services write their spans
        legs = _legs(list(read_rounds(read_spans(folder), answers[0].sent_at)))
    times = sorted(host_times(answers))
    spent = [answer.statistics for answer in answers]
    rounds = sum(each.num_rounds for each in spent)
    model_us = sum(each.calibration_duration_us + each.draft_duration_us + each.verify_duration_us for each in spent)
    return {
        "host_ms_p50": statistics.median(times),
        "host_ms_mean": statistics.mean(times),
        "model_ms_mean": model_us / rounds / 1e3,
        "rounds": rounds,
        "median_us_of_each_leg": {leg: statistics.median(seconds) * 1e6 for leg, seconds in legs.items()},
    }


def _legs(rounds: list[Round]) -> dict[str, list[float]]:
    """Returns the times of every leg, seconds, over all rounds that passed every station."""
    legs: dict[str, list[float]] = defaultdict(list)
    for each in rounds:
        for (part, leg), seconds in each.legs.items():
            legs[f"{part}: {leg}"].append(seconds)
    return legs


def measure_capacity(concurrency: int, max_tokens: int) -> dict[str, Any]:
    """Loads the services with a scripted pair that takes no time, and returns rates from each service's CPU time."""
    with LocalStack(options(SCRIPTED, SCRIPTED)) as stack:
        asks = [Ask("hello", max_tokens, 4, seed) for seed in range(concurrency)]
        run_load(stack.address, [Ask("hello", 64, 4)] * concurrency, concurrency)
        before = {name: _cpu_seconds(service.process.pid) for name, service in stack.services.items()}
        started = time.perf_counter()
        answers = run_load(stack.address, asks, concurrency)
        seconds = time.perf_counter() - started
        used = {name: _cpu_seconds(stack.services[name].process.pid) - before[name] for name in before}
    rounds = sum(answer.statistics.num_rounds for answer in answers)
    return {
        "concurrency": concurrency,
        "rounds": rounds,
        "rounds_per_second_of_the_whole": rounds / seconds,
        "rounds_per_cpu_second": {name: rounds / cpu for name, cpu in used.items()},
    }


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--instant-only", action="store_true", help="measure a few rounds of instant models alone")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.instant_only:
        rounds = measure_round(options(SCRIPTED, SCRIPTED), ["hello"] * 3, 400)
        write_report(arguments, {"round_with_instant_models": rounds})
        return
    embedded = options(embedded_model("target"), embedded_model("drafter"))
    results = {
        "bare_hop_us": {"at once": bare_hop_us(0.0), "after 5 ms of rest": bare_hop_us(0.005)},
        "round_with_instant_models": measure_round(options(SCRIPTED, SCRIPTED), ["hello"] * 10, 400),
        "round_with_waiting_models": measure_round(options(WAITING, WAITING), ["hello"] * 5, 400),
        "round_with_the_embedded_pair": measure_round(embedded, load_prompts()[:8], 128),
        "gateway": measure_capacity(arguments.concurrency, 2000),
    }
    write_report(arguments, results)


if __name__ == "__main__":
    main()
