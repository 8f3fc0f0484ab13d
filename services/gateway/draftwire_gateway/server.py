"""The gateway's gRPC edge, and the assembly of its service."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from functools import partial
from typing import Any

import grpc
from typing_extensions import override

from draftwire.errors import InvalidRequestError
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import PromptPart
from draftwire.runtime import messages
from draftwire.runtime.addresses import host_of_peer
from draftwire.runtime.call_limits import SPARE_CALLS, CallLimits
from draftwire.runtime.channels import check_prompt_fits
from draftwire.runtime.codec import Codec, converters
from draftwire.runtime.http_server import MAX_HTTP_CONNECTIONS, HttpEndpoint, HttpListener
from draftwire.runtime.interceptor import Metadata, ignore_ends, value_of
from draftwire.runtime.logging import configure_logging
from draftwire.runtime.process import run_service
from draftwire.runtime.service import Service
from draftwire.runtime.tls import Dialler, TlsFiles, expiries_of, server_context, server_credentials, watch_tls
from draftwire.runtime.tracing import open_tracer
from draftwire.runtime.unknown_fields import refuse_unknown_fields
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from draftwire_gateway.access_log import log_call
from draftwire_gateway.auth.access import Access, payer
from draftwire_gateway.body_budget import BodyBudget
from draftwire_gateway.config import AUTO_LOCAL_DRAFTS, GatewayConfig
from draftwire_gateway.core import MAX_IDS_ON_LOOP, GatewayCore, local_strategies
from draftwire_gateway.http.app import make_app
from draftwire_gateway.peers.pool import Pool
from draftwire_gateway.peers.roster import Roster
from draftwire_gateway.peers.sources import sources_of
from draftwire_gateway.peers.wire import DrafterLink, VerifierLink
from draftwire_gateway.requested_generation import (
    MAX_CHOICES,
    MAX_DRAFTERS,
    MAX_STOP_STRINGS,
    GeneratedChoice,
    RequestedGeneration,
    check_num_choices,
)
from draftwire_gateway.session.choices import ChoiceEvent, PromptEcho
from draftwire_gateway.session.committed_text import Delta, Finish, FinishReason
from draftwire_gateway.session.policy import Arm, DraftSource
from draftwire_gateway.session.spans import RequestTracing
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.speculation.explanation import Explanation, LoadExplanation
from draftwire_gateway.speculation.pairs import PairName
from draftwire_gateway.speculation.predicting_chooser import LEAST_GAIN
from draftwire_gateway.text.conversation import (
    MAX_CHAT_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatTurn,
    Conversation,
    Tool,
    ToolCall,
)

AnyPrompt = gateway_pb2.GenerateRequest | gateway_pb2.Prompt

GENERATE = "/draftwire.v1.GatewayService/Generate"

_REASONS = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
}
_SOURCES = {
    TokenSource.ACCEPTED: gateway_pb2.TOKEN_SOURCE_ACCEPTED,
    TokenSource.RECOVERED: gateway_pb2.TOKEN_SOURCE_RECOVERED,
    TokenSource.BONUS: gateway_pb2.TOKEN_SOURCE_BONUS,
    TokenSource.PLAIN: gateway_pb2.TOKEN_SOURCE_PLAIN,
}

_NAMED_ALIKE = (
    *("num_choices", "max_tokens", "seed", "num_speculative_tokens", "num_draft_nodes", "stop_below"),
    *("logprobs", "prompt_logprobs", "logprobs_mode"),
)
"""Parameters that may be left out and have the same names in `RequestedGeneration`."""


_statistics_to_proto = Codec(Statistics, gateway_pb2.GenerationStatistics).encode
converters(ToolCall, gateway_pb2.ToolCall)
converters(ChatTurn, gateway_pb2.ChatMessage)
converters(Tool, gateway_pb2.Tool)
_, _conversation_from_proto = converters(
    Conversation, gateway_pb2.ChatPrompt, {"turns": "messages", "continues_last": "continue_final_message"}
)


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Converts between gRPC messages and the core."""

    def __init__(self, core: GatewayCore, pool: Pool, access: Access) -> None:
        self._core = core
        self._pool = pool
        self._access = access
        self._waiting = BodyBudget()
        """Budget of the requests that wait for a place."""

    @contextmanager
    def admit(self, method: str, metadata: Metadata) -> Iterator[None]:
        """Decides on a call by its metadata, before its request is received.

        Raises:
            UnauthenticatedError: the caller shows no valid token.
            NoRoomError: the caller has reached a limit, or too many requests run and wait.
        """
        caller = self._access.authenticate(value_of(metadata, "authorization"))
        if method != GENERATE:
            yield
            return
        counting = self._core.metrics.counting_refusals
        with counting("gateway", caller.name):
            self._core.queue.refuse_if_full()
        with ExitStack() as running:
            with counting("caller", caller.name):
                running.enter_context(caller.request())
            with counting("gateway", caller.name):  # which may give up a request that arrives too slowly
                yield

    @override
    async def Generate(
        self,
        request: gateway_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse],
    ) -> None:
        caller = self._access.authenticate(_metadata(context, "authorization"))
        self._check_sizes(request)
        refuse_unknown_fields(request)
        num_choices = _num_choices(request)
        counting = self._core.metrics.counting_refusals
        async with AsyncExitStack() as running:
            with counting("caller", caller.name, num_choices):
                running.enter_context(caller.request(num_choices))
            with counting("gateway", caller.name, num_choices):
                with self._waiting.share(caller.name) as share:
                    share.take(request.ByteSize())
                    place = await running.enter_async_context(self._core.queue.place(num_choices, caller.name))
                generations = await self._core.complete(await self._requested(request, caller.name))
                generations = await self._core.check_form(generations, payer(caller, host_of_peer(context.peer())))
            traceparent = _metadata(context, "traceparent") or ""
            async with aclosing(self._core.generate(generations, place, traceparent)) as events:
                async for event in events:
                    response = _event_to_proto(event)
                    caller.charge(len(response.delta.token_ids))
                    await asyncio.sleep(0)  # so that the deltas of one step of the verifier leave together
                    await context.write(response)

    @override
    async def GetServer(
        self,
        request: gateway_pb2.GetServerRequest,
        context: grpc.aio.ServicerContext[gateway_pb2.GetServerRequest, gateway_pb2.GetServerResponse],
    ) -> gateway_pb2.GetServerResponse:
        self._access.authenticate(_metadata(context, "authorization"))
        refuse_unknown_fields(request)
        core = self._core
        drafters = {drafter.description.name: drafter.description for drafter in self._pool.drafters.connected}
        default, rules = core.defaults.rule, core.target.rules
        return gateway_pb2.GetServerResponse(
            target=messages.model_to_proto(core.description),
            drafters=[messages.model_to_proto(description) for _, description in sorted(drafters.items())],
            num_speculative_tokens=core.defaults.num_speculative_tokens,
            max_speculative_tokens=core.defaults.max_speculative_tokens,
            rejection_sample_methods=[default, *(rule.name for rule in rules if rule.name != default)],
            lossy_rejection_sample_methods=[rule.name for rule in rules if not rule.is_lossless],
            chooses_draft_lengths=core.defaults.adapts_length,
            drafter_names=core.defaults.drafter_names(),
        )

    @override
    async def ExplainSpeculation(
        self,
        request: gateway_pb2.ExplainSpeculationRequest,
        context: grpc.aio.ServicerContext[
            gateway_pb2.ExplainSpeculationRequest, gateway_pb2.ExplainSpeculationResponse
        ],
    ) -> gateway_pb2.ExplainSpeculationResponse:
        self._access.authenticate(_metadata(context, "authorization"))
        refuse_unknown_fields(request)
        explanations = self._core.pairs.explain()
        return gateway_pb2.ExplainSpeculationResponse(
            is_adaptive=self._core.defaults.adapts_length,
            choices=[_choice_to_proto(pair, explained) for pair, explained in explanations.items()],
            least_gain=LEAST_GAIN,
        )

    def _check_sizes(self, request: gateway_pb2.GenerateRequest) -> None:
        """Refuses oversized lists before they are copied."""
        description = self._core.description
        _refuse_over("prompts", len(request.prompts.prompts), MAX_CHOICES)
        _refuse_over("generated_choices", len(request.generated_choices), MAX_CHOICES)
        prompts: Sequence[AnyPrompt] = [request, *request.prompts.prompts]
        num_generated = max((len(generated.token_ids) for generated in request.generated_choices), default=0)
        for name, size, most in (
            ("stop", len(request.stop), MAX_STOP_STRINGS),
            ("stop_token_ids", len(request.stop_token_ids), description.vocab_size),
            ("drafter", len(request.drafter), MAX_DRAFTERS),
            ("token_ids", max(len(prompt.token_ids.ids) for prompt in prompts), description.context_length),
            ("generated_choices", num_generated, description.context_length),
        ):
            _refuse_over(name, size, most)

    async def _requested(self, request: gateway_pb2.GenerateRequest, caller: str) -> RequestedGeneration:
        return RequestedGeneration(
            prompts=[await self._prompt_ids(prompt, caller) for prompt in _prompts(request)],
            sampling=messages.sampling_from_proto(request.sampling),
            caller=caller,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            drafter=tuple(request.drafter),
            rule=_optional(request, "rejection_sample_method"),
            cache_salt=request.cache_salt,
            generated_choices=tuple([await _generated(one) for one in request.generated_choices]),
            echo=request.echo,
            token_details=request.token_details,
            **{name: _optional(request, name) for name in _NAMED_ALIKE},
        )

    async def _prompt_ids(self, prompt: AnyPrompt, caller: str) -> list[int]:
        match prompt.WhichOneof("prompt"):
            case "text":
                return await self._core.tokenize(prompt.text, caller)
            case "token_ids":
                return await _id_list(prompt.token_ids.ids)
            case "chat":
                return await self._core.render_chat(_conversation(prompt.chat), caller)
        raise InvalidRequestError("a prompt is needed: text, token_ids or chat")


async def _generated(generated: gateway_pb2.GeneratedChoice) -> GeneratedChoice:
    return GeneratedChoice(generated.choice, tuple(await _id_list(generated.token_ids)), generated.is_finished)


async def _id_list(token_ids: Sequence[int]) -> list[int]:
    """Returns ids as a list; long ones are copied on a thread, because a request may have many."""
    if len(token_ids) > MAX_IDS_ON_LOOP // MAX_CHOICES:
        return await asyncio.to_thread(list, token_ids)
    return list(token_ids)


def _refuse_over(name: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidRequestError(f"{name} takes at most {most}, not {size}")


def _prompts(request: gateway_pb2.GenerateRequest) -> Sequence[AnyPrompt]:
    return request.prompts.prompts if request.WhichOneof("prompt") == "prompts" else [request]


def _num_choices(request: gateway_pb2.GenerateRequest) -> int:
    """Returns the number of requested choices, over all prompts. Refuses 0, and too many."""
    num_prompts = len(_prompts(request))
    return num_prompts * check_num_choices(num_prompts, _optional(request, "num_choices"))


def _optional(request: gateway_pb2.GenerateRequest, name: str) -> Any:
    return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]


def _conversation(chat: gateway_pb2.ChatPrompt) -> Conversation:
    """Decodes a conversation, and refuses one that is empty or too large."""
    _refuse_over("messages", len(chat.messages), MAX_CHAT_MESSAGES)  # before they are copied
    _refuse_over("tool_calls", sum(len(message.tool_calls) for message in chat.messages), MAX_TOOL_CALLS)
    _refuse_over("tools", len(chat.tools), MAX_TOOLS)
    return _conversation_from_proto(chat)


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> str | None:
    """Returns the value of a call's header; None if it is missing or repeated."""
    return value_of(context.invocation_metadata() or (), name)


def _event_to_proto(choice_event: ChoiceEvent) -> gateway_pb2.GenerateResponse:
    generation, choice = choice_event.generation, choice_event.generation.choice
    match choice_event.event:
        case Delta() as delta:
            message = gateway_pb2.GenerateDelta(
                choice=choice,
                token_ids=delta.token_ids,
                text=delta.text,
                logprobs=[token.logprob for token in delta.logprobs],
                top_logprobs=messages.top_to_proto(delta.logprobs),
                token_sources=[_SOURCES[source] for source in delta.sources],
                num_draft_tokens=delta.num_draft_tokens,
                draft_logprobs=delta.draft_logprobs,
                text_lengths=delta.text_lengths,
            )
            return gateway_pb2.GenerateResponse(delta=message)
        case PromptPart(first_position, tokens):
            prompt = gateway_pb2.PromptLogprobs(
                choice=choice,
                first_position=first_position,
                token_ids=[token.token_id for token in tokens],
                logprobs=[token.logprob for token in tokens],
                top_logprobs=messages.top_to_proto(tokens),
            )
            return gateway_pb2.GenerateResponse(prompt_logprobs=prompt)
        case PromptEcho(token_ids, text):
            echo = gateway_pb2.PromptEcho(choice=choice, token_ids=token_ids, text=text)
            return gateway_pb2.GenerateResponse(prompt_echo=echo)
        case Finish(reason, statistics, drafter_error):
            finish = gateway_pb2.GenerateFinish(
                choice=choice,
                reason=_REASONS[reason],
                statistics=_statistics_to_proto(statistics),
                seed=generation.seed,
                rejection_sample_method=generation.rule.name,
                drafter_error=drafter_error,
                is_lossy=generation.is_lossy,
            )
            return gateway_pb2.GenerateResponse(finish=finish)


def _choice_to_proto(pair: PairName, explanation: Explanation) -> gateway_pb2.SpeculationChoice:
    return gateway_pb2.SpeculationChoice(
        verifier=pair.verifier_address,
        drafter=pair.drafter_model,
        beside=pair.local_strategy,
        num_sessions=explanation.num_sessions,
        loads=[_load_to_proto(load, pair.drafters) for load in explanation.loads],
    )


def _load_to_proto(load: LoadExplanation, drafters: Mapping[DraftSource, str]) -> gateway_pb2.LoadChoice:
    def name_of(arm: Arm) -> str:
        return "" if arm.source is None else drafters[arm.source]

    return gateway_pb2.LoadChoice(
        min_sessions=load.min_sessions,
        max_sessions=load.max_sessions,
        num_draft_tokens=load.arm.length,
        estimates=[
            gateway_pb2.DraftLengthEstimate(
                num_draft_tokens=way.arm.length,
                drafter=name_of(way.arm),
                tokens_per_round=way.tokens_per_round,
                round_s=sum(way.parts),
                verify_s=way.parts.verify_s,
                draft_s=way.parts.draft_s,
                session_share=way.share,
                num_rounds=way.num_rounds,
            )
            for way in load.ways
        ],
        chosen=name_of(load.arm),
    )


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    configure_logging(config.server.log_format, "gateway")
    return asyncio.run(_serve(config))


async def _serve(config: GatewayConfig) -> int:
    return await run_service(await make_service(config))


async def make_service(config: GatewayConfig) -> Service:
    """Assembles a gateway service, without starting it."""
    tls = watch_tls(config.tls)
    access = Access(config.tokens_file, api_key=config.api_key)
    limits = (Dialler(config.connections, config.tls, tls), config.startup_timeout_s)
    sources = await sources_of(config)
    most = config.max_speculative_tokens
    verifiers = Roster("verifier", sources.verifiers, lambda address: VerifierLink(address, *limits, most))
    drafters = Roster("drafter", sources.drafters, lambda address: DrafterLink(address, *limits))
    pool = Pool(
        verifiers,
        drafters,
        config.connections.max_message_bytes,
        config.discovery.near_drafter_sessions,
        config.rejection_sample_method,
        () if config.local_drafts == AUTO_LOCAL_DRAFTS else local_strategies(config.local_drafts),
    )
    core = GatewayCore(config, pool)
    core.metrics.watch((verifiers, drafters))
    core.metrics.watch_certificates(partial(expiries_of, tls))
    tracer = open_tracer(config.tracing, "gateway", secrets.token_hex(8))
    if tracer is not None:
        core.tracing = RequestTracing(tracer, config.trace_sample_ratio, random.SystemRandom())
    streams: list[asyncio.Task[None]] = []

    async def start() -> None:
        streams.extend(asyncio.create_task(stream) for stream in pool.maintain())
        reference = await pool.meet(config.startup_timeout_s)
        check_prompt_fits(pool.description, config.max_request_bytes, "max_request_bytes")
        core.serve_model(pool.description, await reference.tokenizer_files())
        await pool.wait_connected(config.startup_timeout_s)

    async def run() -> None:
        await asyncio.gather(*streams)

    def stop() -> None:
        for stream in streams:
            stream.cancel()
        core.stop()

    servicer = GatewayServicer(core, pool, access)
    max_request_bytes = min(config.max_request_bytes, config.connections.max_message_bytes)

    def why_unready() -> str:
        return pool.why_no_target() or ("full" if core.queue.is_full() else "")

    return Service(
        name="gateway",
        listeners=_http_listeners(config, core, pool, access, tls),
        grpc_names=("draftwire.v1.GatewayService",),
        settings=config.server,
        connections=config.connections,
        limits=CallLimits(
            max_request_bytes, config.max_requests + config.max_waiting_requests + SPARE_CALLS, is_public=True
        ),
        admit=servicer.admit,
        on_call_end=log_call if config.access_log else ignore_ends,
        credentials=server_credentials(tls, config.tls),
        metrics=core.metrics,
        register=partial(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, servicer),
        start=start,
        run=run,
        stop=stop,
        num_sessions=lambda: core.num_requests,
        why_unready=why_unready,
        tracer=tracer,
    )


def _http_listeners(
    config: GatewayConfig, core: GatewayCore, pool: Pool, access: Access, tls: TlsFiles | None
) -> list[HttpListener]:
    """Returns the listener of the HTTP edge, if it has a port."""
    if config.http_port is None:
        return []
    max_connections = max(MAX_HTTP_CONNECTIONS, 4 * config.max_requests + config.max_waiting_requests)
    context = server_context(tls, config.tls)
    endpoint = HttpEndpoint(config.server.host, config.http_port, context, max_connections=max_connections)

    def drafters() -> set[str]:
        return {drafter.description.name for drafter in pool.drafters.connected}

    return [HttpListener(lambda gate: make_app(core, drafters, access, gate), endpoint, config.connections)]
