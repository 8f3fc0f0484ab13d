"""More requests at once than there is room for: all are served, in turn, over HTTP and gRPC."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from observing import read_metric
from tiny_models import save_spelling_model

from benchmarks.law import stack_options
from draftwire.client import AsyncClient
from draftwire_gateway.auth.tokens import TokenEntry, digest_of
from tests.in_process import InProcessStack

TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "<e>"]
CALLERS = ("flood", "other")
AT_ONCE = 300
SESSIONS = 64
"""Of the verifier, by default: far fewer than the gateway lets run."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    folder = tmp_path_factory.mktemp("queue")
    target, drafter = (
        save_spelling_model(folder / name, TOKENS, len(TOKENS) - 1, seed, 64)
        for name, seed in (("target", 6), ("drafter", 9))
    )
    tokens = folder / "tokens.toml"
    tokens.write_text("".join(TokenEntry(name, digest_of(f"secret-{name}")).to_toml() for name in CALLERS))
    options = stack_options(target, drafter)
    options["gateway"] |= {"tokens_file": tokens, "max_requests": 128}
    with InProcessStack(options) as stack:
        yield stack


def client_for(running: InProcessStack, caller: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{running.http_address}/v1", api_key=f"secret-{caller}", max_retries=0, timeout=120.0
    )


async def complete(client: openai.AsyncOpenAI, served: list[str], caller: str) -> None:
    asked = {"ignore_eos": True, "num_speculative_tokens": 2}
    answer = await client.completions.create(model="target", prompt="hello", max_tokens=12, extra_body=asked)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    served.append(caller)


def test_three_hundred_at_once_need_no_retry_and_a_flood_delays_nobody(running: InProcessStack) -> None:
    served: list[str] = []

    async def flood() -> None:
        async with client_for(running, "flood") as flooding, client_for(running, "other") as others:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(complete(flooding, served, "flood"))
                while len(served) < 20:
                    await asyncio.sleep(0.01)
                before = len(served)
                await asyncio.gather(*(complete(others, served, "other") for _ in range(5)))
                overtaken = served[before:].count("flood")
            # Those that run when they come, and as many as there are turns meanwhile; a queue of one line has them all.
            assert overtaken <= 2 * SESSIONS + 5 * 2 < AT_ONCE - before

    asyncio.run(flood())
    assert len(served) == AT_ONCE + 5


@pytest.mark.slow
def test_waiting_requests_are_counted_and_served_over_grpc_too(running: InProcessStack) -> None:
    async def flood() -> list[int]:
        async with AsyncClient(running.address, token="secret-other") as client:
            asked = [
                asyncio.create_task(client.generate("hello", max_tokens=12, ignore_eos=True, resume_s=0.0))
                for _ in range(AT_ONCE)
            ]
            most = 0.0
            while not all(task.done() for task in asked):
                most = max(most, read_metric(running, "gateway", "num_requests_waiting"))
                await asyncio.sleep(0.02)
            assert most >= AT_ONCE - 2 * 128
            return [len((await task).token_ids) for task in asked]

    assert asyncio.run(flood()) == [12] * AT_ONCE
