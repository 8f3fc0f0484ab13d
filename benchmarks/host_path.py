"""Host overhead of a round beside the models, its parts, and what services and steps make of many sessions.

    python -m benchmarks.host_path --output benchmarks/results/host_path.json

Runs scripted pairs, and the embedded pair, through the three processes on loopback, with the defaults of users: audit,
metrics and logs are on. The whole round is the time between two deltas at the client. With models that take no time it
is all host, and is compared with a message on a bare stream between processes that are awake, measured in the same
run. Host time is the round less the model time that the response reports for it (reading, drafting and verifying, as
the services measure it); probabilities, rule and audit are in that.

Under load, each service's CPU time (all threads) is divided by the rounds of all sessions; that of the verifier is
without its rule, the work of a step beside the forward pass, which a second, traced run measures. A step is full if it
serves all sessions that are open.
"""

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.bare_hop import bare_hop_us
from benchmarks.load import Answer, Ask, complete, run_load
from benchmarks.prompts import load_prompts
from benchmarks.relay import Relay
from benchmarks.report import read_metric, write_report
from benchmarks.round_profile import Round, Span, read_rounds, read_spans, traced
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.v1 import gateway_pb2_grpc

ACCEPTANCE = "acceptance=0.8/0.7/0.6/0.5"
SCRIPTED = f"scripted:{ACCEPTANCE}"
WAITING = f"scripted:verify_ms=5,draft_ms=1,{ACCEPTANCE}"
RELAY_S = 1e-3
"""Delay of every connection through a relay, one way."""
LONG = 16_000
"""Tokens of texts that do not end while they are measured."""


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


def measure_round(
    stack_options: dict[str, dict[str, object]], prompts: list[str], max_tokens: int, hop_us: float
) -> dict[str, Any]:
    """Measures rounds of one session at a time, and the times of their parts. `hop_us` is a bare message's."""
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
        **whole_round(answers, hop_us),
        "host_ms_p50": statistics.median(times),
        "host_ms_mean": statistics.mean(times),
        "host_in_hops": 1e3 * statistics.median(times) / hop_us,
        "model_ms_mean": model_us / rounds / 1e3,
        "rounds": rounds,
        "median_us_of_each_leg": {leg: statistics.median(seconds) * 1e6 for leg, seconds in legs.items()},
    }


def whole_round(answers: list[Answer], hop_us: float) -> dict[str, float]:
    """Returns the time between two deltas after each completion's first ones, nothing subtracted."""
    gaps = sorted(gap for answer in answers for gap in answer.gaps[3:])
    middle = statistics.median(gaps)
    return {
        "round_ms_p50": 1e3 * middle,
        "round_ms_p99": 1e3 * gaps[int(0.99 * len(gaps))],
        "round_in_hops": 1e6 * middle / hop_us,
    }


def measure_relayed(hop_us: float) -> dict[str, float]:
    """Measures rounds of instant models, of one session, where every connection between services has a delay."""
    models = options(SCRIPTED, SCRIPTED)
    del models["gateway"]
    with ExitStack() as running:
        services = running.enter_context(LocalStack(models)).services
        ports = {name: running.enter_context(Relay(one.port, RELAY_S)).port for name, one in services.items()}
        peers = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        stack = running.enter_context(LocalStack({"gateway": peers}))
        run_load(stack.address, [Ask("hello", 32, 4)] * 4, 1)
        return whole_round(run_load(stack.address, [Ask("hello", 400, 4, seed) for seed in range(3)], 1), hop_us)


def _legs(rounds: list[Round]) -> dict[str, list[float]]:
    """Returns the times of every leg, seconds, over all rounds that passed every station."""
    legs: dict[str, list[float]] = defaultdict(list)
    for each in rounds:
        for (part, leg), seconds in each.legs.items():
            legs[f"{part}: {leg}"].append(seconds)
    return legs


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the services and the client at a moment."""

    at: float
    rounds: float
    """Of all sessions, decided by the verifier."""
    steps: float
    """Of the verifier."""
    tokens: float
    """Committed by rounds."""
    cpu_s: Mapping[str, float]
    """CPU time of the services, and of this process, the client."""

    @classmethod
    def take(cls, stack: LocalStack) -> "Reading":
        """Reads them."""
        port = stack.services["verifier"].metrics_port
        cpu_s = {name: _cpu_seconds(service.process.pid) for name, service in stack.services.items()}
        return cls(
            time.perf_counter(),
            read_metric(port, "target_passes_total"),
            read_metric(port, "engine_steps_total"),
            read_metric(port, "generation_tokens_total"),
            {**cpu_s, "client": time.process_time()},
        )


@contextmanager
def loaded(stack: LocalStack, sessions: int, prompts: Sequence[str], draft_len: int) -> Iterator[None]:
    """Keeps so many sessions decoding, each a long text after the other."""
    is_over = threading.Event()

    async def run() -> None:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)

            async def one(index: int) -> None:
                for seed in range(index, 2**31, sessions):
                    await complete(stub, Ask(prompts[index % len(prompts)], LONG, draft_len, seed))

            texts = [asyncio.create_task(one(index)) for index in range(sessions)]
            while not is_over.is_set():
                await asyncio.sleep(0.05)
            for text in texts:
                text.cancel()

    client = threading.Thread(target=asyncio.run, args=(run(),))
    client.start()
    try:
        yield
    finally:
        is_over.set()
        client.join()


def measure_load(
    stack_options: dict[str, dict[str, object]],
    sessions: int,
    seconds: float,
    prompts: Sequence[str] = ("hello",),
    draft_len: int = 4,
) -> dict[str, Any]:
    """Loads the services with so many sessions for a while, and returns rates, CPU times and how full steps are.

    Args:
        stack_options: of the services.
        sessions: open at once.
        seconds: of each of the two runs.
        prompts: of their texts.
        draft_len: draft tokens of a round; 0 for plain decoding.
    """
    with LocalStack(stack_options) as stack, loaded(stack, sessions, prompts, draft_len):
        time.sleep(min(seconds, 3.0))
        first = Reading.take(stack)
        time.sleep(seconds)
        last = Reading.take(stack)
    rounds, took_s = last.rounds - first.rounds, last.at - first.at
    cpu_ms = {name: 1e3 * (last.cpu_s[name] - first.cpu_s[name]) / rounds for name in first.cpu_s}
    rule_ms = measure_rule(stack_options, sessions, seconds, prompts, draft_len)
    fullness = rounds / (last.steps - first.steps) / sessions
    tokens_per_second = (last.tokens - first.tokens) / took_s
    return {
        "rounds_per_second": rounds / took_s,
        "tokens_per_second": tokens_per_second,
        "cpu_ms_of_a_session_and_round": {**cpu_ms, "verifier": cpu_ms["verifier"] - rule_ms, "rule": rule_ms},
        "fullness_of_steps": fullness,
        "tokens_per_second_if_all_steps_were_full": tokens_per_second / fullness,
    }


def measure_rule(
    stack_options: dict[str, dict[str, object]], sessions: int, seconds: float, prompts: Sequence[str], draft_len: int
) -> float:
    """Returns the CPU time of the verifier's steps beside the forward passes, for a session and round, ms."""
    with traced(stack_options) as (stack, folder):
        with loaded(stack, sessions, prompts, draft_len):
            time.sleep(seconds)
            rounds = Reading.take(stack).rounds
        stack.stop()
        spans = read_spans(folder)
    cpu_s = {name: _cpu_of(spans, name) for name in ("verify step", "target's forward pass")}
    return 1e3 * (cpu_s["verify step"] - cpu_s["target's forward pass"]) / rounds


def _cpu_of(spans: list[Span], name: str) -> float:
    return sum(span.cpu_s for span in spans if span.name == name)


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 4, 16, 64], help="under load [%(default)s]")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load [%(default)g]")
    parser.add_argument("--instant-only", action="store_true", help="measure a few rounds of instant models alone")
    parser.add_argument("--load-only", action="store_true", help="measure the loads alone")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    instant = options(SCRIPTED, SCRIPTED)
    results: dict[str, Any] = {}
    if not arguments.load_only:
        hop_us = bare_hop_us(0.0)
        results["bare_hop_us"] = {"at once": hop_us, "after 5 ms of rest": bare_hop_us(0.005)}
        num_texts = 3 if arguments.instant_only else 10
        results["round_with_instant_models"] = measure_round(instant, ["hello"] * num_texts, 400, hop_us)
    if not arguments.instant_only and not arguments.load_only:
        waiting, embedded = options(WAITING, WAITING), options(embedded_model("target"), embedded_model("drafter"))
        results["round_with_waiting_models"] = measure_round(waiting, ["hello"] * 5, 400, hop_us)
        results["round_with_the_embedded_pair"] = measure_round(embedded, load_prompts()[:8], 128, hop_us)
        results["round_with_instant_models_through_relays"] = measure_relayed(hop_us)
    if not arguments.instant_only:
        results["load"] = {str(n): measure_load(instant, n, arguments.seconds) for n in arguments.sessions}
    write_report(arguments, results)


if __name__ == "__main__":
    main()
