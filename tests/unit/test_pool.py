"""The gateway's peers: who serves what, who is met first, and who cannot be used."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gateway_fakes import describe, now, run

from draftwire.errors import DraftwireError, InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.models.description import ModelDescription
from draftwire.services.gateway.pool import POLL_SECONDS, Pool
from draftwire.services.gateway.wire import DrafterLink

LARGEST_BYTES = 2**20


@dataclass
class FakePeer:
    """A model server that answers, or fails, after a while."""

    model: ModelDescription
    seconds: float = 0.0
    error: DraftwireError | None = None
    tokens: list[str] = field(default_factory=lambda: ["a", "b"])
    was_cancelled: bool = False

    async def describe(self) -> ModelDescription:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return self.model

    async def vocabulary(self) -> list[str]:
        return self.tokens


class FakeLink:
    """As much of a link as a pool looks at."""

    def __init__(self, address: str = "peer:1", **state: Any) -> None:
        self.address = address
        self.connected = True
        self.is_resting = False
        self.num_sessions = 0
        self.fault: DraftwireError | None = None
        self.instance_id = 0
        self.quarantined: set[int] = set()
        self.peer = FakePeer(describe("target"))
        self.__dict__.update(state)

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return drafter_id not in self.quarantined


class FakeDrafterLink(FakeLink, DrafterLink):  # type: ignore[misc]
    """A pool tells drafters from verifiers by their class."""

    connected = is_resting = num_sessions = peer = None  # type: ignore[assignment]


def make_pool(verifiers: list[Any], drafters: list[Any] | None = None) -> Pool:
    return Pool(verifiers, drafters or [], LARGEST_BYTES)


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
    assert pool.drafter_for(pool.verifiers[0], {1}) is None
    drafters[0].instance_id = 2
    assert pool.drafter_for(pool.verifiers[0], {1}) is drafters[0]


def test_quarantine_counts_at_the_verifier_that_imposed_it() -> None:
    strict, other = FakeLink(quarantined={1}), FakeLink()
    first, second = FakeLink(instance_id=1), FakeLink(instance_id=2, num_sessions=5)
    pool = make_pool([strict, other], [first, second])
    assert pool.drafter_for(strict, ()) is second  # type: ignore[arg-type]
    assert pool.drafter_for(other, ()) is first  # type: ignore[arg-type]


def test_drafter_that_is_not_connected_drafts_nothing() -> None:
    pool = make_pool([FakeLink()], [FakeLink(instance_id=1, connected=False)])
    assert pool.drafter_for(pool.verifiers[0], ()) is None
    assert pool.connected_drafters == []


# Who is met


def test_first_verifier_that_answers_decides_which_model_is_served() -> None:
    slow = FakeLink(peer=FakePeer(describe("slow"), seconds=5.0))
    broken = FakeLink(peer=FakePeer(describe("broken"), seconds=1.0, error=UnavailableError("down")))
    quick = FakeLink(peer=FakePeer(describe("quick"), seconds=2.0))
    pool = make_pool([slow, broken, quick])

    async def meet() -> float:
        assert await pool.meet(60.0) is quick.peer
        met_at = now()
        await asyncio.sleep(0)
        return met_at

    assert run(meet()) == pytest.approx(2.0)
    assert pool.description.name == "quick"
    assert slow.peer.was_cancelled


def test_error_of_a_verifier_is_raised_when_none_fits() -> None:
    peers = [FakePeer(describe("x"), seconds, ModelMismatchError(f"other {seconds}")) for seconds in (1.0, 2.0)]
    with pytest.raises(ModelMismatchError, match=r"other 1\.0"):
        run(make_pool([FakeLink(peer=peer) for peer in peers]).meet(60.0))


def test_verifier_that_still_loads_is_asked_again_until_it_answers_or_the_time_is_up() -> None:
    peer = FakePeer(describe("x"), 1.0, UnavailableError("service is loading"))
    link = FakeLink("slow:1", peer=peer)

    async def meet() -> float:
        asyncio.get_running_loop().call_later(30.0, setattr, peer, "error", None)
        await make_pool([link]).meet(60.0)
        return now()

    assert 30.0 < run(meet()) < 33.0
    peer.error = UnavailableError("service is loading")
    with pytest.raises(UnavailableError, match="no verifier at slow:1 came up within 60 s"):
        run(make_pool([link]).meet(60.0))


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
    pool = make_pool([FakeLink(peer=reference or FakePeer(SERVED))])
    await pool.meet(60.0)
    await pool._check(link, model)


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
    pool = make_pool([FakeLink(peer=reference)])
    await pool.meet(60.0)
    reference.model = replace(SERVED, vocabulary_fingerprint=b"other")
    with pytest.raises(ModelMismatchError, match="vocabulary of drafter:1"):
        await pool._check(drafter_link(drafter, []), drafter)


async def test_vocabularies_are_compared_over_the_connection_that_there_is_then() -> None:
    """A link opens a new channel when its certificates were renewed, and closes the old one."""
    drafter, link = replace(SERVED, name="small", vocabulary_fingerprint=b"other"), FakeLink(peer=FakePeer(SERVED))
    pool = make_pool([link])
    await pool.meet(60.0)
    link.peer.error = UnavailableError("closed")
    link.peer = FakePeer(SERVED)
    with pytest.raises(ModelMismatchError):
        await pool._check(drafter_link(drafter, ["x"]), drafter)


def test_every_link_is_maintained_with_the_pools_check() -> None:
    checks: list[Any] = []

    class MaintainedLink(FakeLink):
        async def maintain(self, check: Any) -> None:
            checks.append(check)

    pool = make_pool([MaintainedLink(), MaintainedLink()], [MaintainedLink()])

    async def maintain() -> None:
        await asyncio.gather(*pool.maintain())

    run(maintain())
    assert checks == [pool._check] * 3
