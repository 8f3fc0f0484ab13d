"""Where services are: listed, looked up, or followed in Kubernetes, against a server that speaks as its API does."""

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from kubernetes.aio.client import V1EndpointSlice
from kubernetes_api import PORT, Asked, KubernetesApi, endpoint_slice, pod
from observing import until
from structlog.testing import capture_logs

from draftwire.errors import InvalidRequestError
from draftwire.runtime.settings import TlsSettings
from draftwire_gateway.config import DiscoverySettings, GatewayConfig
from draftwire_gateway.peers import discovery, endpoint_slices
from draftwire_gateway.peers.discovery import DnsSource, Endpoint, Source, SourceStatus, StaticSource
from draftwire_gateway.peers.endpoint_slices import (
    EndpointSliceSource,
    WatchTimes,
    endpoints_of,
    read_configuration,
)
from draftwire_gateway.peers.sources import sources_of

TIMES = WatchTimes(watch_s=1, answer_s=0.5)
A, B, C = (f"10.0.0.{number}" for number in (1, 2, 3))
V = f":{PORT}"


@dataclass
class Followed:
    """What a source has said, and what was logged meanwhile."""

    source: Any
    status: SourceStatus
    logs: list[Any]
    endpoints: frozenset[Endpoint] | None = None
    num_known: int = 0

    @property
    def events(self) -> list[str]:
        return [f"{line['event'].removeprefix('gateway.discovery_')} {line['log_level']}" for line in self.logs]

    async def follow(self) -> None:
        async with aclosing(self.source.endpoints()) as changes:
            async for self.endpoints in changes:
                self.num_known += 1

    async def until(self, *hosts: str, **conditions: bool) -> None:
        """Waits until it says that there are services at these hosts, all of them in some condition."""
        await until(
            lambda: (
                self.endpoints is not None
                and sorted(endpoint.address.rpartition(":")[0] for endpoint in self.endpoints) == sorted(hosts)
                and all(getattr(one, name) == value for one in self.endpoints for name, value in conditions.items())
            ),
            self,
        )

    async def until_failed(self, times: int) -> None:
        await until(lambda: self.status.num_failures >= times, self)

    async def until_well(self) -> None:
        await until(lambda: not self.status.fault, self)


@asynccontextmanager
async def following(source: Source) -> AsyncIterator[Followed]:
    """Follows a source, and makes sure that it ends when it is told to."""
    with capture_logs() as logs:
        followed = Followed(source, source.status, logs)
        task = asyncio.create_task(followed.follow())
        try:
            yield followed
            assert not task.done()
        finally:
            task.cancel()
            async with asyncio.timeout(1.0):
                await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def watching(times: WatchTimes = TIMES) -> AsyncIterator[Followed]:
    """Follows the endpoints of the service "verifier" in Kubernetes."""
    source = EndpointSliceSource(await read_configuration(), "default", "verifier", times)
    async with following(source) as followed:
        yield followed


# A list


async def test_listed_addresses_are_said_once_and_cannot_be_out_of_date() -> None:
    source = StaticSource(("a:1", "b:2"))
    async with aclosing(source.endpoints()) as changes:
        said = [endpoints async for endpoints in changes]
    assert said == [frozenset({Endpoint("a:1"), Endpoint("b:2")})]
    assert source.status.synced_at is None


def test_endpoint_takes_sessions_while_it_is_ready_and_does_not_terminate() -> None:
    for is_ready, is_terminating in product((True, False), repeat=2):
        endpoint = Endpoint("a:1", is_ready=is_ready, is_terminating=is_terminating)
        assert endpoint.takes_sessions == (is_ready and not is_terminating)


# Names


@pytest.fixture
def begun() -> Counter[str]:
    """How often each name was looked up."""
    return Counter()


@pytest.fixture
def names(
    monkeypatch: pytest.MonkeyPatch, begun: Counter[str]
) -> Iterator[dict[str, Sequence[str] | Exception | None]]:
    """What names are looked up as, in the place of the system's resolver; None: there is no answer."""
    answers: dict[str, Sequence[str] | Exception | None] = {}

    def look_up(host: str, port: int, *, type: int) -> list[Any]:
        assert threading.current_thread().daemon, "it keeps the process alive while it hangs"
        begun[host] += 1
        while (answer := answers[host]) is None:
            time.sleep(0.01)
        if isinstance(answer, Exception):
            raise answer
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in answer]
        return [(family, type, 6, "", (address, port)) for family, address in zip(families, answer, strict=True)]

    monkeypatch.setattr(discovery, "socket", SimpleNamespace(getaddrinfo=look_up, SOCK_STREAM=socket.SOCK_STREAM))
    yield answers
    for host, answer in answers.items():
        answers[host] = [] if answer is None else answer


async def test_every_address_of_a_name_is_an_endpoint_and_is_looked_up_again(names: dict[str, Any]) -> None:
    names |= {"verifiers": [A, "fd00::1"], "more": [B]}
    async with following(DnsSource(("verifiers:50052", "more:1"), pause_s=0.01)) as followed:
        await followed.until(A, "[fd00::1]", B)
        addresses = (f"{A}:50052", "[fd00::1]:50052", f"{B}:1")
        assert followed.endpoints == set(map(Endpoint, addresses))
        names["verifiers"] = [C]
        await followed.until(C, B)


@pytest.mark.parametrize(
    "fault", [socket.gaierror(socket.EAI_AGAIN, "temporary"), socket.gaierror(socket.EAI_NONAME, "no such name")]
)
async def test_name_that_cannot_be_looked_up_changes_nothing_and_is_logged_once(
    names: dict[str, Any], fault: Exception
) -> None:
    names["verifiers"] = [A]
    async with following(DnsSource(("verifiers:1",), pause_s=0.01)) as followed:
        await followed.until(A)
        synced_at = followed.status.synced_at
        names["verifiers"] = fault
        await followed.until_failed(3)
        await followed.until(A)
        assert "verifiers:1" in followed.status.fault
        last = followed.status.synced_at
        names["verifiers"] = [B]
        await followed.until(B)
    assert followed.events == ["failed warning", "recovered info"]
    assert synced_at <= last < (followed.status.synced_at or 0.0)


async def test_name_that_cannot_be_looked_up_does_not_hide_the_others(names: dict[str, Any]) -> None:
    names |= {"verifiers": socket.gaierror(socket.EAI_AGAIN, "temporary"), "more": [B]}
    async with following(DnsSource(("verifiers:1", "more:1"), pause_s=0.01)) as followed:
        await followed.until(B)


async def test_hanging_resolver_is_given_up_and_asked_again_once_it_answers(
    names: dict[str, Any], begun: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look-up that hangs takes a thread for as long as it does."""
    monkeypatch.setattr(discovery, "DNS_TIMEOUT_SECONDS", 0.05)
    names |= {"verifiers": None, "more": [B]}
    async with following(DnsSource(("verifiers:1", "more:1"), pause_s=0.01)) as followed:
        await followed.until_failed(5)
        await followed.until(B)
        assert begun["verifiers"] == 1
        assert begun["more"] >= 4
        names["verifiers"] = [A]
        await followed.until(A, B)
        names["verifiers"] = [C]
        await followed.until(C, B)


async def test_real_resolver_is_asked() -> None:
    async with following(DnsSource(("127.0.0.1:7",), pause_s=10.0)) as followed:
        await followed.until("127.0.0.1")


# What slices say


def verifiers(*items: Any, name: str = "x", **changes: Any) -> Any:
    return endpoint_slice(name, "verifier", items) | changes


def told_by(slices: Sequence[Any]) -> frozenset[Endpoint]:
    """Returns the endpoints of slices, which come as JSON."""
    return endpoints_of(V1EndpointSlice.from_dict(slice_) for slice_ in slices)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, (True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, False)),
        ({"ready": False}, (False, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True)),
        ({"ready": False, "serving": False, "terminating": True}, (False, True)),
        ({"ready": True, "serving": True, "terminating": True}, (True, True)),  # publishNotReadyAddresses
    ],
)
def test_conditions_that_are_not_known_count_as_ready(
    conditions: dict[str, bool | None], expected: tuple[bool, bool]
) -> None:
    for item in ({**pod(A), "conditions": conditions}, {**pod(A), "conditions": conditions, "zone": None}):
        assert told_by([verifiers(item)]) == {Endpoint(A + V, None, *expected)}


TERMINATING = Endpoint(A + V, is_terminating=True)
SLICES = {
    "none": ([verifiers()], []),
    "no conditions at all": ([verifiers({"addresses": [A]})], [Endpoint(A + V)]),
    "several addresses of one pod": (
        [verifiers({**pod(A, "zone-1"), "addresses": [A, B]})],
        [Endpoint(A + V, "zone-1")],
    ),
    "addresses of IPv6 alone": (
        [verifiers({**pod(A), "addresses": ["fd00::1"]}, addressType="IPv6")],
        [Endpoint("[fd00::1]" + V)],
    ),
    "addresses of two families": (
        [verifiers({**pod(A), "addresses": ["fd00::1"]}, name="a6", addressType="IPv6"), verifiers(pod(A), name="b4")],
        [Endpoint(A + V)],
    ),
    "one that is ready in one of two slices": (
        [verifiers(pod(A, ready=False, serving=False)), verifiers(pod(A, "zone-1"), name="y")],
        [Endpoint(A + V, "zone-1")],
    ),
    "one that terminates in one of two slices": (
        [verifiers(pod(A)), verifiers(pod(A, terminating=True), name="y")],
        [TERMINATING],
    ),
    "ports of each slice": (
        [verifiers(pod(A)), verifiers(pod(B), name="y", ports=[{"name": "grpc", "port": 9}])],
        [Endpoint(A + V), Endpoint(f"{B}:9")],
    ),
    "the port named grpc": (
        [verifiers(pod(A), ports=[{"name": "metrics", "port": 1}, {"name": "grpc", "port": 2}])],
        [Endpoint(f"{A}:2")],
    ),
    "the first port": (
        [verifiers(pod(A), ports=[{"name": "metrics", "port": 1}, {"name": "http", "port": 2}])],
        [Endpoint(f"{A}:1")],
    ),
    "a port with an empty name": ([verifiers(pod(A), ports=[{"name": "", "port": 3}])], [Endpoint(f"{A}:3")]),
    "a port without a name": ([verifiers(pod(A), ports=[{"port": 3}])], [Endpoint(f"{A}:3")]),
    "the first port that has a number": (
        [verifiers(pod(A), ports=[{"name": "grpc", "port": None}, {"name": "other", "port": 4}])],
        [Endpoint(f"{A}:4")],
    ),
    "an empty list of ports": ([verifiers(pod(A), ports=[])], []),
    "no list of ports": ([verifiers(pod(A), ports=None)], []),
}


@pytest.mark.parametrize(("slices", "expected"), SLICES.values(), ids=list(SLICES))
def test_slices_list_each_pod_once_whatever_their_order(slices: list[Any], expected: list[Endpoint]) -> None:
    """With the port named grpc, else the first; a pod that terminates in one slice terminates."""
    assert told_by(slices) == told_by(slices[::-1]) == set(expected)


# Kubernetes


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KubernetesApi]:
    """A server that KUBECONFIG leads to, with pauses that suit tests."""
    monkeypatch.setattr(endpoint_slices, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(endpoint_slices, "LONGEST_PAUSE_S", 0.2)
    with KubernetesApi() as running:
        (tmp_path / "kubeconfig").write_text(running.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield running


async def test_slices_are_listed_once_and_then_watched_from_there(api: KubernetesApi) -> None:
    api.put(verifiers(pod(A, "zone-1")))
    async with watching() as followed:
        await followed.until(A)
        assert followed.endpoints == {Endpoint(A + V, "zone-1")}
        api.put(verifiers(pod(B), name="y"))
        await followed.until(A, B)
        api.put(verifiers(pod(A), pod(C)))
        await followed.until(A, B, C)
        api.delete("x")
        await followed.until(B)
    path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
    selector = {"labelSelector": "kubernetes.io/service-name=verifier"}
    assert api.lists == [Asked(path, selector, "Bearer secret-token")]
    watch = {
        "watch": "true",
        "resourceVersion": "1001",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "1",
    }
    assert api.watches[0] == Asked(path, selector | watch, "Bearer secret-token")


async def test_other_services_and_namespaces_are_nothing_to_it(api: KubernetesApi) -> None:
    api.put(endpoint_slice("x", "drafter", [pod(A)]))
    api.put(endpoint_slice("y", "verifier", [pod(B)], namespace="elsewhere"))
    async with watching() as followed:
        await followed.until()
        api.put(endpoint_slice("x", "drafter", [pod(C)]))
        api.put(verifiers(pod(B), name="z"))
        await followed.until(B)


async def test_conditions_of_an_endpoint_change_while_it_is_watched(api: KubernetesApi) -> None:
    async with watching() as followed:
        for is_ready, is_terminating in ((True, False), (False, False), (True, False), (False, True)):
            api.put(verifiers(pod(A, ready=is_ready, serving=is_ready or is_terminating, terminating=is_terminating)))
            await followed.until(A, is_ready=is_ready, is_terminating=is_terminating)


@pytest.mark.slow
async def test_watch_that_ended_goes_on_from_the_last_version_without_a_new_list(api: KubernetesApi) -> None:
    async with watching() as followed:
        await followed.until()
        api.put(verifiers(pod(A)))
        await followed.until(A)
        await until(lambda: len(api.watches) == 3, "three watches are open")
        api.put(verifiers(pod(B), name="y"))
        await followed.until(A, B)
    assert len(api.lists) == 1
    assert [asked.query["resourceVersion"] for asked in api.watches] == ["1000", "1001", "1001"]
    assert followed.status.num_failures == 0


@pytest.mark.slow
async def test_bookmark_moves_the_version_and_changes_nothing_else(api: KubernetesApi) -> None:
    api.put(verifiers(pod(A)))
    async with watching() as followed:
        await followed.until(A)
        await until(lambda: api.watches, "a watch is open")
        api.bookmark()
        await until(lambda: len(api.watches) == 2, "a second watch is open")
        assert followed.num_known == 1
        await followed.until(A)
    assert [asked.query["resourceVersion"] for asked in api.watches] == ["1001", "1002"]


@pytest.fixture(params=[True, False], ids=["as a status", "as an event"])
def expiring(api: KubernetesApi, request: pytest.FixtureRequest) -> KubernetesApi:
    """Real servers do both: they answer with the status 410, or with a stream that says so."""
    api.gone_is_status = request.param
    return api


async def test_expired_watch_is_begun_anew_with_a_list_and_is_no_failure(expiring: KubernetesApi) -> None:
    api = expiring
    api.put(verifiers(pod(A)))
    api.put(verifiers(pod(B), name="y"))
    async with watching() as followed:
        await followed.until(A, B)
        await until(lambda: api.watches, "a watch is open")
        api.delete("x")
        api.put(verifiers(pod(C), name="z"))
        api.forget_history()
        await followed.until(B, C)
        api.put(verifiers(pod(A)))
        await followed.until(A, B, C)
    assert (len(api.lists), followed.status.num_failures, followed.logs) == (2, 0, [])


async def test_watch_that_expired_between_two_watches_is_begun_anew(expiring: KubernetesApi) -> None:
    async with watching() as followed:
        await followed.until()
        followed.source._version = "1"
        expiring.forget_history()
        await until(lambda: len(expiring.lists) == 2, "it lists again")
    assert followed.status.num_failures == 0


async def test_outage_keeps_what_is_known_is_logged_once_and_ends_by_itself(api: KubernetesApi) -> None:
    api.put(verifiers(pod(A)))
    async with watching() as followed:
        await followed.until(A)
        api.stop()
        await followed.until_failed(4)
        await followed.until(A)
        assert followed.status.fault
        api.delete("x")
        api.put(verifiers(pod(B), name="y"))
        api.start()
        await followed.until(B)
        await followed.until_well()
    assert followed.events == ["failed warning", "recovered info"]


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
    async with watching():
        await until(lambda: len(pauses) >= 6, "it pauses six times")
    shares = [pause / most for pause, most in zip(pauses, (1.0, 2.0, 4.0, 8.0, 8.0, 8.0), strict=False)]
    assert 0.5 <= min(shares) < max(shares) <= 1.0


@pytest.mark.parametrize("status", [500, 503, 429, 504])
async def test_server_that_fails_is_asked_again(api: KubernetesApi, status: int) -> None:
    api.put(verifiers(pod(A)))
    api.refusal = status
    async with watching() as followed:
        await followed.until_failed(2)
        assert followed.num_known == 0
        assert f"HTTP {status}" in followed.status.fault
        api.refusal = None
        await followed.until(A)
        await followed.until_well()
    assert followed.events == ["failed warning", "recovered info"]


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403])
async def test_missing_rights_are_named_in_an_error_and_asked_for_again(api: KubernetesApi, status: int) -> None:
    async with watching() as followed:
        await followed.until()
        api.refusal = 500
        await followed.until_failed(1)
        api.refusal = status
        await until(lambda: f"HTTP {status}" in followed.status.fault, followed)
        await followed.until_failed(followed.status.num_failures + 2)
        api.refusal = None
        api.put(verifiers(pod(A)))
        await followed.until(A)
        await followed.until_well()
    assert followed.events == ["failed warning", "failed error", "recovered info"]
    said = {401: "its credentials are not accepted", 403: "get, list and watch of endpointslices in namespace default"}
    assert said[status] in followed.logs[1]["reason"]


async def test_token_that_is_refused_is_read_anew(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    (tmp_path / "kubeconfig").write_text(api.kubeconfig().replace('"token": "secret-token"', f'"tokenFile": "{token}"'))
    async with watching() as followed:
        await followed.until()
        assert api.lists[-1].authorization == "Bearer old"
        token.write_text("new")
        api.refusal = 401
        await followed.until_failed(2)
        api.refusal = None
        api.put(verifiers(pod(A)))
        await followed.until(A)
        await followed.until_well()
    assert api.lists[-1].authorization == "Bearer new"


async def test_right_to_list_alone_is_an_error_that_is_logged_once(api: KubernetesApi) -> None:
    """That it was given is noticed when a watch begins, not when it ends."""
    api.refuses_watches = True
    async with watching(WatchTimes(watch_s=60, answer_s=0.5)) as followed:
        await followed.until_failed(4)
        api.put(verifiers(pod(A)))
        await followed.until(A)
        assert followed.events == ["failed error"]
        api.refuses_watches = False
        await followed.until_well()
    assert followed.events == ["failed error", "recovered info"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["answers", "answers_watches"])
async def test_answer_that_does_not_begin_is_given_up_long_before_a_watch_ends(api: KubernetesApi, what: str) -> None:
    getattr(api, what).clear()
    async with watching(WatchTimes(watch_s=60, answer_s=0.2)) as followed:
        await followed.until_failed(2)
        assert followed.status.fault == "no answer in time"
        getattr(api, what).set()
        await followed.until()
        await followed.until_well()


@pytest.mark.slow
async def test_connection_that_is_dead_is_noticed_and_a_new_one_opened(api: KubernetesApi) -> None:
    """Nothing is closed: without a deadline of its own the client would wait for ever."""
    api.put(verifiers(pod(A)))
    async with watching() as followed:
        await followed.until(A)
        await until(lambda: api.watches, "a watch is open")
        started = time.monotonic()
        api.answers.clear()
        await followed.until_failed(1)
        assert time.monotonic() - started < TIMES.watch_s + TIMES.answer_s + 2.0
        await followed.until(A)
        api.put(verifiers(pod(B)))
        api.answers.set()
        await followed.until(B)


async def test_source_ends_at_once_while_it_waits_for_a_silent_server(api: KubernetesApi) -> None:
    api.answers.clear()
    async with watching(replace(TIMES, answer_s=60.0)):
        await until(lambda: len(api.lists) == 1, "it lists")


async def test_server_that_ends_every_watch_at_once_is_not_asked_in_a_tight_loop(api: KubernetesApi) -> None:
    api.ends_watches_at_once = True
    async with watching() as followed:
        await followed.until_failed(1)
        before = len(api.watches)
        await asyncio.sleep(0.5)
        assert len(api.watches) - before < 20


@pytest.mark.parametrize(
    "broken",
    [
        {"addressType": None, "endpoints": [{"addresses": []}]},
        {"endpoints": [{"conditions": {}}]},
        {"endpoints": [{"addresses": []}]},
        {"endpoints": ["x"]},
        {"ports": [{"name": "grpc", "port": "http"}]},
        {"endpoints": 7},
    ],
)
async def test_slices_that_are_none_are_failures_and_change_nothing(api: KubernetesApi, broken: dict[str, Any]) -> None:
    """A watch that said so is given up: the next one is another."""
    api.put(verifiers(pod(A)))
    async with watching(WatchTimes(watch_s=60, answer_s=0.5)) as followed:
        await followed.until(A)
        await until(lambda: api.watches, "a watch is open")
        api.put(verifiers(pod(B), name="y") | broken)
        await followed.until_failed(2)
        assert "not a" in followed.status.fault
        await followed.until(A)
        api.delete("y")
        api.put(verifiers(pod(C), name="z"))
        await followed.until(A, C)
        await until(lambda: len(api.watches) == 2, "a second watch is open")


@pytest.mark.slow
async def test_age_is_that_of_the_last_answer(api: KubernetesApi) -> None:
    async with watching() as followed:
        await followed.until()
        first = followed.status.synced_at
        await until(lambda: len(api.watches) == 2, "a second watch is open")
        second = followed.status.synced_at
        assert second > first
        api.stop()
        await followed.until_failed(2)
        assert followed.status.synced_at - second < TIMES.watch_s  # type: ignore[operator]


@pytest.mark.slow
async def test_token_of_the_pod_is_read_again_when_it_was_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of pods live for an hour. The library looks once a minute; here, ten times a second."""
    from kubernetes.aio.config import incluster_config

    ca = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("old")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    quick = SimpleNamespace(timedelta=lambda minutes: timedelta(seconds=minutes / 10), datetime=datetime)
    monkeypatch.setattr(incluster_config, "datetime", quick)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with KubernetesApi(tls) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put(verifiers(pod(A)))
        async with watching() as followed:
            await followed.until(A)
            (tmp_path / "token").write_text("new")
            await until(
                lambda: "bearer new" in {asked.authorization for asked in api.watches}, "the new token is shown"
            )
        assert api.lists[0].authorization == "bearer old"


# What is configured


PLAINTEXT = TlsSettings(allow_plaintext=True, tls_require_client_cert=False)


async def sources(**settings: Any) -> tuple[str, str]:
    """Returns the names of where verifiers and drafters are looked for."""
    made = await sources_of(GatewayConfig(discovery=DiscoverySettings("kubernetes", **settings), tls=PLAINTEXT))
    return made.verifiers.name, made.drafters.name


async def test_configuration_names_services_and_namespace(api: KubernetesApi) -> None:
    named = {"verifier_service": "v", "namespace": "n"}
    assert await sources(**named, drafter_service="d") == ("service n/v", "service n/d")
    made = await sources_of(GatewayConfig(discovery=DiscoverySettings("kubernetes", **named), tls=PLAINTEXT))
    assert made.drafters == StaticSource(())


async def test_namespace_is_the_pods_own_unless_one_is_named(
    api: KubernetesApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint_slices, "NAMESPACE_FILE", tmp_path / "namespace")
    with pytest.raises(InvalidRequestError, match="set namespace"):
        await sources(verifier_service="v")
    (tmp_path / "namespace").write_text("mine\n")
    assert (await sources(verifier_service="v"))[0] == "service mine/v"


@pytest.mark.parametrize("kubeconfig", [None, "", "{", "[]"])
async def test_without_a_cluster_the_gateway_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kubeconfig: str | None
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    if kubeconfig is not None:
        (tmp_path / "kubeconfig").write_text(kubeconfig)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(InvalidRequestError, match="needs a pod, or KUBECONFIG"):
        await sources(verifier_service="v", namespace="n")


async def test_without_the_library_the_gateway_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'draftwire\[services,kubernetes\]'"):
        await sources(verifier_service="v", namespace="n")


async def test_listed_names_are_looked_up_and_addresses_are_not() -> None:
    made = await sources_of(GatewayConfig(verifier="dns:///v:1,dns:///w:2", drafter="d:3,e:4", tls=PLAINTEXT))
    assert made.verifiers == DnsSource(("v:1", "w:2"), status=made.verifiers.status)
    assert made.drafters == StaticSource(("d:3", "e:4"))
    default = await sources_of(GatewayConfig())
    assert (default.verifiers.name, default.drafters.name) == ("127.0.0.1:50052", "127.0.0.1:50053")


def test_library_is_imported_only_where_it_is_used() -> None:
    code = "import sys, draftwire_gateway.peers.sources; sys.exit(bool({'kubernetes', 'aiohttp'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
