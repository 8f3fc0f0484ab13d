"""Pods of a rolling restart, as processes: each is taken out of its Service, and then gets SIGTERM and its grace.

Endpoints go first, as with the chart's `preStopSeconds`: gateways hear it from the API server of `kubernetes_api`, and
`ServiceAddress` routes new connections to the gateways that are left, as kube-proxy does.
"""

import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from kubernetes_api import KubernetesApi, endpoint_slice, pod
from observing import wait_until
from service_address import ServiceAddress

from benchmarks.relay import free_port
from draftwire.cli.local_stack import LocalStack, ServiceProcess
from draftwire.client import Client
from draftwire.errors import DraftwireError
from draftwire.models.script import expected_tokens

SCRIPT = "scripted:acceptance=0.8,verify_ms=5,context_length=4096"
PROMPT = [1, 2, 3, 4, 5]
GRPC_CLIENTS = HTTP_CLIENTS = 3
DRAIN_SECONDS = 30.0
"""What a pod may take; the longest completion takes a small part of that."""
PRE_STOP_SECONDS = 1.0
START_SECONDS = 120.0


@dataclass(eq=False)
class Pod:
    """A process, with an address of its own and the port of its service."""

    service: str
    address: str
    process: ServiceProcess


class Cluster:
    """All pods, and what the API and the Service of the gateways say of them."""

    def __init__(self, exits: ExitStack, kubeconfig: Path) -> None:
        self._exits = exits
        self._api = exits.enter_context(KubernetesApi())
        kubeconfig.write_text(self._api.kubeconfig())
        self._ports = {"verifier": free_port(), "drafter": free_port()}
        self._numbers = iter(range(2, 250))
        self.pods: list[Pod] = []
        self.grpc, self.http = exits.enter_context(ServiceAddress()), exits.enter_context(ServiceAddress())

    def add(self, *services: str) -> list[Pod]:
        """Starts a pod of each service, and lets it be found once it serves."""
        with ThreadPoolExecutor() as starting:
            started = list(starting.map(self._started, services))
        self.pods += started
        self.publish()
        return started

    def remove(self, gone: Pod) -> float:
        """Takes a pod out of its Service, stops it some time later, and returns how long it drained."""
        self.pods.remove(gone)
        self.publish()
        time.sleep(PRE_STOP_SECONDS)
        started_at = time.monotonic()
        gone.process.process.send_signal(signal.SIGTERM)
        assert gone.process.process.wait(DRAIN_SECONDS + 10.0) == 0, gone.service
        return time.monotonic() - started_at

    def publish(self) -> None:
        for service, port in self._ports.items():
            ready = [pod(one.address) for one in self.pods if one.service == service]
            ports = [{"name": "grpc", "port": port}]
            self._api.put(endpoint_slice(f"{service}-abcde", service, ready, ports))
        gateways = [one.process for one in self.pods if one.service == "gateway"]
        self.grpc.ports = [one.port for one in gateways]
        self.http.ports = [one.http_port for one in gateways]

    def _started(self, service: str) -> Pod:
        address = f"127.0.0.{next(self._numbers)}"
        options: dict[str, Any] = {"model": SCRIPT, "host": address, "port": self._ports.get(service), "threads": 1}
        if service == "gateway":
            found = {f"{role}_service": role for role in self._ports}
            options = {"discovery": "kubernetes", "namespace": "default", "local_drafts": "none", **found}
        stack = LocalStack({service: {**options, "drain_seconds": DRAIN_SECONDS, "allow_plaintext": True}}, None, 120.0)
        self._exits.callback(stack.stop)
        stack.start()
        return Pod(service, address, stack.services[service])


@dataclass(slots=True)
class Load:
    """Clients that ask again and again, and what became of it."""

    cluster: Cluster
    outcomes: Counter[str] = field(default_factory=Counter)
    sessions_moved: int = 0
    draft_tokens: int = 0
    longest_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, work: Callable[[], None]) -> None:
        asking = [self._ask_by_grpc] * GRPC_CLIENTS + [self._ask_by_http] * HTTP_CLIENTS
        clients = [threading.Thread(target=ask) for ask in asking]
        for client in clients:
            client.start()
        try:
            work()
        finally:
            self._is_over.set()
            for client in clients:
                client.join()

    def _ask_by_grpc(self) -> None:
        with Client(f"127.0.0.1:{self.cluster.grpc.port}") as client:
            for num_tokens in self._lengths():
                try:
                    done = client.generate(PROMPT, max_tokens=num_tokens, temperature=0.0)
                except DraftwireError as error:
                    self._note(f"grpc {type(error).__name__}: {error}")
                    continue
                is_whole = done.token_ids == expected_tokens(len(PROMPT), num_tokens)
                self._note("grpc whole" if is_whole else "grpc broken")
                with self._lock:
                    self.sessions_moved += done.statistics.num_verifiers_lost
                    self.draft_tokens += done.statistics.num_draft_tokens

    def _ask_by_http(self) -> None:
        """Keeps its connection for the next request until the server closes it, as pools of connections do."""
        connection = HTTPConnection("127.0.0.1", self.cluster.http.port, timeout=60.0)
        for num_tokens in self._lengths():
            if has_ended(connection):
                connection.close()
            try:
                text = streamed(connection, num_tokens)
            except (OSError, HTTPException, ValueError) as error:
                self._note(f"http {type(error).__name__}: {error}")
                connection.close()
                continue
            self._note("http whole" if text == expected_tokens(len(PROMPT), num_tokens) else "http broken")
        connection.close()

    def _lengths(self) -> Iterator[int]:
        """Yields numbers of tokens to ask for: a moment's, and those of seconds."""
        generator = random.Random(threading.get_ident())
        while not self._is_over.is_set():
            started_at = time.monotonic()
            yield generator.choice((8, 100, 400))
            self.longest_s = max(self.longest_s, time.monotonic() - started_at)
            self._is_over.wait(0.02)  # between a response and the next request, as people have it

    def _note(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1


def has_ended(connection: HTTPConnection) -> bool:
    """Returns whether the server has closed a kept connection."""
    if connection.sock is None:
        return False
    connection.sock.settimeout(0.0)
    try:
        return connection.sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.sock.settimeout(60.0)


def streamed(connection: HTTPConnection, num_tokens: int) -> list[int]:
    """Returns the token ids of a streamed completion. Raises ValueError if it is refused, or does not end properly."""
    asked = {"model": "scripted", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "return_token_ids": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    with connection.getresponse() as response:
        events = response.read().decode().split("\n\n")
    if response.status != 200 or "data: [DONE]" not in events:
        raise ValueError(f"{response.status} {events[-1][:200]}")
    chunks = [json.loads(line[6:]) for event in events for line in event.split("\n") if line.startswith("data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


@pytest.mark.timeout(400)
def test_rolling_restart_of_pods_loses_no_completion_of_grpc_or_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    drained: list[tuple[str, float]] = []
    with ExitStack() as exits:
        cluster = Cluster(exits, tmp_path / "kubeconfig")
        old = cluster.add("verifier", "drafter")
        old += cluster.add("gateway")
        load = Load(cluster)

        def restart() -> None:
            wait_until(lambda: load.outcomes.total() > 20 and load.draft_tokens > 0, "completions are drafted", 60.0)
            for one in old:
                cluster.add(one.service)  # as a Deployment does: one more, then one less
                before = load.outcomes.total()
                wait_until(lambda before=before: load.outcomes.total() > before + 10, "the load goes on", 60.0)
                drained.append((one.service, round(cluster.remove(one), 2)))
            before = load.outcomes.total()
            wait_until(lambda: load.outcomes.total() > before + 20, "the load goes on", 60.0)

        load.run(restart)
        print(json.dumps({**load.outcomes, "drained_s": drained, "longest_completion_s": round(load.longest_s, 2)}))
        print(f"sessions that moved: {load.sessions_moved}, draft tokens: {load.draft_tokens}")
        assert set(load.outcomes) == {"grpc whole", "http whole"}
        assert load.sessions_moved == 0, "all ended within the drain of their verifier"
        assert all(seconds < DRAIN_SECONDS for _, seconds in drained), "none was cut"
