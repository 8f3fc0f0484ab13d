"""The verifier's core: who is told of a refused block and a drafter in quarantine, and who is not."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from engine_service_contract import EngineServiceContract, Served
from greetings import greet
from session_specs import target_spec
from structlog.testing import capture_logs

from draftwire.audit import AuditSums
from draftwire.engine.target_session import Step, StepItem, StepResult
from draftwire.errors import NoRoomError, ProtocolViolationError, Violation
from draftwire.method.encoding import Claim, DraftDistributions, decode
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import CommittedTokens, Fence, Permit, PlainRun, ReceivedBlock, Verdict
from draftwire.runtime import messages
from draftwire.runtime.call_limits import PeerStreams, StreamUse
from draftwire.runtime.messages import MAX_BLOCKS
from draftwire.runtime.metrics import PREFIX
from draftwire.runtime.outbox import ITEMS_IN_A_TURN, Outbox
from draftwire.runtime.settings import ModelSettings
from draftwire.v1 import session_pb2, verifier_pb2
from draftwire_verifier.brake import BURST, REST_S, Brake
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.drafter_peers import BlockRefused, DrafterStream
from draftwire_verifier.drafters import MAX_DRAFTERS, PROVEN_TOKENS, Drafters
from draftwire_verifier.server import MAX_GREETINGS, VerifierServicer

PROMPT = [1, 2, 3, 4]
DRAFTER, OTHER = 7, 8
PERMIT_KEY = bytes(range(16))
DISHONEST = AuditSums(10_000, 5_000.0, 100.0, 0.0, 100.0)


@pytest.fixture
async def core() -> AsyncIterator[VerifierCore]:
    core = VerifierCore(VerifierConfig(ModelSettings("scripted:")))
    await core.start()
    core.drafters._new_id = itertools.count(DRAFTER).__next__
    for drafter_id in (DRAFTER, OTHER):
        assert core.peers.welcome(greet(), core.description).id == drafter_id
    yield core
    core.stop()


def open_session(
    core: VerifierCore,
    session_id: int,
    lease_id: int,
    drafter_id: int | None = DRAFTER,
    seed: int | None = None,
    **given: Any,
) -> None:
    """Opens a session whose first permit a drafter shows with a block that comes too late."""
    spec = target_spec(
        session_id=session_id,
        token_ids=PROMPT,
        verifying_key=(session_id if seed is None else seed).to_bytes(KEY_BYTES, "little"),
        max_draft_tokens=3,
        max_len=20,
        permit_key=PERMIT_KEY,
        **given,
    )
    core.open_session(spec, lease_id)
    if drafter_id is not None:
        show_permit(core, session_id, drafter_id)


def show_permit(core: VerifierCore, session_id: int, drafter_id: int, number: int = 0) -> None:
    """Has a drafter show a permit, with a block that is not taken."""
    session = core._scheduler.sessions[session_id, 0]
    session.queued = True
    core.push_blocks([replace(make_block(session_id, [97], drafter_id), permit=Permit.make(PERMIT_KEY, number))])
    session.queued = False
    core._scheduler.dropped.clear()


def make_block(session_id: int, token_ids: list[int], drafter_id: int = DRAFTER, **fence: Any) -> ReceivedBlock:
    given = {"round": 0, "prefix_len": len(PROMPT), "prefix_hash": CommittedTokens(PROMPT).hash} | fence
    (draft,) = decode([Claim(token_ids, DraftDistributions(Encoding.ONE_HOT, 320))], 320)
    return ReceivedBlock(Fence(session_id, 0, **given), token_ids, draft, True, drafter_id)


def events_of(outbox: Outbox[Any]) -> list[Any]:
    return list(outbox._items)


def num_refused(core: VerifierCore, violation: Violation) -> float:
    labels = {"violation": violation.value}
    return core.metrics.registry.get_sample_value(PREFIX + "blocks_refused_total", labels) or 0.0


def convict(core: VerifierCore, session_id: int, drafter_id: int = DRAFTER) -> None:
    """Tells the core of a step whose block damns its drafter."""
    session = core._scheduler.sessions[session_id, 0]
    step = Step([StepItem(session, make_block(session_id, [97], drafter_id), 1)], 0.0)
    core.peers.learn(step, StepResult([], [], [], 0, 0), [DISHONEST])


class TestVerifierService(EngineServiceContract):
    """Sessions are asked for a plain round."""

    def make_core(self) -> VerifierCore:
        return VerifierCore(VerifierConfig(ModelSettings("scripted:verify_ms=1")))

    async def open(self, core: VerifierCore, session_id: int, lease_id: int) -> None:
        open_session(core, session_id, lease_id, None)

    def ask(self, core: VerifierCore, session_id: int) -> None:
        core.run_plain(PlainRun(core._scheduler.sessions[session_id, 0].fence, 1))

    def done(self, served: Served) -> list[int]:
        return [event.fence.session_id for event in events_of(served.outbox) if isinstance(event, Verdict)]

    def say_nothing(self, core: VerifierCore) -> None:
        core.push_blocks([])


@pytest.mark.parametrize(
    ("violation", "bad"),
    [
        (Violation.PREFIX, make_block(1, [97], prefix_hash=1)),
        (Violation.LENGTH, make_block(1, [97] * 4)),
        (Violation.TOKEN_ID, make_block(1, [320])),
    ],
)
async def test_violation_is_told_once_to_its_own_lease_and_counted(
    core: VerifierCore, violation: Violation, bad: ReceivedBlock
) -> None:
    (own, outbox), (other, other_outbox) = core.open_lease(), core.open_lease()
    open_session(core, 1, own)
    open_session(core, 2, own)
    open_session(core, 3, other)
    core.push_blocks([bad, bad, make_block(1, [97]), make_block(2, [97])])
    (refused,) = events_of(outbox)
    assert isinstance(refused, BlockRefused)
    assert (refused.session_id, refused.epoch, refused.round, refused.quarantined_drafter_id) == (1, 0, 0, None)
    assert refused.permit_number == 0
    assert events_of(other_outbox) == []
    assert {one: num_refused(core, one) for one in Violation if num_refused(core, one)} == {violation: 1.0}
    assert core._scheduler.dropped == {"no_speculation": 2} | ({"violation": 1} if bad.fence.prefix_hash == 1 else {})
    assert core._scheduler.sessions[2, 0].block is not None


async def test_block_of_a_wrong_peer_is_counted_and_told_to_nobody(core: VerifierCore) -> None:
    lease, outbox = core.open_lease()
    open_session(core, 1, lease)
    assert core.push_blocks([make_block(1, [97], OTHER), make_block(1, [98])]) == (1, 1)
    assert events_of(outbox) == []
    assert num_refused(core, Violation.PEER) == 1.0
    block = core._scheduler.sessions[1, 0].block
    assert block is not None
    assert block.token_ids == [98]


async def test_blocks_of_a_wrong_peer_are_logged_once_per_stream_and_all_counted(core: VerifierCore) -> None:
    lease, _ = core.open_lease()
    open_session(core, 1, lease)
    with capture_logs() as lines:
        for _ in range(3):
            core.push_blocks([make_block(1, [97], OTHER)] * 100)
        assert len(lines) == 1
        drafter = core.drafters.get(OTHER)
        assert drafter is not None
        core.peers.welcome(greet(drafter.identity), core.description)
        core.push_blocks([make_block(1, [97], OTHER)] * 100)
    assert [line["drafter_id"] for line in lines if line["event"] == "verifier.block_refused"] == [OTHER, OTHER]
    assert num_refused(core, Violation.PEER) == 400.0


def message_of(num_blocks: int) -> verifier_pb2.PushDraftBlocksRequest:
    """Returns a message of blocks for sessions that are not there."""
    blocks = [session_pb2.DraftBlock()] * num_blocks
    return verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=blocks))


async def test_stream_of_useless_blocks_is_read_slowly(core: VerifierCore) -> None:
    servicer, brake, drafter = VerifierServicer(core), Brake(), core.drafters.get(DRAFTER)
    assert drafter is not None
    with patch("draftwire_verifier.server.asyncio.sleep") as sleep:
        for _ in range(BURST // MAX_BLOCKS):
            await servicer._push_blocks(message_of(MAX_BLOCKS), DrafterStream(drafter), brake)
        sleep.assert_not_called()
        await servicer._push_blocks(message_of(MAX_BLOCKS), DrafterStream(drafter), brake)
    sleep.assert_awaited_once_with(MAX_BLOCKS * REST_S)
    assert core.metrics.registry.get_sample_value(PREFIX + "drafter_rest_seconds_total") == MAX_BLOCKS * REST_S


async def test_message_of_more_blocks_than_sessions_ends_the_stream_unread(
    core: VerifierCore,
) -> None:
    servicer = VerifierServicer(core)
    most = max(MAX_BLOCKS, core.config.engine.max_sessions)
    drafter = core.drafters.get(DRAFTER)
    assert drafter is not None
    await servicer._push_blocks(message_of(most), DrafterStream(drafter), Brake())
    with patch.object(messages, "blocks_from_proto") as decode, pytest.raises(ProtocolViolationError, match="at most"):
        await servicer._push_blocks(message_of(most + 1), DrafterStream(drafter), Brake())
    decode.assert_not_called()


async def test_commands_of_a_large_message_are_carried_out_in_turns(core: VerifierCore) -> None:
    close = verifier_pb2.TargetCommand(close_session=session_pb2.CloseSession(epoch=1))
    request = verifier_pb2.RunTargetSessionsRequest(commands=[close] * 10 * ITEMS_IN_A_TURN)

    async def requests() -> AsyncIterator[verifier_pb2.RunTargetSessionsRequest]:
        yield request

    reading = asyncio.create_task(VerifierServicer(core)._read_commands(requests(), 0))
    for _ in range(8):
        await asyncio.sleep(0)
        assert not reading.done(), "others have their turn"
    await reading


async def test_drafter_that_leaves_after_its_hello_is_answered_as_a_whole(core: VerifierCore) -> None:
    """A write that is cancelled leaves the call without a status."""
    written: list[verifier_pb2.PushDraftBlocksResponse] = []

    async def write(response: verifier_pb2.PushDraftBlocksResponse) -> None:
        await asyncio.sleep(0.05)
        written.append(response)

    async def requests() -> AsyncIterator[verifier_pb2.PushDraftBlocksRequest]:
        hello = verifier_pb2.DrafterHello(model=messages.model_to_proto(core.description), instance_id=1)
        yield verifier_pb2.PushDraftBlocksRequest(hello=hello)

    context: Any = SimpleNamespace(write=write, auth_context=dict, peer=str)
    await VerifierServicer(core).PushDraftBlocks(requests(), context)
    (welcome,) = written
    assert welcome.HasField("welcome")
    assert len(welcome.identity.token) == 16


def pushed(servicer: VerifierServicer, core: VerifierCore, *, says_hello: bool) -> "asyncio.Task[None]":
    """Opens a drafter's stream that sends nothing more, ever."""

    async def requests() -> AsyncIterator[verifier_pb2.PushDraftBlocksRequest]:
        if says_hello:
            hello = verifier_pb2.DrafterHello(model=messages.model_to_proto(core.description), instance_id=1)
            yield verifier_pb2.PushDraftBlocksRequest(hello=hello)
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(write=AsyncMock(), auth_context=dict, peer=str)
    return asyncio.create_task(servicer.PushDraftBlocks(requests(), context))


async def test_streams_that_never_say_hello_keep_no_drafter_out(core: VerifierCore) -> None:
    servicer = VerifierServicer(core)
    silent = [pushed(servicer, core, says_hello=False) for _ in range(4 * MAX_GREETINGS)]
    honest = pushed(servicer, core, says_hello=True)
    await asyncio.sleep(0.05)
    assert sum(task.done() for task in silent) >= 2 * MAX_GREETINGS
    assert not honest.done()
    for task in (*silent, honest):
        task.cancel()
    ends = await asyncio.gather(*silent, honest, return_exceptions=True)
    assert {type(end) for end in ends} == {NoRoomError, asyncio.CancelledError}


async def test_streams_of_no_use_keep_no_drafter_out(core: VerifierCore) -> None:
    servicer = VerifierServicer(core)
    servicer._drafters = PeerStreams("streams of drafters", 2)
    tasks = [pushed(servicer, core, says_hello=True)]
    await asyncio.sleep(0.01)
    core.peers.streams[list(core.peers.streams)[-1]].use = StreamUse.PRESENT
    for _ in range(3):
        tasks.append(pushed(servicer, core, says_hello=True))
        await asyncio.sleep(0.01)
    assert [task.done() for task in tasks] == [False, True, True, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_quarantine_ends_speculation_of_the_drafters_sessions_and_no_other(core: VerifierCore) -> None:
    (first, outbox), (second, second_outbox) = core.open_lease(), core.open_lease()
    open_session(core, 1, first)
    open_session(core, 2, first, OTHER)
    open_session(core, 3, second)
    open_session(core, 4, second, None)
    convict(core, 1)
    for told, session_id in ((outbox, 1), (second_outbox, 3)):
        assert [(event.session_id, event.quarantined_drafter_id) for event in events_of(told)] == [
            (session_id, DRAFTER)
        ]
    open_session(core, 5, second)
    assert [event.session_id for event in events_of(second_outbox)] == [3, 5]
    assert events_of(second_outbox)[-1].quarantined_drafter_id == DRAFTER
    open_session(core, 6, first, OTHER)
    core.push_blocks([make_block(number, [97], OTHER if number in (2, 6) else DRAFTER) for number in (1, 2, 3, 5, 6)])
    taken = [key[0] for key, session in core._scheduler.sessions.items() if session.block is not None]
    assert taken == [2, 6]
    assert len(events_of(outbox)) == 1
    convict(core, 1)
    assert len(events_of(outbox)) == 1, "once is enough"


async def test_drafter_that_reconnects_stays_in_quarantine(core: VerifierCore) -> None:
    lease, outbox = core.open_lease()
    open_session(core, 1, lease)
    convict(core, 1)
    drafter = core.drafters.get(DRAFTER)
    assert drafter is not None
    drafter.num_streams -= 1
    assert core.peers.welcome(greet(drafter.identity), core.description) is drafter
    open_session(core, 2, lease)
    assert [event.session_id for event in events_of(outbox)] == [1, 2]


async def test_quarantined_drafter_is_refused_at_its_permit_and_loses_its_block(
    core: VerifierCore,
) -> None:
    lease, outbox = core.open_lease()
    open_session(core, 1, lease)
    convict(core, 1)
    for session_id in (2, 3):
        open_session(core, session_id, lease, None)
    first = replace(make_block(2, [97]), permit=Permit.make(PERMIT_KEY, 4))
    core.push_blocks([first, first, make_block(2, [97])])
    told = events_of(outbox)[1:]
    assert [(event.session_id, event.permit_number, event.quarantined_drafter_id) for event in told] == [
        (2, 4, DRAFTER)
    ]
    assert core._scheduler.sessions[2, 0].block is None
    assert core._scheduler.dropped == {"no_speculation": 3}
    core.push_blocks([replace(make_block(2, [97], OTHER), permit=Permit.make(PERMIT_KEY, 5))])
    assert core._scheduler.sessions[2, 0].block is not None, "another drafter may take its place"
    assert len(events_of(outbox)) == 2


async def test_quarantine_spares_sessions_that_another_drafter_took_over(core: VerifierCore) -> None:
    lease, outbox = core.open_lease()
    for session_id in (1, 2):
        open_session(core, session_id, lease)
    show_permit(core, 2, OTHER, number=1)
    convict(core, 1)
    assert [event.session_id for event in events_of(outbox)] == [1]
    core.push_blocks([make_block(2, [97], OTHER)])
    assert core._scheduler.sessions[2, 0].block is not None


async def test_violation_of_a_replacement_is_reported_and_a_forged_permit_is_not(
    core: VerifierCore,
) -> None:
    lease, outbox = core.open_lease()
    open_session(core, 1, lease)
    show_permit(core, 1, OTHER, number=3)
    core.push_blocks([replace(make_block(1, [97]), permit=Permit.make(bytes(16), 4))])
    assert events_of(outbox) == []
    assert num_refused(core, Violation.PEER) == 1.0
    core.push_blocks([make_block(1, [320], OTHER)])
    assert [(event.session_id, event.permit_number) for event in events_of(outbox)] == [(1, 3)]


def test_remembered_drafters_are_bounded_and_important_ones_stay_longest() -> None:
    drafters = Drafters(itertools.count(1).__next__)
    connected = drafters.connect(greet())
    convicted = drafters.connect(greet())
    proven = drafters.connect(greet())
    proven.add(AuditSums(PROVEN_TOKENS))
    used = drafters.connect(greet())
    assert convicted.add(DISHONEST)
    for drafter in (convicted, proven, used):
        drafter.num_streams = 0
    for _ in range(2 * MAX_DRAFTERS):
        drafters.connect(greet(), {used.id}).num_streams = 0
    assert len(list(drafters)) == MAX_DRAFTERS
    assert all(drafters.get(kept.id) is kept for kept in (connected, convicted, proven, used))
    assert drafters.get(10) is None


@pytest.mark.parametrize("shares_text", [False, True])
async def test_session_of_a_seed_that_was_used_before_is_no_evidence(core: VerifierCore, shares_text: bool) -> None:
    """Its draft tokens are drawn with the same numbers, so that one unlucky seed would bring an honest drafter down.

    The verifier remembers that by itself: what it is told of the numbers decides nothing.
    """
    lease_id, outbox = core.open_lease()
    open_session(core, 1, lease_id, seed=42, shares_text=shares_text)
    core.close_session(1, 0)
    open_session(core, 2, lease_id, seed=42, shares_text=shares_text)
    convict(core, 2)
    assert not core.drafters.get(DRAFTER).is_quarantined
    assert events_of(outbox) == []
    open_session(core, 3, lease_id, seed=43, shares_text=shares_text)
    convict(core, 3)
    assert core.drafters.get(DRAFTER).is_quarantined
