"""Measures throughput and latency of a gateway at the client."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwire.client.aio import AsyncClient
from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt
from draftwire.client.request_maker import Options, check_is_one


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one completion, in seconds of the client's clock."""

    completion: Completion
    first_token_s: float
    """Seconds from sending the request to the first token."""
    duration_s: float
    """Seconds from sending the request to the end."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return len(self.completion.token_ids)

    @property
    def per_token_s(self) -> float | None:
        """Mean time between two tokens; None for fewer than two tokens."""
        return (self.duration_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Run:
    """Timings of the completions of one benchmark run."""

    timings: list[Timing]
    duration_s: float
    """Seconds from the first request to the end of the last completion."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(timing.num_tokens for timing in self.timings)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all completions."""
        return self.num_tokens / self.duration_s

    @property
    def completions_per_second(self) -> float:
        """Finished completions per second."""
        return len(self.timings) / self.duration_s

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per forward pass of the target, over all rounds."""
        statistics = [timing.completion.statistics for timing in self.timings]
        return sum(one.num_emitted_tokens for one in statistics) / max(1, sum(one.num_rounds for one in statistics))

    @property
    def acceptance_rate(self) -> float | None:
        """`Completion.acceptance_rate` over all draft tokens of the run; None where none were drafted."""
        statistics = [timing.completion.statistics for timing in self.timings]
        num_positions = sum(one.num_draft_positions or one.num_draft_tokens for one in statistics)
        return sum(one.num_accepted_tokens for one in statistics) / num_positions if num_positions else None


async def measure(
    client: AsyncClient,
    jobs: Sequence[tuple[Prompt, Options]],
    concurrency: int,
    on_end: Callable[[], object] = lambda: None,
) -> Run:
    """Completes all prompts, `concurrency` at a time: when a completion ends, the next one starts.

    The client is already connected, so that no timing includes the connection. `on_end` is called after each
    completion.

    Raises:
        InvalidRequestError: a job requests several completions.
        DraftwireError: a completion failed; the others are cancelled.
    """
    for prompt, options in jobs:
        check_is_one(prompt, options)
    timings: list[Timing | None] = [None] * len(jobs)
    waiting = iter(range(len(jobs)))

    async def work() -> None:
        for number in waiting:
            prompt, options = jobs[number]
            timings[number] = await _time(client, prompt, options)
            on_end()

    started_at = time.monotonic()
    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(jobs)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return Run([timing for timing in timings if timing is not None], time.monotonic() - started_at)


async def _time(client: AsyncClient, prompt: Prompt, options: Options) -> Timing:
    started_at = time.monotonic()
    first_at: float | None = None
    async with client.stream(prompt, **options) as stream:
        async for piece in stream:
            if first_at is None and piece.token_ids:
                first_at = time.monotonic()
    ended_at = time.monotonic()
    assert stream.completion is not None, "a stream that ends has completions"
    return Timing(stream.completion, (first_at or ended_at) - started_at, ended_at - started_at)
