"""Drafter, verifier and gateway as three processes on this machine."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    started: threading.Event = field(default_factory=threading.Event)
    """Set when the service serves or its process has ended."""
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
        start_timeout_s: float = 120.0,
    ) -> None:
        """Prepares.

        Args:
            options: for each service to start ("drafter", "verifier", "gateway") its settings by option name, such as
                `{"verifier": {"model": "models/target", "port": 0}}`. The gateway is told where the others are,
                unless `discovery` says where it hears of them.
            on_log: receives every log line of every service, on threads of its own.
            start_timeout_s: how long all of it may take to come up.
        """
        self.services: dict[str, ServiceProcess] = {}
        self._options = options
        self._on_log = on_log
        self._start_timeout_s = start_timeout_s
        self._ended: queue.Queue[str] = queue.Queue()

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return f"127.0.0.1:{self.services['gateway'].port}"

    @property
    def http_address(self) -> str:
        """http://host:port of the gateway, or https://."""
        scheme = "https" if "tls_cert" in self._options["gateway"] else "http"
        return f"{scheme}://127.0.0.1:{self.services['gateway'].http_port}"

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
        deadline = time.monotonic() + self._start_timeout_s
        models = [name for name in ("verifier", "drafter") if name in self._options]
        for name in models:
            self._launch(name, {})
        for name in models:
            self._wait(name, deadline)
        if "gateway" in self._options:
            peers: dict[str, object] = {"drafter": "none"}
            peers.update({name: f"127.0.0.1:{self.services[name].port}" for name in models})
            self._launch("gateway", {} if "discovery" in self._options["gateway"] else peers)
            self._wait("gateway", deadline)

    def wait(self) -> str:
        """Returns the name of the first service whose process ends."""
        return self._ended.get()

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
            [sys.executable, "-m", f"draftwire.services.{name}", *arguments],
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.DEVNULL,  # else whoever reads our output would wait for the services to end
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which stops the services in order
        )
        service = self.services[name] = ServiceProcess(name, process)
        threading.Thread(target=self._follow, args=(service,), daemon=True).start()

    def _wait(self, name: str, deadline: float) -> None:
        service = self.services[name]
        if not service.started.wait(max(0.0, deadline - time.monotonic())):
            raise UnavailableError(f"{name} did not come up within {self._start_timeout_s:g} s")
        if not service.port:
            raise UnavailableError(f"{name} did not come up: {service.last_line}")

    def _follow(self, service: ServiceProcess) -> None:
        """Reads a service's log until its process ends."""
        assert service.process.stderr is not None
        for text in service.process.stderr:
            line = _parse(text)
            if not service.has_failed:  # what comes after that is of its other processes
                service.last_line = str(line.get("reason", line["event"])) or service.last_line
            service.has_failed |= line["event"] == f"{service.name}.server_failed"
            if line["event"] == f"{service.name}.server_started":
                service.port, service.metrics_port = int(line["port"]), int(line["metrics_port"] or 0)
                service.http_port = int(line.get("http_port") or 0)
                service.started.set()
            if self._on_log is not None:
                self._on_log(service.name, line)
        service.process.wait()
        service.started.set()
        self._ended.put(service.name)


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _parse(text: str) -> LogLine:
    """Returns a log line; what is not one of ours (a traceback, a library's warning) becomes an event of its own."""
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    return line if isinstance(line, dict) and "event" in line else {"event": text.rstrip(), "level": "output"}
