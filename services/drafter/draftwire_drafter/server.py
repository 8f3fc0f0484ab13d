"""The drafter's gRPC server."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import grpc
from typing_extensions import override

from draftwire.engine.leases import SessionFailed
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.guard import end_if_lost
from draftwire.engine.ranks.place import Place
from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import BlockSent, DrafterIdentity
from draftwire.models.card import ModelCard
from draftwire.runtime import messages
from draftwire.runtime.call_limits import SPARE_CALLS, CallLimits, PeerStreams
from draftwire.runtime.caller_identity import CallerRole, require_role
from draftwire.runtime.channels import check_prompt_fits, in_messages
from draftwire.runtime.model_service import ModelServicer
from draftwire.runtime.outbox import exchange, in_turns
from draftwire.runtime.service import Service
from draftwire.runtime.time_limits import Watchdog
from draftwire.runtime.tls import Dialler, expiries_of, server_credentials, watch_tls
from draftwire.runtime.tracing import open_tracer
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, session_pb2
from draftwire.v1.model_pb2_grpc import add_ModelServiceServicer_to_server
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.spans import DrafterSpans
from draftwire_drafter.verifier_links import BlockLink
from draftwire_drafter.wire import GrpcBlockLink, Introduction, LinkEvents, check_block_fits

MAX_IDENTITIES = 1024
"""Verifiers of which a drafter remembers the identity that they gave it."""


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Decodes requests for the core and encodes its events."""

    def __init__(self, core: DrafterCore) -> None:
        self._core = core
        self._streams = PeerStreams("streams of gateways")

    @override
    async def RunDraftSessions(
        self,
        request_iterator: AsyncIterator[drafter_pb2.RunDraftSessionsRequest],
        context: grpc.aio.ServicerContext[drafter_pb2.RunDraftSessionsRequest, drafter_pb2.RunDraftSessionsResponse],
    ) -> None:
        require_role(context, CallerRole.GATEWAY)
        lease_id, outbox = self._core.open_lease()
        lease = drafter_pb2.DraftEvent(lease=session_pb2.Lease(lease_id=lease_id, instance_id=self._core.instance_id))

        async def write_events() -> None:
            while events := await outbox.take_all():
                for message in in_messages(_events_to_proto, events):
                    await context.write(message)

        try:
            async with self._streams.one(lambda: self._core.use_of(lease_id)):
                await context.write(drafter_pb2.RunDraftSessionsResponse(events=[lease]))
                await exchange(self._read_commands(request_iterator, lease_id), write_events())
        finally:
            self._core.end_lease(lease_id)

    @override
    async def OpenDraftSession(
        self,
        request: drafter_pb2.OpenDraftSessionRequest,
        context: grpc.aio.ServicerContext[drafter_pb2.OpenDraftSessionRequest, drafter_pb2.OpenDraftSessionResponse],
    ) -> drafter_pb2.OpenDraftSessionResponse:
        require_role(context, CallerRole.GATEWAY)
        drafter_id = await self._core.open_session(messages.draft_spec_from_proto(request), request.lease_id)
        return drafter_pb2.OpenDraftSessionResponse(drafter_id=drafter_id)

    async def _read_commands(self, requests: AsyncIterator[drafter_pb2.RunDraftSessionsRequest], lease_id: int) -> None:
        core = self._core
        async for request in requests:
            async for command in in_turns(request.commands):
                match command.WhichOneof("command"):
                    case "calibration":
                        calibration = messages.calibration_from_proto(command.calibration)
                        if core.is_for(lease_id, (calibration.fence.session_id, calibration.fence.epoch)):
                            core.calibrate(calibration)
                    case "send_drafted":
                        send = messages.send_drafted_from_proto(command.send_drafted)
                        if core.is_for(lease_id, (send.session_id, send.epoch)):
                            core.send_drafted(send)
                    case "close_session":
                        key = (command.close_session.session_id, command.close_session.epoch)
                        if core.is_for(lease_id, key):
                            core.close_session(*key)
                    case _:
                        raise ProtocolViolationError("a command without content")


def _events_to_proto(events: Sequence[BlockSent | SessionFailed]) -> drafter_pb2.RunDraftSessionsResponse:
    return drafter_pb2.RunDraftSessionsResponse(events=[_event_to_proto(event) for event in events])


def _event_to_proto(event: BlockSent | SessionFailed) -> drafter_pb2.DraftEvent:
    if isinstance(event, BlockSent):
        return drafter_pb2.DraftEvent(sent=messages.block_sent_to_proto(event))
    return drafter_pb2.DraftEvent(failure=messages.failure_to_proto(event.session_id, event.epoch, event.error))


def make_service(config: DrafterConfig, place: Place | None = None, followers: Followers | None = None) -> Service:
    """Makes a drafter, to be started. Call in a running event loop."""
    tls = watch_tls(config.tls)
    dialler = Dialler(config.connections, config.tls, tls)
    identities: dict[str, DrafterIdentity] = {}  # those that verifiers gave, by address, the latest last

    async def connect(address: str, card: ModelCard, on_lost: Callable[[], None]) -> BlockLink:
        introduction = Introduction(card, core.instance_id, identities.get(address), core.need)
        on_outcomes, on_features = partial(core.learn, address), partial(core.feed, address)
        events = LinkEvents(on_lost, core.metrics.draft_bytes.inc, on_outcomes, on_features)
        link = await GrpcBlockLink.connect(address, introduction, dialler, config.connect_timeout_s, events)
        if link.identity is not None:
            identities.pop(address, None)
            identities[address] = link.identity
        if len(identities) > MAX_IDENTITIES:
            del identities[next(iter(identities))]
        return link

    core = DrafterCore(config, connect, place, followers)
    core.metrics.watch_certificates(partial(expiries_of, tls))
    tracer = open_tracer(config.tracing, "drafter", f"{core.instance_id:016x}")
    core.spans = DrafterSpans(tracer) if tracer is not None else None

    async def start() -> None:
        await core.start()
        largest = config.connections.max_message_bytes
        check_prompt_fits(core.description, largest)
        check_block_fits(
            config.drafts.block_bytes(core.description.vocab_size, config.engine.max_draft_tokens), largest
        )

    def register(server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(DrafterServicer(core), server)
        add_ModelServiceServicer_to_server(ModelServicer(lambda: core.card), server)

    return Service(
        name="drafter",
        grpc_names=("draftwire.v1.DrafterService", "draftwire.v1.ModelService"),
        settings=config.server,
        connections=config.connections,
        credentials=server_credentials(tls, config.tls),
        metrics=core.metrics,
        register=register,
        start=start,
        run=lambda: end_if_lost(core.run()),
        stop=core.stop,
        num_sessions=lambda: core.num_sessions,
        limits=CallLimits(config.connections.max_message_bytes, config.engine.max_sessions + SPARE_CALLS),
        watchdog=Watchdog(config.engine.watchdog_s, core.busy_s),
        tracer=tracer,
        is_lost=lambda: core.group.is_lost,
    )
