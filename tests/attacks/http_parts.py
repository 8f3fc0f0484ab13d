"""Attacks on the HTTP parser without a token: the parts of a request are as small, and as many, as its form allows.

Each has a control that sends as many bytes in few parts, in the same way, on as many connections.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tests.attacks.http_requests import split
from tests.attacks.victim import Attack, Figures, Victim, attack, judged

NUM_SENDERS = 24
NUM_METRICS_SENDERS = 48
PART_BYTES = 2**18
"""What is sent at once."""
SEGMENT_BYTES = 64
"""Of what one connection sends in segments, before its other end may have read them."""
PAUSE_SECONDS = 0.05
"""Before a connection is opened anew: how fast connections can be opened is no question of what they send."""

CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LARGE_CHUNK = b"1000\r\n" + b" " * 4096 + b"\r\n"
LARGE_CHUNKS = LARGE_CHUNK * (PART_BYTES // len(LARGE_CHUNK))
HEAD_BYTES = 15_000
"""Of a head or of trailers: what h11 takes before it is complete."""


def head(method: bytes = b"POST", path: bytes = b"/v1/completions") -> bytes:
    return method + b" " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def chunks(chunk: bytes) -> bytes:
    return chunk * (PART_BYTES // len(chunk))


def send_for(seconds: float, address: str, first: bytes, then: bytes, segment_bytes: int) -> int:
    """Sends `first`, and then `then` again and again, on one connection after the other; returns how many bytes."""
    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(split(address), timeout=1.0) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.sendall(first)
            sent += len(first)
            while then and time.monotonic() < until:
                for start in range(0, len(then), segment_bytes):
                    raw.sendall(then[start : start + segment_bytes])
                    sent += min(segment_bytes, len(then) - start)
            if not then:
                raw.recv(2**16)
        time.sleep(PAUSE_SECONDS)
    return sent


def sender(
    first: bytes,
    then: bytes,
    *,
    segment_bytes: int = PART_BYTES,
    num_senders: int = NUM_SENDERS,
    where: Callable[[Victim], str] = lambda victim: victim.http,
) -> Attack:
    """Returns what sends the same on many connections at once."""

    def send(victim: Victim) -> Figures:
        with ThreadPoolExecutor(num_senders) as threads:
            sending = [
                threads.submit(send_for, victim.seconds, where(victim), first, then, segment_bytes)
                for _ in range(num_senders)
            ]
            return judged({"mib": sum(one.result() for one in sending) / 2**20}, {})

    return send


def verifier_metrics(victim: Victim) -> str:
    return victim.metrics["verifier"]


LARGE_CHUNKS_OF_HEALTH = sender(head(b"GET", b"/health") + CHUNKED, LARGE_CHUNKS)
LARGE_CHUNKS_OF_COMPLETIONS = sender(head() + CHUNKED, LARGE_CHUNKS)
LARGE_CHUNKS_OF_METRICS = sender(
    head(b"GET", b"/metrics") + CHUNKED, LARGE_CHUNKS, num_senders=NUM_METRICS_SENDERS, where=verifier_metrics
)
LARGE_SEGMENTS = sender(head() + b"content-length: 8000000\r\n\r\n", b" " * PART_BYTES)
LINE = b"x-line: " + b"x" * HEAD_BYTES + b"\r\n"
LINES = b"x:\r\n" * (HEAD_BYTES // 4)
ONE_PAGE = head(b"GET", b"/nothing") + b"\r\n"


@attack("anyone", control=LARGE_CHUNKS_OF_HEALTH)
def chunks_of_one_byte_for_health(victim: Victim) -> Figures:
    """Bodies for a route that has none."""
    return sender(head(b"GET", b"/health") + CHUNKED, chunks(b"1\r\nx\r\n"))(victim)


@attack("anyone", control=LARGE_CHUNKS_OF_COMPLETIONS)
def chunks_of_one_byte(victim: Victim) -> Figures:
    """Bodies for a route that has one, of which no token is known yet."""
    return sender(head() + CHUNKED, chunks(b"1\r\nx\r\n"))(victim)


@attack("anyone", control=LARGE_CHUNKS_OF_COMPLETIONS)
def chunks_of_sixteen_bytes(victim: Victim) -> Figures:
    return sender(head() + CHUNKED, chunks(b"10\r\n" + b"x" * 16 + b"\r\n"))(victim)


@attack("anyone", control=LARGE_CHUNKS_OF_COMPLETIONS)
def chunks_with_extensions(victim: Victim) -> Figures:
    """Chunks of one byte each, whose sizes have as much beside them as a fair chunk has bytes."""
    return sender(head() + CHUNKED, chunks(b"1;x=" + b"x" * 60 + b"\r\nx\r\n"))(victim)


@attack("anyone", control=LARGE_CHUNKS_OF_METRICS)
def chunks_of_one_byte_for_metrics(victim: Victim) -> Figures:
    """The same for the verifier's metrics, on most of the connections that these have."""
    return sender(
        head(b"GET", b"/metrics") + CHUNKED,
        chunks(b"1\r\nx\r\n"),
        num_senders=NUM_METRICS_SENDERS,
        where=verifier_metrics,
    )(victim)


@attack("anyone", control=sender(head() + CHUNKED + b"0\r\n" + LINE + b"\r\n", b""))
def trailers_of_many_lines(victim: Victim) -> Figures:
    return sender(head() + CHUNKED + b"0\r\n" + LINES + b"\r\n", b"")(victim)


@attack("anyone", control=sender(head(b"GET", b"/nothing") + LINE + b"\r\n", b""))
def heads_of_many_lines(victim: Victim) -> Figures:
    return sender(head(b"GET", b"/nothing") + LINES + b"\r\n", b"")(victim)


@attack("anyone", control=LARGE_SEGMENTS)
def segments_of_one_byte(victim: Victim) -> Figures:
    """A body with a declared length, in as many segments of TCP as it has bytes."""
    return sender(head() + b"content-length: 8000000\r\n\r\n", b" " * 4096, segment_bytes=1)(victim)


@attack("anyone", control=sender(ONE_PAGE, b""))
def pipelined_requests(victim: Victim) -> Figures:
    """Requests behind each other, without waiting for answers, on connections that stay."""
    return sender(ONE_PAGE, ONE_PAGE * (PART_BYTES // len(ONE_PAGE)))(victim)
