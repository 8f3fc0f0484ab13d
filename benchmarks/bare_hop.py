"""Latency of a message on a bare grpc.aio stream between two processes: the lower bound of the services' messages.

python -m benchmarks.bare_hop
"""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.queues import Queue

import grpc

METHOD = "/bare.Echo/Run"
MESSAGE_BYTES = 200
WARM_UP = 100


def same(message: bytes) -> bytes:
    """Serialises bytes as they are."""
    return message


async def _echo(
    requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext[bytes, bytes]
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _serve(port: Queue[int]) -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_echo, same, same)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", {"Run": handler}),))
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    port.put(bound)
    await server.wait_for_termination()


def _run_server(port: Queue[int]) -> None:
    asyncio.run(_serve(port))


async def _measure(port: int, pause_s: float, count: int) -> float:
    times = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(METHOD, same, same)()
        for _ in range(WARM_UP + count):
            await asyncio.sleep(pause_s)
            started = time.perf_counter()
            await call.write(b"x" * MESSAGE_BYTES)
            await call.read()
            times.append(time.perf_counter() - started)
        call.cancel()
    return statistics.median(times[WARM_UP:]) / 2.0


def bare_hop_us(pause_s: float, count: int = 400) -> float:
    """Returns the median one-way latency in us between two processes that sleep for `pause_s` before each message."""
    context = multiprocessing.get_context("spawn")
    port: Queue[int] = context.Queue()
    process = context.Process(target=_run_server, args=(port,), daemon=True)
    process.start()
    try:
        return asyncio.run(_measure(port.get(timeout=60), pause_s, count)) * 1e6
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    print({f"after {pause * 1e3:g} ms": round(bare_hop_us(pause)) for pause in (0.0, 0.005)})
