"""Drafter, verifier and gateway in this process: the real servers, on real ports, in one event loop.

Starts in a tenth of the time of three processes. What a process is the point of (signals, kills, memory, the command
line) needs `LocalStack`.
"""

import asyncio
import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import pytest
import structlog
import typer

from draftwire.cli.local_stack import OnLog
from draftwire.cli.options import SERVICES, build, serve_command
from draftwire.engine.target_session import Step, StepResult
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.runtime import logging as service_logging
from draftwire.runtime.service import Running, Service, start
from draftwire.runtime.status import root_cause
from draftwire_drafter.server import make_service as make_drafter
from draftwire_gateway.server import make_service as make_gateway
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.server import make_service as make_verifier

Result = TypeVar("Result")

START_SECONDS = 60.0
STOP_SECONDS = 30.0

_sink: contextvars.ContextVar[Callable[[Mapping[str, Any]], None] | None] = contextvars.ContextVar("sink", default=None)
"""Who gets the log lines of the service that this is part of."""
_loop_lock = threading.Lock()


@dataclass(slots=True)
class InProcessService:
    """One running service."""

    name: str
    running: Running
    has_tls: bool
    ending: "concurrent.futures.Future[None] | None" = None
    """Of a service that a test has stopped or killed."""

    @property
    def port(self) -> int:
        """Of gRPC."""
        return self.running.ports["port"] or 0

    @property
    def metrics_port(self) -> int:
        """0 where metrics are not served."""
        return self.running.ports["metrics_port"] or 0

    @property
    def http_port(self) -> int:
        """Of a gateway; 0 where it has none."""
        return self.running.ports.get("http_port") or 0


class InProcessStack:
    """Starts services in this process and stops them again. A context manager; see `LocalStack`.

    Attributes:
        services: the running services by name.
    """

    num_started = 0
    """Stacks started so far in this process."""

    def __init__(self, options: Mapping[str, Mapping[str, object]], on_log: OnLog | None = None) -> None:
        """Prepares; arguments as those of `LocalStack`."""
        self.services: dict[str, InProcessService] = {}
        self._options = options
        self._on_log = on_log

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return f"127.0.0.1:{self.services['gateway'].port}"

    @property
    def http_address(self) -> str:
        """http://host:port of the gateway, or https://."""
        gateway = self.services["gateway"]
        return f"{'https' if gateway.has_tls else 'http'}://127.0.0.1:{gateway.http_port}"

    def __enter__(self) -> "InProcessStack":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts drafter and verifier, then the gateway, and returns when all of them serve.

        Raises:
            UnavailableError: one of them did not come up; the message is its own.
        """
        type(self).num_started += 1
        models = [name for name in ("verifier", "drafter") if name in self._options]
        for name in models:
            self._start(name, {})
        if "gateway" in self._options:
            peers: dict[str, object] = {"drafter": "none"}
            peers.update({name: f"127.0.0.1:{self.services[name].port}" for name in models})
            self._start("gateway", {} if "discovery" in self._options["gateway"] else peers)

    def stop(self) -> None:
        """Drains and stops all services, the gateway first."""
        order = [name for name in ("gateway", "drafter", "verifier") if name in self.services]
        services = [self.services.pop(name) for name in order]
        on_loop(_stop([service.running for service in services if service.ending is None]), STOP_SECONDS)
        for service in services:
            if service.ending is not None:
                service.ending.result(STOP_SECONDS)

    def begin_stop(self, name: str) -> "concurrent.futures.Future[None]":
        """Does to a service what SIGTERM does: it drains, and then ends. Returns at once."""
        service = self.services[name]
        service.ending = asyncio.run_coroutine_threadsafe(_stop([service.running]), _loop())
        return service.ending

    def kill(self, name: str) -> None:
        """Ends a service at once, in the middle of its calls, as if its process had died."""
        service = self.services[name]
        service.ending = asyncio.run_coroutine_threadsafe(service.running.stop(grace_s=0.0), _loop())
        service.ending.result(STOP_SECONDS)

    def _start(self, name: str, peers: Mapping[str, object]) -> None:
        defaults: dict[str, object] = {"port": 0, "metrics_port": 0}
        if name == "gateway":
            defaults["http_port"] = 0
        config = parse(name, {**defaults, **peers, **self._options[name]})
        assert name == "gateway" or config.wanted_group.size == 1, "ranks are processes: they need `LocalStack`"
        try:
            service, running = on_loop(self._serve(name, config), START_SECONDS)
        except (DraftwireError, OSError) as error:
            raise UnavailableError(f"{name} did not come up: {root_cause(error)}") from error
        self.services[name] = InProcessService(name, running, service.credentials is not None)

    async def _serve(self, name: str, config: Any) -> tuple[Service, Running]:
        # A task has a context of its own: what is bound here reaches all that the service starts, and nothing else.
        on_log = self._on_log
        _sink.set(None if on_log is None else lambda line: on_log(name, line))
        structlog.contextvars.bind_contextvars(service=name)
        service = await _MAKERS[name](config)
        return service, await start(service)


def parse(name: str, options: Mapping[str, object]) -> Any:
    """Returns a service's configuration from options as `LocalStack` takes them, read as the command line reads them.

    Raises:
        UnavailableError: there is no such option, or its value is malformed or out of range.
    """
    arguments = [_argument(key.replace("_", "-"), value) for key, value in options.items()]
    app = typer.Typer(add_completion=False)
    app.command()(serve_command(name))
    try:
        context = typer.main.get_command(app).make_context(name, arguments)
        return build(SERVICES[name], context.params)
    except (DraftwireError, typer.BadParameter) as error:
        raise UnavailableError(f"{name} did not come up: {error}") from error


@contextmanager
def slow_verifiers(step_s: float = 0.03) -> Iterator[None]:
    """Makes steps of this process's verifiers so slow that a slow drafter takes part in most rounds."""
    step_at_once = TargetEngine.step

    def step(self: TargetEngine, step: Step) -> StepResult:
        time.sleep(step_s)
        return step_at_once(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetEngine, "step", step)
        yield


def on_loop(work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
    """Runs a coroutine on the loop of all in-process services, and returns its result."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(timeout_s)


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _loop() -> asyncio.AbstractEventLoop:
    """Returns the loop of all services of this process. For any thread."""
    with _loop_lock:
        return _start_loop()


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop that runs on a thread of its own until the process ends."""
    started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()

    async def run() -> None:
        started.set_result(asyncio.get_running_loop())
        await asyncio.Event().wait()

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            service_logging._format_exception,
            _pass_on,
        ]
    )
    threading.Thread(target=lambda: asyncio.run(run()), name="services", daemon=True).start()
    return started.result(10.0)


def _pass_on(_logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Gives a log line to its stack, and to nobody else."""
    sink = _sink.get()
    if sink is not None:
        sink(dict(line))
    raise structlog.DropEvent


async def _stop(services: Sequence[Running]) -> None:
    """Drains services one after another, then ends what is left of all at once."""
    try:
        for running in services:
            await running.drain()
    finally:
        await asyncio.gather(*(running.stop(grace_s=0.0) for running in services))


async def _make_verifier(config: Any) -> Service:
    return make_verifier(config)


async def _make_drafter(config: Any) -> Service:
    return make_drafter(config)


_MAKERS: Mapping[str, Callable[[Any], Awaitable[Service]]] = {
    "verifier": _make_verifier,
    "drafter": _make_drafter,
    "gateway": make_gateway,
}
