"""The verifier's gRPC edge."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncIterator

import grpc

from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.rounds import Verdict
from draftwire.services.outbox import Outbox
from draftwire.services.rpc import messages
from draftwire.services.rpc.model_service import ModelServicer
from draftwire.services.rpc.process import Service, run_service
from draftwire.services.rpc.streams import exchange
from draftwire.services.verifier.config import VerifierConfig
from draftwire.services.verifier.core import BlockRefused, TargetEvent, VerifierCore
from draftwire.v1 import session_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire.v1.model_pb2_grpc import add_ModelServiceServicer_to_server


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Translates between messages and the core."""

    def __init__(self, core: VerifierCore) -> None:
        self._core = core

    async def RunTargetSessions(
        self,
        request_iterator: AsyncIterator[verifier_pb2.RunTargetSessionsRequest],
        context: grpc.aio.ServicerContext[
            verifier_pb2.RunTargetSessionsRequest, verifier_pb2.RunTargetSessionsResponse
        ],
    ) -> None:
        """See the proto."""
        lease_id, outbox = self._core.open_lease()
        lease = verifier_pb2.TargetEvent(lease=session_pb2.Lease(lease_id=lease_id))
        try:
            await context.write(verifier_pb2.RunTargetSessionsResponse(events=[lease]))
            await exchange(self._read_commands(request_iterator), self._write_events(outbox, context))
        finally:
            self._core.end_lease(lease_id)

    async def OpenTargetSession(
        self,
        request: verifier_pb2.OpenTargetSessionRequest,
        context: grpc.aio.ServicerContext[
            verifier_pb2.OpenTargetSessionRequest, verifier_pb2.OpenTargetSessionResponse
        ],
    ) -> verifier_pb2.OpenTargetSessionResponse:
        """See the proto."""
        self._core.open_session(messages.target_spec_from_proto(request), request.lease_id)
        return verifier_pb2.OpenTargetSessionResponse()

    async def PushDraftBlocks(
        self,
        request_iterator: AsyncIterator[verifier_pb2.PushDraftBlocksRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.PushDraftBlocksRequest, verifier_pb2.PushDraftBlocksResponse],
    ) -> None:
        """See the proto."""
        welcomed = False
        async for request in request_iterator:
            kind = request.WhichOneof("message")
            if kind == "hello" and not welcomed:
                own = self._core.welcome_drafter(messages.model_from_proto(request.hello.model))
                await context.write(verifier_pb2.PushDraftBlocksResponse(welcome=messages.model_to_proto(own)))
                welcomed = True
            elif kind == "blocks" and welcomed:
                for message in request.blocks.blocks:
                    self._push_block(message)
            else:
                raise ProtocolViolationError("a drafter says hello once, first, and then sends blocks")

    def _push_block(self, message: session_pb2.DraftBlock) -> None:
        try:
            block = messages.block_from_proto(message)
        except InvalidRequestError as error:
            self._core.refuse_block((message.fence.session_id, message.fence.epoch), str(error))
        else:
            self._core.push_block(block)

    async def _read_commands(self, requests: AsyncIterator[verifier_pb2.RunTargetSessionsRequest]) -> None:
        async for request in requests:
            for command in request.commands:
                match command.WhichOneof("command"):
                    case "plain_run":
                        self._core.run_plain(messages.plain_run_from_proto(command.plain_run))
                    case "close_session":
                        self._core.close_session(command.close_session.session_id, command.close_session.epoch)
                    case _:
                        raise ProtocolViolationError("a command without content")

    async def _write_events(
        self,
        outbox: Outbox[TargetEvent],
        context: grpc.aio.ServicerContext[
            verifier_pb2.RunTargetSessionsRequest, verifier_pb2.RunTargetSessionsResponse
        ],
    ) -> None:
        while events := await outbox.take_all():
            message = verifier_pb2.RunTargetSessionsResponse(events=[_event_to_proto(event) for event in events])
            await context.write(message)


def _event_to_proto(event: TargetEvent) -> verifier_pb2.TargetEvent:
    if isinstance(event, Verdict):
        return verifier_pb2.TargetEvent(verdict=messages.verdict_to_proto(event))
    if isinstance(event, BlockRefused):
        refusal = verifier_pb2.BlockRefusal(
            session_id=event.session_id, epoch=event.epoch, round=event.round, message=event.reason
        )
        return verifier_pb2.TargetEvent(refusal=refusal)
    return verifier_pb2.TargetEvent(failure=messages.failure_to_proto(event.session_id, event.epoch, event.error))


def serve(config: VerifierConfig) -> int:
    """Runs a verifier until a signal ends it, and returns the process's exit status."""
    return asyncio.run(_serve(config))


async def _serve(config: VerifierConfig) -> int:
    core = VerifierCore(config)

    def register(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(core), server)
        add_ModelServiceServicer_to_server(ModelServicer(lambda: core.card), server)

    service = Service(
        name="verifier",
        grpc_names=("draftwire.v1.VerifierService", "draftwire.v1.ModelService"),
        settings=config.server,
        metrics=core.metrics,
        register=register,
        start=core.start,
        run=core.run_steps,
        stop=core.stop,
        num_sessions=lambda: core.num_sessions,
    )
    return await run_service(service)
