"""Effect of a long prompt on running sessions: their gaps between tokens, before and during its prefill.

    python -m benchmarks.long_prompt --output benchmarks/results/long_prompt.json
    python -m benchmarks.long_prompt --pair scripted --output benchmarks/results/long_prompt_scripted.json
    python -m benchmarks.long_prompt --pair /tmp/370m --prompt-tokens 2048 --modes plain

Eight sessions decode, then a prompt of 4,096 tokens arrives. Measured for the drafter and the verifier together, in
plain and in speculative mode. The embedded pair has a longer context declared: its text beyond the training length
is meaningless, but the cost is real, and all processes share this machine's cores. A scripted pair sleeps instead of
computing, as if each model had a device of its own. Of a pair in a folder the context is declared longer too.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.load import Answer, Ask, complete
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.v1 import gateway_pb2_grpc

CONTEXT_LENGTH = 8192
RUNNING = 8
MODES = {"plain": 0, "speculative": 4}
"""Draft tokens of a round."""
SCRIPT = "scripted:verify_ms=8,draft_ms=2,calibration_ms=2,read_us=500,acceptance=0.8/0.7/0.6/0.5"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between the deltas of running sessions, milliseconds."""

    median: float
    p99: float
    largest: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Gaps":
        """Summarises gaps in seconds."""
        ordered = sorted(1e3 * gap for gap in seconds)
        return cls(statistics.median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1], len(ordered))


def lengthened(model: str, folder: Path) -> Path:
    """Copies a model and declares a longer context."""
    copy = folder / Path(model).name
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_LENGTH
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@dataclass(frozen=True, slots=True)
class Run:
    """One arrival of the long prompt."""

    prompt_tokens: int
    seconds_to_first_token: float
    before: list[float]
    """Seconds between deltas of the running sessions before the prompt was sent."""
    during: list[float]
    """The same from its arrival to its first token."""


async def measure(address: str, text: str, num_speculative_tokens: int, run_tokens: int, settle_s: float) -> Run:
    """Runs the sessions, and sends the prompt so many seconds later."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        asks = [Ask(prompt, run_tokens, num_speculative_tokens, seed) for seed, prompt in enumerate(load_prompts())]
        answers = [Answer(time.perf_counter()) for _ in range(RUNNING)]
        running = [asyncio.create_task(complete(stub, ask, answer)) for ask, answer in zip(asks, answers, strict=False)]
        await asyncio.sleep(settle_s)
        long = Answer(time.perf_counter())
        await complete(stub, Ask(text, 8, num_speculative_tokens), long)
        first = long.delta_times[0]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    started, sent = answers[0].sent_at, long.sent_at
    return Run(
        prompt_tokens=long.statistics.num_prompt_tokens,
        seconds_to_first_token=first - sent,
        before=[gap for answer in answers for gap in answer.gaps_between(started + settle_s / 3, sent)],
        during=[gap for answer in answers for gap in answer.gaps_between(sent, first)],
    )


def long_text(pair: str, num_tokens: int) -> str:
    """Returns a text of that many tokens: letters, each one token together with its space in the embedded tokenizer."""
    letters = ("abcdefghijklmnopqrstuvwxyz"[index * 7 % 26] for index in range(num_tokens))
    return ("" if pair == "scripted" else " ").join(letters)


def summary(runs: list[Run]) -> dict[str, object]:
    """Compares the gaps of all runs together with the median gap before the prompt was sent."""
    base = statistics.median(gap for run in runs for gap in run.before)
    return {
        "prompt_tokens": runs[0].prompt_tokens,
        "seconds_to_first_token": [run.seconds_to_first_token for run in runs],
        "gaps_before_ms": Gaps.of([gap for run in runs for gap in run.before]),
        "gaps_during_ms": Gaps.of([gap for run in runs for gap in run.during]),
        "added_to_the_median_gap_ms": Gaps.of([gap - base for run in runs for gap in run.during]),
    }


def main() -> None:
    """Measures both modes, prints the gaps, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", default="embedded", help="embedded, scripted, or a folder of target/ and drafter/")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--max-added-latency-ms", type=float, default=100.0)
    parser.add_argument("--settle-seconds", type=float, default=3.0, help="of the sessions alone [%(default)g]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of drafter and verifier [%(default)s]")
    parser.add_argument("--run-tokens", type=int, default=3000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, dict[str, object]] = {}
        for name, model in (("verifier", "target"), ("drafter", "drafter")):
            source = embedded_model(model) if arguments.pair == "embedded" else str(Path(arguments.pair) / model)
            options[name] = {
                "model": SCRIPT if arguments.pair == "scripted" else lengthened(source, Path(folder)),
                "max_added_latency_ms": arguments.max_added_latency_ms,
                "threads": arguments.threads,
            }
        results = {}
        for mode in arguments.modes:
            runs = []
            turns = progress(range(arguments.repetitions), mode)
            for _ in turns:  # each on new services, whose prefix caches are empty
                with LocalStack({**options, "gateway": {}}) as stack:
                    text = long_text(arguments.pair, arguments.prompt_tokens)
                    how = (MODES[mode], arguments.run_tokens, arguments.settle_seconds)
                    runs.append(asyncio.run(measure(stack.address, text, *how)))
            results[mode] = summary(runs)
    write_report(arguments, {"max_added_latency_ms": arguments.max_added_latency_ms, **results})


if __name__ == "__main__":
    main()
