"""The life of a service process: bind, load, serve, drain, stop."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftwire.errors import UnavailableError
from draftwire.services.logging import configure_logging
from draftwire.services.metrics import ServiceMetrics
from draftwire.services.rpc.channels import server_options
from draftwire.services.rpc.interceptor import ServiceGate
from draftwire.services.rpc.status import is_expected, root_cause
from draftwire.services.settings import ConnectionSettings, ServerSettings
from draftwire.services.tracing import Tracer
from draftwire.services.watchdog import Watchdog

log = structlog.get_logger()

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Listener(Protocol):
    """Another way into a service than gRPC, in the same event loop."""

    @property
    def name(self) -> str:
        """Names its port in the log: `<name>_port`."""

    async def start(self, gate: ServiceGate) -> int:
        """Listens, and returns the port. While the gate has a refusal, calls are refused.

        Raises:
            UnavailableError: the port cannot be had.
        """

    async def run(self) -> None:
        """Returns once it was stopped, and raises what else ended it. Called after `start`."""

    async def stop(self) -> None:
        """Ends what the drain has left. Called whether it was started or not."""


@dataclass(frozen=True, slots=True)
class Service:
    """What makes one service different from another."""

    name: str
    grpc_names: tuple[str, ...]
    """Full names of the gRPC services, for health and reflection."""
    settings: ServerSettings
    connections: ConnectionSettings
    metrics: ServiceMetrics
    register: Callable[[grpc.aio.Server], None]
    """Adds the servicers to the server."""
    start: Callable[[], Awaitable[None]]
    """Loads what calls need. Calls are refused with UNAVAILABLE until it returns."""
    run: Callable[[], Awaitable[None]]
    """Works until it is cancelled."""
    stop: Callable[[], None]
    """Frees what `start` took."""
    num_sessions: Callable[[], int]
    """Sessions that a drain waits for."""
    credentials: grpc.ServerCredentials | None = None
    """TLS; None is plaintext."""
    watchdog: Watchdog | None = None
    """Watches the device, once the service has started."""
    listeners: Sequence[Listener] = ()
    """Other ways in."""
    tracer: Tracer | None = None
    """Closed when all else has ended."""


_IMPORTED_AT = time.monotonic()


async def run_service(service: Service) -> int:
    """Runs a service until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a drain, 1 after a failure while running, 2 if the service could not start.
    """
    settings = service.settings
    configure_logging(settings.log_format, service.name)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_lost_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if settings.stop_with_stdin:
        _stop_with_stdin(stopping)

    gate = ServiceGate()
    server = grpc.aio.server(interceptors=[gate], options=server_options(service.connections))
    service.register(server)
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    reflection.enable_server_reflection((*service.grpc_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    for name in service.grpc_names:
        await probe.set(name, NOT_SERVING)
    run: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    try:
        port = _bind(server, service)
        other_ports = {f"{listener.name}_port": await listener.start(gate) for listener in service.listeners}
        metrics_port = None
        if settings.metrics_port is not None:
            metrics_port = service.metrics.serve(settings.metrics_port, settings.host)
        await server.start()
        if not await _start(service, stopping):
            return 0
        gc.collect()
        gc.freeze()  # what is loaded now stays: collections need not look at it again and again
        gate.refusal = ""
        for name in service.grpc_names:
            await probe.set(name, SERVING)
        watch = asyncio.ensure_future(_watch(service, gate, probe))
        startup_s = _age_s()
        service.metrics.startup_s.set(startup_s)
        log.info(
            f"{service.name}.server_started",
            host=settings.host,
            port=port,
            metrics_port=metrics_port,
            **other_ports,
            tls=service.credentials is not None,
            startup_ms=round(startup_s * 1e3),
        )
        run = asyncio.ensure_future(_run(service))
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({run, stop}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        gate.refusal = "failing" if run.done() else "draining"
        await probe.enter_graceful_shutdown()
        if not run.done():
            await _drain(service, settings.drain_seconds)
        if run.done():
            run.result()
    except Exception as error:
        cause = root_cause(error)
        if is_expected(error) or isinstance(cause, OSError):
            log.error(f"{service.name}.server_failed", reason=str(cause))
        else:
            # Before the first call there is no prompt that a message could quote.
            reason = type(cause).__name__ if run else f"{type(cause).__name__}: {cause}"
            log.exception(f"{service.name}.server_failed", reason=reason)
        return 1 if run else 2
    finally:
        stops = (server.stop(grace=1.0), *(listener.stop() for listener in service.listeners))
        for fault in await asyncio.gather(*stops, return_exceptions=True):
            if fault is not None:  # what else there is has to be stopped too
                log.error(f"{service.name}.stop_failed", exc_info=fault)
        for task in (watch, run):
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        service.stop()
        if service.tracer is not None:
            await service.tracer.close()
    log.info(f"{service.name}.server_stopped")
    return 0


def _bind(server: grpc.aio.Server, service: Service) -> int:
    host, port = service.settings.host, service.settings.port
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        if service.credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, service.credentials))
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: is something else running there?") from error


async def _run(service: Service) -> None:
    """Works until it is cancelled, or the service or one of its listeners ends."""
    works = [asyncio.ensure_future(work) for work in (service.run(), *(one.run() for one in service.listeners))]
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def _watch(service: Service, gate: ServiceGate, probe: health.aio.HealthServicer) -> None:
    """Says NOT_SERVING, of the process too, while a call on the device takes too long, and takes no new calls."""
    watchdog = service.watchdog
    while watchdog is not None:
        await asyncio.sleep(watchdog.interval_s)
        if not watchdog.check():
            continue
        if watchdog.is_stuck:
            log.error(f"{service.name}.device_stuck", limit_s=watchdog.limit_s)
        else:
            log.warning(f"{service.name}.device_recovered")
        gate.refusal = "stuck in a call on its device" if watchdog.is_stuck else ""
        for name in ("", *service.grpc_names):
            await probe.set(name, NOT_SERVING if watchdog.is_stuck else SERVING)


async def _start(service: Service, stopping: asyncio.Event) -> bool:
    """Runs `service.start`; returns False if a signal came first."""
    started_at = time.monotonic()
    start = asyncio.ensure_future(service.start())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not start.done():
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        return False
    start.result()
    log.info(f"{service.name}.service_warmed", duration_s=round(time.monotonic() - started_at, 1))
    return True


def _age_s() -> float:
    """Returns for how long this process has lived, seconds; on Linux with what it imported before it could measure."""
    if sys.platform != "linux":
        return time.monotonic() - _IMPORTED_AT
    started_at_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at_ticks / os.sysconf("SC_CLK_TCK")


def _log_lost_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that nobody waits for. asyncio's own handler would print what the task holds too."""
    log.error("process.error_lost", reason=context.get("message"), exc_info=context.get("exception"))


def _stop_with_stdin(stopping: asyncio.Event) -> None:
    """Stops when whoever holds the other end of the pipe is gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            stopping.set()

    loop.add_reader(sys.stdin.fileno(), read)


async def _drain(service: Service, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := service.num_sessions()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if left:
        log.warning(f"{service.name}.drain_ended", sessions_cut=left)
