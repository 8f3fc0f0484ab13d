"""The gateway's peers: who serves what, who is met first, and who cannot be used."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import describe
from link_fakes import FakeLink, FakePeer, ListedSource
from structlog.testing import capture_logs
from virtual_time import in_virtual_time, now, run, timed

from draftwire.errors import InvalidRequestError, ModelMismatchError, UnavailableError
from draftwire.requests.rules import RuleFacts
from draftwire_gateway.peers.discovery import Endpoint
from draftwire_gateway.peers.pool import POLL_SECONDS, Pool
from draftwire_gateway.peers.roster import Roster
from draftwire_gateway.peers.wire import DrafterLink

LARGEST_BYTES = 2**20


class FakeDrafterLink(FakeLink, DrafterLink):  # type: ignore[misc]
    """A pool tells drafters from verifiers by their class."""

    connected = is_cooling_down = num_sessions = peer = is_silent = None  # type: ignore[assignment]


def make_roster(role: str, links: Sequence[Any]) -> Roster[Any]:
    """Returns one that knows its links already."""
    by_address = {link.address: link for link in links}
    assert len(by_address) == len(links), "links of a roster have addresses of their own"
    roster: Roster[Any] = Roster(role, ListedSource(list(by_address)), by_address.__getitem__)
    roster._follow({address: Endpoint(address, by_address[address].zone) for address in by_address})
    return roster


def make_pool(verifiers: Sequence[Any], drafters: Sequence[Any] = (), near_drafter_sessions: int = 2) -> Pool:
    rosters = make_roster("verifier", verifiers), make_roster("drafter", drafters)
    return Pool(*rosters, LARGEST_BYTES, near_drafter_sessions, "block")


# Who serves


def test_verifier_with_fewest_sessions_is_first_and_resting_ones_are_last() -> None:
    busy, idle = FakeLink(num_sessions=3), FakeLink(num_sessions=1)
    resting, resting_idle = FakeLink(num_sessions=2, is_cooling_down=True), FakeLink(is_cooling_down=True)
    lost = FakeLink(connected=False)
    pool = make_pool([lost, resting, busy, resting_idle, idle])
    assert list(pool.targets()) == [idle, busy, resting_idle, resting]


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ([], "no verifier can be reached"),
        ([{"connected": False}], "no verifier can be reached"),
        ([{"is_well": False, "is_silent": True}], "no verifier answers"),
        ([{"is_well": False, "is_silent": True}, {"is_well": False}], "no verifier takes sessions"),
        ([{"is_well": False, "is_silent": True}, {"connected": False}, {}], ""),
        ([{"is_cooling_down": True}], ""),
    ],
)
@in_virtual_time
async def test_one_verifier_that_answers_is_enough_and_its_time_is_noted(
    links: list[dict[str, Any]], reason: str
) -> None:
    pool = make_pool([FakeLink(**state) for state in links])
    assert (pool.why_no_target(), bool(pool.targets())) == (reason, not reason)
    assert pool.last_usable_at() == (float("-inf") if reason else now())
    watching = asyncio.create_task(pool._watch())
    await asyncio.sleep(10.0)
    for link in pool.verifiers.links:
        link.is_well = False
    await asyncio.sleep(10.0)
    assert pool.last_usable_at() == (float("-inf") if reason else pytest.approx(now() - 10.0, abs=0.2))
    watching.cancel()


State = dict[str, Any]
RESTING_BUSY_IDLE = [{"num_sessions": 0, "is_cooling_down": True}, {"num_sessions": 9}, {"num_sessions": 4}]
DRAFTERS: list[tuple[State, list[State], set[int], int | None]] = [
    # The one with the fewest sessions, unless it rests.
    ({}, RESTING_BUSY_IDLE, set(), 2),
    ({}, RESTING_BUSY_IDLE, {3}, 1),
    ({}, RESTING_BUSY_IDLE, {2, 3}, 0),
    ({}, RESTING_BUSY_IDLE, {1, 2, 3}, None),
    # Known by its process: two addresses may lead to one, and one address to another than before.
    ({}, [{"instance_id": 7}, {"instance_id": 7}], {7}, None),
    ({}, [{"instance_id": 8}, {"instance_id": 7}], {7}, 0),
    # In quarantine at this verifier, or not connected.
    ({"quarantined": {1}}, [{}, {"num_sessions": 5}], set(), 1),
    ({"quarantined": {3}}, [{}, {"num_sessions": 5}], set(), 0),
    # By what the verifier knows it by, if it has told: what another one calls itself is nobody's name.
    ({"address": "v:1", "quarantined": {77}}, [{"known": {"v:1": 77}}, {"num_sessions": 5}], set(), 1),
    ({"address": "v:1", "quarantined": {77}}, [{"known": {"v:2": 77}}, {"num_sessions": 5}], set(), 0),
    ({"address": "v:1", "quarantined": {1}}, [{"known": {"v:1": 77}}, {"num_sessions": 5}], set(), 0),
    ({}, [{"connected": False}], set(), None),
    # In the verifier's zone, until it has too many sessions more, or where no other can.
    ({"zone": "a"}, [{"zone": "a"}, {"zone": "b"}], set(), 0),
    ({"zone": "a"}, [{"zone": "a", "num_sessions": 6}, {"zone": "b", "num_sessions": 4}], set(), 0),
    ({"zone": "a"}, [{"zone": "a", "num_sessions": 7}, {"zone": "b", "num_sessions": 4}], set(), 1),
    ({"zone": "a"}, [{"zone": "a"}, {"zone": "b", "num_sessions": 9}], {1}, 1),
    ({"zone": "a", "quarantined": {1}}, [{"zone": "a"}, {"zone": "b", "num_sessions": 9}], set(), 1),
    ({"zone": "a"}, [{"zone": "a", "connected": False}, {"zone": "b", "num_sessions": 9}], set(), 1),
    ({"zone": "a"}, [{"zone": "a", "is_cooling_down": True}, {"zone": "b", "num_sessions": 9}], set(), 1),
    # Where a zone is not known the number of sessions decides alone.
    *(
        ({"zone": own}, [{"zone": busy, "num_sessions": 3}, {"zone": idle, "num_sessions": 2}], set(), 1)
        for own, idle, busy in ((None, "b", None), ("a", None, "a"), (None, None, None), (None, "a", "b"))
    ),
]
"""A verifier, drafters whose processes are 1, 2, 3 unless they say otherwise, those not to be taken, and who drafts."""


@pytest.mark.parametrize(("verifier", "drafters", "but", "expected"), DRAFTERS)
def test_drafter_that_is_free_and_near_drafts(
    verifier: State, drafters: list[State], but: set[int], expected: int | None
) -> None:
    links: list[Any] = [FakeLink(**{"instance_id": number, **state}) for number, state in enumerate(drafters, 1)]
    pool = make_pool([FakeLink(**verifier)], links, near_drafter_sessions=2)
    chosen = next(iter(pool.drafters_for(pool.verifiers.links[0], but)), None)
    assert chosen is (None if expected is None else links[expected])
    assert pool.drafters.connected == [link for link in links if link.connected]


def test_service_that_left_serves_nothing_new() -> None:
    leaving, staying = FakeLink(), FakeLink(num_sessions=9)
    pool = make_pool([leaving, staying], [FakeLink(instance_id=1)])
    leaving.has_left.set()
    pool.drafters.links[0].has_left.set()
    assert list(pool.targets()) == [staying]
    assert not pool.drafters_for(staying, ())  # type: ignore[arg-type]
    assert pool.drafters.connected == []


@pytest.mark.parametrize(("wanted", "missing"), [((), []), (("suffix",), []), (("eagle3", "suffix"), ["eagle3"])])
async def test_verifier_that_cannot_draft_as_configured_is_named_in_the_log(
    wanted: tuple[str, ...], missing: list[str]
) -> None:
    link = FakeLink()
    pool = Pool(make_roster("verifier", [link]), make_roster("drafter", []), LARGEST_BYTES, 0, "block", wanted)
    model = replace(link.peer.model, local_strategies=("suffix", "lookup"))
    with capture_logs() as logs:
        await pool._check(link, model)  # type: ignore[arg-type]
    found = [entry for entry in logs if entry["event"] == "gateway.local_drafts_missing"]
    assert [entry["missing"] for entry in found] == ([missing] if missing else [])


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
        pool = Pool(*rosters, LARGEST_BYTES, 0, "block")  # type: ignore[arg-type]
        tasks = [asyncio.create_task(task) for task in pool.maintain()]
        try:
            return pool, *await timed(pool.meet(60.0))
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


def test_loading_verifier_is_asked_until_it_answers_or_time_is_up() -> None:
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


OTHER = "other model"
UNFIT: list[State] = [
    {"connected": False, "fault": fault} for fault in (ModelMismatchError(OTHER), InvalidRequestError("long"))
]
ABSENT: list[State] = [{"address": address, "connected": False} for address in ("a:1", "b:1")]
WAITS: dict[str, tuple[list[State], list[State], list[float], str, float]] = {
    "until one of each is connected": (ABSENT, ABSENT, [1.0, 3.0], "", 3.0),
    "for no drafter where there are none": ([{}], [], [], "", 0.0),
    "for one that is fit": ([*UNFIT, *ABSENT], [], [1.0], "", 1.0),
    "in vain for a verifier to be found": ([], [], [], "no verifier", 10.0),
    "in vain for a verifier": (ABSENT, ABSENT, [], "no verifier at a:1, b:1.* within 10 s", 10.0),
    "in vain for a drafter": ([{}], ABSENT, [], "no drafter at a:1, b:1.* within 10 s", 10.0),
    "for no verifier if none is fit": (UNFIT, UNFIT, [], OTHER, 0.0),
    "for no drafter if none is fit": ([{}], UNFIT, [], OTHER, 0.0),
}
"""Verifiers, drafters, when the last ones of each are connected, the error, and how many seconds it takes."""


@pytest.mark.parametrize("name", WAITS)
def test_gateway_waits_for_peers_that_may_come(name: str) -> None:
    *states, connected_at, says, seconds = WAITS[name]
    verifiers, drafters = ([FakeLink(**state) for state in of_role] for of_role in states)

    async def wait() -> None:
        for (*_, last), at in zip((verifiers, drafters), connected_at, strict=False):
            asyncio.get_running_loop().call_later(at, setattr, last, "connected", True)
        kind = ModelMismatchError if says == OTHER else UnavailableError
        with pytest.raises(kind, match=says) if says else nullcontext():
            await make_pool(verifiers, drafters).wait_connected(10.0)

    assert run(timed(wait()))[1] == pytest.approx(seconds, abs=2 * POLL_SECONDS if seconds else 0.0)


# Who cannot be used


SERVED = replace(describe("served", 100), weights_fingerprint=b"weights", vocabulary_fingerprint=b"words")
OTHER_WORDS = replace(SERVED, name="small", vocabulary_fingerprint=b"other")
OTHER_MODEL = r"verifier:2 serves impostor \((float32|bfloat16)\).*served \(float32"


def drafter_link(*tokens: str) -> FakeDrafterLink:
    return FakeDrafterLink("drafter:1", peer=FakePeer(OTHER_WORDS, tokens=list(tokens)))


async def pool_that_met(*links: FakeLink) -> Pool:
    """Returns a pool that met the first of its verifiers."""
    pool = make_pool(links)
    await pool._check(links[0], await links[0].peer.describe())  # type: ignore[arg-type]
    return pool


@pytest.mark.parametrize(
    ("link", "changes", "says"),
    [
        (FakeLink("verifier:2"), {"name": "elsewhere", "revision": "other"}, ""),
        (FakeLink("verifier:2"), {"name": "impostor", "weights_fingerprint": b"other"}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"name": "impostor", "dtype": "bfloat16"}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"name": "impostor", "vocabulary_fingerprint": b"other"}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"name": "impostor", "vocab_size": 60}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"name": "impostor", "context_length": 99}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"name": "impostor", "stop_token_ids": ()}, OTHER_MODEL),
        (FakeLink("verifier:2"), {"context_length": 1_000_000}, "a prompt of 1000000 tokens"),
        (FakeLink("verifier:2"), {"rules": (RuleFacts("own"), *SERVED.rules)}, ""),
        (FakeLink("verifier:2"), {"rules": SERVED.rules[:1]}, ""),
        (FakeLink("verifier:2"), {"rules": SERVED.rules[1:]}, "unknown rejection_sample_method; known: token"),
        (FakeLink("verifier:2"), {"rules": (RuleFacts("block", is_lossless=False),)}, "block is lossy"),
        (drafter_link(), {"weights_fingerprint": b"other", "dtype": "bfloat16", "context_length": 50}, ""),
        (drafter_link("a", "c"), {"vocabulary_fingerprint": b"other"}, r"small has 2.* token 1: 'b' against 'c'"),
    ],
)
async def test_verifier_must_have_the_served_model_and_a_drafter_its_vocabulary(
    link: FakeLink, changes: dict[str, Any], says: str
) -> None:
    """Under whatever name. What differs is named."""
    pool = await pool_that_met(FakeLink(peer=FakePeer(SERVED)))
    with pytest.raises((ModelMismatchError, InvalidRequestError), match=says) if says else nullcontext():
        await pool._check(link, replace(SERVED, **changes))  # type: ignore[arg-type]


async def test_verifier_without_the_default_rule_does_not_set_the_served_model() -> None:
    other, fit = (FakeLink(f"verifier:{number}", peer=FakePeer(SERVED)) for number in (1, 2))
    pool = make_pool([other, fit])
    with pytest.raises(InvalidRequestError, match="unknown rejection_sample_method"):
        await pool._check(other, replace(OTHER_WORDS, rules=()))  # type: ignore[arg-type]
    await pool._check(fit, SERVED)  # type: ignore[arg-type]
    assert pool.description is SERVED


async def test_drafter_that_fits_only_what_is_served_elsewhere_by_now_is_refused() -> None:
    """The verifier that was met first may have come back with another model, which nothing is decided by any more."""
    reference = FakePeer(SERVED)
    pool = await pool_that_met(FakeLink(peer=reference))
    reference.model = OTHER_WORDS
    with pytest.raises(ModelMismatchError, match="vocabulary of drafter:1"):
        await pool._check(drafter_link(), OTHER_WORDS)


async def test_vocabularies_are_compared_over_the_connection_that_there_is_then() -> None:
    """A link opens a new channel when its certificates were renewed, and is closed when its verifier has left."""
    first, second = FakeLink(peer=FakePeer(SERVED)), FakeLink(peer=FakePeer(SERVED, tokens=["a", "z"]))
    pool = await pool_that_met(first, second)
    first.peer.error = UnavailableError("closed")
    first.peer = FakePeer(SERVED)
    with pytest.raises(ModelMismatchError, match="'b' against 'x'"):
        await pool._check(drafter_link("a", "x"), OTHER_WORDS)
    first.has_left.set()
    first.peer.error = UnavailableError("closed")
    with pytest.raises(ModelMismatchError, match="'z' against 'x'"):
        await pool._check(drafter_link("a", "x"), OTHER_WORDS)
    second.has_left.set()
    with pytest.raises(ModelMismatchError, match="vocabulary of drafter:1"):
        await pool._check(drafter_link("a", "x"), OTHER_WORDS)
