"""How much of a connection with TLS is read at once, and what ends it."""

import asyncio
import time

import pytest
from typing_extensions import Buffer, override

from draftwire.runtime.tls_reads import (
    LEAST_READ_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_UNANSWERED_BYTES,
    MORE_BYTES,
    READ_S,
    TURN_S,
    BoundedReads,
)

MOST_BYTES = 8192


class FakeTransport(asyncio.Transport):
    is_aborted = False

    @override
    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    @override
    def abort(self) -> None:
        self.is_aborted = True


class CostlyTls(asyncio.BufferedProtocol):
    """Takes CPU time for each byte."""

    s_per_byte = 0.0

    def __init__(self) -> None:
        self._buffer = bytearray(MOST_BYTES)

    @override
    def get_buffer(self, sizehint: int) -> Buffer:
        return self._buffer

    @override
    def buffer_updated(self, nbytes: int) -> None:
        until = time.thread_time() + self.s_per_byte * nbytes
        while time.thread_time() < until:
            pass


class Rig:
    """A connection whose handshake is done."""

    def __init__(self, num_connections: int = 1) -> None:
        self.transport, self.tls = FakeTransport(), CostlyTls()
        self.reads = BoundedReads(self.transport, self.tls, MOST_BYTES, lambda: num_connections)
        self.reads.is_shaking_hands = False

    def read(self) -> int:
        """Reads as much as may be read at once, and returns how much that is."""
        num_bytes = len(memoryview(self.reads.get_buffer(-1)))
        self.reads.buffer_updated(num_bytes)
        return num_bytes


def test_read_that_costs_little_is_as_large_as_it_may_be() -> None:
    rig = Rig()
    assert rig.transport.protocol is rig.reads
    assert [rig.read() for _ in range(20)] == [MOST_BYTES] * 20


@pytest.mark.parametrize("num_connections", [1, 1000])
def test_costly_read_is_followed_by_ones_within_the_bound(num_connections: int) -> None:
    rig, most_s = Rig(num_connections), min(READ_S, TURN_S / num_connections)
    rig.tls.s_per_byte = 1e-6
    assert rig.read() == MOST_BYTES
    fair = max(LEAST_READ_BYTES, int(most_s / rig.tls.s_per_byte))
    assert max(rig.read() for _ in range(10)) <= fair + MORE_BYTES


def test_reads_grow_slowly_again() -> None:
    """Else a peer would make every second read a large one that costs much."""
    rig = Rig()
    rig.tls.s_per_byte = 1e-6
    rig.read()
    smallest = rig.read()
    rig.tls.s_per_byte = 0.0
    sizes = [rig.read() for _ in range(MOST_BYTES // MORE_BYTES)]
    assert sizes[-1] == MOST_BYTES
    assert all(after - before <= MORE_BYTES for before, after in zip([smallest, *sizes], sizes, strict=False))


def test_handshake_without_an_end_is_aborted() -> None:
    rig = Rig()
    rig.reads.is_shaking_hands = True
    read = 0
    while not rig.transport.is_aborted:
        read += rig.read()
    assert read == MAX_HANDSHAKE_BYTES + MOST_BYTES


def test_peer_that_sends_on_and_reads_nothing_is_aborted() -> None:
    rig = Rig()
    for _ in range(10):
        rig.reads.pause_writing()
        for _ in range(MAX_UNANSWERED_BYTES // MOST_BYTES):
            rig.read()
        rig.reads.resume_writing()
        rig.read()
    assert not rig.transport.is_aborted
    rig.reads.pause_writing()
    for _ in range(MAX_UNANSWERED_BYTES // MOST_BYTES + 1):
        rig.read()
    assert rig.transport.is_aborted
