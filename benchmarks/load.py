"""Load generator for a running gateway: concurrent completions, each timed delta by delta. Shared by the benchmarks."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from draftwire.v1 import gateway_pb2, gateway_pb2_grpc, session_pb2


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion to request."""

    prompt: str
    max_tokens: int
    num_speculative_tokens: int
    seed: int = 0
    temperature: float = 1.0
    rule: str = "block"
    """By which drafts are judged."""
    num_draft_nodes: int = 0
    """Draft tokens of a token tree; 0 drafts chains."""


@dataclass(slots=True)
class Answer:
    """A completion as its client received it."""

    sent_at: float
    """By `time.perf_counter`, seconds."""
    delta_times: list[float] = field(default_factory=list)
    """Arrival of each delta."""
    statistics: gateway_pb2.GenerationStatistics = field(default_factory=gateway_pb2.GenerationStatistics)

    @property
    def gaps(self) -> list[float]:
        """Seconds between deltas."""
        return [later - earlier for earlier, later in pairwise(self.delta_times)]

    def gaps_between(self, start: float, end: float) -> list[float]:
        """Returns the seconds between deltas of which at least the later lies within a span of time."""
        return [later - earlier for earlier, later in pairwise(self.delta_times) if start <= later <= end]


async def complete(stub: gateway_pb2_grpc.GatewayServiceAsyncStub, ask: Ask, answer: Answer | None = None) -> Answer:
    """Requests one completion; fills `answer` as deltas arrive."""
    request = gateway_pb2.GenerateRequest(
        text=ask.prompt,
        sampling=session_pb2.SamplingParameters(temperature=ask.temperature),
        rejection_sample_method=ask.rule,
        max_tokens=ask.max_tokens,
        num_speculative_tokens=ask.num_speculative_tokens,
        seed=ask.seed,
        num_draft_nodes=ask.num_draft_nodes or None,
    )
    answer = answer or Answer(time.perf_counter())
    async for response in stub.Generate(request):
        if response.WhichOneof("event") == "delta":
            answer.delta_times.append(time.perf_counter())
        else:
            answer.statistics = response.finish.statistics
    return answer


async def _run(address: str, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def gated(ask: Ask) -> Answer:
            async with gate:
                return await complete(stub, ask)

        return list(await asyncio.gather(*(gated(ask) for ask in asks)))


def run_load(address: str, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
    """Requests completions, at most `concurrency` at once, and returns the answers in the order of `asks`."""
    return asyncio.run(_run(address, asks, concurrency))
