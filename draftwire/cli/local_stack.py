"""Drafter, verifier and gateway as three processes on this machine."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from draftwire.errors import UnavailableError

LogLine = Mapping[str, Any]
OnLog = Callable[[str, LogLine], None]

STOP_SECONDS = 30.0


@dataclass(slots=True)
class ServiceProcess:
    """One running service."""

    name: str
    process: subprocess.Popen[str]
    port: int = 0
    metrics_port: int = 0
    http_port: int = 0
    """Of a gateway; 0 where it has none."""
    has_tls: bool = False
    """Whether it is called over TLS."""
    has_ended: bool = False
    """Whether its process has."""
    last_line: str = ""
    """The last thing it said, or why it failed."""
    has_failed: bool = False
    """Whether it has said why."""


class LocalStack:
    """Starts the three services and stops them again. A context manager.

    Attributes:
        services: the running services by name.
    """

    def __init__(
        self,
        options: Mapping[str, Mapping[str, object]],
        on_log: OnLog | None = None,
        start_timeout_s: float | None = 120.0,
    ) -> None:
        """Prepares.

        Args:
            options: for each service to start ("drafter", "verifier", "gateway") its settings by option name, such as
                `{"verifier": {"model": "models/target", "port": 0}}`. The gateway is told where the others are,
                unless `discovery` says where it hears of them.
            on_log: receives every log line of every service, on threads of its own. If it fails, it gets no more
                lines, and `start` or `wait` fails with what it raised.
            start_timeout_s: how long all of it may take to come up; None waits as long as all processes live.
        """
        self.services: dict[str, ServiceProcess] = {}
        self._options = options
        self._on_log = on_log
        self._start_timeout_s = start_timeout_s
        self._news: queue.Queue[ServiceProcess | BaseException] = queue.Queue()
        """Services that serve now or have ended, and what `on_log` raised."""

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return f"127.0.0.1:{self.services['gateway'].port}"

    @property
    def http_address(self) -> str:
        """http://host:port of the gateway, or https://."""
        gateway = self.services["gateway"]
        return f"{'https' if gateway.has_tls else 'http'}://127.0.0.1:{gateway.http_port}"

    def __enter__(self) -> "LocalStack":
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
        """Starts drafter and verifier together, then the gateway, and returns when all of them serve.

        Raises:
            UnavailableError: one of them did not come up; the message is its own.
        """
        deadline = None if self._start_timeout_s is None else time.monotonic() + self._start_timeout_s
        models = [name for name in ("verifier", "drafter") if name in self._options]
        for name in models:
            self._launch(name, {})
        self._wait(models, deadline)
        if "gateway" in self._options:
            peers: dict[str, object] = {"drafter": "none"}
            peers.update({name: f"127.0.0.1:{self.services[name].port}" for name in models})
            self._launch("gateway", {} if "discovery" in self._options["gateway"] else peers)
            self._wait(["gateway"], deadline)

    def wait(self) -> str:
        """Returns the name of the first service whose process ends."""
        while not (service := self._next(None)).has_ended:
            pass
        return service.name

    def stop(self) -> None:
        """Stops all services, the gateway first, so that running requests can finish."""
        for name in ("gateway", "drafter", "verifier"):
            service = self.services.get(name)
            if service is None:
                continue
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGTERM)
            try:
                service.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()

    def _launch(self, name: str, peers: Mapping[str, object]) -> None:
        defaults: dict[str, object] = {"port": 0, "metrics_port": 0, "log_format": "json", "stop_with_stdin": True}
        if name == "gateway":
            defaults["http_port"] = 0
        options = {**defaults, **peers, **self._options[name]}
        arguments = [_argument(key.replace("_", "-"), value) for key, value in options.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "draftwire.cli", "serve", name, *arguments],
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.DEVNULL,  # else whoever reads our output would wait for the services to end
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # libraries write what they like
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which stops the services in order
        )
        service = self.services[name] = ServiceProcess(name, process)
        threading.Thread(target=self._follow, args=(service,), daemon=True).start()

    def _wait(self, names: Sequence[str], deadline: float | None) -> None:
        """Returns when these services serve; fails with the first one that has ended, whatever the others do."""
        awaited = set(names)
        while awaited:
            try:
                service = self._next(deadline)
            except queue.Empty:
                late = " and ".join(sorted(awaited))
                raise UnavailableError(f"{late} did not come up within {self._start_timeout_s:g} s") from None
            if service.has_ended:
                raise UnavailableError(f"{service.name} did not come up: {service.last_line}")
            awaited.discard(service.name)

    def _next(self, deadline: float | None) -> ServiceProcess:
        """Returns the next service that serves or has ended.

        Raises:
            queue.Empty: there was none by the deadline.
        """
        news = self._news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if isinstance(news, BaseException):
            raise news
        return news

    def _follow(self, service: ServiceProcess) -> None:
        """Reads a service's log until its process ends. Whatever fails, it reads on: a full pipe stops the service."""
        assert service.process.stderr is not None
        for text in service.process.stderr:
            line = _parse(text)
            self._note(service, line)
            if self._on_log is not None:
                try:
                    self._on_log(service.name, line)
                except BaseException as error:  # rich raises SystemExit where the reader is gone
                    self._on_log = None
                    self._news.put(error)
        service.process.wait()
        service.has_ended = True
        self._news.put(service)

    def _note(self, service: ServiceProcess, line: LogLine) -> None:
        """Learns from a line of a service's log how it is."""
        if not service.has_failed:  # what comes after that is of its other processes
            service.last_line = str(line.get("reason", line["event"])) or service.last_line
        service.has_failed |= line["event"] == f"{service.name}.server_failed"
        if line["event"] == f"{service.name}.server_started":
            service.port, service.metrics_port = int(line["port"]), int(line["metrics_port"] or 0)
            service.http_port = int(line.get("http_port") or 0)
            service.has_tls = bool(line["tls"])
            self._news.put(service)


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _parse(text: str) -> LogLine:
    """Returns a log line; what is not one of ours (a traceback, a library's warning) becomes an event of its own."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    return line if isinstance(line, dict) and "event" in line else {"event": text.rstrip(), "level": "output"}
