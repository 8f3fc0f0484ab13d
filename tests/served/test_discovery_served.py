"""A gateway that hears from Kubernetes where its verifiers and drafters are, while they come and go."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from kubernetes_api import KubernetesApi, endpoint_slice, pod
from observing import read_metric, wait_until

from benchmarks.relay import free_port
from draftwire.client import Client
from draftwire.models.script import expected_tokens
from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
PROMPT = [1, 2, 3, 4, 5]
DEADLINE_S = 60.0
LONG = 1200
"""Tokens of a completion that takes seconds, and half a minute where a core is slow and shared."""

ADDRESSES = {"verifier-1": "127.0.0.11", "verifier-2": "127.0.0.12", "drafter-1": "127.0.0.21"}


class Cluster:
    """Pods, each with an address of its own and the port of its service, and what the API says of them."""

    def __init__(self, api: KubernetesApi, exits: ExitStack) -> None:
        self.api = api
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()
        self._ports = {"verifier": free_port(), "drafter": free_port()}
        self.pods = {name: exits.enter_context(self._pod(name)) for name in ADDRESSES}
        self.show(["verifier-1"], [])
        options = {"discovery": "kubernetes", "verifier_service": "verifier", "drafter_service": "drafter"}
        settings = {
            **options,
            "namespace": "default",
            "max_requests": 64,
            "allow_plaintext": True,
            "local_drafts": "none",
        }
        self.gateway = exits.enter_context(InProcessStack({"gateway": settings}, on_log=self._note))
        self.client = exits.enter_context(Client(self.gateway.address))

    def show(self, verifiers: list[str], drafters: list[str], **conditions: dict[str, bool]) -> None:
        """Lets the API say which pods there are; `conditions` are of pods by their names in snake_case."""
        while not self.events.empty():
            self.events.get()
        for service, names in (("verifier", verifiers), ("drafter", drafters)):
            pods = [pod(ADDRESSES[name], **conditions.get(name.replace("-", "_"), {})) for name in names]
            ports = [{"name": "metrics", "port": 1}, {"name": "grpc", "port": self._ports[service]}]
            self.api.put(endpoint_slice(f"{service}-abcde", service, pods, ports))

    def wait_for(self, event: str, name: str) -> None:
        """Waits until the gateway has logged an event, about a pod unless the name is empty."""
        deadline = time.monotonic() + DEADLINE_S
        wanted = (f"gateway.{event}", ADDRESSES.get(name, ""))
        while self.events.get(timeout=max(0.01, deadline - time.monotonic())) != wanted:
            pass

    def num_peers(self, role: str, state: str) -> float:
        return read_metric(self.gateway, "gateway", "num_peers", f'role="{role}",state="{state}"')

    def num_sessions(self, name: str) -> float:
        return read_metric(self.pods[name], name.partition("-")[0], "num_sessions", host=ADDRESSES[name])

    def complete(self, max_tokens: int = 40) -> Any:
        """Returns the statistics of a completion."""
        completion = self.client.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
        assert completion.token_ids == expected_tokens(len(PROMPT), max_tokens)
        assert completion.num_resumed == 0
        return completion.statistics

    def _pod(self, name: str) -> InProcessStack:
        service = name.partition("-")[0]
        options = {"model": SCRIPT, "host": ADDRESSES[name], "port": self._ports[service], "drain_seconds": 0.5}
        return InProcessStack({service: options})

    def _note(self, _service: str, line: Any) -> None:
        self.events.put((str(line["event"]), str(line.get("address", "")).rpartition(":")[0]))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    kubeconfig = tmp_path_factory.mktemp("kubernetes") / "kubeconfig"
    with KubernetesApi() as api, pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as exits:
        kubeconfig.write_text(api.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield Cluster(api, exits)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def test_drafter_that_is_added_drafts_and_one_that_is_removed_does_not(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    cluster.show(["verifier-1"], [])
    assert cluster.complete().num_drafts == 0
    cluster.show(["verifier-1"], ["drafter-1"])
    cluster.wait_for("peer_connected", "drafter-1")
    wait_until(lambda: cluster.complete().num_drafts > 0, "the drafter takes part")
    wait_until(lambda: cluster.num_sessions("drafter-1") == 0, "drafter-1 has 0 sessions")
    running = background.submit(cluster.complete, LONG)
    wait_until(lambda: cluster.num_sessions("drafter-1") == 1, "drafter-1 has 1 sessions")
    cluster.show(["verifier-1"], [])
    cluster.wait_for("peer_left", "drafter-1")
    assert cluster.complete().num_drafts == 0
    assert not running.done()
    assert cluster.num_sessions("drafter-1") == 1, "it drafts on for the session that it has"
    assert running.result(DEADLINE_S).num_drafters_lost == 0
    wait_until(lambda: cluster.num_peers("drafter", "leaving") == 0, "no drafter is leaving")


def test_drafter_that_comes_and_goes_drafts_while_it_is_there(cluster: Cluster, background: ThreadPoolExecutor) -> None:
    running = [background.submit(cluster.complete, LONG) for _ in range(2)]
    for _ in range(3):
        cluster.show(["verifier-1"], ["drafter-1"])
        cluster.wait_for("peer_found", "drafter-1")
        wait_until(lambda: cluster.complete().num_drafts > 0, "the drafter takes part")
        cluster.show(["verifier-1"], [])
        cluster.wait_for("peer_left", "drafter-1")
        assert cluster.complete().num_drafts == 0
    assert all(future.result(DEADLINE_S) for future in running)


def test_added_verifier_takes_sessions_and_the_first_can_be_drained(
    cluster: Cluster, background: ThreadPoolExecutor
) -> None:
    cluster.show(["verifier-1"], ["drafter-1"])
    wait_until(lambda: cluster.num_sessions("verifier-1") == 0, "verifier-1 has 0 sessions")
    running = [background.submit(cluster.complete, LONG) for _ in range(4)]
    wait_until(lambda: cluster.num_sessions("verifier-1") == 4, "verifier-1 has 4 sessions")
    cluster.show(["verifier-1", "verifier-2"], ["drafter-1"])
    cluster.wait_for("peer_connected", "verifier-2")
    running += [background.submit(cluster.complete, LONG) for _ in range(4)]
    wait_until(lambda: cluster.num_sessions("verifier-2") == 4, "verifier-2 has 4 sessions")

    leaves = {"ready": False, "serving": True, "terminating": True}
    cluster.show(["verifier-1", "verifier-2"], ["drafter-1"], verifier_1=leaves)
    cluster.wait_for("peer_left", "verifier-1")
    running += [background.submit(cluster.complete, LONG) for _ in range(2)]
    wait_until(lambda: cluster.num_sessions("verifier-2") == 6, "verifier-2 has 6 sessions")
    assert cluster.num_sessions("verifier-1") == 4
    assert cluster.num_peers("verifier", "leaving") == 1
    cluster.pods["verifier-1"].stop()  # drains for less than its sessions take
    cluster.show(["verifier-2"], ["drafter-1"])
    lost = [future.result(2 * DEADLINE_S).num_verifiers_lost for future in running]
    assert lost == [1] * 4 + [0] * 6
    wait_until(lambda: cluster.num_peers("verifier", "leaving") == 0, "no verifier is leaving")
    assert cluster.num_peers("verifier", "connected") == 1


def test_outage_of_the_api_changes_nothing_for_completions(cluster: Cluster) -> None:
    cluster.show(["verifier-2"], ["drafter-1"])
    cluster.api.stop()
    cluster.wait_for("discovery_failed", "")
    cluster.complete()
    assert cluster.num_peers("verifier", "connected") == 1
    cluster.api.start()
    cluster.show(["verifier-2"], [])
    cluster.wait_for("peer_left", "drafter-1")
