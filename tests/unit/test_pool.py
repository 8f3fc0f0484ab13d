"""The gateway's peers: who serves what, who is met first, and who cannot be used."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import describe, now, run
from link_fakes import FakeLink, FakePeer, ListedSource

from draftwire.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire.services.gateway.discovery import Endpoint
from draftwire.services.gateway.pool import POLL_SECONDS, Pool
from draftwire.services.gateway.roster import Roster
from draftwire.services.gateway.wire import DrafterLink

LARGEST_BYTES = 2**20


class FakeDrafterLink(FakeLink, DrafterLink):  # type: ignore[misc]
    """A pool tells drafters from verifiers by their class."""

    connected = is_resting = num_sessions = peer = None  # type: ignore[assignment]


def make_roster(role: str, links: Sequence[Any]) -> Roster[Any]:
    """Returns one that knows its links already."""
    by_address = {link.address: link for link in links}
    assert len(by_address) == len(links), "links of a roster have addresses of their own"
    roster: Roster[Any] = Roster(role, ListedSource(list(by_address)), by_address.__getitem__)
    roster._follow({address: Endpoint(address, by_address[address].zone) for address in by_address})
    return roster


def make_pool(verifiers: Sequence[Any], drafters: Sequence[Any] = (), near_drafter_sessions: int = 2) -> Pool:
    rosters = make_roster("verifier", verifiers), make_roster("drafter", drafters)
    return Pool(*rosters, LARGEST_BYTES, near_drafter_sessions)


# Who serves


def test_verifier_with_the_fewest_sessions_comes_first_and_those_that_rest_come_last() -> None:
    busy, idle = FakeLink(num_sessions=3), FakeLink(num_sessions=1)
    resting, resting_idle = FakeLink(num_sessions=2, is_resting=True), FakeLink(is_resting=True)
    lost = FakeLink(connected=False)
    pool = make_pool([lost, resting, busy, resting_idle, idle])
    assert list(pool.targets()) == [idle, busy, resting_idle, resting]


def test_without_a_connected_verifier_there_is_no_target() -> None:
    assert list(make_pool([FakeLink(connected=False)]).targets()) == []


def test_drafter_with_the_fewest_sessions_drafts_unless_it_rests() -> None:
    target = FakeLink()
    resting = FakeLink(instance_id=1, is_resting=True)
    busy, idle = FakeLink(instance_id=2, num_sessions=9), FakeLink(instance_id=3, num_sessions=4)
    pool = make_pool([target], [resting, busy, idle])
    assert pool.drafter_for(target, ()) is idle  # type: ignore[arg-type]
    assert pool.drafter_for(target, {3}) is busy  # type: ignore[arg-type]
    assert pool.drafter_for(target, {2, 3}) is resting  # type: ignore[arg-type]
    assert pool.drafter_for(target, {1, 2, 3}) is None  # type: ignore[arg-type]


def test_drafter_is_known_by_its_process_not_by_its_address() -> None:
    """Two addresses may lead to one process, and one address to another process than before."""
    drafters = [FakeLink("drafter:1", instance_id=1), FakeLink("drafter:2", instance_id=1)]
    pool = make_pool([FakeLink()], drafters)
    assert pool.drafter_for(pool.verifiers.links[0], {1}) is None
    drafters[0].instance_id = 2
    assert pool.drafter_for(pool.verifiers.links[0], {1}) is drafters[0]


def test_quarantine_counts_at_the_verifier_that_imposed_it() -> None:
    strict, other = FakeLink(quarantined={1}), FakeLink()
    first, second = FakeLink(instance_id=1), FakeLink(instance_id=2, num_sessions=5)
    pool = make_pool([strict, other], [first, second])
    assert pool.drafter_for(strict, ()) is second  # type: ignore[arg-type]
    assert pool.drafter_for(other, ()) is first  # type: ignore[arg-type]


def test_drafter_that_is_not_connected_drafts_nothing() -> None:
    pool = make_pool([FakeLink()], [FakeLink(instance_id=1, connected=False)])
    assert pool.drafter_for(pool.verifiers.links[0], ()) is None
    assert pool.connected_drafters == []


def test_service_that_left_serves_nothing_new() -> None:
    leaving, staying = FakeLink(), FakeLink(num_sessions=9)
    pool = make_pool([leaving, staying], [FakeLink(instance_id=1)])
    leaving.has_left.set()
    pool.drafters.links[0].has_left.set()
    assert list(pool.targets()) == [staying]
    assert pool.drafter_for(staying, ()) is None  # type: ignore[arg-type]
    assert pool.connected_drafters == []


# Zones


def near_and_far(near: int, far: int, **state: Any) -> tuple[Pool, FakeLink, FakeLink]:
    """Returns a pool whose verifier is in zone a, and its drafters, with so many sessions, in zones a and b."""
    drafters = (
        FakeLink(zone="a", instance_id=1, num_sessions=near, **state),
        FakeLink(zone="b", instance_id=2, num_sessions=far),
    )
    return make_pool([FakeLink(zone="a")], drafters, near_drafter_sessions=2), *drafters


@pytest.mark.parametrize(("num_near", "num_far", "is_near_chosen"), [(0, 0, True), (6, 4, True), (7, 4, False)])
def test_near_drafter_drafts_until_it_has_too_many_sessions_more(
    num_near: int, num_far: int, is_near_chosen: bool
) -> None:
    pool, near, far = near_and_far(num_near, num_far)
    assert pool.drafter_for(pool.verifiers.links[0], ()) is (near if is_near_chosen else far)


def test_far_drafter_drafts_where_no_near_one_can() -> None:
    pool, near, far = near_and_far(0, 9)
    target = pool.verifiers.links[0]
    assert pool.drafter_for(target, {1}) is far
    target.quarantined = {1}  # type: ignore[attr-defined]
    assert pool.drafter_for(target, ()) is far
    target.quarantined = set()  # type: ignore[attr-defined]
    near.connected = False
    assert pool.drafter_for(target, ()) is far


def test_near_drafter_that_rests_is_not_free() -> None:
    pool, _, far = near_and_far(0, 9, is_resting=True)
    assert pool.drafter_for(pool.verifiers.links[0], ()) is far


@pytest.mark.parametrize(
    ("of_verifier", "of_idle", "of_busy"), [(None, "b", None), ("a", None, "a"), (None, None, None), (None, "a", "b")]
)
def test_where_a_zone_is_not_known_the_number_of_sessions_decides_alone(
    of_verifier: str | None, of_idle: str | None, of_busy: str | None
) -> None:
    idle = FakeLink(zone=of_idle, instance_id=1, num_sessions=2)
    busy = FakeLink(zone=of_busy, instance_id=2, num_sessions=3)
    pool = make_pool([FakeLink(zone=of_verifier)], [busy, idle])
    assert pool.drafter_for(pool.verifiers.links[0], ()) is idle


# Who is met


def meeting(verifiers: Sequence[FakeLink], drafters: Sequence[FakeLink] = (), after_s: float = 0.0) -> Any:
    """Meets the first verifier over links that are maintained, and returns pool, peer and the time it took.

    Args:
        verifiers: links that the pool finds.
        drafters: the same of drafters.
        after_s: when the source says where they are.
    """

    async def meet() -> Any:
        rosters = []
        for role, links in (("verifier", verifiers), ("drafter", drafters)):
            by_address = {link.address: link for link in links}
            rosters.append(Roster(role, ListedSource(list(by_address), after_s), by_address.__getitem__))  # type: ignore
        pool = Pool(*rosters, LARGEST_BYTES, 0)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(task) for task in pool.maintain()]
        try:
            return pool, await pool.meet(60.0), now()
        finally:
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return run(meet())


def test_first_verifier_that_answers_decides_which_model_is_served() -> None:
    slow = FakeLink(peer=FakePeer(describe("slow"), seconds=5.0))
    broken = FakeLink(peer=FakePeer(describe("broken"), seconds=1.0, error=UnavailableError("down")))
    quick = FakeLink(peer=FakePeer(describe("quick"), seconds=2.0))
    pool, peer, seconds = meeting([slow, broken, quick])
    assert peer is quick.peer
    assert (seconds, pool.description.name) == (pytest.approx(2.0, abs=2 * POLL_SECONDS), "quick")


def test_verifier_that_answers_later_does_not_decide_again() -> None:
    first, second = (FakeLink(peer=FakePeer(describe(name), seconds)) for name, seconds in (("a", 1.0), ("b", 1.01)))
    pool, peer, _ = meeting([first, second])
    assert (peer, pool.description.name) == (first.peer, "a")


def test_verifier_is_waited_for_until_it_is_found() -> None:
    _, _, seconds = meeting([FakeLink()], after_s=30.0)
    assert 30.0 <= seconds < 31.0
    with pytest.raises(UnavailableError, match=r"no verifier at found:1 \(nobody knows\) came up within 60 s"):
        meeting([FakeLink("found:1")], after_s=61.0)


def test_error_of_a_verifier_is_raised_when_none_fits() -> None:
    peers = [FakePeer(describe("x"), seconds, ModelMismatchError(f"other {seconds}")) for seconds in (1.0, 2.0)]
    with pytest.raises(ModelMismatchError, match=r"other 1\.0"):
        meeting([FakeLink(peer=peer) for peer in peers])


def test_verifier_whose_prompts_do_not_fit_decides_nothing() -> None:
    huge = FakePeer(describe("huge", 1_000_000))
    fitting = FakePeer(describe("fitting"), seconds=3.0)
    pool, _, _ = meeting([FakeLink(peer=huge), FakeLink(peer=fitting)])
    assert pool.description.name == "fitting"
    with pytest.raises(InvalidRequestError, match="a prompt of 1000000 tokens"):
        meeting([FakeLink(peer=huge)])


def test_verifier_that_still_loads_is_asked_again_until_it_answers_or_the_time_is_up() -> None:
    peer = FakePeer(describe("x"), 1.0, UnavailableError("loading"), recovers_at=30.0)
    _, _, seconds = meeting([FakeLink(peer=peer)])
    assert 30.0 < seconds < 33.0
    peer.recovers_at = 1000.0
    with pytest.raises(UnavailableError, match="no verifier at slow:1 came up within 60 s"):
        meeting([FakeLink("slow:1", peer=peer)])


def test_drafter_that_answers_first_is_judged_when_there_is_a_verifier() -> None:
    drafter = FakeDrafterLink(peer=FakePeer(describe("small")), connected=False)
    verifier = FakeLink(peer=FakePeer(describe("large"), seconds=5.0))
    meeting([verifier], [drafter])
    assert drafter.fault is None


def test_waiting_ends_when_one_verifier_and_one_drafter_are_connected() -> None:
    verifiers = [FakeLink(connected=False), FakeLink(connected=False)]
    drafters = [FakeLink(connected=False), FakeLink(connected=False)]

    async def wait() -> float:
        asyncio.get_running_loop().call_later(1.0, setattr, verifiers[1], "connected", True)
        asyncio.get_running_loop().call_later(3.0, setattr, drafters[0], "connected", True)
        await make_pool(verifiers, drafters).wait_connected(10.0)
        return now()

    assert run(wait()) == pytest.approx(3.0, abs=2 * POLL_SECONDS)


def test_gateway_without_drafters_waits_for_none() -> None:
    run(make_pool([FakeLink()]).wait_connected(0.0))


def test_verifier_that_is_not_found_yet_is_waited_for_but_no_drafter_is() -> None:
    with pytest.raises(UnavailableError, match="no verifier"):
        run(make_pool([]).wait_connected(10.0))


@pytest.mark.parametrize(("missing", "named"), [("verifier", "no verifier at a:1, b:1"), ("drafter", "no drafter")])
def test_waiting_for_a_peer_that_does_not_come_ends_in_time(missing: str, named: str) -> None:
    links = [FakeLink("a:1", connected=False), FakeLink("b:1", connected=False)]
    pool = make_pool(links if missing == "verifier" else [FakeLink()], links)

    async def wait() -> float:
        with pytest.raises(UnavailableError, match=f"{named}.* within 10 s"):
            await pool.wait_connected(10.0)
        return now()

    assert 10.0 <= run(wait()) < 11.0


@pytest.mark.parametrize("kind", ["verifier", "drafter"])
def test_fault_is_raised_at_once_when_every_peer_of_a_kind_has_one(kind: str) -> None:
    fault = ModelMismatchError("other model")
    unfit = [FakeLink(connected=False, fault=fault), FakeLink(connected=False, fault=InvalidRequestError("too long"))]
    pool = make_pool(unfit if kind == "verifier" else [FakeLink()], unfit)

    async def wait() -> float:
        with pytest.raises(ModelMismatchError, match="other model"):
            await pool.wait_connected(10.0)
        return now()

    assert run(wait()) == 0.0


def test_one_peer_that_is_unfit_does_not_end_the_waiting_for_the_others() -> None:
    unfit, late = FakeLink(connected=False, fault=ModelMismatchError("other model")), FakeLink(connected=False)

    async def wait() -> None:
        asyncio.get_running_loop().call_later(1.0, setattr, late, "connected", True)
        await make_pool([unfit, late]).wait_connected(10.0)

    run(wait())


# Who cannot be used


SERVED = replace(describe("served", 100), weights_fingerprint=b"weights", vocabulary_fingerprint=b"words")


async def check(link: Any, model: ModelDescription, reference: FakePeer | None = None) -> None:
    pool = await pool_with(FakeLink(peer=reference or FakePeer(SERVED)))
    await pool._check(link, model)


async def pool_with(link: FakeLink) -> Pool:
    """Returns a pool that met a verifier."""
    pool = make_pool([link])
    await pool._check(link, await link.peer.describe())  # type: ignore[arg-type]
    return pool


async def test_verifier_with_the_same_model_under_another_name_is_taken() -> None:
    await check(FakeLink(), replace(SERVED, name="elsewhere", revision="other"))


@pytest.mark.parametrize(
    "change",
    [
        {"weights_fingerprint": b"other"},
        {"dtype": "bfloat16"},
        {"vocabulary_fingerprint": b"other"},
        {"vocab_size": 60},
        {"context_length": 99},
        {"stop_token_ids": ()},
    ],
)
async def test_verifier_with_another_model_is_refused_and_both_are_named(change: dict[str, Any]) -> None:
    other = replace(SERVED, name="impostor", **change)
    with pytest.raises(
        ModelMismatchError, match=r"verifier:2 serves impostor \((float32|bfloat16)\).*served \(float32"
    ):
        await check(FakeLink("verifier:2"), other)


async def test_peer_whose_prompts_would_not_fit_into_a_message_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a prompt of 1000000 tokens"):
        await check(FakeLink(), replace(SERVED, context_length=1_000_000))


def drafter_link(model: ModelDescription, tokens: list[str]) -> FakeDrafterLink:
    return FakeDrafterLink("drafter:1", peer=FakePeer(model, tokens=tokens))


async def test_drafter_may_have_another_model_with_the_same_vocabulary() -> None:
    drafter = replace(SERVED, name="small", weights_fingerprint=b"other", dtype="bfloat16", context_length=50)
    await check(drafter_link(drafter, []), drafter)


async def test_drafter_with_another_vocabulary_is_refused_and_the_first_differing_token_named() -> None:
    drafter = replace(SERVED, name="small", vocabulary_fingerprint=b"other")
    with pytest.raises(ModelMismatchError, match=r"drafter small has 2.* token 1: 'b' against 'c'"):
        await check(drafter_link(drafter, ["a", "c"]), drafter)


async def test_drafter_that_fits_only_what_is_served_elsewhere_by_now_is_refused() -> None:
    """The verifier that was met first may have come back with another model, which nothing is decided by any more."""
    drafter = replace(SERVED, name="small", vocabulary_fingerprint=b"other")
    reference = FakePeer(SERVED)
    pool = await pool_with(FakeLink(peer=reference))
    reference.model = replace(SERVED, vocabulary_fingerprint=b"other")
    with pytest.raises(ModelMismatchError, match="vocabulary of drafter:1"):
        await pool._check(drafter_link(drafter, []), drafter)


async def test_vocabularies_are_compared_over_the_connection_that_there_is_then() -> None:
    """A link opens a new channel when its certificates were renewed, and closes the old one."""
    drafter, link = replace(SERVED, name="small", vocabulary_fingerprint=b"other"), FakeLink(peer=FakePeer(SERVED))
    pool = await pool_with(link)
    link.peer.error = UnavailableError("closed")
    link.peer = FakePeer(SERVED)
    with pytest.raises(ModelMismatchError):
        await pool._check(drafter_link(drafter, ["x"]), drafter)


async def test_vocabularies_are_compared_with_another_verifier_when_the_first_has_left() -> None:
    """Its link may be closed."""
    drafter = replace(SERVED, name="small", vocabulary_fingerprint=b"other")
    first, second = FakeLink(peer=FakePeer(SERVED)), FakeLink(peer=FakePeer(SERVED, tokens=["a", "z"]))
    pool = make_pool([first, second])
    await pool._check(first, SERVED)  # type: ignore[arg-type]
    first.has_left.set()
    first.peer.error = UnavailableError("closed")
    with pytest.raises(ModelMismatchError, match="'z' against 'x'"):
        await pool._check(drafter_link(drafter, ["a", "x"]), drafter)
    second.has_left.set()
    with pytest.raises(ModelMismatchError, match="vocabulary of drafter:1"):
        await pool._check(drafter_link(drafter, ["a", "x"]), drafter)
