"""The life of a service process: bind, load, serve, drain, stop."""

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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

log = structlog.get_logger()

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


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


async def run_service(service: Service) -> int:
    """Runs a service until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a drain, 1 after a failure while running, 2 if the service could not start.
    """
    settings = service.settings
    configure_logging(settings.log_format, service.name)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    gate = ServiceGate()
    server = grpc.aio.server(interceptors=[gate], options=server_options(service.connections))
    service.register(server)
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    reflection.enable_server_reflection((*service.grpc_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    for name in service.grpc_names:
        await probe.set(name, NOT_SERVING)
    run: asyncio.Task[None] | None = None
    try:
        port = _bind(server, settings)
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
        log.info(f"{service.name}.server_started", host=settings.host, port=port, metrics_port=metrics_port)
        run = asyncio.ensure_future(service.run())
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({run, stop}, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        gate.refusal = "draining"
        await probe.enter_graceful_shutdown()
        await _drain(service, settings.drain_seconds)
    except Exception as error:
        cause = root_cause(error)
        if is_expected(error) or isinstance(cause, OSError):
            log.error(f"{service.name}.server_failed", reason=str(cause))
        else:
            log.exception(f"{service.name}.server_failed")
        return 1 if run else 2
    finally:
        await server.stop(grace=1.0)
        if run:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        service.stop()
    log.info(f"{service.name}.server_stopped")
    return 0


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    address = f"{settings.host}:{settings.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: is something else running there?") from error
    return int(port)


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


async def _drain(service: Service, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := service.num_sessions()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if left:
        log.warning(f"{service.name}.drain_ended", sessions_cut=left)
