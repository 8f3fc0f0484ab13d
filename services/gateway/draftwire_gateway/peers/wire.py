"""Streams to verifiers and drafters over gRPC."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import override

from draftwire.errors import (
    DraftwireError,
    InvalidRequestError,
    ModelMismatchError,
    ProtocolViolationError,
    UnavailableError,
)
from draftwire.method.rounds import Calibration, DraftSessionSpec, PlainRun, SendDrafted, TargetSessionSpec
from draftwire.models.description import ModelDescription
from draftwire.requests.logprobs import MAX_PROMPT_PART
from draftwire.runtime import messages
from draftwire.runtime.channels import in_messages
from draftwire.runtime.outbox import Outbox
from draftwire.runtime.peers import ModelPeer, received
from draftwire.runtime.served_request import request_metadata
from draftwire.runtime.status import MAX_MESSAGE, error_of, error_of_number
from draftwire.runtime.tls import Dialler, RenewedChannel
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, session_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_gateway.peers.answer_watch import AnswerWatch
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost, Inbox, SessionEvent, TargetLost
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate

log = structlog.get_logger()

SessionCommand = TypeVar("SessionCommand")
Event = TypeVar("Event")

RECONNECT_SECONDS = 0.5
OPEN_SECONDS = 10.0
"""Timeout of opening a session on a verifier, which reads the prompt later."""

MAX_QUARANTINED = 4096
"""Drafters in quarantine that are remembered for each verifier."""

SERVICE = "draftwire.v1.VerifierService"
"""Service whose health a gateway asks for."""
UNANSWERED = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""Statuses of questions that the peer has not answered. Any other one is an answer."""

COOLDOWN_SECONDS = 1.0
"""How long a service that was unavailable for a session is avoided, if there is another one."""


class SessionLink(ABC, Generic[SessionCommand, Event]):
    """A stream under a lease, reopened for ever, that delivers the events of many sessions to their inboxes.

    Prompts are sent on a separate connection. When the stream breaks, every session on it gets a loss event, and a new
    stream is opened for new sessions.
    """

    _command_type: Callable[..., SessionCommand]
    _request_type: Callable[..., Any]
    """Message with some commands."""
    _loss: Callable[[Exception], SessionEvent]
    """Last event of a session that was lost."""

    def __init__(self, address: str, dialler: Dialler, timeout_s: float) -> None:
        """Connects nothing before `maintain`. The address is host:port; the service's calls have `timeout_s`."""
        self.address = address
        self.zone: str | None = None
        """Zone of the service, if known. Set by the roster."""
        self.has_left = asyncio.Event()
        """Set by the roster while no new sessions may be opened on the service."""
        self.description: ModelDescription
        self._timeout_s = timeout_s
        self._control = RenewedChannel(dialler, address, bulk=False)
        self._bulk = RenewedChannel(dialler, address, bulk=True)
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        self.instance_id = 0
        """Identifies the process that granted the lease."""
        self.fault: DraftwireError | None = None
        """Reason why the service cannot be used although it answers, such as another model."""
        self._lease_id: int | None = None
        self._cooldown_until = 0.0
        self._outbox = Outbox[SessionCommand]()

    @property
    def connected(self) -> bool:
        """Whether sessions can be opened now."""
        return self._lease_id is not None

    @property
    def is_silent(self) -> bool:
        """Whether the service does not answer, although it is connected."""
        return False

    @property
    def is_leaving(self) -> bool:
        """Whether no new sessions may be opened on the service; open ones go on."""
        return self.has_left.is_set()

    @property
    def num_sessions(self) -> int:
        """Sessions that this gateway has open on the service."""
        return len(self._inboxes)

    @property
    def is_cooling_down(self) -> bool:
        """Whether the service was unavailable for a session within `COOLDOWN_SECONDS`, as while it drains."""
        return time.monotonic() < self._cooldown_until

    @property
    def peer(self) -> ModelPeer:
        """The service as a model server."""
        return ModelPeer(self._bulk.get(), self._timeout_s)

    async def maintain(self, check: Check) -> None:
        """Keeps the stream open, for ever."""
        logged = ""
        while True:
            try:
                await self._describe(check)
                await self._run_stream()
                reason = "the service ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    self.fault = error_of(error)
            except DraftwireError as error:
                reason = str(error)
            finally:
                lost_lease, self._lease_id = self._lease_id, None
                self._outbox.close()
            for key in list(self._inboxes):
                self._lose(key, UnavailableError(f"lost {self.address}: {reason}"))
            if lost_lease is not None:
                log.warning("gateway.peer_lost", address=self.address, reason=reason)
            elif self.fault is not None and reason != logged:
                log.error("gateway.peer_unfit", address=self.address, reason=reason)
            logged = reason
            await asyncio.sleep(RECONNECT_SECONDS)

    def close(self, session_id: int, epoch: int) -> None:
        """Closes a session, without waiting, unless it was lost before. Its inbox gets no more events."""
        if self._inboxes.pop((session_id, epoch), None) is not None:
            self._outbox.put(self._command_type(close_session={"session_id": session_id, "epoch": epoch}))

    def _leased(self, session_id: int, epoch: int, inbox: Inbox) -> int:
        """Registers the inbox of a session, and returns the id of the lease to open it under."""
        if self._lease_id is None:
            raise UnavailableError(f"no connection to {self.address}")
        self._inboxes[session_id, epoch] = inbox
        return self._lease_id

    def _deliver(self, key: tuple[int, int], event: SessionEvent) -> None:
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(event)

    def _lose(self, key: tuple[int, int], error: Exception) -> None:
        """Delivers the loss of a session, its last event."""
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            inbox.put_nowait(self._loss(error))

    def _failure(self, failure: session_pb2.SessionFailure) -> None:
        error = error_of_number(failure.status_code, failure.message[:MAX_MESSAGE])
        self._lose((failure.session_id, failure.epoch), error)

    async def disconnect(self) -> None:
        """Closes the connections of a link that is no longer maintained."""
        await self._control.close()
        await self._bulk.close()

    async def _describe(self, check: Check) -> None:
        """Requests and checks the description of the served model, which may have changed since the last connection."""
        try:
            description = await self.peer.describe()
            await check(self, description)
        except (ModelMismatchError, InvalidRequestError) as error:
            self.fault = error
            raise
        self.description, self.fault = description, None

    async def _open_session(self, call: Awaitable[Any]) -> Any:
        """Awaits the call that opens a session, returns its response, and converts its error."""
        try:
            return received(await call)
        except grpc.aio.AioRpcError as error:
            refusal = error_of(error)
            if isinstance(refusal, UnavailableError):
                self._cooldown_until = time.monotonic() + COOLDOWN_SECONDS
            raise refusal from error

    async def _run_stream(self) -> None:
        """Opens a stream and delivers its events until it ends."""
        self._outbox = Outbox[SessionCommand]()
        call = self._open_stream(self._requests(self._outbox))
        try:
            async for response in call:
                for event in received(response).events:
                    self._receive(event)
        finally:
            call.cancel()

    def _take_lease(self, lease: session_pb2.Lease) -> None:
        self._lease_id, self.instance_id = lease.lease_id, lease.instance_id
        self._cooldown_until = 0.0
        log.info("gateway.peer_connected", address=self.address, model=self.description.name)

    async def _requests(self, outbox: Outbox[SessionCommand]) -> AsyncIterator[Any]:
        while commands := await outbox.take_all():
            for request in in_messages(lambda some: self._request_type(commands=some), commands):
                yield request

    @abstractmethod
    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]: ...

    @abstractmethod
    def _receive(self, event: Event) -> None: ...


Check = Callable[[SessionLink[Any, Any], ModelDescription], Awaitable[None]]
"""Raises if a service with a given model cannot be used."""


class VerifierLink(SessionLink[verifier_pb2.TargetCommand, verifier_pb2.TargetEvent]):
    """A `TargetPort` over gRPC."""

    _command_type, _request_type = verifier_pb2.TargetCommand, verifier_pb2.RunTargetSessionsRequest
    _loss = TargetLost

    def __init__(self, address: str, dialler: Dialler, timeout_s: float, max_draft_tokens: int) -> None:
        """Connects nothing before `maintain`. A session may request `max_draft_tokens` at most."""
        super().__init__(address, dialler, timeout_s)
        self._most_tokens = max_draft_tokens + 1
        """Most tokens of a verdict: the draft tokens, and that of the verifier."""
        self._quarantined: set[int] = set()
        self._opening: set[grpc.aio.Call] = set()
        """Calls that open sessions."""
        self._lost_after_s = dialler.connections.keepalive_timeout_s
        self._watch = self._new_watch()

    @property
    @override
    def is_silent(self) -> bool:
        return self._watch.is_silent

    @property
    def is_well(self) -> bool:
        """Whether the verifier answers and takes sessions, as far as it has been asked."""
        return self._watch.is_well

    def takes_blocks_of(self, drafter_id: int) -> bool:
        """Whether the verifier has not reported a drafter as quarantined."""
        return drafter_id not in self._quarantined

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        """Opens a session by a unary call; its verdicts arrive on the stream."""
        lease_id = self._leased(spec.session_id, spec.epoch, inbox)
        stub = verifier_pb2_grpc.VerifierServiceStub(self._bulk.get())
        request = messages.target_spec_to_proto(spec, lease_id)
        timeout_s = min(OPEN_SECONDS, self._timeout_s)
        call = stub.OpenTargetSession(request, timeout=timeout_s, metadata=request_metadata())
        self._opening.add(call)
        try:
            await self._open_session(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # it is the caller that leaves
                raise
            raise UnavailableError(f"{self.address} does not answer") from None
        finally:
            self._opening.discard(call)

    def run_plain(self, run: PlainRun) -> None:
        """Requests plain rounds, without waiting."""
        self._outbox.put(verifier_pb2.TargetCommand(plain_run=messages.plain_run_to_proto(run)))

    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]:
        return verifier_pb2_grpc.VerifierServiceStub(self._control.get()).RunTargetSessions(requests)

    @override
    async def _run_stream(self) -> None:
        """The same, until the verifier does not answer any more, which raises UnavailableError."""
        self._watch = self._new_watch()
        stream = asyncio.ensure_future(super()._run_stream())
        watching = asyncio.ensure_future(self._watch.run())
        try:
            done, _ = await asyncio.wait({stream, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stream.cancel()
            watching.cancel()
            await asyncio.gather(stream, watching, return_exceptions=True)

    def _new_watch(self) -> AnswerWatch:
        return AnswerWatch(self._ask_health, self._lost_after_s, self._end_openings)

    async def _ask_health(self, timeout_s: float) -> bool:
        """Returns whether the verifier is ready, on the connection of its stream; an `Ask`."""
        stub = health_pb2_grpc.HealthStub(self._control.get())
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in UNANSWERED:
                raise UnavailableError(f"{self.address} does not answer") from error
            return True  # it has no room for such questions, say
        return bool(received(answer).status == health_pb2.HealthCheckResponse.SERVING)

    def _end_openings(self) -> None:
        """Lets nobody wait who opens a session on a verifier that does not answer."""
        for call in tuple(self._opening):
            call.cancel()

    def _receive(self, event: verifier_pb2.TargetEvent) -> None:
        self._watch.note_sign()
        match event.WhichOneof("event"):
            case "verdict":
                key = (event.verdict.fence.session_id, event.verdict.fence.epoch)
                if self._is_open(key, event.verdict.token_ids, self._most_tokens):
                    self._deliver(key, messages.verdict_from_proto(event.verdict))
            case "prompt_read":
                key = (event.prompt_read.session_id, event.prompt_read.epoch)
                if self._is_open(key, event.prompt_read.token_ids, MAX_PROMPT_PART):
                    self._deliver(key, messages.prompt_read_from_proto(event.prompt_read))
            case "refusal":
                has_room = len(self._quarantined) < MAX_QUARANTINED  # what a peer reports is not kept without a bound
                if has_room and event.refusal.HasField("quarantined_drafter_id"):
                    self._quarantined.add(event.refusal.quarantined_drafter_id)
                error = ModelMismatchError(f"the verifier refused a block: {event.refusal.message[:MAX_MESSAGE]}")
                refused = BlocksRefused(error, event.refusal.permit_number)
                self._deliver((event.refusal.session_id, event.refusal.epoch), refused)
            case "failure":
                self._failure(event.failure)
            case "lease":
                if event.lease.instance_id != self.instance_id:
                    self._quarantined.clear()  # another process issues other ids, and audits from the start
                self._take_lease(event.lease)

    def _is_open(self, key: tuple[int, int], token_ids: Sequence[int], most: int) -> bool:
        """Whether an event is to be decoded: its session is open. All its lists are as long as its tokens, or it is
        refused by the decoder before that reads them.

        Raises:
            ProtocolViolationError: the event has too many tokens. The verifier's stream is ended.
        """
        if len(token_ids) > most:
            raise ProtocolViolationError(f"{self.address} sent {len(token_ids)} tokens at once, of {most} at most")
        return key in self._inboxes


class DrafterLink(SessionLink[drafter_pb2.DraftCommand, drafter_pb2.DraftEvent]):
    """A `DrafterPort` over gRPC."""

    _command_type, _request_type = drafter_pb2.DraftCommand, drafter_pb2.RunDraftSessionsRequest
    _loss = DrafterLost

    def __init__(self, address: str, dialler: Dialler, timeout_s: float) -> None:
        super().__init__(address, dialler, timeout_s)
        self.round_trip = RoundTripEstimate()
        self._known_as: dict[str, int] = {}

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        """Opens a session by a unary call, which returns after the prefill."""
        lease_id = self._leased(spec.session_id, spec.epoch, inbox)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._bulk.get())
        request = messages.draft_spec_to_proto(spec, lease_id)
        response = await self._open_session(
            stub.OpenDraftSession(request, timeout=self._timeout_s, metadata=request_metadata())
        )
        if response.drafter_id:
            self._known_as[spec.verifier_address] = response.drafter_id

    def known_as(self, address: str) -> int:
        """Returns what the verifier at an address knows the drafter by; its instance id, if it has not told."""
        return self._known_as.get(address, self.instance_id)

    def calibrate(self, calibration: Calibration) -> None:
        """Requests a block, without waiting."""
        self._outbox.put(drafter_pb2.DraftCommand(calibration=messages.calibration_to_proto(calibration)))

    def send_drafted(self, command: SendDrafted) -> None:
        """Requests the tokens drawn so far of the block in progress, without waiting."""
        self._outbox.put(drafter_pb2.DraftCommand(send_drafted=messages.send_drafted_to_proto(command)))

    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]:
        return drafter_pb2_grpc.DrafterServiceStub(self._control.get()).RunDraftSessions(requests)

    def _receive(self, event: drafter_pb2.DraftEvent) -> None:
        match event.WhichOneof("event"):
            case "sent":
                sent = messages.block_sent_from_proto(event.sent)
                self._deliver((sent.session_id, sent.epoch), sent)
            case "failure":
                self._failure(event.failure)
            case "lease":
                if event.lease.instance_id != self.instance_id:
                    self._known_as.clear()  # by that process the verifiers know another one
                self._take_lease(event.lease)
