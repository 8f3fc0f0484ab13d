"""Leases: a gateway that goes or does not read loses its own stream, and stops nobody else."""

import asyncio

import pytest

from draftwire.engine.leases import Leases
from draftwire.errors import ProtocolViolationError
from draftwire.runtime.outbox import Outbox

SECONDS = 5.0
"""For what should happen at once."""
MORE_THAN_FIT = 100_000


async def all_of(outbox: Outbox[int]) -> list[int]:
    """Returns what is left in an outbox that was closed."""
    items: list[int] = []
    async with asyncio.timeout(SECONDS):
        while part := await outbox.take_all():
            items += part
    return items


async def test_lease_that_ends_closes_its_stream_after_what_was_sent() -> None:
    leases = Leases[int]()
    lease_id, outbox = leases.open()
    leases.require(lease_id)
    leases.send(lease_id, 1)
    leases.end(lease_id)
    assert await all_of(outbox) == [1]
    with pytest.raises(ProtocolViolationError, match="unknown lease"):
        leases.require(lease_id)


async def test_stream_that_nobody_reads_is_cut_and_others_go_on() -> None:
    leases = Leases[int]()
    (unread_id, unread), (read_id, read) = leases.open(), leases.open()
    for number in range(MORE_THAN_FIT):
        leases.send(unread_id, number)
    assert len(await all_of(unread)) < MORE_THAN_FIT
    leases.send(read_id, 1)
    assert await read.take_all() == [1]
