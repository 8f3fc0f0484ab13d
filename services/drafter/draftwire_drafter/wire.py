"""The drafter's client of a verifier: one stream for draft blocks."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc
import structlog

from draftwire.errors import DraftwireError, ModelMismatchError, ProtocolViolationError, UnavailableError
from draftwire.method.rounds import DraftBlock, DrafterIdentity, RoundOutcome
from draftwire.models.card import ModelCard
from draftwire.models.description import FEATURES, vocabulary_mismatch
from draftwire.options.heads import feature_messages
from draftwire.options.heads.features import FeatureNeed, FeatureRequest, SessionFeatures
from draftwire.runtime import messages
from draftwire.runtime.channels import FRAME_BYTES, require_room
from draftwire.runtime.outbox import Outbox
from draftwire.runtime.peers import ModelPeer, received
from draftwire.runtime.served_request import context_of_no_request
from draftwire.runtime.status import error_of
from draftwire.runtime.tls import Dialler
from draftwire.v1 import verifier_pb2

log = structlog.get_logger()

PUSH_METHOD = "/draftwire.v1.VerifierService/PushDraftBlocks"
"""Called without the generated stub, whose encoder does not count."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Contents of a drafter's hello."""

    card: ModelCard
    instance_id: int
    identity: DrafterIdentity | None = None
    """Identity that the verifier issued on an earlier connection."""
    need: FeatureNeed | None = None
    """The features that the verifier has to send; None if none are needed."""


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Callbacks for what happens to a link, called on the event loop."""

    on_lost: Callable[[], None]
    """Called once, when the stream ends after the welcome, for any reason."""
    on_sent: Callable[[int], None]
    """Called with the size of each message with blocks, bytes."""
    on_outcomes: Callable[[list[RoundOutcome]], None]
    """Called with the outcomes of rounds that the verifier reports."""
    on_features: Callable[[SessionFeatures], None]
    """Called with each message of features, unchecked."""


class GrpcBlockLink:
    """One long-lived stream to one verifier, for the blocks of all sessions."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        max_message_bytes: int,
        events: LinkEvents,
    ) -> None:
        """Use `connect`."""
        self.address = address
        self._events = events
        self._max_message_bytes = max_message_bytes
        self.broken = False
        self.identity: DrafterIdentity | None = None
        """Identity that the verifier issued; None if it issues none. Set by `connect`."""
        self.drafter_id = 0
        """See `BlockLink.drafter_id`."""
        self._channel = channel
        self._outbox = Outbox[DraftBlock | FeatureRequest]()
        self._lifetime: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        address: str,
        introduction: Introduction,
        dialler: Dialler,
        timeout_s: float,
        events: LinkEvents,
    ) -> GrpcBlockLink:
        """Opens the stream and waits for the verifier's welcome.

        Args:
            address: host:port of the verifier.
            introduction: model and process, for the hello.
            dialler: opens the connection.
            timeout_s: how long to wait for the welcome.
            events: what is called when something happens to the link.

        Raises:
            ModelMismatchError: the verifier's vocabulary differs; names the first differing token. Or it sends no
                features, and they are needed.
            InvalidRequestError: the identity that the verifier gives is none.
            UnavailableError: no welcome before the timeout.
        """
        channel = dialler.open(address, bulk=True)
        link = cls(address, channel, dialler.connections.max_message_bytes, events)
        card, need = introduction.card, introduction.need
        source = None if need is None else feature_messages.feature_source_to_proto(need.fingerprint, need.encoding)
        hello = verifier_pb2.DrafterHello(
            model=messages.model_to_proto(card.description),
            instance_id=introduction.instance_id,
            identity=messages.identity_to_proto(introduction.identity) if introduction.identity is not None else None,
            features=source,
        )
        push = channel.stream_stream(
            PUSH_METHOD,
            request_serializer=link._encode,
            response_deserializer=verifier_pb2.PushDraftBlocksResponse.FromString,
        )
        call = push(link._requests(hello), wait_for_ready=True)
        is_welcome = False
        try:
            async with asyncio.timeout(timeout_s):
                response = await call.read()
            if not isinstance(response, verifier_pb2.PushDraftBlocksResponse):
                raise UnavailableError(f"verifier at {address} ended the stream")
            if need is not None and FEATURES not in response.welcome.capabilities:
                raise ModelMismatchError(f"verifier at {address} keeps no features of heads: set its feature_head")
            link._take_identity(response, introduction)
            is_welcome = True
        except TimeoutError:
            raise UnavailableError(f"verifier at {address} did not answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise await _refusal(error, ModelPeer(channel, timeout_s), card) from error
        finally:
            if not is_welcome:  # also if this coroutine was cancelled
                link._outbox.close()
                await channel.close()
        link._lifetime = asyncio.create_task(link._watch(call), context=context_of_no_request())
        log.info("drafter.verifier_connected", address=address)
        return link

    def _take_identity(self, welcome: verifier_pb2.PushDraftBlocksResponse, introduction: Introduction) -> None:
        if welcome.HasField("identity"):
            self.identity = messages.identity_from_proto(welcome.identity)
        self.drafter_id = introduction.instance_id if self.identity is None else self.identity.drafter_id

    def push(self, block: DraftBlock) -> None:
        """Queues a block to be sent; see `BlockLink.push`."""
        if self.broken:
            raise UnavailableError(f"verifier at {self.address} was lost")
        self._outbox.put(block)

    def request_features(self, request: FeatureRequest) -> None:
        """Queues a request of features; see `BlockLink.request_features`."""
        if self.broken:
            raise UnavailableError(f"verifier at {self.address} was lost")
        self._outbox.put(request)

    async def close(self) -> None:
        """Closes the connection; see `BlockLink.close`."""
        self.broken = True
        self._outbox.close()
        lifetime, self._lifetime = self._lifetime, None
        if lifetime is not None:
            lifetime.cancel()
            await asyncio.wait({lifetime})
        await self._channel.close()

    async def _requests(self, hello: verifier_pb2.DrafterHello) -> AsyncIterator[verifier_pb2.PushDraftBlocksRequest]:
        yield verifier_pb2.PushDraftBlocksRequest(hello=hello)
        while queued := await self._outbox.take_all():
            blocks = [each for each in queued if isinstance(each, DraftBlock)]
            wanted = [each for each in queued if isinstance(each, FeatureRequest)]
            for start in range(0, len(wanted), messages.MAX_BLOCKS):
                some = map(feature_messages.feature_request_to_proto, wanted[start : start + messages.MAX_BLOCKS])
                requests = verifier_pb2.FeatureRequests(requests=some)
                yield verifier_pb2.PushDraftBlocksRequest(feature_requests=requests)
            for part in in_parts(blocks, self._max_message_bytes // 2):
                encoded = verifier_pb2.DraftBlocks(blocks=map(messages.block_to_proto, part))
                yield verifier_pb2.PushDraftBlocksRequest(blocks=encoded)

    def _encode(self, request: verifier_pb2.PushDraftBlocksRequest) -> bytes:
        """Encodes a message and counts its bytes: to measure it would be to encode it another time."""
        data = request.SerializeToString()
        if request.HasField("blocks"):
            self._events.on_sent(len(data) + FRAME_BYTES)
        return data

    async def _watch(
        self, call: grpc.aio.StreamStreamCall[verifier_pb2.PushDraftBlocksRequest, verifier_pb2.PushDraftBlocksResponse]
    ) -> None:
        """Reads outcomes until the end of the stream, then marks the link as broken."""
        reason: str | None = None
        try:
            while (read := await call.read()) is not grpc.aio.EOF:
                response = received(read)
                assert isinstance(response, verifier_pb2.PushDraftBlocksResponse), "it is none but at the end"
                if response.HasField("outcomes"):
                    self._events.on_outcomes(list(map(messages.outcome_from_proto, response.outcomes.outcomes)))
                elif response.HasField("features"):
                    self._events.on_features(feature_messages.features_from_proto(response.features))
            reason = await call.details()
        except grpc.aio.AioRpcError as error:
            reason = error.details()
        except DraftwireError as error:
            reason = str(error)
        except Exception as error:  # of what takes outcomes: its sessions must end with the link
            log.exception("drafter.stream_failed", address=self.address)
            reason = type(error).__name__
        finally:
            self.broken = True
            self._outbox.close()
        log.warning("drafter.verifier_lost", address=self.address, reason=reason)
        self._events.on_lost()
        await self._channel.close()


async def _refusal(error: grpc.aio.AioRpcError, peer: ModelPeer, card: ModelCard) -> DraftwireError:
    """Returns the error for a stream that the verifier ended before its welcome."""
    refusal = error_of(error)
    if isinstance(refusal, ProtocolViolationError):
        target = await peer.describe()
        if target.vocabulary_fingerprint != card.description.vocabulary_fingerprint:
            return vocabulary_mismatch(target, card.description, await peer.vocabulary(), card.vocabulary)
    return refusal


def check_block_fits(most_block_bytes: int, max_message_bytes: int) -> None:
    """Checks that every block fits into one message.

    Raises:
        InvalidRequestError: the limit is too small.
    """
    require_room("a draft block, at most max_draft_tokens long", most_block_bytes, max_message_bytes)


def in_parts(blocks: list[DraftBlock], most_bytes: int) -> Iterator[list[DraftBlock]]:
    """Splits blocks into parts of at most `MAX_BLOCKS`, whose distributions do not exceed `most_bytes` unless a single
    block does.
    """
    part: list[DraftBlock] = []
    size = 0
    for block in blocks:
        block_size = len(block.distributions.data)
        if part and (size + block_size > most_bytes or len(part) == messages.MAX_BLOCKS):
            yield part
            part, size = [], 0
        part.append(block)
        size += block_size
    yield part
