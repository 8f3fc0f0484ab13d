"""Cost of streaming over HTTP beside gRPC: tokens per second, and the gateway's CPU time, on the embedded pair.

    python -m benchmarks.http_edge --output benchmarks/results/http_edge.json

Both ways stream the same completions alternately, so that noise of the machine affects both: the same prompts, seeds
and parameters, under "coupled", which gives both the same text. The HTTP client is minimal, Python's own http.client
and JSON parser, so that the server is measured and not the client. Ratios are of medians.
"""

import argparse
import http.client
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client

WAYS = ("grpc", "http", "http with details")
DRAFT_LENGTH = 4
"""Fixed, so that both ways have the same rounds."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion."""

    prompt: str
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way at one concurrency, in one repetition."""

    way: str
    concurrency: int
    tokens_per_second: float
    """Of all streams together."""
    gateway_us_per_token: float
    """CPU time of the gateway."""
    text_bytes: int
    """Of all texts: the same for all ways."""


def over_grpc(client: Client, ask: Ask) -> tuple[str, int]:
    """Streams a completion; returns its text and the number of its tokens."""
    stream = client.stream(
        ask.prompt,
        max_tokens=ask.max_tokens,
        seed=ask.seed,
        num_speculative_tokens=DRAFT_LENGTH,
        rejection_sample_method="coupled",
        ignore_eos=True,
    )
    text = "".join([piece.text for piece in stream])
    assert stream.completion is not None
    return text, len(stream.completion.token_ids)


def over_http(port: int, model: str, ask: Ask, details: bool) -> tuple[str, int]:
    """Does the same over HTTP."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "num_speculative_tokens": DRAFT_LENGTH,
        "rejection_sample_method": "coupled",
        "ignore_eos": True,
        "token_details": details,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        chunks = list(_chunks(connection.getresponse()))
    finally:
        connection.close()
    text = "".join([choice["text"] for chunk in chunks for choice in chunk["choices"]])
    return text, chunks[-1]["usage"]["completion_tokens"]


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(stack: LocalStack, client: Client, way: str, concurrency: int, asks: list[Ask]) -> Measurement:
    """Keeps `concurrency` streams running until every prompt is continued."""
    gateway = stack.services["gateway"]

    def draw(ask: Ask) -> tuple[str, int]:
        if way == "grpc":
            return over_grpc(client, ask)
        return over_http(gateway.http_port, "target", ask, way == "http with details")

    started, used = time.perf_counter(), cpu_seconds(gateway.process.pid)
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(draw, asks))
    seconds, used = time.perf_counter() - started, cpu_seconds(gateway.process.pid) - used
    num_tokens = sum(count for _, count in answers)
    return Measurement(
        way=way,
        concurrency=concurrency,
        tokens_per_second=num_tokens / seconds,
        gateway_us_per_token=used / num_tokens * 1e6,
        text_bytes=sum(len(text.encode()) for text, _ in answers),
    )


def measure_all(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Yields the measurements of all ways, repetition by repetition."""
    options = {
        "verifier": {"model": embedded_model("target"), "threads": 1},
        "drafter": {"model": embedded_model("drafter"), "threads": 1},
        "gateway": {},
    }
    prompts = load_prompts()
    with LocalStack(options) as stack, Client(stack.address) as client:
        for way in WAYS:
            measure(stack, client, way, 4, [Ask(prompt, 0, 16) for prompt in prompts[:4]])
        for _ in progress(range(arguments.repetitions), "http_edge"):
            for concurrency in arguments.concurrencies:
                count = max(arguments.completions, concurrency)
                asks = [Ask(prompts[i % len(prompts)], i, arguments.max_tokens) for i in range(count)]
                for way in WAYS:
                    yield measure(stack, client, way, concurrency, asks)


def main() -> None:
    """Measures, prints medians and ratios, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measurements = list(measure_all(arguments))
    results: dict[str, Any] = {}
    for concurrency in arguments.concurrencies:
        of_way = {
            way: [one for one in measurements if (one.way, one.concurrency) == (way, concurrency)] for way in WAYS
        }
        rates = {way: [one.tokens_per_second for one in of_way[way]] for way in WAYS}
        cpu = {way: statistics.median(one.gateway_us_per_token for one in of_way[way]) for way in WAYS}
        results[f"at_{concurrency}"] = {
            "tokens_per_second": {way: statistics.median(own) for way, own in rates.items()},
            "beside_grpc": {way: ratio_of(rates[way], rates["grpc"]) for way in WAYS[1:]},
            "gateway_us_per_token": cpu,
            "has_same_texts": len({one.text_bytes for ones in of_way.values() for one in ones}) == 1,
        }
    write_report(arguments, {**results, "measurements": [asdict(one) for one in measurements]})


if __name__ == "__main__":
    main()
