"""Where services are: listed, looked up, or followed in Kubernetes, against a server that speaks as its API does."""

import asyncio
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from kubernetes_api import PORT, KubernetesApi, endpoint_slice, pod
from structlog.testing import capture_logs

from draftwire.errors import InvalidRequestError
from draftwire.services.gateway import discovery, endpoint_slices
from draftwire.services.gateway.config import DiscoverySettings, GatewayConfig
from draftwire.services.gateway.discovery import DnsSource, Endpoint, Source, StaticSource
from draftwire.services.gateway.endpoint_slices import (
    EndpointSliceSource,
    WatchTimes,
    endpoints_of,
    read_configuration,
)
from draftwire.services.gateway.sources import sources_of

DEADLINE_S = 10.0
TIMES = WatchTimes(watch_s=1, answer_s=0.5)
A, B, C = (f"10.0.0.{number}" for number in (1, 2, 3))
V = f":{PORT}"


class Followed:
    """What a source has said."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.endpoints: frozenset[Endpoint] | None = None
        self.num_told = 0

    @property
    def by_host(self) -> dict[str, Endpoint]:
        return {endpoint.address.rpartition(":")[0]: endpoint for endpoint in self.endpoints or ()}

    async def follow(self) -> None:
        async with aclosing(self.source.endpoints()) as changes:
            async for endpoints in changes:
                self.endpoints = endpoints
                self.num_told += 1

    async def until(self, *hosts: str, **conditions: bool) -> None:
        """Waits until it says that there are services at these hosts, all of them in some condition."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._says(hosts, conditions):
            assert time.monotonic() < deadline, f"it says {self.endpoints}"
            await asyncio.sleep(0.005)

    def _says(self, hosts: Sequence[str], conditions: Mapping[str, bool]) -> bool:
        if self.endpoints is None or sorted(self.by_host) != sorted(hosts):
            return False
        return all(
            getattr(endpoint, name) == value for endpoint in self.endpoints for name, value in conditions.items()
        )


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Followed]:
    """Follows a source, and makes sure that it ends when it is told to."""
    followed = Followed(source)
    task = asyncio.create_task(followed.follow())
    try:
        yield followed
        assert not task.done() or isinstance(source, StaticSource)
    finally:
        task.cancel()
        async with asyncio.timeout(1.0):
            await asyncio.gather(task, return_exceptions=True)


async def until(holds: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def events(logs: list[Any]) -> list[str]:
    return [f"{line['event'].removeprefix('gateway.discovery_')} {line['log_level']}" for line in logs]


# A list


async def test_listed_addresses_are_said_once_and_cannot_be_out_of_date() -> None:
    source = StaticSource(("a:1", "b:2"))
    async with aclosing(source.endpoints()) as changes:
        said = [endpoints async for endpoints in changes]
    assert said == [frozenset({Endpoint("a:1"), Endpoint("b:2")})]
    assert source.status.synced_at is None


@pytest.mark.parametrize(
    ("is_ready", "is_terminating", "takes_sessions"),
    [(True, False, True), (False, False, False), (True, True, False), (False, True, False)],
)
def test_endpoint_takes_sessions_while_it_is_ready_and_does_not_terminate(
    is_ready: bool, is_terminating: bool, takes_sessions: bool
) -> None:
    assert Endpoint("a:1", None, is_ready, True, is_terminating).takes_sessions == takes_sessions


# Names


class Resolver:
    """Answers look-ups in the place of the system's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Sequence[str] | Exception] = {}
        self.num_asked = 0
        self.is_hung = False
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, *, type: int) -> list[Any]:
        self.num_asked += 1
        while self.is_hung:
            await asyncio.sleep(0.01)
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in answer]
        return [(family, type, 6, "", (address, port)) for family, address in zip(families, answer, strict=True)]


async def test_every_address_of_a_name_is_an_endpoint_and_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.answers = {"verifiers": [A, "fd00::1"], "more": [B]}
    async with following(DnsSource(("verifiers:50052", "more:1"), pause_s=0.01)) as followed:
        await followed.until(A, "[fd00::1]", B)
        assert followed.by_host[A].address == f"{A}:50052"
        assert followed.by_host["[fd00::1]"].address == "[fd00::1]:50052"
        assert followed.by_host[B].address == f"{B}:1"
        resolver.answers["verifiers"] = [C]
        await followed.until(C, B)


@pytest.mark.parametrize(
    "fault", [socket.gaierror(socket.EAI_AGAIN, "temporary"), socket.gaierror(socket.EAI_NONAME, "no such name")]
)
async def test_name_that_cannot_be_looked_up_changes_nothing_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    resolver = Resolver(monkeypatch)
    resolver.answers = {"verifiers": [A]}
    source = DnsSource(("verifiers:1",), pause_s=0.01)
    with capture_logs() as logs:
        async with following(source) as followed:
            await followed.until(A)
            synced_at = source.status.synced_at
            resolver.answers["verifiers"] = fault
            await until(lambda: source.status.num_failures >= 3)
            await followed.until(A)
            assert "verifiers:1" in source.status.fault
            last = source.status.synced_at
            resolver.answers["verifiers"] = [B]
            await followed.until(B)
    assert events(logs) == ["failed warning", "recovered info"]
    assert synced_at <= last < (source.status.synced_at or 0.0)


async def test_name_that_cannot_be_looked_up_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.answers = {"verifiers": socket.gaierror(socket.EAI_AGAIN, "temporary"), "more": [B]}
    async with following(DnsSource(("verifiers:1", "more:1"), pause_s=0.01)) as followed:
        await followed.until(B)


async def test_resolver_that_hangs_is_given_up_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DNS_TIMEOUT_SECONDS", 0.05)
    resolver = Resolver(monkeypatch)
    resolver.answers = {"verifiers": [A]}
    resolver.is_hung = True
    source = DnsSource(("verifiers:1",), pause_s=0.01)
    async with following(source) as followed:
        await until(lambda: source.status.num_failures >= 2)
        assert followed.num_told == 0
        resolver.is_hung = False
        await followed.until(A)


async def test_real_resolver_is_asked() -> None:
    async with following(DnsSource(("127.0.0.1:7",), pause_s=10.0)) as followed:
        await followed.until("127.0.0.1")


# What slices say


def address_and_zone(slices: Sequence[Any]) -> list[tuple[str, str | None]]:
    return sorted((endpoint.address, endpoint.zone) for endpoint in endpoints_of(slices))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, (True, True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, True, False)),
        ({"ready": False}, (False, False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
        ({"ready": False, "serving": False, "terminating": True}, (False, False, True)),
        ({"ready": True, "serving": True, "terminating": True}, (True, True, True)),  # publishNotReadyAddresses
    ],
)
def test_conditions_that_are_not_known_count_as_ready(
    conditions: dict[str, bool | None], expected: tuple[bool, bool, bool]
) -> None:
    for item in ({**pod(A), "conditions": conditions}, {**pod(A), "conditions": conditions, "zone": None}):
        (endpoint,) = endpoints_of([endpoint_slice("x", "v", [item])])
        assert (endpoint.is_ready, endpoint.is_serving, endpoint.is_terminating) == expected


def test_endpoint_without_any_conditions_is_ready() -> None:
    (endpoint,) = endpoints_of([endpoint_slice("x", "v", [{"addresses": [A]}])])
    assert endpoint == Endpoint(A + V)


def test_several_addresses_of_an_endpoint_lead_to_one_pod() -> None:
    item = {**pod(A, "zone-1"), "addresses": [A, B]}
    assert address_and_zone([endpoint_slice("x", "v", [item])]) == [(A + V, "zone-1")]


def test_pod_with_addresses_of_two_families_is_taken_once_by_its_ipv4_address() -> None:
    six = {**pod(A), "addresses": ["fd00::1"]}
    slices = [endpoint_slice("a6", "v", [six], address_type="IPv6"), endpoint_slice("b4", "v", [pod(A)])]
    assert address_and_zone(slices) == [(A + V, None)]
    assert address_and_zone(slices[:1]) == [("[fd00::1]" + V, None)]


def test_endpoint_in_two_slices_is_taken_once_and_terminates_if_either_says_so() -> None:
    def together(first: Any, second: Any) -> Endpoint:
        (one,) = endpoints_of([endpoint_slice("x", "v", [first]), endpoint_slice("y", "v", [second])])
        (same,) = endpoints_of([endpoint_slice("x", "v", [second]), endpoint_slice("y", "v", [first])])
        assert one == same
        return one

    assert together(pod(A, ready=False, serving=False), pod(A, "zone-1")) == Endpoint(A + V, "zone-1")
    assert together(pod(A), pod(A, terminating=True)).is_terminating


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([{"name": "metrics", "port": 1}, {"name": "grpc", "port": 2}], 2),
        ([{"name": "metrics", "port": 1}, {"name": "http", "port": 2}], 1),
        ([{"name": "", "port": 3}], 3),
        ([{"port": 3}], 3),
        ([{"name": "grpc", "port": None}, {"name": "other", "port": 4}], 4),
        ([], None),
        (None, None),
    ],
)
def test_port_is_the_one_named_grpc_else_the_first(ports: Any, expected: int | None) -> None:
    slice_ = endpoint_slice("x", "v", [pod(A)]) | {"ports": ports}
    found = [] if expected is None else [(f"{A}:{expected}", None)]
    assert address_and_zone([slice_]) == found


def test_each_slice_has_ports_of_its_own() -> None:
    slices = [endpoint_slice("x", "v", [pod(A)]), endpoint_slice("y", "v", [pod(B)], [{"name": "grpc", "port": 9}])]
    assert address_and_zone(slices) == [(A + V, None), (f"{B}:9", None)]


def test_slice_without_endpoints_says_nothing() -> None:
    assert endpoints_of([endpoint_slice("x", "v", [])]) == frozenset()


# Kubernetes


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KubernetesApi]:
    """A server that KUBECONFIG leads to, with pauses that suit tests."""
    monkeypatch.setattr(endpoint_slices, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(endpoint_slices, "LONGEST_PAUSE_S", 0.2)
    with KubernetesApi() as running:
        use_kubeconfig(monkeypatch, tmp_path, running)
        yield running


def use_kubeconfig(monkeypatch: pytest.MonkeyPatch, folder: Path, api: KubernetesApi) -> None:
    (folder / "kubeconfig").write_text(api.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))


async def source_of(service: str = "verifier", times: WatchTimes = TIMES) -> EndpointSliceSource:
    return EndpointSliceSource(await read_configuration(), "default", service, times)


async def test_slices_are_listed_once_and_then_watched_from_there(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A, "zone-1")]))
    async with following(await source_of()) as followed:
        await followed.until(A)
        assert followed.endpoints == {Endpoint(A + V, "zone-1")}
        api.put(endpoint_slice("y", "verifier", [pod(B)]))
        await followed.until(A, B)
        api.put(endpoint_slice("x", "verifier", [pod(A), pod(C)]))
        await followed.until(A, B, C)
        api.delete("x")
        await followed.until(B)
        assert len(api.lists()) == 1
    (first, *_) = api.watches()
    assert first.path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    assert first.query == {
        "labelSelector": "kubernetes.io/service-name=verifier",
        "watch": "true",
        "resourceVersion": "1001",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "1",
    }
    assert {asked.authorization for asked in api.asked} == {"Bearer secret-token"}


async def test_other_services_and_namespaces_are_nothing_to_it(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "drafter", [pod(A)]))
    api.put(endpoint_slice("y", "verifier", [pod(B)], namespace="elsewhere"))
    async with following(await source_of()) as followed:
        await followed.until()
        api.put(endpoint_slice("x", "drafter", [pod(C)]))
        api.put(endpoint_slice("z", "verifier", [pod(B)]))
        await followed.until(B)


async def test_conditions_of_an_endpoint_change_while_it_is_watched(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    async with following(await source_of()) as followed:
        await followed.until(A, is_ready=True)
        api.put(endpoint_slice("x", "verifier", [pod(A, ready=False, serving=False)]))
        await followed.until(A, is_ready=False, is_serving=False)
        api.put(endpoint_slice("x", "verifier", [pod(A)]))
        await followed.until(A, is_ready=True)
        api.put(endpoint_slice("x", "verifier", [pod(A, ready=False, terminating=True)]))
        await followed.until(A, is_terminating=True, is_serving=True)


async def test_watch_that_ended_goes_on_from_the_last_version_without_a_new_list(api: KubernetesApi) -> None:
    source = await source_of()
    async with following(source) as followed:
        await followed.until()
        api.put(endpoint_slice("x", "verifier", [pod(A)]))
        await followed.until(A)
        await until(lambda: len(api.watches()) == 3)
        api.put(endpoint_slice("y", "verifier", [pod(B)]))
        await followed.until(A, B)
    assert len(api.lists()) == 1
    assert [asked.query["resourceVersion"] for asked in api.watches()] == ["1000", "1001", "1001"]
    assert source.status.num_failures == 0


async def test_bookmark_moves_the_version_and_changes_nothing_else(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    async with following(await source_of()) as followed:
        await followed.until(A)
        await until(api.watches)
        api.bookmark()
        await until(lambda: len(api.watches()) == 2)
        assert followed.num_told == 1
        await followed.until(A)
    assert [asked.query["resourceVersion"] for asked in api.watches()] == ["1001", "1002"]


@pytest.mark.parametrize("gone_is_status", [True, False])
async def test_expired_watch_is_begun_anew_with_a_list_and_is_no_failure(
    api: KubernetesApi, gone_is_status: bool
) -> None:
    api.gone_is_status = gone_is_status
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    api.put(endpoint_slice("y", "verifier", [pod(B)]))
    source = await source_of()
    with capture_logs() as logs:
        async with following(source) as followed:
            await followed.until(A, B)
            await until(api.watches)
            api.delete("x")
            api.put(endpoint_slice("z", "verifier", [pod(C)]))
            api.forget_history()
            await followed.until(B, C)
            api.put(endpoint_slice("x", "verifier", [pod(A)]))
            await followed.until(A, B, C)
    assert (len(api.lists()), source.status.num_failures, logs) == (2, 0, [])


async def test_watch_that_expired_between_two_watches_is_begun_anew(api: KubernetesApi) -> None:
    """Then real servers answer with the status 410, or with a stream whose first event says so."""
    for gone_is_status in (True, False):
        api.gone_is_status = gone_is_status
        api.asked.clear()
        source = await source_of()
        async with following(source) as followed:
            await followed.until(*followed.by_host)
            source._version = "1"
            api.forget_history()
            await until(lambda: len(api.lists()) == 2)
        assert source.status.num_failures == 0


async def test_outage_keeps_what_is_known_is_logged_once_and_ends_by_itself(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    source = await source_of()
    with capture_logs() as logs:
        async with following(source) as followed:
            await followed.until(A)
            api.stop()
            await until(lambda: source.status.num_failures >= 4)
            await followed.until(A)
            assert source.status.fault
            api.delete("x")
            api.put(endpoint_slice("y", "verifier", [pod(B)]))
            api.start()
            await followed.until(B)
            await until(lambda: not source.status.fault)
    assert events(logs) == ["failed warning", "recovered info"]


async def test_pauses_grow_while_the_api_is_gone(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform in half the pause to the whole, so that gateways do not come back together."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds > 0.01:
            pauses.append(seconds)
        await sleep(min(seconds, 0.01))

    monkeypatch.setattr(endpoint_slices, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(endpoint_slices, "LONGEST_PAUSE_S", 8.0)
    monkeypatch.setattr(asyncio, "sleep", note)
    api.stop()
    async with following(await source_of()):
        await until(lambda: len(pauses) >= 6)
    for pause, most in zip(pauses, (1.0, 2.0, 4.0, 8.0, 8.0, 8.0), strict=False):
        assert most / 2 <= pause <= most
    assert len({pause / most for pause, most in zip(pauses, (1.0, 2.0, 4.0, 8.0, 8.0, 8.0), strict=False)}) > 1


@pytest.mark.parametrize("status", [500, 503, 429, 504])
async def test_server_that_fails_is_asked_again(api: KubernetesApi, status: int) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    api.refusal = status
    source = await source_of()
    with capture_logs() as logs:
        async with following(source) as followed:
            await until(lambda: source.status.num_failures >= 2)
            assert followed.num_told == 0
            assert f"HTTP {status}" in source.status.fault
            api.refusal = None
            await followed.until(A)
            await until(lambda: not source.status.fault)
    assert events(logs) == ["failed warning", "recovered info"]


@pytest.mark.parametrize("status", [401, 403])
async def test_missing_rights_are_an_error_that_says_which_and_are_asked_for_again(
    api: KubernetesApi, status: int
) -> None:
    source = await source_of()
    with capture_logs() as logs:
        async with following(source) as followed:
            await followed.until()
            api.refusal = 500
            await until(lambda: source.status.num_failures >= 1)
            api.refusal = status
            await until(lambda: f"HTTP {status}" in source.status.fault)
            failures = source.status.num_failures
            await until(lambda: source.status.num_failures >= failures + 2)
            api.refusal = None
            api.put(endpoint_slice("x", "verifier", [pod(A)]))
            await followed.until(A)
            await until(lambda: not source.status.fault)
    assert events(logs) == ["failed warning", "failed error", "recovered info"]
    assert "get, list and watch of endpointslices in namespace default" in logs[1]["reason"]


async def test_right_to_list_alone_is_an_error_that_is_logged_once(api: KubernetesApi) -> None:
    """That it was given is noticed when a watch begins, not when it ends."""
    api.refuses_watches = True
    source = await source_of(times=WatchTimes(watch_s=60, answer_s=0.5))
    with capture_logs() as logs:
        async with following(source) as followed:
            await until(lambda: source.status.num_failures >= 4)
            api.put(endpoint_slice("x", "verifier", [pod(A)]))
            await followed.until(A)
            assert events(logs) == ["failed error"]
            api.refuses_watches = False
            await until(lambda: len(logs) == 2)
    assert events(logs) == ["failed error", "recovered info"]


async def test_watch_that_does_not_begin_is_given_up_long_before_it_would_have_ended(api: KubernetesApi) -> None:
    api.ignores_watches = True
    source = await source_of(times=WatchTimes(watch_s=60, answer_s=0.2))
    async with following(source):
        await until(lambda: source.status.num_failures >= 2)
        assert source.status.fault == "no answer in time"


async def test_connection_that_is_dead_is_noticed_and_a_new_one_opened(api: KubernetesApi) -> None:
    """Nothing is closed: without a deadline of its own the client would wait for ever."""
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    source = await source_of()
    async with following(source) as followed:
        await followed.until(A)
        await until(api.watches)
        started = time.monotonic()
        api.is_dead = True
        await until(lambda: source.status.num_failures >= 1)
        assert time.monotonic() - started < TIMES.watch_s + TIMES.answer_s + 2.0
        await followed.until(A)
        api.put(endpoint_slice("x", "verifier", [pod(B)]))
        api.is_dead = False
        await followed.until(B)


async def test_server_that_accepts_and_never_answers_is_given_up(api: KubernetesApi) -> None:
    api.is_dead = True
    source = await source_of()
    async with following(source) as followed:
        await until(lambda: source.status.num_failures >= 2)
        assert source.status.fault == "no answer in time"
        api.is_dead = False
        await followed.until()


async def test_source_ends_at_once_while_it_waits_for_a_server_that_does_not_answer(api: KubernetesApi) -> None:
    api.is_dead = True
    async with following(await source_of(times=replace(TIMES, answer_s=60.0))):
        await until(lambda: len(api.asked) == 1)


async def test_server_that_ends_every_watch_at_once_is_not_asked_in_a_tight_loop(api: KubernetesApi) -> None:
    api.ends_watches_at_once = True
    source = await source_of()
    async with following(source):
        await asyncio.sleep(0.5)
        assert 1 <= len(api.watches()) < 20
        assert source.status.num_failures >= 1


@pytest.mark.parametrize(
    "broken",
    [
        {"addressType": None, "endpoints": [{"addresses": []}]},
        {"endpoints": [{"conditions": {}}]},
        {"endpoints": ["x"]},
        {"ports": [{"name": "grpc", "port": "http"}]},
        {"endpoints": 7},
    ],
)
async def test_slices_that_are_none_are_failures_and_change_nothing(api: KubernetesApi, broken: dict[str, Any]) -> None:
    api.put(endpoint_slice("x", "verifier", [pod(A)]))
    source = await source_of()
    async with following(source) as followed:
        await followed.until(A)
        await until(api.watches)
        api.put(endpoint_slice("y", "verifier", [pod(B)]) | broken)
        await until(lambda: source.status.num_failures >= 2)
        assert "not a" in source.status.fault
        await followed.until(A)
        api.delete("y")
        api.put(endpoint_slice("z", "verifier", [pod(C)]))
        await followed.until(A, C)


async def test_age_is_that_of_the_last_answer(api: KubernetesApi) -> None:
    source = await source_of()
    async with following(source) as followed:
        await followed.until()
        first = source.status.synced_at
        await until(lambda: len(api.watches()) == 2)
        second = source.status.synced_at
        assert second > first
        api.stop()
        await until(lambda: source.status.num_failures >= 2)
        assert source.status.synced_at - second < TIMES.watch_s  # type: ignore[operator]


async def test_token_of_the_pod_is_read_again_when_it_was_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of pods live for an hour. The library looks once a minute; here, ten times a second."""
    from kubernetes.aio.config import incluster_config

    ca = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    for name, content in (("token", b"old"), ("ca.crt", ca.cert_pem.bytes())):
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    quick = SimpleNamespace(timedelta=lambda minutes: timedelta(seconds=minutes / 10), datetime=datetime)
    monkeypatch.setattr(incluster_config, "datetime", quick)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with KubernetesApi(tls) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put(endpoint_slice("x", "verifier", [pod(A)]))
        async with following(await source_of()) as followed:
            await followed.until(A)
            (tmp_path / "token").write_text("new")
            await until(lambda: api.asked[-1].authorization == "bearer new")
        assert api.asked[0].authorization == "bearer old"


# What is configured


async def sources(**settings: Any) -> tuple[Source, Source]:
    config = GatewayConfig(discovery=DiscoverySettings("kubernetes", **settings))
    made = await sources_of(config)
    return made.verifiers, made.drafters


async def test_configuration_names_services_and_namespace(api: KubernetesApi) -> None:
    verifiers, drafters = await sources(verifier_service="v", drafter_service="d", namespace="n")
    assert (verifiers.name, drafters.name) == ("service n/v", "service n/d")
    _, none = await sources(verifier_service="v", namespace="n")
    assert none == StaticSource(())


async def test_namespace_is_the_pods_own_unless_one_is_named(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint_slices, "NAMESPACE_FILE", tmp_path / "namespace")
    with pytest.raises(InvalidRequestError, match="set namespace"):
        await sources(verifier_service="v")
    (tmp_path / "namespace").write_text("mine\n")
    assert (await sources(verifier_service="v"))[0].name == "service mine/v"


async def test_without_a_cluster_or_the_library_the_gateway_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequestError, match="needs a pod, or KUBECONFIG"):
        await sources(verifier_service="v", namespace="n")
    for text in ("", "{", "[]"):
        (tmp_path / "kubeconfig").write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        with pytest.raises(InvalidRequestError, match="needs a pod, or KUBECONFIG"):
            await sources(verifier_service="v", namespace="n")
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'draftwire\[services,kubernetes\]'"):
        await sources(verifier_service="v", namespace="n")


async def test_listed_names_are_looked_up_and_addresses_are_not() -> None:
    made = await sources_of(GatewayConfig(verifier="dns:///v:1,dns:///w:2", drafter="d:3,e:4"))
    assert made.verifiers == DnsSource(("v:1", "w:2"), status=made.verifiers.status)
    assert made.drafters == StaticSource(("d:3", "e:4"))
    default = await sources_of(GatewayConfig())
    assert (default.verifiers.name, default.drafters.name) == ("127.0.0.1:50052", "127.0.0.1:50053")


def test_library_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys, draftwire.services.gateway.sources; sys.exit(bool({'kubernetes', 'aiohttp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
