"""The verifier's gRPC server."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc
from typing_extensions import override

from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.guard import end_if_lost
from draftwire.engine.ranks.place import Place
from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import PromptRead, RoundOutcome, Verdict
from draftwire.models.description import ISSUED_IDENTITIES, ModelDescription
from draftwire.options.heads import feature_messages
from draftwire.runtime import messages
from draftwire.runtime.call_limits import SPARE_CALLS, Arrivals, CallLimits, PeerStreams, StreamUse
from draftwire.runtime.caller_identity import CallerRole, origin_of, require_role
from draftwire.runtime.channels import FRAME_BYTES, check_prompt_fits, in_messages
from draftwire.runtime.codec import Codec
from draftwire.runtime.interceptor import num_received_bytes
from draftwire.runtime.model_service import ModelServicer
from draftwire.runtime.outbox import exchange, in_turns
from draftwire.runtime.received_blocks import decoded_blocks
from draftwire.runtime.service import Service
from draftwire.runtime.time_limits import Watchdog
from draftwire.runtime.tls import expiries_of, server_credentials, watch_tls
from draftwire.runtime.tracing import open_tracer
from draftwire.v1 import session_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire.v1.model_pb2_grpc import add_ModelServiceServicer_to_server
from draftwire_verifier.brake import Brake
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import TargetEvent, VerifierCore
from draftwire_verifier.drafter_peers import BlockRefused, DrafterStream
from draftwire_verifier.drafters import Greeting
from draftwire_verifier.spans import VerifierSpans

MAX_GREETINGS = 64
"""Streams of drafters whose hello may come slowly at once."""

_ORDER = "a drafter says hello once, first, and then sends blocks, or requests of features if its hello names some"


_refusal_to_proto = Codec(BlockRefused, verifier_pb2.BlockRefusal, {"reason": "message"}).encode


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Decodes requests for the core and encodes its events."""

    def __init__(self, core: VerifierCore) -> None:
        self._core = core
        self._gateways, self._drafters = PeerStreams("streams of gateways"), PeerStreams("streams of drafters")
        self._greetings = Arrivals(MAX_GREETINGS)

    @override
    async def RunTargetSessions(
        self,
        request_iterator: AsyncIterator[verifier_pb2.RunTargetSessionsRequest],
        context: grpc.aio.ServicerContext[
            verifier_pb2.RunTargetSessionsRequest, verifier_pb2.RunTargetSessionsResponse
        ],
    ) -> None:
        require_role(context, CallerRole.GATEWAY)
        lease_id, outbox = self._core.open_lease()
        lease = verifier_pb2.TargetEvent(lease=session_pb2.Lease(lease_id=lease_id, instance_id=self._core.instance_id))

        async def write_events() -> None:
            while events := await outbox.take_all():
                for message in in_messages(_events_to_proto, events):
                    await context.write(message)

        try:
            async with self._gateways.one(lambda: self._core.use_of(lease_id)):
                await context.write(verifier_pb2.RunTargetSessionsResponse(events=[lease]))
                await exchange(self._read_commands(request_iterator, lease_id), write_events())
        finally:
            self._core.end_lease(lease_id)

    @override
    async def OpenTargetSession(
        self,
        request: verifier_pb2.OpenTargetSessionRequest,
        context: grpc.aio.ServicerContext[
            verifier_pb2.OpenTargetSessionRequest, verifier_pb2.OpenTargetSessionResponse
        ],
    ) -> verifier_pb2.OpenTargetSessionResponse:
        require_role(context, CallerRole.GATEWAY)
        spec = messages.target_spec_from_proto(request)
        self._core.open_session(spec, request.lease_id, await self._core.automaton_of(spec))
        return verifier_pb2.OpenTargetSessionResponse()

    @override
    async def PushDraftBlocks(
        self,
        request_iterator: AsyncIterator[verifier_pb2.PushDraftBlocksRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.PushDraftBlocksRequest, verifier_pb2.PushDraftBlocksResponse],
    ) -> None:
        require_role(context, CallerRole.DRAFTER)
        requests = aiter(request_iterator)
        first = await self._greetings.receive(lambda: anext(requests, None))
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            raise ProtocolViolationError(_ORDER)
        model = messages.model_from_proto(first.hello.model)
        source = first.hello.features if first.hello.HasField("features") else None
        encoding = None if source is None else feature_messages.feature_encoding_from_proto(source)
        greeting = _greeting(first.hello, model, origin_of(context))
        drafter = self._core.peers.welcome(greeting, model, None if source is None else source.fingerprint)
        stream = self._core.peers.open_stream(drafter, model, encoding)
        feeds = self._core.feeds
        if feeds is not None:
            feeds.resume(stream)

        async def write() -> None:
            while some := await stream.outbox.take_all():
                outcomes = [each for each in some if isinstance(each, RoundOutcome)]
                if outcomes:
                    told = verifier_pb2.RoundOutcomes(outcomes=map(messages.outcome_to_proto, outcomes))
                    await context.write(verifier_pb2.PushDraftBlocksResponse(outcomes=told))
                keys = [each for each in some if not isinstance(each, RoundOutcome)]
                for features in await feeds.take(stream, keys) if keys and feeds is not None else []:
                    part = feature_messages.features_to_proto(features)
                    await context.write(verifier_pb2.PushDraftBlocksResponse(features=part))

        def end() -> None:
            self._core.peers.end_stream(stream)
            stream.outbox.close()

        try:
            response = verifier_pb2.PushDraftBlocksResponse(
                welcome=messages.model_to_proto(self._core.description),
                identity=messages.identity_to_proto(drafter.identity),
            )
            async with self._drafters.one(lambda: stream.use):
                await context.write(response)
                await exchange(self._read_drafter(requests, stream), write(), end)
        finally:
            end()
            drafter.num_streams -= 1

    async def _read_drafter(
        self, requests: AsyncIterator[verifier_pb2.PushDraftBlocksRequest], stream: DrafterStream
    ) -> None:
        brake = Brake()
        async for request in requests:
            match request.WhichOneof("message"):
                case "blocks":
                    await self._push_blocks(request, stream, brake)
                case "feature_requests" if stream.encoding is not None:
                    self._request_features(request, stream)
                case _:
                    raise ProtocolViolationError(_ORDER)

    def _request_features(self, request: verifier_pb2.PushDraftBlocksRequest, stream: DrafterStream) -> None:
        wanted = request.feature_requests.requests
        if len(wanted) > self._most_items:
            raise ProtocolViolationError(f"a message holds at most {self._most_items} requests")
        assert self._core.feeds is not None, "else it would not have been welcomed"
        self._core.feeds.request(stream, list(map(feature_messages.feature_request_from_proto, wanted)))

    @property
    def _most_items(self) -> int:
        """Blocks, or requests, in a message, at most: a session waits for one."""
        return max(messages.MAX_BLOCKS, self._core.config.engine.max_sessions)

    async def _push_blocks(
        self, request: verifier_pb2.PushDraftBlocksRequest, stream: DrafterStream, brake: Brake
    ) -> None:
        core, model = self._core, self._core.description
        core.metrics.count_bytes(num_received_bytes.get() + FRAME_BYTES)
        limits = (model.vocab_size, core.config.engine.max_draft_tokens, model.max_tree_nodes)
        blocks = await decoded_blocks(request.blocks.blocks, stream.drafter.id, limits, self._most_items)
        num_judged, num_useless = core.push_blocks(blocks)
        stream.use = StreamUse.PRESENT if num_judged else stream.use
        rest_s = brake.rest_s(num_judged, num_useless)
        if rest_s:
            core.metrics.rest_s.inc(rest_s)
            await asyncio.sleep(rest_s)

    async def _read_commands(
        self, requests: AsyncIterator[verifier_pb2.RunTargetSessionsRequest], lease_id: int
    ) -> None:
        core = self._core
        async for request in requests:
            async for command in in_turns(request.commands):
                match command.WhichOneof("command"):
                    case "plain_run":
                        run = messages.plain_run_from_proto(command.plain_run)
                        if core.is_for(lease_id, (run.fence.session_id, run.fence.epoch)):
                            core.run_plain(run)
                    case "close_session":
                        key = (command.close_session.session_id, command.close_session.epoch)
                        if core.is_for(lease_id, key):
                            core.close_session(*key)
                    case _:
                        raise ProtocolViolationError("a command without content")


def _greeting(hello: verifier_pb2.DrafterHello, model: ModelDescription, origin: str) -> Greeting:
    identity = messages.identity_from_proto(hello.identity) if hello.HasField("identity") else None
    keeps_identity = ISSUED_IDENTITIES in model.capabilities
    return Greeting(model.name, origin, hello.instance_id, identity, keeps_identity)


def _events_to_proto(events: Sequence[TargetEvent]) -> verifier_pb2.RunTargetSessionsResponse:
    return verifier_pb2.RunTargetSessionsResponse(events=[_event_to_proto(event) for event in events])


def _event_to_proto(event: TargetEvent) -> verifier_pb2.TargetEvent:
    if isinstance(event, Verdict):
        return verifier_pb2.TargetEvent(verdict=messages.verdict_to_proto(event))
    if isinstance(event, PromptRead):
        return verifier_pb2.TargetEvent(prompt_read=messages.prompt_read_to_proto(event))
    if isinstance(event, BlockRefused):
        return verifier_pb2.TargetEvent(refusal=_refusal_to_proto(event))
    return verifier_pb2.TargetEvent(failure=messages.failure_to_proto(event.session_id, event.epoch, event.error))


def make_service(config: VerifierConfig, place: Place | None = None, followers: Followers | None = None) -> Service:
    """Makes a verifier, to be started. Call in a running event loop."""
    tls = watch_tls(config.tls)
    core = VerifierCore(config, place, followers)
    core.metrics.watch_certificates(partial(expiries_of, tls))
    tracer = open_tracer(config.tracing, "verifier", f"{core.instance_id:016x}")
    core.spans = VerifierSpans(tracer) if tracer is not None else None

    async def start() -> None:
        await core.start()
        check_prompt_fits(core.description, config.connections.max_message_bytes)

    def register(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(core), server)
        add_ModelServiceServicer_to_server(ModelServicer(lambda: core.card), server)

    return Service(
        name="verifier",
        grpc_names=("draftwire.v1.VerifierService", "draftwire.v1.ModelService"),
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
