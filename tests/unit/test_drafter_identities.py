"""Who a drafter is to a verifier, and how far one is trusted that is new."""

import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from greetings import greet
from session_specs import target_spec
from structlog.testing import capture_logs

from draftwire.audit import AuditSums
from draftwire.engine.target_session import Step, StepItem, StepResult, TargetSession
from draftwire.errors import Violation, WrongRoleError
from draftwire.method.encoding import Claim, DraftDistributions, decode
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import Permit, ReceivedBlock
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.caller_identity import ROLE_PREFIX, CallerRole, origin_of, require_role
from draftwire.runtime.metrics import PREFIX
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.drafters import (
    CREDIT_TOKENS,
    ORIGIN_WINDOW,
    PROVEN_TOKENS,
    REFILL_S,
    Drafter,
    Drafters,
)

PROMPT = [1, 2, 3, 4]
PERMIT_KEY = bytes(range(16))
BLOCK = 16
LIE = AuditSums(BLOCK, 0.5 * BLOCK, 0.25 * BLOCK, 0.0, 0.0)
"""Of a block of a drafter that declares two tokens alike and always sends the one that is accepted."""
TRUTH = AuditSums(BLOCK, 0.0, 0.25 * BLOCK, 0.0, 0.0)


# Identities


def test_drafter_is_known_again_by_what_it_was_given_and_by_nothing_else() -> None:
    drafters = Drafters()
    honest, other = drafters.connect(greet()), drafters.connect(greet())
    assert drafters.connect(greet(honest.identity)) is honest
    assert drafters.connect(greet(honest.identity, origin="certificate b")) is honest, "certificates are renewed"
    guessed = replace(honest.identity, token=bytes(KEY_BYTES))
    mixed = replace(honest.identity, token=other.identity.token)
    strangers = [drafters.connect(greet(shown)) for shown in (None, guessed, mixed, replace(guessed, drafter_id=5))]
    assert len({drafter.id for drafter in (honest, other, *strangers)}) == 6
    assert len({drafter.identity.token for drafter in (honest, other, *strangers)}) == 6


def test_drafter_of_the_previous_version_is_known_by_origin_and_own_name() -> None:
    drafters = Drafters()
    old = greet(instance_id=7, keeps_identity=False)
    known = drafters.connect(old)
    assert drafters.connect(old) is known
    others = (replace(old, origin="certificate b"), replace(old, instance_id=8), replace(old, keeps_identity=True))
    for other in others:
        assert drafters.connect(other) is not known


def connection(peer: str = "ipv4:10.0.0.1:4711", certificate: bytes = b"", uris: tuple[str, ...] = ()) -> Any:
    names = {"x509_pem_cert": [certificate], "peer_uri": [uri.encode() for uri in uris]} if certificate else {}
    return SimpleNamespace(peer=lambda: peer, auth_context=lambda: names)


def test_origin_is_the_certificate_or_else_the_host() -> None:
    assert origin_of(connection()) == origin_of(connection("ipv4:10.0.0.1:5")) == "host 10.0.0.1"
    assert origin_of(connection("ipv6:%5B::ffff:10.0.0.1%5D:5")) == "host 10.0.0.1"
    assert origin_of(connection("unix:")) == "host unix"
    network = [origin_of(connection(f"ipv6:%5B2001:db8::{host}%5D:5")) for host in ("1", "ffff")]
    assert network == ["host 2001:db8::/64"] * 2
    assert origin_of(connection("ipv6:[2001:db8:0:1::1]:5")) == "host 2001:db8:0:1::/64"
    first, second = (origin_of(connection("ipv4:10.0.0.1:5", certificate)) for certificate in (b"one", b"two"))
    assert first == origin_of(connection("ipv4:10.0.0.2:5", b"one")) != second
    assert first.startswith("certificate ")


def test_caller_of_another_role_is_refused_and_one_without_is_logged_once() -> None:
    roles = [f"{ROLE_PREFIX}drafter", "spiffe://other"]
    require_role(connection(certificate=b"role", uris=tuple(roles)), CallerRole.DRAFTER)
    require_role(connection(certificate=b"role", uris=(*roles, f"{ROLE_PREFIX}gateway")), CallerRole.GATEWAY)
    for uris in (roles, [f"{ROLE_PREFIX}user"], [f"{ROLE_PREFIX}gateways"]):
        with pytest.raises(WrongRoleError, match="not of a gateway"):
            require_role(connection(certificate=b"role", uris=tuple(uris)), CallerRole.GATEWAY)
    with capture_logs() as logs:
        for _ in range(3):
            require_role(connection(certificate=b"role of nobody", uris=("spiffe://other",)), CallerRole.GATEWAY)
            require_role(connection(), CallerRole.GATEWAY)
    assert [(line["event"], line["role"]) for line in logs] == [("rpc.role_missed", "gateway")]


# Trust


@pytest.fixture
async def core() -> AsyncIterator[VerifierCore]:
    core = VerifierCore(VerifierConfig(ModelSettings("scripted:"), engine=EngineSettings(max_tree_nodes=BLOCK)))
    await core.start()
    yield core
    core.stop()


session_ids = itertools.count(1)


def open_session(
    core: VerifierCore, temperature: float = 1.0, rule: str = "block", seed: int = 0, max_tree_nodes: int = 0
) -> TargetSession:
    session_id = next(session_ids)
    spec = target_spec(
        session_id=session_id,
        token_ids=PROMPT,
        sampling=SamplingParams(temperature),
        rule=rule,
        verifying_key=(seed or session_id).to_bytes(KEY_BYTES, "little"),
        max_draft_tokens=BLOCK,
        permit_key=PERMIT_KEY,
        max_tree_nodes=max_tree_nodes,
    )
    lease_id, _ = core.open_lease()
    core.open_session(spec, lease_id)
    return core._scheduler.sessions[session_id, 0]


def push(
    core: VerifierCore, session: TargetSession, drafter: Drafter, named: int | None = None, num_tokens: int = BLOCK
) -> ReceivedBlock:
    """Has a drafter send a block with its permit, and returns it as it was queued: a tree if the session takes them."""
    tokens = list(range(97, 97 + num_tokens))
    tree = TokenTree((ROOT,) * num_tokens) if session.spec.max_tree_nodes else None
    encoding = Encoding.ONE_HOT if tree is None else Encoding.NONE
    (draft,) = decode([Claim(tokens, DraftDistributions(encoding, 320), tree)], 320)
    permit = Permit.make(PERMIT_KEY, session.permit_number + 1, drafter.id if named is None else named)
    core.push_blocks([ReceivedBlock(session.fence, tokens, draft, True, drafter.id, permit=permit, tree=tree)])
    assert session.block is not None, "it is queued"
    return session.block


def judge(core: VerifierCore, sums: AuditSums, *sessions: TargetSession) -> None:
    """Has a step audit what the sessions have queued; they begin anew, without a verdict."""
    items = [StepItem(session, session.block, 1) for session in sessions]
    for session in sessions:
        session.block, session.queued = None, False
        core._scheduler._ready.clear()
    for session in sessions:
        core.trust.begin(session)
    core.peers.learn(Step(items, 0.0), StepResult([], [], [], 0, 0), [sums] * len(items))


def connect(core: VerifierCore, **greeting: Any) -> Drafter:
    return core.peers.welcome(greet(**greeting), core.description)


def blocks_used(core: VerifierCore, drafter: Drafter, sums: AuditSums, num_blocks: int) -> int:
    """Returns how many of a drafter's blocks are used, each judged before the next one comes."""
    used = 0
    session = open_session(core)
    for _ in range(num_blocks):
        if drafter.is_quarantined:
            break
        used += push(core, session, drafter).is_used
        judge(core, sums, session)
    core.close_session(*session.key)
    return used


async def test_frames_under_another_drafters_name_are_their_senders(core: VerifierCore) -> None:
    honest, liar = connect(core, instance_id=7), connect(core, instance_id=7)
    session, other = open_session(core), open_session(core)
    push(core, other, honest)
    blocks_used(core, liar, LIE, 100)
    assert (liar.is_quarantined, honest.is_quarantined) == (True, False)
    assert other.drafter_id == honest.id
    push(core, session, honest)
    assert session.drafter_id == honest.id


async def test_permit_is_worth_nothing_to_another_drafter(core: VerifierCore) -> None:
    named, thief = connect(core), connect(core)
    session = open_session(core)
    with pytest.raises(AssertionError, match="queued"):
        push(core, session, thief, named=named.id)
    assert session.drafter_id is None
    labels = {"violation": Violation.PEER.value}
    assert core.metrics.registry.get_sample_value(PREFIX + "blocks_refused_total", labels) == 1.0
    push(core, session, named)
    assert session.drafter_id == named.id


@pytest.mark.parametrize("num_blocks", [1, 3])
async def test_forty_fresh_identities_gain_no_more_than_one(core: VerifierCore, num_blocks: int) -> None:
    """Two origins: one identity lies until it is found out; forty lie for a few blocks each, and none is found out. A
    round that has begun before the audit that finds the origin out may use one more block.
    """
    alone = connect(core, origin="host alone")
    gain = blocks_used(core, alone, LIE, 100)
    assert alone.is_quarantined
    together = [connect(core) for _ in range(40)]
    gains = [blocks_used(core, drafter, LIE, num_blocks) for drafter in together]
    assert not any(drafter.is_quarantined for drafter in together)
    assert 0 < sum(gains) <= gain + 1 < 40 * num_blocks


async def test_honest_past_of_an_origin_hides_no_fresh_identities_that_lie(core: VerifierCore) -> None:
    for _ in range(20):
        blocks_used(core, connect(core), TRUTH, PROVEN_TOKENS // BLOCK)
    gain = sum(blocks_used(core, connect(core), LIE, 3) for _ in range(40))
    assert gain * BLOCK < 2 * ORIGIN_WINDOW < 40 * 3 * BLOCK


async def test_credit_of_an_origin_bounds_what_is_used_at_any_time(core: VerifierCore) -> None:
    """However it is spread, also over blocks that are queued at once, and whatever the audit thinks."""
    num_blocks = CREDIT_TOKENS // BLOCK
    used = 0
    for _ in range(3 * num_blocks // 60):
        sessions = [open_session(core) for _ in range(60)]
        used += sum(push(core, session, connect(core)).is_used for session in sessions)
        judge(core, TRUTH, *sessions)
        for session in sessions:
            core.close_session(*session.key)
    assert used == num_blocks
    aside = core.metrics.registry.get_sample_value(PREFIX + "blocks_set_aside_total")
    assert aside == 3 * num_blocks // 60 * 60 - used
    assert push(core, open_session(core), connect(core, origin="certificate b")).is_used, "others have their own"


@pytest.mark.parametrize("nodes", [0, 6])
async def test_whether_a_block_is_used_does_not_depend_on_what_it_holds(core: VerifierCore, nodes: int) -> None:
    """Of every number of tokens that a session allows, at every credit near its end. How many nodes a drawn tree has
    depends on its tokens: a drafter that had smaller ones used than larger ones would choose among texts.
    """
    outcomes = {}
    for left, count in itertools.product(range(BLOCK + 2), range(1, (nodes or BLOCK) + 1)):
        drafter = connect(core, origin=f"host of {left} and {count}")
        drafter.origin._spent = CREDIT_TOKENS - left
        drafter.origin._refill = lambda: None
        session = open_session(core, max_tree_nodes=nodes)
        outcomes[left, count] = push(core, session, drafter, num_tokens=count).is_used
        core.close_session(*session.key)
    allowed = nodes or BLOCK
    assert outcomes == {(left, count): left >= allowed for left, count in outcomes}


@pytest.mark.parametrize("left", [0, BLOCK, 2 * BLOCK])
async def test_whether_a_block_is_used_does_not_depend_on_when_it_comes(core: VerifierCore, left: int) -> None:
    """A drafter that takes longer for one of two tokens: its block comes before another session's, or after it. Where
    drafts are drawn as the target draws, those that are used enter the text, and others are drawn again.
    """
    law = [0.0, 0.0]
    for token in range(2):
        origin = f"host of {left} and {token}"
        slow, other = connect(core, origin=origin), connect(core, origin=origin)
        slow.origin._spent = CREDIT_TOKENS - left
        slow.origin._refill = lambda: None
        session, neighbour = open_session(core), open_session(core)
        for sender, receiver in [(slow, session), (other, neighbour)][:: -1 if token else 1]:
            push(core, receiver, sender)
        assert session.block is not None, "it was queued"
        assert neighbour.block is not None, "it was queued"
        assert session.block.is_used is (left >= BLOCK), "of those that begin first"
        assert neighbour.block.is_used is (left >= 2 * BLOCK)
        for drawn in range(2):
            law[token if session.block.is_used else drawn] += 0.25
        core.close_session(*session.key)
        core.close_session(*neighbour.key)
        assert slow.origin._num_promised == 0
    assert law == [0.5, 0.5]


async def test_credit_that_comes_back_in_the_middle_of_a_round_is_for_the_next(core: VerifierCore) -> None:
    """Also if another drafter of the origin connects then: blocks before and after that are treated alike."""
    fresh = connect(core)
    fresh.origin._spent, fresh.origin._refill = CREDIT_TOKENS, lambda: None
    session = open_session(core)
    fresh.origin._spent = 0.0
    connect(core)
    assert not push(core, session, fresh).is_used
    judge(core, TRUTH, session)
    assert push(core, session, fresh).is_used


async def test_round_that_is_over_keeps_its_credit_until_it_is_audited(core: VerifierCore) -> None:
    """Its verdict is sent, and its session's next round has begun: together they have credit for two blocks."""
    fresh = connect(core)
    fresh.origin._spent, fresh.origin._refill = CREDIT_TOKENS - 2 * BLOCK, lambda: None
    session = open_session(core)
    assert push(core, session, fresh).is_used
    items = [StepItem(session, session.block, 1)]
    session.block, session.queued = None, False
    core.trust.begin(session)
    assert not push(core, open_session(core), connect(core)).is_used, "both blocks may be used"
    core.peers.learn(Step(items, 0.0), StepResult([], [], [], 0, 0), [TRUTH])
    assert push(core, session, fresh).is_used
    judge(core, TRUTH, session)
    assert not push(core, session, fresh).is_used
    assert fresh.origin._num_promised == 0


async def test_session_that_ends_before_its_first_round_leaves_nothing(core: VerifierCore) -> None:
    fresh = connect(core)
    session = open_session(core)
    assert fresh.origin._num_promised == BLOCK
    core.close_session(*session.key)
    assert (fresh.origin._num_promised, core.trust._rounds, core.trust._unaudited) == (0, {}, {})


async def test_drafter_that_proves_itself_is_trusted_from_the_next_round_on(core: VerifierCore) -> None:
    """Else blocks that come late would be used where those that come soon are not."""
    fresh = connect(core)
    fresh.origin._spent = CREDIT_TOKENS
    fresh.origin._refill = lambda: None
    session = open_session(core)
    assert not push(core, session, fresh).is_used
    other = open_session(core)
    while not fresh.is_proven:
        push(core, other, fresh)
        judge(core, TRUTH, other)
    session.block, session.queued = None, False
    assert not push(core, session, fresh).is_used
    judge(core, TRUTH, session)
    assert push(core, session, fresh).is_used


async def test_what_a_drafter_has_queued_when_it_is_found_out_is_not_used(core: VerifierCore) -> None:
    liar, honest = connect(core), connect(core, origin="certificate b")
    session, other = open_session(core), open_session(core)
    assert push(core, session, liar).is_used
    assert push(core, other, honest).is_used
    blocks_used(core, liar, LIE, 100)
    assert liar.is_quarantined
    assert session.block is not None, "it is queued"
    assert not session.block.is_used
    assert session.drafter_id is None
    assert other.block is not None, "it is queued"
    assert other.block.is_used


async def test_liar_leaves_replicas_with_its_certificate_alone(core: VerifierCore) -> None:
    """The proven one goes on; the new one starts without credit, and proves itself with blocks that are not used."""
    proven, liar, fresh = connect(core), connect(core), connect(core)
    needed = PROVEN_TOKENS // BLOCK
    assert blocks_used(core, proven, TRUTH, needed) == needed
    assert proven.is_proven
    blocks_used(core, liar, LIE, 100)
    assert liar.is_quarantined
    assert blocks_used(core, proven, TRUTH, 5) == 5
    assert blocks_used(core, fresh, TRUTH, needed + 5) == 4, "the first round after began before the audit"
    assert (fresh.is_proven, fresh.is_quarantined) == (True, False)
    assert blocks_used(core, connect(core, identity=fresh.identity), TRUTH, 5) == 5, "it connected again"


async def test_drafter_that_proves_itself_gives_back_its_credit(core: VerifierCore) -> None:
    needed = PROVEN_TOKENS // BLOCK
    for _ in range(2 * CREDIT_TOKENS // PROVEN_TOKENS + 1):
        assert blocks_used(core, connect(core), TRUTH, needed) == needed


async def test_credit_that_was_spent_comes_back_with_time_unless_it_was_abused(core: VerifierCore) -> None:
    now = 0.0
    core.drafters._clock = lambda: now
    few, num_blocks = PROVEN_TOKENS // BLOCK - 1, CREDIT_TOKENS // BLOCK
    used = sum(blocks_used(core, connect(core), TRUTH, few) for _ in range(4))
    assert used == num_blocks
    now += REFILL_S / 2
    assert sum(blocks_used(core, connect(core), TRUTH, few) for _ in range(3)) == num_blocks // 2
    now += REFILL_S
    blocks_used(core, connect(core), LIE, 100)
    now += 10 * REFILL_S
    assert blocks_used(core, connect(core), TRUTH, few) == 0


def evict(drafters: Drafters, origins: Iterable[str]) -> None:
    """Connects a drafter of each origin, which leaves again at once."""
    for origin in origins:
        drafters.connect(greet(origin=origin)).num_streams = 0


@pytest.mark.parametrize("sums", [LIE, TRUTH], ids=["suspected", "spent"])
def test_credit_of_an_origin_is_not_renewed_by_having_its_records_evicted(
    monkeypatch: pytest.MonkeyPatch, sums: AuditSums
) -> None:
    """By somebody with a certificate of another origin, whose drafters are many."""
    monkeypatch.setattr("draftwire_verifier.drafters.MAX_DRAFTERS", 4)
    drafters = Drafters(clock=lambda: 0.0)
    first = drafters.connect(greet())
    while first.origin.has_credit(BLOCK):
        first.origin.spend(sums)
    assert (first.origin.suspicion is None) is (sums is TRUTH)
    first.num_streams, first_id = 0, first.id
    del first
    evict(drafters, ["certificate b"] * 4)
    assert drafters.get(first_id) is None
    assert not drafters.connect(greet()).origin.has_credit(BLOCK)


def test_remembered_origins_are_bounded_and_suspects_are_kept_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for most in ("MAX_DRAFTERS", "MAX_ORIGINS"):
        monkeypatch.setattr(f"draftwire_verifier.drafters.{most}", 4)
    drafters = Drafters()
    suspected = drafters.connect(greet(origin="host of a liar"))
    while suspected.origin.suspicion is None:
        suspected.origin.spend(LIE)
    suspected.num_streams = 0
    del suspected
    evict(drafters, (f"host {number}" for number in range(20)))
    assert len(drafters._origins) <= 4 + 4
    assert len(drafters._left) == 4
    assert not drafters.connect(greet(origin="host of a liar")).origin.has_credit(1)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"rule": "coupled"}, {"seed": 2**100}])
async def test_session_that_no_drafter_can_bias_unseen_needs_no_credit(
    core: VerifierCore, changes: dict[str, Any]
) -> None:
    blocks_used(core, connect(core), LIE, 100)
    fresh = connect(core)
    assert not push(core, open_session(core), fresh).is_used
    if "seed" in changes:
        core.close_session(*open_session(core, **changes).key)
    assert push(core, open_session(core, **changes), fresh).is_used
