"""What a drafter's service puts together around its core."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from draftwire.method.rounds import DrafterIdentity
from draftwire.runtime.outbox import ITEMS_IN_A_TURN
from draftwire.runtime.settings import ModelSettings
from draftwire.v1 import drafter_pb2, session_pb2
from draftwire_drafter import server
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.wire import GrpcBlockLink, LinkEvents


async def test_drafter_shows_each_verifier_the_identity_that_this_one_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, DrafterIdentity | None]] = []
    given = {"one:1": DrafterIdentity(5, b"a" * 16), "two:1": DrafterIdentity(6, b"b" * 16), "old:1": None}

    async def connect(address: str, introduction: server.Introduction, *_: Any) -> Any:
        shown.append((address, introduction.identity))
        return MagicMock(identity=given[address])

    cores: list[Any] = []
    monkeypatch.setattr(server.GrpcBlockLink, "connect", connect)
    monkeypatch.setattr(server, "DrafterCore", lambda *given: cores.append(given) or MagicMock(instance_id=1))
    server.make_service(DrafterConfig(ModelSettings("scripted:")))
    ((_, link_to, *_),) = cores
    for address in [*given, *given]:
        await link_to(address, MagicMock(), lambda: None)
    assert shown == [(address, None) for address in given] + list(given.items())


async def test_commands_of_a_large_message_are_carried_out_in_turns() -> None:
    close = drafter_pb2.DraftCommand(close_session=session_pb2.CloseSession(epoch=1))
    request = drafter_pb2.RunDraftSessionsRequest(commands=[close] * 10 * ITEMS_IN_A_TURN)

    async def requests() -> AsyncIterator[drafter_pb2.RunDraftSessionsRequest]:
        yield request

    core = MagicMock()
    reading = asyncio.create_task(server.DrafterServicer(core)._read_commands(requests(), 0))
    for _ in range(8):
        await asyncio.sleep(0)
        assert not reading.done(), "others have their turn"
    await reading
    assert core.close_session.call_count == len(request.commands)


async def test_bytes_of_a_verifier_that_are_no_message_end_the_link_at_once() -> None:
    """In their place gRPC gives None; the call itself goes on."""
    lost, channel = MagicMock(), AsyncMock()
    call = MagicMock(read=AsyncMock(return_value=None), details=asyncio.Event().wait)
    link = GrpcBlockLink("a:1", channel, 2**20, LinkEvents(lost, MagicMock(), MagicMock(), MagicMock()))
    await asyncio.wait_for(link._watch(call), 5.0)
    assert link.broken
    lost.assert_called_once_with()
    channel.close.assert_awaited_once_with()
