"""The drafter's core: links to verifiers, and which sessions their loss ends, and that of its own group."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from engine_service_contract import EngineServiceContract, Served, join_group
from group_fakes import FakeFollowers, FakeParallelModel
from observing import until
from session_specs import changed, draft_spec

from draftwire.errors import GroupLostError, UnavailableError
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftSessionSpec,
    Fence,
    Permit,
    SendDrafted,
)
from draftwire.models.card import ModelCard
from draftwire.options.heads.features import SessionFeatures
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import ModelSettings
from draftwire_drafter import verifier_links
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.verifier_links import BlockLink

PROMPT = [1, 2, 3, 4]
PERMIT = Permit(2, bytes(KEY_BYTES))
PLAIN = SamplingParams()


@dataclass
class FakeLink:
    """Keeps the blocks that a verifier would get."""

    lose: Callable[[], None]
    broken: bool = False
    drafter_id: int = 0
    blocks: list[DraftBlock] = field(default_factory=list)

    def push(self, block: DraftBlock) -> None:
        if self.broken:
            raise UnavailableError("lost")
        self.blocks.append(block)

    async def close(self) -> None:
        self.broken = True

    def break_off(self) -> None:
        self.broken = True
        self.lose()


def make_spec(
    session_id: int, address: str = "a:1", prompt: list[int] = PROMPT, sampling: SamplingParams = PLAIN
) -> DraftSessionSpec:
    return draft_spec(
        session_id=session_id,
        epoch=0,
        choice=0,
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=sampling,
        rule="block",
        drafting_key=bytes(KEY_BYTES),
        stop_token_ids=frozenset(),
        verifier_address=address,
        target_vocab_size=320,
        max_draft_tokens=8,
        max_len=len(prompt) + 100,
        permit=PERMIT,
    )


def make_calibration(session_id: int, round_number: int = 0, num_draft_tokens: int = 4) -> Calibration:
    """Asks for a block behind the prompt."""
    fence = Fence(session_id, 0, round_number, len(PROMPT), CommittedTokens(PROMPT).hash)
    return Calibration(fence, len(PROMPT), [], num_draft_tokens)


class TestDrafterService(EngineServiceContract):
    """Sessions are asked for a block."""

    def make_core(self) -> DrafterCore:
        self.link = FakeLink(lambda: None)
        return DrafterCore(DrafterConfig(ModelSettings("scripted:")), AsyncMock(return_value=self.link))

    async def open(self, core: DrafterCore, session_id: int, lease_id: int) -> None:
        await core.open_session(make_spec(session_id), lease_id)

    def ask(self, core: DrafterCore, session_id: int) -> None:
        core.calibrate(make_calibration(session_id))

    def done(self, served: Served) -> list[int]:
        return [block.fence.session_id for block in self.link.blocks]

    def say_nothing(self, core: DrafterCore) -> None:
        core.calibrate(make_calibration(99))


@dataclass
class Rig:
    """A scripted drafter with one gateway."""

    core: DrafterCore
    links: dict[str, list[FakeLink]]
    lease_id: int
    events: list[Any]
    running: asyncio.Task[None]

    @classmethod
    @asynccontextmanager
    async def running_of(
        cls, core: DrafterCore, links: dict[str, list[FakeLink]], lease_id: int, events: list[Any]
    ) -> AsyncIterator["Rig"]:
        """Runs a core that was started, and stops it at the end."""
        running = asyncio.create_task(core.run())
        try:
            yield cls(core, links, lease_id, events, running)
        finally:
            running.cancel()
            await core._torch.run(lambda: None)  # the running step ends while there is a loop to tell of it
            core.stop()

    async def open(
        self,
        session_id: int,
        address: str = "a:1",
        prompt: list[int] = PROMPT,
        sampling: SamplingParams = PLAIN,
    ) -> None:
        spec = make_spec(session_id, address, prompt, sampling)
        await asyncio.wait_for(self.core.open_session(spec, self.lease_id), 10.0)

    def calibrate(self, session_id: int, round_number: int = 0, num_draft_tokens: int = 4) -> None:
        self.core.calibrate(make_calibration(session_id, round_number, num_draft_tokens))


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    links: dict[str, list[FakeLink]] = {}

    async def connect(address: str, card: ModelCard, on_lost: Callable[[], None]) -> BlockLink:
        link = FakeLink(on_lost)
        links.setdefault(address, []).append(link)
        return link

    script = getattr(request, "param", "scripted:")
    core = DrafterCore(DrafterConfig(ModelSettings(script)), connect)
    await core.start()
    lease_id, outbox = core.open_lease()
    async with Rig.running_of(core, links, lease_id, outbox._items) as rig:
        yield rig


async def test_sessions_of_a_lost_verifier_fail_at_once_and_no_others(rig: Rig) -> None:
    for session_id, address in ((1, "a:1"), (2, "b:1"), (3, "a:1")):
        await rig.open(session_id, address)
    rig.links["a:1"][0].break_off()
    assert [(failed.session_id, str(failed.error)) for failed in rig.events] == [
        (1, "verifier at a:1 was lost"),
        (3, "verifier at a:1 was lost"),
    ]
    assert all(isinstance(failed.error, UnavailableError) for failed in rig.events)
    assert rig.core.num_sessions == 1
    rig.calibrate(2)
    await until(lambda: rig.links["b:1"][0].blocks, "the session of another verifier drafts")
    assert len(rig.events) == 2


async def test_links_without_sessions_are_closed_oldest_first_if_there_are_many(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway names the verifiers, and may name any."""
    monkeypatch.setattr(verifier_links, "MAX_IDLE_LINKS", 2)
    await rig.open(0, "used:1")
    for session_id in range(1, 6):
        await rig.open(session_id, f"idle:{session_id}")
        rig.core.close_session(session_id, 0)
    await rig.open(6, "used:2")
    closed = [address for address, (link,) in rig.links.items() if link.broken]
    assert closed == ["idle:1", "idle:2", "idle:3"]
    assert not rig.events
    await rig.open(7, "idle:1")
    assert len(rig.links["idle:1"]) == 2, "it is opened again for who wants it"


async def test_session_after_the_loss_gets_a_new_link_and_shows_its_permit_there(rig: Rig) -> None:
    await rig.open(1)
    first = rig.links["a:1"][0]
    rig.calibrate(1)
    await until(lambda: first.blocks, "a block is sent over the first link")
    first.break_off()
    await rig.open(2)
    (_, second) = rig.links["a:1"]
    for number in range(2):
        rig.calibrate(2, number)
        await until(lambda number=number: len(second.blocks) > number, f"block {number} is sent")
    assert [block.permit for block in first.blocks + second.blocks] == [PERMIT, PERMIT, None]


async def test_permit_of_a_calibration_is_shown_and_the_identity_reported(rig: Rig) -> None:
    await rig.open(1)
    link = rig.links["a:1"][0]
    link.drafter_id = 77
    spec = changed(make_spec(2), permit=None)
    assert await rig.core.open_session(spec, rig.lease_id) == 77
    for number, permit in enumerate((PERMIT, None)):
        rig.core.calibrate(replace(make_calibration(2, number), permit=permit))
        await until(lambda number=number: len(link.blocks) > number, f"block {number} is sent")
    assert [block.permit for block in link.blocks] == [PERMIT, None]


@pytest.mark.parametrize("rig", ["scripted:calibration_ms=100"], indirect=True)
async def test_session_that_is_opening_fails_with_its_verifier(rig: Rig) -> None:
    await rig.open(1)
    opening = asyncio.create_task(rig.open(2, prompt=[5] * 50))
    await asyncio.sleep(0.02)
    assert not opening.done()
    rig.links["a:1"][0].break_off()
    with pytest.raises(UnavailableError, match="was lost"):
        await opening
    assert rig.core.num_sessions == 0


@pytest.mark.parametrize("rig", ["scripted:calibration_ms=100"], indirect=True)
async def test_opening_that_is_given_up_leaves_no_session(rig: Rig) -> None:
    opening = asyncio.create_task(rig.open(1, prompt=[5] * 50))
    await until(lambda: rig.core.num_sessions, "the session is being opened")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert rig.core.num_sessions == 0


async def test_sessions_that_open_together_share_one_attempt_to_connect() -> None:
    """Those that it fails are told at the same time, one that gives up ends it for nobody, and later ones try again."""
    attempts: list[asyncio.Future[BlockLink]] = []

    async def connect(address: str, card: ModelCard, on_lost: Callable[[], None]) -> BlockLink:
        attempts.append(asyncio.get_running_loop().create_future())
        return await attempts[-1]

    core = DrafterCore(DrafterConfig(ModelSettings("scripted:")), connect)
    await core.start()
    lease_id, outbox = core.open_lease()
    async with Rig.running_of(core, {}, lease_id, outbox._items) as rig:
        for number, outcome in enumerate((UnavailableError("nobody is there"), FakeLink(lambda: None))):
            openings = [asyncio.create_task(rig.open(session_id)) for session_id in (1, 2, 3)]
            await until(lambda number=number: rig.core.num_sessions == 3 and len(attempts) == number + 1, "they wait")
            openings[0].cancel()
            await until(lambda: rig.core.num_sessions == 2, "one has given up")
            if isinstance(outcome, FakeLink):
                attempts[-1].set_result(outcome)
            else:
                attempts[-1].set_exception(outcome)
            _, *told = await asyncio.gather(*openings, return_exceptions=True)
            assert told == ([None, None] if isinstance(outcome, FakeLink) else [outcome, outcome])
        assert len(attempts) == 2


async def test_link_that_broke_before_anybody_was_told_is_not_used_again(rig: Rig) -> None:
    await rig.open(1)
    rig.links["a:1"][0].broken = True
    await rig.open(2)
    assert len(rig.links["a:1"]) == 2


@pytest.mark.parametrize("rig", ["scripted:draft_ms=50"], indirect=True)
async def test_block_under_way_is_sent_when_it_is_asked_for(rig: Rig) -> None:
    await rig.open(1)
    rig.calibrate(1, num_draft_tokens=8)
    await asyncio.sleep(0.12)
    rig.core.send_drafted(SendDrafted(1, 0, 0))
    (link,) = rig.links["a:1"]
    await until(lambda: link.blocks, "a block is sent")
    assert 1 <= len(link.blocks[0].token_ids) < 8
    assert rig.events == [BlockSent(1, 0, 0)]


async def test_every_flush_gets_one_reply_when_its_block_is_sent_and_no_other(rig: Rig) -> None:
    await rig.open(1)
    rig.calibrate(1)
    (link,) = rig.links["a:1"]
    await until(lambda: link.blocks, "a block is sent")
    assert rig.events == []
    for number in (0, 1):
        rig.core.send_drafted(SendDrafted(1, 0, number))
    rig.core.send_drafted(SendDrafted(2, 0, 0))
    assert rig.events == [BlockSent(1, 0, 0)]
    rig.calibrate(1, round_number=1)
    rig.core.send_drafted(SendDrafted(1, 0, 1))
    await until(lambda: len(link.blocks) == 2, "the second block is sent")
    await until(lambda: len(rig.events) == 2, "the second flush is answered")
    assert rig.events == [BlockSent(1, 0, 0), BlockSent(1, 0, 1)]


# Several processes


async def test_features_that_the_engine_cannot_take_fail_their_session_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks would wait for what the scheduler takes to be there."""

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    for session_id in (1, 2):
        await rig.open(session_id)
    monkeypatch.setattr(rig.core._options, "feeding", SimpleNamespace(take=lambda *_: True, feed=fail))
    rig.core.feed("a:1", SessionFeatures(1, 0, 0, 1, b""))
    await until(lambda: rig.events, "no session failed")
    (failed,) = rig.events
    assert (failed.session_id, str(failed.error)) == (1, "the drafter failed")
    assert list(rig.core._scheduler.sessions) == [(2, 0)]


@pytest.mark.parametrize("rig", ["scripted:calibration_ms=100"], indirect=True)
async def test_lost_rank_fails_a_session_that_opens(rig: Rig) -> None:
    followers = FakeFollowers()
    await rig.open(1)
    rig.running = join_group(rig.core, rig.running, FakeParallelModel(), followers)
    opening = asyncio.create_task(rig.open(2, prompt=[5] * 50))
    await asyncio.sleep(0.02)
    assert rig.core.num_sessions == 2
    followers.end = "rank 1 ended with status -9"
    for task in (rig.running, opening):
        with pytest.raises(GroupLostError, match="rank 1"):
            await asyncio.wait_for(task, 5.0)
    assert rig.core.group.is_lost
    assert rig.core.num_sessions == 0
    assert {failed.session_id for failed in rig.events} == {1, 2}
    assert all(isinstance(failed.error, GroupLostError) for failed in rig.events)
