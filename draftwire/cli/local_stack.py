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
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from draftwire.cli.options import variable
from draftwire.cli.process_end import ProcessEnd, num_memory_kills
from draftwire.errors import UnavailableError
from draftwire.runtime.addresses import UNSPECIFIED

LogLine = Mapping[str, Any]
OnLog = Callable[[str, LogLine], None]

STOP_SECONDS = 30.0
LONGEST_START_S = 7 * 86_400.0
"""How long a gateway waits for models where nobody sets a limit."""


@dataclass(slots=True)
class ServiceProcess:
    """Process, ports and state of one service."""

    name: str
    process: subprocess.Popen[str]
    port: int = 0
    metrics_port: int = 0
    http_port: int = 0
    """HTTP port of a gateway; 0 if it has none."""
    has_tls: bool = False
    is_listening: bool = False
    """Whether its ports are known; it may still be loading."""
    is_serving: bool = False
    """Whether it has served."""
    served_at: float = 0.0
    """Time at which it began to serve, by `time.monotonic`."""
    ending: ProcessEnd | None = None
    """How the process ended; None while it runs."""
    last_line: str = ""
    """The last log line, or the reason of a failed start."""
    has_failed: bool = False
    """Whether the service logged `server_failed`."""
    kills_before: int = 0
    """Processes that the out-of-memory killer had killed before."""

    @property
    def reason(self) -> str:
        """Reason of its end: in its own words if it had any, else the signal or status, with its last line."""
        if self.has_failed or self.ending is None:
            return self.last_line
        return f"it {self.ending}" + (f" ({self.last_line})" if self.last_line else "")


class LocalStack:
    """Context manager that starts the three services and stops them again.

    Attributes:
        services: the running services by name.
    """

    def __init__(
        self,
        options: Mapping[str, Mapping[str, object]],
        on_log: OnLog | None = None,
        start_timeout_s: float | None = 120.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            options: for each service to start ("drafter", "verifier", "gateway") its settings by option name, such as
                `{"verifier": {"model": "models/target", "port": 0}}`. The gateway gets the addresses of the others,
                unless `discovery` is among its settings.
            on_log: receives every log line of every service, on threads of its own. If it raises, it gets no more
                lines, and `start` or `next_end` raises the same exception.
            start_timeout_s: how long the start of all services may take; None waits as long as all processes live.
        """
        self.services: dict[str, ServiceProcess] = {}
        self._options = options
        self._on_log = on_log
        self._start_timeout_s = start_timeout_s
        self._events: queue.Queue[ServiceProcess | BaseException] = queue.Queue()
        """Services that began to listen or to serve, or have ended, and the exception that `on_log` raised."""
        self._peers: dict[str, Mapping[str, object]] = {}
        """Addresses that a service was started with, for its next start."""
        self._launching = threading.Lock()
        self._is_stopping = False

    @property
    def _host(self) -> str:
        """Host by which the gateway is called from here."""
        host = str(self._options["gateway"].get("host", "127.0.0.1"))
        return "127.0.0.1" if host in UNSPECIFIED else host

    @property
    def address(self) -> str:
        """host:port of the gateway."""
        return f"{self._host}:{self.services['gateway'].port}"

    @property
    def http_address(self) -> str:
        """http://host:port of the gateway, or https://."""
        gateway = self.services["gateway"]
        return f"{'https' if gateway.has_tls else 'http'}://{self._host}:{gateway.http_port}"

    def __enter__(self) -> "LocalStack":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts drafter and verifier together, and the gateway as soon as their ports are known, at once if they are
        given; returns when all of them serve.

        Raises:
            UnavailableError: a service did not start; the message is the service's own.
        """
        deadline = None if self._start_timeout_s is None else time.monotonic() + self._start_timeout_s
        models = [name for name in ("verifier", "drafter") if name in self._options]
        for name in models:
            self._launch(name, {})
        if "gateway" in self._options:
            given = {name: int(str(self._options[name].get("port", 0))) for name in models}
            free = [name for name, port in given.items() if not port]
            self._wait(free, deadline, lambda service: service.is_listening)
            ports = {name: port or self.services[name].port for name, port in given.items()}
            peers: dict[str, object] = {"drafter": "none"}
            peers.update({name: f"127.0.0.1:{port}" for name, port in ports.items()})
            self._launch("gateway", {} if "discovery" in self._options["gateway"] else peers)
        self._wait([*self.services], deadline, lambda service: service.is_serving)

    def next_end(self, timeout_s: float | None) -> ServiceProcess | None:
        """Returns the next service whose process ends; None if none ends in time. None waits for ever."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while (service := self._next(deadline)).ending is None:
                pass
        except queue.Empty:
            return None
        return service

    def restart(self, name: str) -> None:
        """Starts a service again whose process has ended, and returns at once. It gets the ports that others know."""
        old = self.services[name]
        ports = {"port": old.port, "http_port": old.http_port}
        self._launch(name, self._peers[name], {key: port for key, port in ports.items() if port})

    def kill(self) -> None:
        """Ends all services at once; `stop` then returns soon. May be called while it waits, as by a signal handler."""
        for service in list(self.services.values()):
            service.process.kill()

    def stop(self) -> None:
        """Stops all services, the gateway first, so that running requests can finish. None starts any more."""
        with self._launching:
            self._is_stopping = True
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

    def interpreter(self, name: str) -> str:
        """Returns the Python that runs a service. One in another environment has draftwire too."""
        return sys.executable

    def _launch(self, name: str, peers: Mapping[str, object], ports: Mapping[str, int] | None = None) -> None:
        """Starts a service on a thread of its own, which then reads its log: Ctrl-C interrupts the main thread
        anywhere, even between the start of a process and the line that remembers it.

        `peers` are the addresses of the others, as options, and `ports` those that it had before.
        """
        launched: Future[None] = Future()
        self._peers[name] = peers
        threading.Thread(target=self._run, args=(name, ports or {}, launched), daemon=True).start()
        launched.result()

    def _arguments(self, name: str, peers: Mapping[str, object], ports: Mapping[str, int]) -> list[str]:
        defaults: dict[str, object] = {"port": 0, "metrics_port": 0, "log_format": "json", "stop_with_stdin": True}
        if name == "gateway":
            defaults["http_port"] = 0
            # It waits for models that load, which is timed here.
            longest_s = LONGEST_START_S if self._start_timeout_s is None else self._start_timeout_s
            defaults["startup_timeout_s"] = os.environ.get(variable(name, "startup_timeout_s"), longest_s)
        return arguments_of({**defaults, **peers, **self._options[name], **ports})

    def _run(self, name: str, ports: Mapping[str, int], launched: Future[None]) -> None:
        """Starts a service and reads its log until it ends."""
        try:
            with self._launching:
                if self._is_stopping:
                    raise UnavailableError(f"{name} was stopped before it started")
                kills_before = num_memory_kills()
                process = self._start(name, self._arguments(name, self._peers[name], ports))
                service = self.services[name] = ServiceProcess(name, process, kills_before=kills_before)
                service.port, service.http_port = ports.get("port", 0), ports.get("http_port", 0)
        except BaseException as error:  # it is the caller's
            launched.set_exception(error)
            return
        launched.set_result(None)
        self._follow(service)

    def _start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.interpreter(name), "-m", "draftwire.cli", "serve", name, *arguments],
            stdin=subprocess.PIPE,  # closed when this process ends, even by SIGKILL; the service then stops
            stdout=subprocess.DEVNULL,  # if inherited, readers of our output would wait for the services to end
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # libraries may write other encodings
            start_new_session=True,  # Ctrl-C reaches the parent alone, which stops the services in order
        )

    def _wait(self, names: Sequence[str], deadline: float | None, is_done: Callable[[ServiceProcess], bool]) -> None:
        """Returns when all of these services are done. Raises as soon as one has ended, whatever the others do."""
        while awaited := [name for name in names if not is_done(self.services[name])]:
            try:
                service = self._next(deadline)
            except queue.Empty:
                late = " and ".join(sorted(awaited))
                raise UnavailableError(f"{late} did not come up within {self._start_timeout_s:g} s") from None
            if service.ending is not None:
                raise UnavailableError(f"{service.name} did not come up: {service.reason}")

    def _next(self, deadline: float | None) -> ServiceProcess:
        """Returns the next service that began to listen or to serve, or has ended.

        Raises:
            queue.Empty: there was none by the deadline.
        """
        event = self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        if isinstance(event, BaseException):
            raise event
        return event

    def _follow(self, service: ServiceProcess) -> None:
        """Reads a service's log until its process ends, even if `on_log` fails: a full pipe would block the service."""
        assert service.process.stderr is not None
        for text in service.process.stderr:
            line = _parse(text)
            self._update(service, line)
            if self._on_log is not None:
                try:
                    self._on_log(service.name, line)
                except BaseException as error:  # rich raises SystemExit on a broken pipe
                    self._on_log = None
                    self._events.put(error)
        status = service.process.wait()
        service.ending = ProcessEnd(status, num_memory_kills() > service.kills_before)
        self._events.put(service)

    def _update(self, service: ServiceProcess, line: LogLine) -> None:
        if not service.has_failed:  # later lines are of the service's other processes
            service.last_line = str(line.get("reason", line["event"])) or service.last_line
        service.has_failed |= line["event"] == f"{service.name}.server_failed"
        if line["event"] in (f"{service.name}.server_listening", f"{service.name}.server_started"):
            service.port, service.metrics_port = int(line["port"]), int(line["metrics_port"] or 0)
            service.http_port = int(line.get("http_port") or 0)
            service.is_listening = True
            if "tls" in line:
                service.has_tls, service.is_serving = bool(line["tls"]), True
                service.served_at = time.monotonic()
            self._events.put(service)


def arguments_of(options: Mapping[str, object]) -> list[str]:
    """Returns a service's options, by name, as its command line has them."""
    return [_argument(key.replace("_", "-"), value) for key, value in options.items()]


def _argument(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _parse(text: str) -> LogLine:
    """Parses a log line. Other output, such as a traceback or a library's warning, becomes an event of its own."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    return line if isinstance(line, dict) and "event" in line else {"event": text.rstrip(), "level": "output"}
