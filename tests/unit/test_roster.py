"""Which links there are: opened when a service is found, kept while it has sessions, freed when it has none."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from gateway_fakes import describe
from link_fakes import FakeLink, FakePeer
from structlog.testing import capture_logs
from virtual_time import in_virtual_time

from draftwire.errors import ModelMismatchError
from draftwire_gateway.metrics import GatewayMetrics
from draftwire_gateway.peers.discovery import Endpoint, SourceStatus
from draftwire_gateway.peers.roster import IDLE_POLL_SECONDS, Roster

A, B = "10.0.0.1:1", "10.0.0.2:1"


class ToldSource:
    """Says what the test says."""

    name = "told"

    def __init__(self) -> None:
        self.status = SourceStatus()
        self._told: asyncio.Queue[frozenset[Endpoint]] = asyncio.Queue()

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        while True:
            yield await self._told.get()

    async def tell(self, *endpoints: Endpoint) -> None:
        """Says where services are, and returns when the roster has taken it."""
        self._told.put_nowait(frozenset(endpoints))
        await asyncio.sleep(0.001)


class Rig:
    """A roster that runs, and all links that it ever made."""

    def __init__(self) -> None:
        self.source = ToldSource()
        self.made: list[FakeLink] = []
        self.state: dict[str, Any] = {}
        """Of new links."""
        self.roster: Roster[Any] = Roster("verifier", self.source, self._connect)

    def _connect(self, address: str) -> Any:
        self.made.append(FakeLink(address, **self.state))
        return self.made[-1]

    async def accept(self, link: Any, model: Any) -> None:
        """Takes every model."""

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self.roster.links]


def with_rig(test: Callable[[Rig], Awaitable[None]]) -> Callable[[], None]:
    """Decorates a test that gets a rig whose roster runs, in virtual time. All links are closed when that ends."""

    @in_virtual_time
    async def run_test() -> None:
        rig = Rig()
        running = asyncio.create_task(rig.roster.run(rig.accept))
        try:
            await test(rig)
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert all(not link.is_maintained and link.num_disconnects == 1 for link in rig.made)

    return run_test


async def settle() -> None:
    await asyncio.sleep(3 * IDLE_POLL_SECONDS)


@with_rig
async def test_endpoint_gets_one_link_however_often_it_is_told(rig: Rig) -> None:
    await rig.source.tell(Endpoint(A, "zone-1"))
    await rig.source.tell(Endpoint(A, "zone-2"), Endpoint(B))
    assert (rig.addresses, [link.zone for link in rig.made]) == ([A, B], ["zone-2", None])
    assert all(link.is_maintained for link in rig.made)
    assert len(rig.made) == 2


@with_rig
async def test_service_that_leaves_keeps_its_sessions_until_the_last_ends(rig: Rig) -> None:
    for endpoint, reason in (
        (None, "gone"),
        (Endpoint(A, is_ready=False, is_terminating=True), "terminating"),
        (Endpoint(A, is_terminating=True), "terminating"),
        (Endpoint(A, is_ready=False), "not ready"),
    ):
        await rig.source.tell(Endpoint(A))
        link = rig.made[-1]
        assert list(rig.roster.links) == [link]
        link.num_sessions = 2
        with capture_logs() as logs:
            await rig.source.tell(*[endpoint] * (endpoint is not None))
        assert [(line["event"], line["address"], line["reason"]) for line in logs] == [("gateway.peer_left", A, reason)]
        assert (rig.addresses, rig.roster.num_by_state()["leaving"]) == ([], 1)
        for left in (2, 1):
            link.num_sessions = left
            await settle()
            assert (link.is_maintained, link.num_disconnects) == (True, 0)
        link.num_sessions = 0
        await settle()
        assert not link.is_maintained
        assert (link.num_disconnects, rig.roster.num_by_state()["leaving"]) == (1, 0)
    assert len(rig.made) == 4, "one that comes back gets a new link"


@with_rig
async def test_endpoint_that_never_was_ready_gets_no_link_until_it_is(rig: Rig) -> None:
    await rig.source.tell(Endpoint(A, is_ready=False))
    assert (rig.made, rig.roster.num_by_state()["unready"]) == ([], 1)
    await rig.source.tell(Endpoint(A))
    assert (rig.addresses, rig.roster.num_by_state()["unready"]) == ([A], 0)


@with_rig
async def test_endpoint_that_comes_back_while_it_has_sessions_keeps_its_link(rig: Rig) -> None:
    await rig.source.tell(Endpoint(A))
    rig.made[0].num_sessions = 1
    await rig.source.tell()
    await settle()
    with capture_logs() as logs:
        await rig.source.tell(Endpoint(A))
    assert [line["event"] for line in logs] == ["gateway.peer_found"]
    rig.made[0].num_sessions = 0
    await settle()
    assert rig.addresses == [A]
    assert rig.made[0].is_maintained
    assert len(rig.made) == 1


@with_rig
async def test_nothing_is_left_of_services_that_came_and_went(rig: Rig) -> None:
    before = len(asyncio.all_tasks())
    for number in range(50):
        await rig.source.tell(Endpoint(f"10.0.1.{number}:1"))
        await rig.source.tell()
    await settle()
    assert [link.num_disconnects for link in rig.made] == [1] * 50
    freed = [weakref.ref(link) for link in rig.made]
    rig.made.clear()
    gc.collect()
    assert len(asyncio.all_tasks()) == before
    assert [reference for reference in freed if reference() is not None] == []


@with_rig
async def test_address_that_is_in_two_places_takes_sessions_if_one_of_them_does(rig: Rig) -> None:
    """As while a pod's slice is written anew."""
    for others in (
        (Endpoint(A), Endpoint(A, is_terminating=True)),
        (Endpoint(A, is_terminating=True), Endpoint(A)),
    ):
        await rig.source.tell(*others)
        assert rig.addresses == [A]
        assert not rig.made[0].is_leaving
    assert len(rig.made) == 1


@with_rig
async def test_end_of_the_roster_closes_everything_whatever_sessions_it_has(rig: Rig) -> None:
    await rig.source.tell(Endpoint(A), Endpoint(B))
    rig.made[0].num_sessions = 3
    await rig.source.tell(Endpoint(B))


@in_virtual_time
async def test_failure_of_a_link_that_nobody_reckoned_with_ends_the_roster() -> None:
    rig = Rig()
    rig.state["peer"] = None  # which is no failure of a service
    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.gather(rig.roster.run(rig.accept), rig.source.tell(Endpoint(A)))
    assert raised.group_contains(AttributeError)


@with_rig
async def test_fault_is_one_of_all_that_are_there_only(rig: Rig) -> None:
    fault = ModelMismatchError("other")
    faults = [rig.roster.fault]
    await rig.source.tell(Endpoint(A), Endpoint(B))
    rig.made[0].fault = fault
    faults.append(rig.roster.fault)
    await rig.source.tell(Endpoint(A))
    assert [*faults, rig.roster.fault] == [None, None, fault]


@with_rig
async def test_metrics_count_services_by_state_and_what_is_known_of_the_source(rig: Rig) -> None:
    metrics = GatewayMetrics()

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"draftwire:{name}", labels | {"role": "verifier"})

    metrics.watch([rig.roster])
    assert read("discovery_age_seconds") is None
    addresses = [f"10.0.0.{number}:1" for number in range(1, 6)]
    await rig.source.tell(*map(Endpoint, addresses), Endpoint("10.0.0.9:1", is_ready=False))
    _connected, connecting, unfit, silent, leaving = rig.made
    silent.is_silent = True
    connecting.connected, unfit.connected, unfit.fault = False, False, ModelMismatchError("other")
    leaving.num_sessions = 1
    await rig.source.tell(*map(Endpoint, addresses[:4]), Endpoint("10.0.0.9:1", is_ready=False))
    states = ("connected", "silent", "connecting", "unfit", "unready", "leaving")
    assert {state: read("num_peers", state=state) for state in states} == dict.fromkeys(states, 1.0)
    rig.source.status.record_success("told")
    rig.source.status.record_failure("told", "down")
    rig.source.status.record_failure("told", "down")
    assert read("discovery_failures_total") == 2
    assert 0.0 <= read("discovery_age_seconds") < 60.0


@with_rig
async def test_link_that_waits_for_its_service_is_freed_too(rig: Rig) -> None:
    """It may wait for minutes for an answer of a machine that is gone."""
    rig.state = {"peer": FakePeer(describe("slow"), seconds=1000.0), "connected": False}
    await rig.source.tell(Endpoint(A))
    await rig.source.tell(Endpoint(A), Endpoint(B))
    await rig.source.tell(Endpoint(A))
    await settle()
    assert rig.made[1].num_disconnects == 1
