"""The gateway's ends of its streams to verifiers and drafters."""

from __future__ import annotations  # the generics of grpc exist for the type checker only

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc
import structlog

from draftwire.errors import DraftwireError, InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.method.rounds import Calibration, DraftSessionSpec, PlainRun, SendDrafted, TargetSessionSpec
from draftwire.models.description import ModelDescription
from draftwire.runtime import messages
from draftwire.runtime.channels import in_messages
from draftwire.runtime.outbox import Outbox
from draftwire.runtime.peers import ModelPeer
from draftwire.runtime.status import error_of, error_of_number
from draftwire.runtime.tls import Dialler, RenewedChannel
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, session_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_gateway.session.ports import BlocksRefused, DrafterLost, Inbox, SessionEvent, TargetLost
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate

log = structlog.get_logger()

SessionCommand = TypeVar("SessionCommand")
Event = TypeVar("Event")

RECONNECT_SECONDS = 0.5

OPEN_SECONDS = 10.0
"""How long a verifier may take to accept a session, whose prompt it reads later."""

REST_SECONDS = 1.0
"""A service that was not ready for a session gets no other one for so long, if there is another service."""


class SessionLink(ABC, Generic[SessionCommand, Event]):
    """A stream under a lease, kept open for ever, that carries the events of many sessions to their inboxes.

    Prompts travel on a connection of their own. When the stream breaks, every session on it is told, and a new stream
    is opened for new sessions.
    """

    def __init__(self, address: str, dialler: Dialler, timeout_s: float) -> None:
        """Prepares.

        Args:
            address: host:port of the service.
            dialler: opens this gateway's connections.
            timeout_s: how long the service may take to answer a call, or to come up at the start.
        """
        self.address = address
        self.zone: str | None = None
        """Where the service stands, if that is known. Set by the roster."""
        self.has_left = asyncio.Event()
        """Set by the roster while the service is to get no new sessions."""
        self.description: ModelDescription
        self._timeout_s = timeout_s
        self._control = RenewedChannel(dialler, address, bulk=False)
        self._bulk = RenewedChannel(dialler, address, bulk=True)
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        self.instance_id = 0
        """Names the process that granted the lease."""
        self.fault: DraftwireError | None = None
        """Why the service cannot be used, though it is there: another model than is wanted."""
        self._lease_id: int | None = None
        self._rests_until = 0.0
        self._outbox = Outbox[SessionCommand]()

    @property
    def connected(self) -> bool:
        """Whether sessions can be opened now."""
        return self._lease_id is not None

    @property
    def is_leaving(self) -> bool:
        """Whether the service is to get no new sessions; those that it has go on."""
        return self.has_left.is_set()

    @property
    def num_sessions(self) -> int:
        """Sessions that this gateway has open there."""
        return len(self._inboxes)

    @property
    def is_resting(self) -> bool:
        """Whether it was not ready for a session a moment ago: it drains, say."""
        return time.monotonic() < self._rests_until

    @property
    def peer(self) -> ModelPeer:
        """The service as a model server."""
        return ModelPeer(self._bulk.get(), self._timeout_s)

    async def maintain(self, check: Check) -> None:
        """Keeps the stream open, for ever.

        Args:
            check: raises why a service with this model cannot be used.
        """
        logged = ""
        while True:
            try:
                await self._get_to_know(check)
                await self._run_stream()
                reason = "the service ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except DraftwireError as error:
                reason = str(error)
            finally:
                lost_lease, self._lease_id = self._lease_id, None
                self._outbox.close()
            if lost_lease is not None:
                log.warning("gateway.peer_lost", address=self.address, reason=reason)
            elif self.fault is not None and reason != logged:
                log.error("gateway.peer_unfit", address=self.address, reason=reason)
            logged = reason
            for key in list(self._inboxes):
                self._deliver(key, self._lost(UnavailableError(f"lost {self.address}: {reason}")))
            await asyncio.sleep(RECONNECT_SECONDS)

    def close(self, session_id: int, epoch: int) -> None:
        """Ends a session, without waiting. Its inbox gets nothing more."""
        if self._inboxes.pop((session_id, epoch), None) is not None:
            self._outbox.put(self._close_command(session_pb2.CloseSession(session_id=session_id, epoch=epoch)))

    def _leased(self, session_id: int, epoch: int, inbox: Inbox) -> int:
        """Registers a session and returns the lease to open it under."""
        if self._lease_id is None:
            raise UnavailableError(f"no connection to {self.address}")
        self._inboxes[session_id, epoch] = inbox
        return self._lease_id

    def _deliver(self, key: tuple[int, int], event: SessionEvent) -> None:
        inbox = self._inboxes.get(key)
        if inbox is not None:
            inbox.put_nowait(event)

    def _failure(self, failure: session_pb2.SessionFailure) -> None:
        error = error_of_number(failure.status_code, failure.message)
        self._deliver((failure.session_id, failure.epoch), self._lost(error))

    async def disconnect(self) -> None:
        """Closes the connections of a link that is not maintained any more."""
        await self._control.close()
        await self._bulk.close()

    async def _get_to_know(self, check: Check) -> None:
        """Learns which model is served, which may be another one than before."""
        try:
            description = await self.peer.describe()
            await check(self, description)
        except (ModelMismatchError, InvalidRequestError) as error:
            self.fault = error
            raise
        self.description, self.fault = description, None

    async def _open_session(self, call: Awaitable[Any]) -> None:
        """Waits for the answer to an opening."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            refusal = error_of(error)
            if isinstance(refusal, UnavailableError):
                self._rests_until = time.monotonic() + REST_SECONDS
            raise refusal from error

    async def _run_stream(self) -> None:
        """Opens a stream and reads it to its end."""
        self._outbox = Outbox[SessionCommand]()
        call = self._open_stream(self._requests(self._outbox))
        try:
            async for response in call:
                for event in response.events:
                    self._receive(event)
        finally:
            call.cancel()

    def _take_lease(self, lease: session_pb2.Lease) -> None:
        self._lease_id, self.instance_id = lease.lease_id, lease.instance_id
        self._rests_until = 0.0
        log.info("gateway.peer_connected", address=self.address, model=self.description.name)

    async def _requests(self, outbox: Outbox[SessionCommand]) -> AsyncIterator[Any]:
        while commands := await outbox.take_all():
            for request in in_messages(self._request, commands):
                yield request

    @abstractmethod
    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]: ...

    @abstractmethod
    def _request(self, commands: Iterable[SessionCommand]) -> Any: ...

    @abstractmethod
    def _receive(self, event: Event) -> None: ...

    @abstractmethod
    def _close_command(self, close: session_pb2.CloseSession) -> SessionCommand: ...

    @abstractmethod
    def _lost(self, error: Exception) -> SessionEvent: ...


Check = Callable[[SessionLink[Any, Any], ModelDescription], Awaitable[None]]
"""Raises why a service with some model cannot be used."""


class VerifierLink(SessionLink[verifier_pb2.TargetCommand, verifier_pb2.TargetEvent]):
    """A `TargetPort` over gRPC."""

    def __init__(self, address: str, dialler: Dialler, timeout_s: float) -> None:
        super().__init__(address, dialler, timeout_s)
        self._quarantined: set[int] = set()

    def takes_blocks_of(self, drafter_id: int) -> bool:
        """Whether the verifier has not said that a drafter is in quarantine."""
        return drafter_id not in self._quarantined

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        """Opens a session by a call of its own, whose verdicts then come on the stream."""
        lease_id = self._leased(spec.session_id, spec.epoch, inbox)
        stub = verifier_pb2_grpc.VerifierServiceStub(self._bulk.get())
        request = messages.target_spec_to_proto(spec, lease_id)
        await self._open_session(stub.OpenTargetSession(request, timeout=min(OPEN_SECONDS, self._timeout_s)))

    def run_plain(self, run: PlainRun) -> None:
        """Asks for plain rounds, without waiting."""
        self._outbox.put(verifier_pb2.TargetCommand(plain_run=messages.plain_run_to_proto(run)))

    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]:
        return verifier_pb2_grpc.VerifierServiceStub(self._control.get()).RunTargetSessions(requests)

    def _request(self, commands: Iterable[verifier_pb2.TargetCommand]) -> verifier_pb2.RunTargetSessionsRequest:
        return verifier_pb2.RunTargetSessionsRequest(commands=commands)

    def _receive(self, event: verifier_pb2.TargetEvent) -> None:
        match event.WhichOneof("event"):
            case "verdict":
                verdict = messages.verdict_from_proto(event.verdict)
                self._deliver((verdict.fence.session_id, verdict.fence.epoch), verdict)
            case "prompt_read":
                read = messages.prompt_read_from_proto(event.prompt_read)
                self._deliver((read.session_id, read.epoch), read)
            case "refusal":
                if event.refusal.HasField("quarantined_drafter_id"):
                    self._quarantined.add(event.refusal.quarantined_drafter_id)
                error = ModelMismatchError(f"the verifier refused a block: {event.refusal.message}")
                refused = BlocksRefused(error, event.refusal.permit_number)
                self._deliver((event.refusal.session_id, event.refusal.epoch), refused)
            case "failure":
                self._failure(event.failure)
            case "lease":
                self._take_lease(event.lease)

    def _close_command(self, close: session_pb2.CloseSession) -> verifier_pb2.TargetCommand:
        return verifier_pb2.TargetCommand(close_session=close)

    def _lost(self, error: Exception) -> SessionEvent:
        return TargetLost(error)


class DrafterLink(SessionLink[drafter_pb2.DraftCommand, drafter_pb2.DraftEvent]):
    """A `DrafterPort` over gRPC."""

    def __init__(self, address: str, dialler: Dialler, timeout_s: float) -> None:
        super().__init__(address, dialler, timeout_s)
        self.round_trip = RoundTripEstimate()

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        """Opens a session by a call of its own, and returns when the drafter has read the prompt."""
        lease_id = self._leased(spec.session_id, spec.epoch, inbox)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._bulk.get())
        request = messages.draft_spec_to_proto(spec, lease_id)
        await self._open_session(stub.OpenDraftSession(request, timeout=self._timeout_s))

    def calibrate(self, calibration: Calibration) -> None:
        """Asks for a block, without waiting."""
        self._outbox.put(drafter_pb2.DraftCommand(calibration=messages.calibration_to_proto(calibration)))

    def send_drafted(self, command: SendDrafted) -> None:
        """Asks for a block under way as far as it is drawn, without waiting."""
        self._outbox.put(drafter_pb2.DraftCommand(send_drafted=messages.send_drafted_to_proto(command)))

    def _open_stream(self, requests: AsyncIterator[Any]) -> grpc.aio.StreamStreamCall[Any, Any]:
        return drafter_pb2_grpc.DrafterServiceStub(self._control.get()).RunDraftSessions(requests)

    def _request(self, commands: Iterable[drafter_pb2.DraftCommand]) -> drafter_pb2.RunDraftSessionsRequest:
        return drafter_pb2.RunDraftSessionsRequest(commands=commands)

    def _receive(self, event: drafter_pb2.DraftEvent) -> None:
        match event.WhichOneof("event"):
            case "failure":
                self._failure(event.failure)
            case "lease":
                self._take_lease(event.lease)

    def _close_command(self, close: session_pb2.CloseSession) -> drafter_pb2.DraftCommand:
        return drafter_pb2.DraftCommand(close_session=close)

    def _lost(self, error: Exception) -> SessionEvent:
        return DrafterLost(error)
