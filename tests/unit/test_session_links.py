"""What links make of the events of their streams. Nothing is connected."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import pytest
from gateway_fakes import FakeTarget, collect, describe, make_loop
from virtual_time import in_virtual_time

from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.rounds import BlockSent
from draftwire.requests import packed_logprobs
from draftwire.requests.logprobs import MAX_PROMPT_PART
from draftwire.runtime import messages
from draftwire.runtime.peers import ModelPeer
from draftwire.runtime.settings import ConnectionSettings
from draftwire.runtime.status import MAX_MESSAGE
from draftwire.v1 import drafter_pb2, session_pb2, verifier_pb2
from draftwire_gateway.peers.wire import DrafterLink, VerifierLink
from draftwire_gateway.session.event_queue import MAX_UNREAD_EVENTS
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost

KEY = (7, 2)
MAX_DRAFT_TOKENS = 8
MOST_TOKENS = {"verdict": MAX_DRAFT_TOKENS + 1, "prompt_read": MAX_PROMPT_PART}
UNAVAILABLE = 14


def new_link(kind: Any) -> Any:
    limits = (MAX_DRAFT_TOKENS,) if issubclass(kind, VerifierLink) else ()
    link = kind("peer:1", MagicMock(connections=ConnectionSettings()), 1.0, *limits)
    link._ask_health = AsyncMock(return_value=True)
    link.description = describe("model")
    return link


def link_of(kind: Any) -> tuple[Any, list[Any]]:
    """Returns a link with one session, and what its inbox gets."""
    link, events = new_link(kind), list[Any]()
    link._inboxes[KEY] = MagicMock(put_nowait=events.append)
    return link, events


def event_of(name: str, key: tuple[int, int] = KEY, token_ids: Sequence[int] = (1,), **fields: Any) -> Any:
    """Returns an event of a verifier."""
    session: dict[str, Any] = {"session_id": key[0], "epoch": key[1]}
    content: Any
    match name:
        case "verdict":
            content = session_pb2.Verdict(
                fence=session_pb2.Fence(**session), token_ids=token_ids, extra_token_kind="EXTRA_TOKEN_KIND_PLAIN"
            )
        case "prompt_read":
            content = verifier_pb2.PromptRead(**session, first_position=1, token_ids=token_ids)
        case "refusal":
            content = verifier_pb2.BlockRefusal(**session)
        case "failure":
            content = session_pb2.SessionFailure(**session, status_code=UNAVAILABLE)
    content.MergeFrom(type(content)(**fields))
    return verifier_pb2.TargetEvent(**{name: content})


# Sizes


@pytest.mark.parametrize("name", MOST_TOKENS)
def test_event_of_too_many_tokens_ends_the_stream_undecoded(name: str) -> None:
    link, events = link_of(VerifierLink)
    link._receive(event_of(name, token_ids=[1] * MOST_TOKENS[name]))
    assert len(events) == 1
    with patch.object(messages, f"{name}_from_proto") as decode, pytest.raises(ProtocolViolationError, match="peer:1"):
        link._receive(event_of(name, token_ids=[1] * (MOST_TOKENS[name] + 1)))
    decode.assert_not_called()
    assert len(events) == 1


@pytest.mark.parametrize("name", MOST_TOKENS)
def test_event_of_a_session_that_is_not_open_is_not_decoded(name: str) -> None:
    link, events = link_of(VerifierLink)
    with patch.object(messages, f"{name}_from_proto") as decode:
        link._receive(event_of(name, key=(KEY[0], KEY[1] - 1)))
    decode.assert_not_called()
    assert events == []


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [-1.0] * 100_000},
        {"draft_logprobs": [-1.0] * 100_000},
        {"top_logprobs": session_pb2.TopLogprobs(num_top=20, token_ids=bytes(4 * 100_000), logprobs=bytes(4))},
        {"top_logprobs": session_pb2.TopLogprobs(num_top=20, token_ids=bytes(4), logprobs=bytes(4 * 100_000))},
        {"top_logprobs": session_pb2.TopLogprobs(num_top=100_000, token_ids=bytes(4), logprobs=bytes(4))},
    ],
    ids=["logprobs", "draft_logprobs", "top ids", "top values", "num_top"],
)
def test_lists_longer_than_the_tokens_end_the_stream_and_are_not_unpacked(fields: dict[str, Any]) -> None:
    link, events = link_of(VerifierLink)
    given = {"logprobs": [-1.0], **fields}
    with patch.object(packed_logprobs.struct, "unpack") as unpack, pytest.raises(InvalidRequestError, match="log-prob"):
        link._receive(event_of("verdict", **given))
    assert not unpack.called or "draft_logprobs" in fields
    assert events == []


# Floods


class Stream:
    """A stream whose messages the test sends."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, kind: Any, *events: Any) -> None:
        self._messages.put_nowait(kind(events=events))

    def send_garbage(self) -> None:
        self._messages.put_nowait(None)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Any:
        return await self._messages.get()

    def cancel(self) -> None:
        """Ends nothing: nobody is connected."""


class FloodingVerifier(VerifierLink):
    """A link to a verifier that opens a session and sends far too many events of it, in one message."""

    flood = ""
    streams: list[Stream]

    async def open(self, spec: Any, inbox: Any) -> None:
        self._leased(spec.session_id, spec.epoch, inbox)
        event = event_of(self.flood, (spec.session_id, spec.epoch))
        self.streams[-1].send(verifier_pb2.RunTargetSessionsResponse, *[event] * (MAX_UNREAD_EVENTS + 2))


class FloodingDrafter(DrafterLink):
    """The same of a drafter."""

    flood = ""
    streams: list[Stream]

    async def open(self, spec: Any, inbox: Any) -> None:
        self._leased(spec.session_id, spec.epoch, inbox)
        session: dict[str, Any] = {"session_id": spec.session_id, "epoch": spec.epoch}
        sent, failure = drafter_pb2.BlockSent(**session), session_pb2.SessionFailure(**session, status_code=UNAVAILABLE)
        event = drafter_pb2.DraftEvent(sent=sent) if self.flood == "sent" else drafter_pb2.DraftEvent(failure=failure)
        self.streams[-1].send(drafter_pb2.RunDraftSessionsResponse, *[event] * (MAX_UNREAD_EVENTS + 2))


@asynccontextmanager
async def maintained(kind: Any, flood: str) -> AsyncIterator[Any]:
    """Yields a link that is maintained, and checks that it still is at the end."""
    link = new_link(kind)
    link.flood, link.streams = flood, []
    response, event = (
        (verifier_pb2.RunTargetSessionsResponse, verifier_pb2.TargetEvent)
        if isinstance(link, VerifierLink)
        else (drafter_pb2.RunDraftSessionsResponse, drafter_pb2.DraftEvent)
    )

    def open_stream(_requests: Any) -> Stream:
        link.streams.append(Stream())
        link.streams[-1].send(response, event(lease=session_pb2.Lease(lease_id=1, instance_id=1)))
        return link.streams[-1]

    with patch.object(link, "_describe", AsyncMock()), patch.object(link, "_open_stream", open_stream):
        upkeep = asyncio.create_task(link.maintain(AsyncMock()))
        while not link.connected:
            await asyncio.sleep(0.01)
        yield link
        await asyncio.sleep(1.0)
        assert not upkeep.done()
        assert link.connected
        assert link.num_sessions == 0
        upkeep.cancel()
        await asyncio.wait([upkeep])


@pytest.mark.slow
@pytest.mark.parametrize("flood", ["verdict", "prompt_read", "refusal", "failure"])
@in_virtual_time
async def test_flood_of_a_verifier_moves_its_sessions_and_ends_nothing_else(flood: str) -> None:
    async with maintained(FloodingVerifier, flood) as link:
        loop = make_loop([link, FakeTarget(address="target:2")], None, max_tokens=20)
        result = await collect(loop)
        result.assert_whole(20)
        assert result.statistics.num_verifiers_lost == 1
    assert len(link.streams) == (1 if flood == "failure" else 2)  # which closes the session, and no more


@pytest.mark.parametrize("flood", ["sent", "failure"])
@in_virtual_time
async def test_flood_of_a_drafter_ends_its_stream_alone(flood: str) -> None:
    async with maintained(FloodingDrafter, flood) as link:
        target = FakeTarget()
        target.delay_s = lambda count: 0.1
        result = await collect(make_loop(target, link, max_tokens=20))
        result.assert_whole(20)
        assert (result.statistics.num_drafters_lost, result.statistics.num_verifiers_lost) == (1, 0)
        assert target.violations == []
    assert len(link.streams) == (1 if flood == "failure" else 2)


@pytest.mark.parametrize("kind", [VerifierLink, DrafterLink])
@in_virtual_time
async def test_bytes_that_are_no_message_end_the_stream_alone(kind: Any) -> None:
    """In their place gRPC gives None. The gateway ended."""
    async with maintained(kind, "") as link:
        link.streams[-1].send_garbage()
    assert len(link.streams) == 2


@pytest.mark.parametrize("ask", [ModelPeer.describe, ModelPeer.vocabulary, ModelPeer.tokenizer_files])
async def test_answer_that_is_no_message_is_an_error_of_the_peer(ask: Any) -> None:
    channel = MagicMock()
    channel.unary_unary.return_value = AsyncMock(return_value=None)
    with pytest.raises(ProtocolViolationError, match="bytes that are no message"):
        await ask(ModelPeer(channel, 1.0))


def test_session_that_failed_gets_no_more_events() -> None:
    link, events = link_of(VerifierLink)
    with patch.object(link, "_outbox") as outbox:
        for name in ("verdict", "failure", "failure", "verdict"):
            link._receive(event_of(name))
        link.close(*KEY)
    assert len(events) == 2
    assert link.num_sessions == 0
    outbox.put.assert_not_called()  # the verifier has closed it


# Identities


def test_quarantine_is_remembered_until_the_verifier_is_another_process() -> None:
    link, _ = link_of(VerifierLink)

    def connect(instance_id: int) -> None:
        link._receive(verifier_pb2.TargetEvent(lease=session_pb2.Lease(lease_id=1, instance_id=instance_id)))

    connect(1)
    link._receive(event_of("refusal", quarantined_drafter_id=5))
    assert not link.takes_blocks_of(5)
    connect(1)
    assert not link.takes_blocks_of(5)
    connect(2)
    assert link.takes_blocks_of(5)


def test_reply_of_a_drafter_reaches_its_session_and_no_other() -> None:
    link, events = link_of(DrafterLink)
    for session_id in (KEY[0], 8):
        sent = drafter_pb2.BlockSent(session_id=session_id, epoch=KEY[1], round=300)
        link._receive(drafter_pb2.DraftEvent(sent=sent))
    assert events == [BlockSent(*KEY, 300)]


def test_messages_of_peers_are_cut() -> None:
    long = "x" * 2 * MAX_MESSAGE
    link, events = link_of(DrafterLink)
    failure = session_pb2.SessionFailure(session_id=KEY[0], epoch=KEY[1], status_code=UNAVAILABLE, message=long)
    link._receive(drafter_pb2.DraftEvent(failure=failure))
    verifier, refusals = link_of(VerifierLink)
    verifier._receive(event_of("refusal", message=long))
    ((lost,), (refused,)) = events, refusals
    assert isinstance(lost, DrafterLost)
    assert isinstance(refused, BlocksRefused)
    assert max(len(str(lost.error)), len(str(refused.error))) < MAX_MESSAGE + 100
