"""A service in an event loop: bind, load, serve, drain, stop. Several can live in one loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwire.runtime.call_limits import CallLimits
from draftwire.runtime.channels import bind, server_options
from draftwire.runtime.http_connection import ON_THE_WAY_SECONDS
from draftwire.runtime.http_server import HttpListener
from draftwire.runtime.interceptor import Admit, EndedCall, ServiceGate, admit_all, ignore_ends
from draftwire.runtime.metrics import ServiceMetrics
from draftwire.runtime.metrics_endpoint import metrics_listener
from draftwire.runtime.settings import ConnectionSettings, ServerSettings
from draftwire.runtime.time_limits import Watchdog

if TYPE_CHECKING:  # imported only if tracing is on
    from draftwire.runtime.open_telemetry import OtlpTracer

log = structlog.get_logger()

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

READINESS_SECONDS = 0.25
"""How often readiness is looked at, for health over gRPC."""

STOP_SECONDS = 1.0
"""Default grace period for calls that are still running after the drain."""


@dataclass(frozen=True, slots=True)
class Service:
    """Definition of a service: name, settings, servicers and hooks."""

    name: str
    grpc_names: tuple[str, ...]
    """Full names of the gRPC services, for health and reflection."""
    settings: ServerSettings
    connections: ConnectionSettings
    metrics: ServiceMetrics
    register: Callable[[grpc.aio.Server], None]
    """Adds the servicers to the server."""
    start: Callable[[], Awaitable[None]]
    """Loads models and other state. Calls are refused with UNAVAILABLE until it returns."""
    run: Callable[[], Awaitable[None]]
    """Runs the service's work until it is cancelled."""
    stop: Callable[[], None]
    """Releases the resources of `start`."""
    num_sessions: Callable[[], int]
    """Returns the number of sessions that a drain still waits for."""
    limits: CallLimits = field(default_factory=CallLimits)
    """Limits of the callers of the gRPC services."""
    admit: Admit = admit_all
    """Decides on each call of the gRPC services, before its request is received."""
    on_call_end: Callable[[EndedCall], None] = ignore_ends
    """Called for each gRPC call that has ended, which the metrics have counted."""
    credentials: grpc.ServerCredentials | None = None
    """TLS; None is plaintext."""
    watchdog: Watchdog | None = None
    """Watches the device, once the service has started."""
    listeners: Sequence[HttpListener] = ()
    """Servers for other protocols."""
    tracer: "OtlpTracer | None" = None
    """Closed last."""
    why_unready: Callable[[], str] = str
    """Returns why the service should get no calls although it takes them, such as a lost peer; empty if it should."""
    is_lost: Callable[[], bool] = lambda: False
    """Returns whether the process must exit with an error, even if `run` was cancelled."""


class Running:
    """A started service: it listens, and accepts calls once it has loaded.

    Attributes:
        ports: ports that it listens on: `port`, `metrics_port` (None where metrics are not served), `<listener>_port`.
    """

    def __init__(self, service: Service) -> None:
        self.ports: Mapping[str, int | None] = {}
        self._service = service
        self._gate = ServiceGate(service.limits, service.admit, self._count, service.why_unready)
        options = server_options(service.connections, service.limits)
        self._server = grpc.aio.server(interceptors=[self._gate], options=options)
        self._probe = health.aio.HealthServicer()
        metrics = metrics_listener(service.metrics.registry, service.settings, service.connections)
        self._listeners: Sequence[HttpListener] = (*service.listeners, *([metrics] if metrics is not None else []))
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        """Waits until the calls have ended that ran when users were sent elsewhere."""

    async def listen(self) -> None:
        """Binds all ports and answers health checks with NOT_SERVING; other calls are refused.

        Raises:
            UnavailableError: a port is not available.
        """
        service = self._service
        service.register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._probe, self._server)
        names = (*service.grpc_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        for name in service.grpc_names:
            await self._probe.set(name, NOT_SERVING)
        port = bind(self._server, service.settings.host, service.settings.port, service.credentials)
        ports: dict[str, int | None] = {"port": port, "metrics_port": None}
        for listener in self._listeners:
            ports[f"{listener.name}_port"] = await listener.start(self._gate)
        self.ports = ports
        await self._server.start()

    async def load(self) -> None:
        """Loads, then accepts calls. Raises what the service's `start` raises."""
        service, started_at = self._service, time.monotonic()
        await service.start()
        log.info(f"{service.name}.service_warmed", duration_s=round(time.monotonic() - started_at, 1))
        self._gate.refusal = ""
        for name in service.grpc_names:
            await self._probe.set(name, SERVING)
        works = (_run(service, self._listeners), self._watch_device(), self._watch_readiness())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def wait(self) -> None:
        """Returns once the service's work has ended by itself; `drain` raises its error."""
        await asyncio.wait({self._tasks[0]})

    async def drain(self) -> None:
        """Refuses new calls and waits for open sessions to finish, for `drain_seconds` at most.

        Connections of users, gRPC and HTTP, end as soon as nothing runs on them: the next call opens one, which leads
        to another gateway where several share an address. On its old one it would be refused until the end.

        Raises the error that ended the service's work, if that has ended.
        """
        service, (run, *watches) = self._service, self._tasks
        for watch in watches:  # health is as it has to be from here on
            watch.cancel()
        drain_s = service.settings.drain_seconds
        await self._probe.enter_graceful_shutdown()
        await asyncio.gather(self._send_away(drain_s), *(listener.drain() for listener in self._listeners))
        self._gate.refusal = "failing" if run.done() else "draining"
        deadline = time.monotonic() + drain_s
        while not run.done() and (left := service.num_sessions()):
            if time.monotonic() >= deadline:
                log.warning(f"{service.name}.drain_ended", sessions_cut=left)
                break
            await asyncio.sleep(0.05)
        if run.done():
            run.result()

    async def _send_away(self, drain_s: float) -> None:
        """Lets users' connections end: gRPC sends GOAWAY, and calls that run go on. Peers hear of it elsewhere."""
        if self._service.limits.is_public:
            self._leaving = asyncio.create_task(self._server.stop(grace=drain_s + STOP_SECONDS))
            await asyncio.wait({self._leaving}, timeout=ON_THE_WAY_SECONDS)

    async def stop(self, grace_s: float = STOP_SECONDS) -> None:
        """Ends running calls, after a grace period, and releases all resources. Call once, in any state."""
        service = self._service
        stops = (
            self._server.stop(grace=grace_s),
            *([self._leaving] if self._leaving is not None else []),
            *(listener.stop() for listener in self._listeners),
        )
        for fault in await asyncio.gather(*stops, return_exceptions=True):
            if fault is not None:  # the rest has to be stopped all the same
                log.error(f"{service.name}.stop_failed", exc_info=fault)
        for task in reversed(self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        service.stop()
        if service.tracer is not None:
            await service.tracer.close()

    def _count(self, call: EndedCall) -> None:
        self._service.metrics.count_call(call.method, call.code)
        self._service.on_call_end(call)

    async def _watch_readiness(self) -> None:
        """Sets health of the services, not of the process, to what `ServiceGate.unready` says."""
        service, was_ready = self._service, True
        while True:
            await asyncio.sleep(READINESS_SECONDS)
            reason = self._gate.unready
            if was_ready == (not reason):
                continue
            was_ready = not reason
            for name in service.grpc_names:
                await self._probe.set(name, SERVING if was_ready else NOT_SERVING)
            if was_ready:
                log.info(f"{service.name}.readiness_restored")
            else:
                log.warning(f"{service.name}.readiness_lost", reason=reason)

    async def _watch_device(self) -> None:
        """Sets health to NOT_SERVING and refuses calls while a call on the device exceeds the watchdog's limit."""
        service, watchdog = self._service, self._service.watchdog
        while watchdog is not None:
            await asyncio.sleep(watchdog.interval_s)
            if not watchdog.check():
                continue
            if watchdog.is_stuck:
                log.error(f"{service.name}.device_stuck", limit_s=watchdog.limit_s)
            else:
                log.warning(f"{service.name}.device_recovered")
            self._gate.refusal = "stuck in a call on its device" if watchdog.is_stuck else ""
            self._gate.is_live = not watchdog.is_stuck
            for name in ("", *service.grpc_names):
                await self._probe.set(name, NOT_SERVING if watchdog.is_stuck else SERVING)


async def start(service: Service) -> Running:
    """Starts a service and returns it once it serves. If that fails or is cancelled, the service is stopped.

    Raises:
        UnavailableError: a port is not available.
        Exception: raised by the service while it loads.
    """
    running = Running(service)
    try:
        await running.listen()
        log.info(f"{service.name}.server_listening", **running.ports)
        await running.load()
    except BaseException:
        await running.stop()
        raise
    return running


async def _run(service: Service, listeners: Sequence[HttpListener]) -> None:
    """Runs the service and its listeners until one of them ends, or it is cancelled."""
    coroutines = (service.run(), *(listener.run() for listener in listeners))
    works = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
    finally:
        for work in works:
            work.cancel()
        while not all(work.done() for work in works):
            with suppress(
                asyncio.CancelledError
            ):  # of `stop`, whose listeners have ended this first: works end in order
                await asyncio.wait(works)
