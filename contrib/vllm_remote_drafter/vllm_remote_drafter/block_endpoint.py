"""Receives the blocks of drafters: as much of a verifier as they need. No vLLM here."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from draftwire.errors import ProtocolViolationError
from draftwire.method.rounds import ReceivedBlock
from draftwire.models.description import ModelDescription
from draftwire.runtime import messages
from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.caller_identity import CallerRole, require_role
from draftwire.runtime.channels import bind, server_options
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.received_blocks import decoded_blocks
from draftwire.runtime.settings import ConnectionSettings
from draftwire.runtime.tls import TlsFiles, server_credentials
from draftwire.v1 import verifier_pb2
from draftwire_verifier.brake import Brake
from vllm_remote_drafter.remote_settings import RemoteDrafterSettings

SERVICE, METHOD = "draftwire.v1.VerifierService", "PushDraftBlocks"
"""The one method that is served."""
BLOCK_BYTES, TOKEN_BYTES = 512, 5
"""Most bytes of a block without distributions beside its tokens, and of a token."""


class BlockEndpoint:
    """Receives blocks of drafters. Opens no sessions and decides nothing."""

    def __init__(
        self, target: ModelDescription, num_draft_tokens: int, deliver: Callable[[Sequence[ReceivedBlock]], int]
    ) -> None:
        """Sends `target` to drafters as their welcome, and takes no blocks longer than `num_draft_tokens`.

        `deliver` gets what arrives, on the event loop, and returns how many of it were of use. Who may send a block is
        shown by its fence alone, which holds the session's random id.
        """
        self._target = target
        self._num_draft_tokens = num_draft_tokens
        self._deliver = deliver
        gate = ServiceGate(CallLimits())
        gate.refusal = ""
        most_bytes = messages.MAX_BLOCKS * (BLOCK_BYTES + TOKEN_BYTES * num_draft_tokens)
        options = server_options(ConnectionSettings(), CallLimits(max_request_bytes=most_bytes))
        self._server = grpc.aio.server(interceptors=[gate], options=options)

    async def start(self, settings: RemoteDrafterSettings, files: TlsFiles | None) -> int:
        """Listens, and returns the port.

        Raises:
            UnavailableError: the port is not available.
        """
        push = grpc.stream_stream_rpc_method_handler(
            self._receive,
            request_deserializer=verifier_pb2.PushDraftBlocksRequest.FromString,
            response_serializer=verifier_pb2.PushDraftBlocksResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: push}),))
        port = bind(self._server, settings.host, settings.port, server_credentials(files, settings.tls))
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Ends the calls of drafters."""
        await self._server.stop(None)

    async def _receive(
        self,
        request_iterator: AsyncIterator[verifier_pb2.PushDraftBlocksRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.PushDraftBlocksRequest, verifier_pb2.PushDraftBlocksResponse],
    ) -> None:
        require_role(context, CallerRole.DRAFTER)
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            raise ProtocolViolationError("a drafter sends a hello first, then blocks")
        welcome = messages.model_to_proto(self._target)
        await context.write(verifier_pb2.PushDraftBlocksResponse(welcome=welcome))
        limits = (self._target.vocab_size, self._num_draft_tokens, 0)
        brake = Brake()
        async for request in requests:
            blocks = await decoded_blocks(request.blocks.blocks, first.hello.instance_id, limits)
            num_used = self._deliver(blocks)
            await asyncio.sleep(brake.rest_s(num_used, max(1, len(blocks)) - num_used))
