"""How full steps are while texts follow each other: tokens/s, first tokens, and gaps between tokens.

    python -m tools.synth --shape 370m --draft-layers 2 --agreement 0.8 --temperature 1.0 --out /tmp/370m
    python -m benchmarks.full_steps --large /tmp/370m --output benchmarks/results/full_steps.json
    python -m benchmarks.full_steps --large /tmp/370m --prompts-joined 2

Each session requests a text when its previous one has ended, of another prompt that nobody has read. A step is full if
it decides a round of every session: a text whose prompt is being read leaves its place empty.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.adaptive import Cell, options_of
from benchmarks.load import Answer, Ask, complete
from benchmarks.prompts import load_prompts
from benchmarks.report import read_metric, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.v1 import gateway_pb2_grpc


def asks(num_joined: int, draft_len: int, lengths: tuple[int, int]) -> Iterator[Ask]:
    """Yields what is requested one after the other, each with so many prompts as one: different ones 200 times. Texts
    of equal lengths stay in step with each other.
    """
    generator, prompts = random.Random(5), load_prompts()
    for seed in range(2**31):
        parts = [prompts[(seed + 7 * part) % len(prompts)] for part in range(num_joined)]
        yield Ask("\n".join(parts), generator.randint(*lengths), draft_len, seed)


def counters(stack: LocalStack) -> Iterator[float]:
    """Yields the time, and the verifier's decided rounds, steps and committed tokens."""
    yield time.perf_counter()
    for name in ("target_passes_total", "engine_steps_total", "generation_tokens_total"):
        yield read_metric(stack.services["verifier"].metrics_port, name)


async def measure(stack: LocalStack, wanted: Iterator[Ask], arguments: argparse.Namespace) -> dict[str, Any]:
    """Keeps the sessions busy, and returns the figures of a while after the start."""
    answers: list[Answer] = []
    async with grpc.aio.insecure_channel(stack.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def session() -> None:
            for ask in wanted:
                answers.append(Answer(time.perf_counter()))
                await complete(stub, ask, answers[-1])

        tasks = [asyncio.create_task(session()) for _ in range(arguments.sessions)]
        await asyncio.sleep(arguments.settle_seconds)
        first = await asyncio.to_thread(lambda: list(counters(stack)))
        await asyncio.sleep(arguments.seconds)
        last = await asyncio.to_thread(lambda: list(counters(stack)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    took_s, rounds, steps, tokens = (later - earlier for earlier, later in zip(first, last, strict=True))
    fullness = rounds / steps / arguments.sessions
    tokens_per_second = tokens / took_s
    begun = [answer for answer in answers if answer.delta_times and first[0] <= answer.delta_times[0] <= last[0]]
    return {
        "tokens_per_second": tokens_per_second,
        "fullness_of_steps": fullness,
        "tokens_per_second_if_all_steps_were_full": tokens_per_second / fullness,
        "steps": steps,
        "prompt_tokens_mean": statistics.mean(
            answer.statistics.num_prompt_tokens for answer in answers if answer.statistics.num_prompt_tokens
        ),
        "texts_begun": len(begun),
        "first_token_s": percentiles([answer.delta_times[0] - answer.sent_at for answer in begun]),
        "gap_s": percentiles([gap for answer in answers for gap in answer.gaps_between(first[0], last[0])]),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the largest."""
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))], "largest": ordered[-1]}


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", type=Path, help="folder of the 374 M pair; without it, the embedded one")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--prompts-joined", type=int, default=1, help="committed prompts in each prompt [%(default)s]")
    parser.add_argument("--text-tokens", type=int, nargs=2, default=(48, 64), help="at least and at most [48 64]")
    parser.add_argument("--draft-len", type=int, default=0, help="draft tokens of a round [plain decoding]")
    parser.add_argument("--seconds", type=float, default=45.0, help="that are measured [%(default)g]")
    parser.add_argument("--settle-seconds", type=float, default=10.0, help="before [%(default)g]")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cell = Cell("full steps", "embedded" if arguments.large is None else "large", arguments.sessions)
    with LocalStack(options_of(cell, arguments.large)) as stack:
        wanted = asks(arguments.prompts_joined, arguments.draft_len, tuple(arguments.text_tokens))
        write_report(arguments, asyncio.run(measure(stack, wanted, arguments)))


if __name__ == "__main__":
    main()
