"""The gateway's gRPC edge."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from draftwire.errors import InvalidRequestError
from draftwire.logprobs import PromptPart
from draftwire.services.gateway.access import Access
from draftwire.services.gateway.config import GatewayConfig
from draftwire.services.gateway.core import GatewayCore
from draftwire.services.gateway.loop import Delta, Finish, FinishReason
from draftwire.services.gateway.pool import Pool
from draftwire.services.gateway.request import MAX_STOP_STRINGS, Generation, RequestedGeneration
from draftwire.services.gateway.statistics import Statistics
from draftwire.services.gateway.wire import DrafterLink, VerifierLink
from draftwire.services.rpc import messages
from draftwire.services.rpc.process import Service, run_service
from draftwire.services.rpc.tls import Dialler, server_credentials, watch_tls
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from draftwire.verification import RULES

MAX_CHAT_MESSAGES = 4096
"""Turns of a conversation, at most."""

_REASONS = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Translates between messages and the core."""

    def __init__(self, core: GatewayCore, pool: Pool, access: Access) -> None:
        self._core = core
        self._pool = pool
        self._access = access

    async def Generate(
        self,
        request: gateway_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse],
    ) -> None:
        """See the proto."""
        with self._access.authenticate(_authorization(context)).request() as caller:
            generation = self._core.complete(await self._requested(request))
            async with aclosing(self._responses(generation)) as responses:
                async for response in responses:
                    caller.charge(len(response.delta.token_ids))
                    await context.write(response)

    async def GetServer(
        self,
        request: gateway_pb2.GetServerRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GetServerRequest, gateway_pb2.GetServerResponse],
    ) -> gateway_pb2.GetServerResponse:
        """See the proto."""
        self._access.authenticate(_authorization(context))
        core = self._core
        drafters = self._pool.connected_drafters
        default = core.defaults.rule
        return gateway_pb2.GetServerResponse(
            target=messages.model_to_proto(core.description),
            drafter=messages.model_to_proto(drafters[0].description) if drafters else None,
            num_speculative_tokens=core.defaults.num_speculative_tokens,
            max_speculative_tokens=core.defaults.max_speculative_tokens,
            rejection_sample_methods=[default, *(name for name in RULES if name != default)],
            lossy_rejection_sample_methods=[name for name, rule in RULES.items() if not rule.is_lossless],
        )

    def _check_sizes(self, request: gateway_pb2.GenerateRequest) -> None:
        """Refuses what is far too much before anything is made of it."""
        description = self._core.description
        for name, size, most in (
            ("messages", len(request.chat.messages), MAX_CHAT_MESSAGES),
            ("stop", len(request.stop), MAX_STOP_STRINGS),
            ("stop_token_ids", len(request.stop_token_ids), description.vocab_size),
            ("token_ids", len(request.token_ids.ids), description.context_length),
            ("generated_token_ids", len(request.generated_token_ids), description.context_length),
        ):
            if size > most:
                raise InvalidRequestError(f"{name} takes at most {most}, not {size}")

    async def _requested(self, request: gateway_pb2.GenerateRequest) -> RequestedGeneration:
        self._check_sizes(request)
        prompt_ids = await self._prompt_ids(request)
        if request.HasField("num_choices") and request.num_choices != 1:
            raise InvalidRequestError("num_choices other than 1 is not supported")
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
            generated_ids=tuple(request.generated_token_ids),
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
            logprobs_mode=request.logprobs_mode if request.HasField("logprobs_mode") else None,
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
                yield _event_to_proto(event, generation)


def _authorization(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """Returns the header of that name; None where there is none, or more than one."""
    values = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
    return values[0] if len(values) == 1 else None


def _event_to_proto(event: Delta | PromptPart | Finish, generation: Generation) -> gateway_pb2.GenerateResponse:
    match event:
        case Delta(token_ids, text, tokens):
            delta = gateway_pb2.GenerateDelta(
                token_ids=token_ids,
                text=text,
                logprobs=[token.logprob for token in tokens],
                top_logprobs=messages.top_to_proto(tokens),
            )
            return gateway_pb2.GenerateResponse(delta=delta)
        case PromptPart(first_position, tokens):
            prompt = gateway_pb2.PromptLogprobs(
                first_position=first_position,
                token_ids=[token.token_id for token in tokens],
                logprobs=[token.logprob for token in tokens],
                top_logprobs=messages.top_to_proto(tokens),
            )
            return gateway_pb2.GenerateResponse(prompt_logprobs=prompt)
        case Finish():
            return gateway_pb2.GenerateResponse(finish=_finish_to_proto(event, generation))


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
        num_drafters_lost=statistics.num_drafters_lost,
        num_verifiers_lost=statistics.num_verifiers_lost,
        acceptance_histogram=statistics.acceptance_histogram,
        mean_acceptance_length=statistics.mean_acceptance_length,
        draft_acceptance_rate=statistics.draft_acceptance_rate,
    )


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    return asyncio.run(_serve(config))


async def _serve(config: GatewayConfig) -> int:
    tls = watch_tls(config.tls)
    access = Access(config.tokens_file)
    limits = (Dialler(config.connections, config.tls, tls), config.startup_timeout_s)
    verifiers = [VerifierLink(address, *limits) for address in config.verifiers]
    drafters = [DrafterLink(address, *limits) for address in config.drafters]
    pool = Pool(verifiers, drafters, config.connections.max_message_bytes)
    core = GatewayCore(config, pool)
    streams: list[asyncio.Task[None]] = []

    async def start() -> None:
        reference = await pool.meet(config.startup_timeout_s)
        core.serve_model(pool.description, await reference.tokenizer_files())
        streams.extend(asyncio.create_task(stream) for stream in pool.maintain())
        await pool.wait_connected(config.startup_timeout_s)

    async def run() -> None:
        await asyncio.gather(*streams)

    def stop() -> None:
        for stream in streams:
            stream.cancel()

    def register(server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServicer(core, pool, access), server)

    service = Service(
        name="gateway",
        grpc_names=("draftwire.v1.GatewayService",),
        settings=config.server,
        connections=config.connections,
        credentials=server_credentials(tls, config.tls),
        metrics=core.metrics,
        register=register,
        start=start,
        run=run,
        stop=stop,
        num_sessions=lambda: core.num_requests,
    )
    return await run_service(service)
