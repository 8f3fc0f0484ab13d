"""The gateway's gRPC edge."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from draftwire.errors import InvalidRequestError
from draftwire.services.gateway.config import GatewayConfig
from draftwire.services.gateway.core import GatewayCore
from draftwire.services.gateway.loop import Delta, Finish, FinishReason
from draftwire.services.gateway.request import Generation, RequestedGeneration
from draftwire.services.gateway.statistics import Statistics
from draftwire.services.gateway.wire import DrafterLink, VerifierLink
from draftwire.services.rpc import messages
from draftwire.services.rpc.channels import check_prompt_fits
from draftwire.services.rpc.peers import check_vocabularies
from draftwire.services.rpc.process import Service, run_service
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from draftwire.verification import RULES

_REASONS = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Translates between messages and the core."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def Generate(
        self,
        request: gateway_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse],
    ) -> None:
        """See the proto."""
        generation = self._core.complete(await self._requested(request))
        async with aclosing(self._responses(generation)) as responses:
            async for response in responses:
                await context.write(response)

    async def GetServer(
        self,
        request: gateway_pb2.GetServerRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GetServerRequest, gateway_pb2.GetServerResponse],
    ) -> gateway_pb2.GetServerResponse:
        """See the proto."""
        core = self._core
        drafter = core.drafter if core.drafter is not None and core.drafter.connected else None
        default = core.defaults.rule
        return gateway_pb2.GetServerResponse(
            target=messages.model_to_proto(core.target.description),
            drafter=messages.model_to_proto(drafter.description) if drafter else None,
            num_speculative_tokens=core.defaults.num_speculative_tokens,
            max_speculative_tokens=core.defaults.max_speculative_tokens,
            rejection_sample_methods=[default, *(name for name in RULES if name != default)],
            lossy_rejection_sample_methods=[name for name, rule in RULES.items() if not rule.is_lossless],
        )

    async def _requested(self, request: gateway_pb2.GenerateRequest) -> RequestedGeneration:
        prompt_ids = await self._prompt_ids(request)
        if request.HasField("num_choices") and request.num_choices != 1:
            raise InvalidRequestError("num_choices other than 1 is not supported")
        if request.num_logprobs:
            raise InvalidRequestError("num_logprobs is not supported")
        if request.HasField("prompt_len") and request.prompt_len != len(prompt_ids):
            raise InvalidRequestError("prompt_len other than the prompt's length is not supported")
        return RequestedGeneration(
            prompt_ids=prompt_ids,
            sampling=messages.sampling_from_proto(request.sampling),
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            seed=request.seed if request.HasField("seed") else None,
            num_speculative_tokens=(
                request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None
            ),
            rule=request.rejection_sample_method if request.HasField("rejection_sample_method") else None,
            cache_salt=request.cache_salt,
        )

    async def _prompt_ids(self, request: gateway_pb2.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._core.tokenize(request.text)
            case "token_ids":
                return list(request.token_ids.ids)
            case "chat":
                turns = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
                return await self._core.render_chat(turns)
        raise InvalidRequestError("a prompt is needed: text, token_ids or chat")

    async def _responses(self, generation: Generation) -> AsyncGenerator[gateway_pb2.GenerateResponse]:
        async with aclosing(self._core.generate(generation)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    delta = gateway_pb2.GenerateDelta(token_ids=event.token_ids, text=event.text)
                    yield gateway_pb2.GenerateResponse(delta=delta)
                else:
                    yield gateway_pb2.GenerateResponse(finish=_finish_to_proto(event, generation))


def _finish_to_proto(finish: Finish, generation: Generation) -> gateway_pb2.GenerateFinish:
    return gateway_pb2.GenerateFinish(
        reason=_REASONS[finish.reason],
        statistics=_statistics_to_proto(finish.statistics),
        seed=generation.seed,
        rejection_sample_method=generation.rule,
        drafter_error=finish.drafter_error,
        is_lossy=generation.is_lossy,
    )


def _statistics_to_proto(statistics: Statistics) -> gateway_pb2.GenerationStatistics:
    return gateway_pb2.GenerationStatistics(
        num_prompt_tokens=statistics.num_prompt_tokens,
        num_generated_tokens=statistics.num_generated_tokens,
        num_emitted_tokens=statistics.num_emitted_tokens,
        num_cached_prompt_tokens=statistics.num_cached_prompt_tokens,
        num_near_ties=statistics.num_near_ties,
        num_rounds=statistics.num_rounds,
        num_drafts=statistics.num_drafts,
        num_draft_tokens=statistics.num_draft_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_accepted_tokens_per_pos=statistics.num_accepted_tokens_per_pos,
        time_to_first_token_us=statistics.time_to_first_token_us,
        duration_us=statistics.duration_us,
        calibration_duration_us=statistics.calibration_us,
        draft_duration_us=statistics.draft_us,
        verify_duration_us=statistics.verify_us,
        queue_duration_us=statistics.queue_us,
    )


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    return asyncio.run(_serve(config))


async def _serve(config: GatewayConfig) -> int:
    limits = (config.connections, config.startup_timeout_s)
    target = VerifierLink(config.verifier, *limits)
    drafter = DrafterLink(config.drafter, *limits) if config.has_drafter else None
    core = GatewayCore(config, target, drafter)
    links = [link for link in (target, drafter) if link is not None]
    streams: list[asyncio.Task[None]] = []

    async def start() -> None:
        await asyncio.gather(*(link.describe() for link in links))
        for link in links:
            check_prompt_fits(link.description, config.connections.max_message_bytes)
        core.use_tokenizer(await target.peer.tokenizer_files())
        if drafter is not None:
            await check_vocabularies(target.peer, drafter.peer)
        streams.extend(asyncio.create_task(link.maintain()) for link in links)
        async with asyncio.timeout(config.startup_timeout_s):
            await asyncio.gather(*(link.wait_connected() for link in links))

    async def run() -> None:
        await asyncio.gather(*streams)

    def stop() -> None:
        for stream in streams:
            stream.cancel()

    def register(server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServicer(core), server)

    service = Service(
        name="gateway",
        grpc_names=("draftwire.v1.GatewayService",),
        settings=config.server,
        connections=config.connections,
        metrics=core.metrics,
        register=register,
        start=start,
        run=run,
        stop=stop,
        num_sessions=lambda: core.num_requests,
    )
    return await run_service(service)
