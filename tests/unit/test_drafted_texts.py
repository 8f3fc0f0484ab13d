"""What a RemoteDrafter makes of vLLM's rows: which text each is, what drafters are asked, and what if they fail."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from draftwire.errors import BlockViolationError, InvalidRequestError, NoRoomError, UnavailableError, Violation
from draftwire.method.encoding import Claim, DraftDistributions, decode_one
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import Calibration, CommittedTokens, DraftSessionSpec, ReceivedBlock
from draftwire.models.description import NEEDS_FEATURES
from draftwire_gateway.session.ports import DrafterLost
from vllm_remote_drafter.drafted_texts import (
    ABSENT_SECONDS,
    IDLE_SECONDS,
    MOST_COMPARED,
    MOST_REFUSALS,
    RESERVED_TOKENS,
    RETRY_SECONDS,
    DraftedText,
    DraftedTexts,
)
from vllm_remote_drafter.remote_settings import RemoteDrafterSettings, parse_settings

VOCAB_SIZE, CONTEXT = 100, 5000
DEADLINE_S = 0.2
LONG = 3


class FakeDrafterLink:
    """A drafter that checks what it is asked as the real one does, and sends what the test says."""

    def __init__(self, address: str = "drafter:1", context_length: int = CONTEXT) -> None:
        self.address = address
        self.connected = True
        self.description = SimpleNamespace(context_length=context_length, capabilities=frozenset[str]())
        self.texts: dict[int, CommittedTokens] = {}
        self.specs: list[DraftSessionSpec] = []
        self.inboxes: dict[int, Any] = {}
        self.asked: list[Calibration] = []
        self.closed: list[int] = []
        self.refusal: Exception | None = None

    @property
    def num_sessions(self) -> int:
        return len(self.texts)

    async def open(self, spec: DraftSessionSpec, inbox: Any) -> None:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        assert len(spec.token_ids) < spec.max_len <= self.description.context_length
        self.specs.append(spec)
        self.texts[spec.session_id], self.inboxes[spec.session_id] = CommittedTokens(spec.token_ids), inbox

    def calibrate(self, calibration: Calibration) -> None:
        fence, text = calibration.fence, self.texts[calibration.fence.session_id]
        assert calibration.base_len == len(text)
        text.append(calibration.token_ids)
        assert (fence.prefix_len, fence.prefix_hash) == (len(text), text.hash)
        assert fence.round == sum(one.fence.session_id == fence.session_id for one in self.asked)
        assert 1 <= calibration.num_draft_tokens <= LONG
        (spec,) = (one for one in self.specs if one.session_id == fence.session_id)
        assert len(text) + calibration.num_draft_tokens <= spec.max_len
        self.asked.append(calibration)

    def close(self, session_id: int, epoch: int) -> None:
        self.closed.append(session_id)
        self.texts.pop(session_id, None)


class Rig:
    """Texts on drafters, with a clock of the test's own."""

    def __init__(self, *drafters: FakeDrafterLink, context_length: int = CONTEXT) -> None:
        self.now = 0.0
        self.drafters = drafters or (FakeDrafterLink(),)
        target: Any = SimpleNamespace(context_length=context_length, vocab_size=VOCAB_SIZE)
        links: Any = self.drafters
        self.texts = DraftedTexts(links, target, "here:2", LONG, DEADLINE_S, lambda: self.now)

    @property
    def drafter(self) -> FakeDrafterLink:
        return self.drafters[0]

    async def ask(self, **rows: list[int]) -> dict[int, Any]:
        """Asks for rows `r0`, `r1` and so on, and lets openings go on."""
        given = {int(name[1:]): np.array(ids, np.int32) for name, ids in rows.items()}
        blocks = self.texts.ask(given)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now += 0.01
        return blocks

    def send(self, calibration: Calibration, *token_ids: int, **changes: Any) -> None:
        draft = decode_one(Claim(list(token_ids), DraftDistributions(Encoding.NONE, VOCAB_SIZE)), VOCAB_SIZE)
        given: dict[str, Any] = {"fence": calibration.fence, "token_ids": list(token_ids), "draft": draft} | changes
        block = ReceivedBlock(**given, has_distributions=False, drafter_id=1)
        blocks = [session.block for session in self.texts._sessions.values()]
        done_before = sum(one is not None and one.done() for one in blocks)
        num_used = self.texts.deliver([block])
        assert num_used == sum(one is not None and one.done() for one in blocks) - done_before


async def test_text_is_opened_then_drafted_for_with_what_was_added() -> None:
    rig = Rig()
    assert await rig.ask(r0=[1, 2]) == {}, "nobody waits for a prefill"
    (spec,) = rig.drafter.specs
    assert (spec.token_ids, spec.verifier_address) == ([1, 2], "here:2")
    assert spec.parameters.sampling.temperature == 0.0
    assert not spec.parameters.rule.needs_draft_probs
    blocks = await rig.ask(r0=[1, 2, 3])
    rig.send(rig.drafter.asked[0], 4, 5, 6)
    assert blocks[0].result(0) == [4, 5, 6]
    blocks = await rig.ask(r0=[1, 2, 3, 4, 5, 9])
    assert rig.drafter.asked[1].token_ids == [4, 5, 9]
    assert not blocks[0].done()


async def test_texts_are_recognised_whatever_row_they_are_in() -> None:
    rig = Rig()
    await rig.ask(r0=[1, 2], r1=[1, 2], r2=[7])
    assert len(rig.drafter.specs) == 3, "equal texts have a session each"
    await rig.ask(r0=[7, 8], r1=[1, 2, 3], r2=[1, 2, 4])
    asked = {tuple(rig.drafter.texts[one.fence.session_id].ids) for one in rig.drafter.asked}
    assert asked == {(7, 8), (1, 2, 3), (1, 2, 4)}
    assert len(rig.drafter.specs) == 3
    for asked_for in rig.drafter.asked:
        rig.send(asked_for, 5)
    await rig.ask(r0=[1, 2, 9])
    assert len(rig.drafter.specs) == 4, "another text that begins alike"


async def test_block_of_another_prefix_or_with_an_error_is_not_taken() -> None:
    rig = Rig()
    await rig.ask(r0=[1])
    first = (await rig.ask(r0=[1, 2]))[0]
    (asked,) = rig.drafter.asked
    rig.send(asked, 5, draft=BlockViolationError(Violation.TOKEN_ID, "no"))
    rig.send(asked, 5, fence=replace(asked.fence, prefix_hash=1))
    rig.send(asked, 5, fence=replace(asked.fence, round=1))
    rig.send(asked, 5, fence=replace(asked.fence, session_id=1))
    assert not first.done()
    rig.send(asked, 6)
    rig.send(asked, 7)
    assert first.result(0) == [6], "the first one counts"


async def test_drafter_that_is_late_rests_longer_each_time_until_it_is_punctual() -> None:
    rig = Rig()
    text = [1]
    await rig.ask(r0=text)

    async def steps_until_asked(most: int = 4000) -> float:
        began, num_asked = rig.now, len(rig.drafter.asked)
        for _ in range(most):
            text.append(2)
            await rig.ask(r0=text)
            if len(rig.drafter.asked) > num_asked:
                return rig.now - began
            if rig.drafter.asked:
                rig.send(rig.drafter.asked[-1], 5)  # late
        raise AssertionError("it is never asked again")

    waits = [await steps_until_asked() for _ in range(4)]
    for number, waited in enumerate(waits[1:], 1):
        assert waited == pytest.approx(DEADLINE_S * 2**number, abs=0.03)
    rig.send(rig.drafter.asked[-1], 5)
    assert await steps_until_asked() == pytest.approx(0.01)
    assert await steps_until_asked() == pytest.approx(DEADLINE_S * 2, abs=0.03), "forgiven: it starts from the shortest"


async def test_drafter_that_is_late_is_not_forgiven_for_what_it_sent_before() -> None:
    rig = Rig()
    await rig.ask(r0=[1], r1=[2])
    await rig.ask(r0=[1, 1], r1=[2, 2])
    (punctual,) = (one for one in rig.drafter.asked if rig.drafter.texts[one.fence.session_id].ids == [1, 1])
    rig.send(punctual, 5)
    for length in range(3, 6):
        assert await rig.ask(r0=[1] * length, r1=[2] * length) == {}, "it rests"
    rig.now += 2 * DEADLINE_S
    assert set(await rig.ask(r0=[1] * 6, r1=[2] * 6)) == {0}


async def test_text_whose_block_is_missing_is_not_asked_for_again() -> None:
    slow, quick = FakeDrafterLink("slow:1"), FakeDrafterLink("quick:1")
    rig = Rig(slow, quick)
    await rig.ask(r0=[1], r1=[2])
    assert (slow.num_sessions, quick.num_sessions) == (1, 1), "the one with the fewest sessions"
    await rig.ask(r0=[1, 1], r1=[2, 2])
    rig.send(quick.asked[0], 5)
    rig.now += 100 * DEADLINE_S
    assert set(await rig.ask(r0=[1, 1, 1], r1=[2, 2, 2])) == {1}
    rig.send(quick.asked[1], 5)
    rig.now += 100 * DEADLINE_S
    assert set(await rig.ask(r0=[1, 1, 1, 1], r1=[2, 2, 2, 2])) == {1}, "its block has not come yet"
    assert len(slow.asked) == 1


@pytest.mark.parametrize("how", ["refused", "lost"])
async def test_text_whose_drafter_fails_goes_to_another_one_after_a_while(how: str) -> None:
    bad, good = FakeDrafterLink("bad:1"), FakeDrafterLink("good:1")
    rig = Rig(bad, good)
    if how == "refused":
        bad.refusal = NoRoomError("full")
        await rig.ask(r0=[1])
    else:
        await rig.ask(r0=[1])
        waiting = (await rig.ask(r0=[1, 1]))[0]
        bad.inboxes[bad.specs[0].session_id].put_nowait(DrafterLost(UnavailableError("gone")))
        assert waiting.result(0) == [], "nobody waits until the deadline"
    bad.connected = False
    assert await rig.ask(r0=[1, 1, 1]) == {}
    assert not good.specs
    rig.now += RETRY_SECONDS
    await rig.ask(r0=[1, 1, 1, 1])
    assert set(await rig.ask(r0=[1, 1, 1, 1, 1])) == {0}
    assert len(good.asked) == 1


async def test_drafter_that_refuses_everybody_keeps_no_text_from_another_one() -> None:
    bad, good = FakeDrafterLink("bad:1"), FakeDrafterLink("good:1")
    bad.refusal = NoRoomError("full")
    rig = Rig(bad, good)
    for length in range(1, 6):
        await rig.ask(r0=[1] * length, r1=[2] * length, r2=[3] * length)
        rig.now += RETRY_SECONDS / 2
    assert good.num_sessions == 3


async def test_drafter_that_keeps_refusing_is_sent_less_until_it_opens_a_session() -> None:
    rig = Rig()
    drafter, text = rig.drafter, [1]
    refused_at: list[float] = []

    async def refuse(spec: DraftSessionSpec, inbox: Any) -> None:
        refused_at.append(rig.now)
        raise NoRoomError("full")

    async def steps(seconds: float) -> None:
        ends_at = rig.now + seconds
        while rig.now < ends_at:
            text.append(2)
            await rig.ask(r0=text, r1=[9, *text])
            rig.now += 0.09

    with patch.object(drafter, "open", refuse):
        await steps(50.0)
    waits = [after - before for before, after in pairwise(refused_at) if after > before]
    expected = [RETRY_SECONDS * 2 ** min(number, MOST_REFUSALS) for number in range(1, len(waits) + 1)]
    assert waits == pytest.approx(expected, abs=0.5)
    assert len(waits) > MOST_REFUSALS
    await steps(RETRY_SECONDS * 2**MOST_REFUSALS + 1)
    assert drafter.num_sessions == 2
    drafter.inboxes[drafter.specs[0].session_id].put_nowait(DrafterLost(UnavailableError("gone")))
    await steps(RETRY_SECONDS * 2 + 1)
    assert len(drafter.specs) == 3, "it starts from the shortest rest"


async def test_drafter_that_needs_the_targets_features_is_not_used() -> None:
    needy, other = FakeDrafterLink("needy:1"), FakeDrafterLink("other:1")
    needy.description.capabilities = frozenset({NEEDS_FEATURES})
    await Rig(needy, other).ask(r0=[1], r1=[2])
    assert (len(needy.specs), len(other.specs)) == (0, 2)


async def test_row_is_compared_as_a_whole_with_few_texts() -> None:
    rig = Rig()
    many = 3 * MOST_COMPARED
    rows = {row: np.array([row, 7], np.int32) for row in range(many)}
    rig.texts.ask(rows)
    compare = DraftedText.is_continued_by
    with patch.object(DraftedText, "is_continued_by", autospec=True, side_effect=compare) as compared:
        rig.texts.ask({many: np.array([99, 8], np.int32)})
        assert compared.call_count == 0, "none ends so"
        rig.texts.ask({many + 1: np.array([99, 7, 5], np.int32)})
        assert compared.call_count == MOST_COMPARED
        rig.texts.ask({many + 2: np.array([MOST_COMPARED - 1, 7, 5], np.int32)})
    assert len(rig.texts.texts) == many + 2, "the last row continues a text"


async def test_session_that_is_full_is_opened_again_up_to_the_longest_text() -> None:
    rig = Rig(context_length=RESERVED_TOKENS + 10)
    await rig.ask(r0=[1] * 6)
    assert rig.drafter.specs[0].max_len == RESERVED_TOKENS + 6
    blocks = await rig.ask(r0=[1] * (RESERVED_TOKENS + 4))
    assert rig.drafter.asked[-1].num_draft_tokens == 2, "no further than its room"
    rig.send(rig.drafter.asked[-1], 5, 5, 5)
    assert not blocks[0].done(), "longer than was requested"
    rig.send(rig.drafter.asked[-1], 5)
    await rig.ask(r0=[1] * (RESERVED_TOKENS + 6))
    assert rig.drafter.closed == [rig.drafter.specs[0].session_id]
    assert rig.drafter.specs[1].max_len == RESERVED_TOKENS + 10
    await rig.ask(r0=[1] * (RESERVED_TOKENS + 9))
    assert rig.drafter.asked[-1].num_draft_tokens == 1
    rig.send(rig.drafter.asked[-1], 5)
    assert await rig.ask(r0=[1] * (RESERVED_TOKENS + 10)) == {}
    await rig.ask(r0=[1] * (RESERVED_TOKENS + 10))
    assert len(rig.drafter.specs) == 2, "there is nothing more to draft"


async def test_text_longer_than_a_drafters_context_is_not_opened_on_it() -> None:
    rig = Rig(FakeDrafterLink(context_length=4))
    await rig.ask(r0=[1] * 4)
    assert not rig.drafter.specs


async def test_ended_texts_are_closed() -> None:
    rig = Rig()
    await rig.ask(r0=[1], r1=[2])
    ended = next(one.session_id for one in rig.drafter.specs if one.token_ids == [2])
    rig.now += ABSENT_SECONDS
    await rig.ask(r0=[1, 1])
    assert rig.drafter.closed == [ended]
    rig.now += IDLE_SECONDS
    rig.texts.end(IDLE_SECONDS)
    assert not rig.drafter.texts
    assert not rig.texts.texts


# Settings


def settings(**given: Any) -> RemoteDrafterSettings:
    return parse_settings({"draftwire": {"drafters": ["localhost:1"], **given}})


def test_settings_are_those_of_the_additional_config() -> None:
    found = settings(port=7, deadline_ms=50)
    assert (found.drafters, found.port, found.deadline_ms, found.tls.tls_ca) == (("localhost:1",), 7, 50, None)
    assert settings(host="0.0.0.0", address="me:7", allow_plaintext=True).tls.allow_plaintext


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_settings({}), "--additional-config must be"),
        (lambda: parse_settings({"draftwire": {}}), "at least one drafter"),
        (lambda: settings(drafters=[]), "at least one drafter"),
        (lambda: settings(drafters="localhost:1"), "wrong type"),
        (lambda: settings(deadline=5), "did you mean deadline_ms"),
        (lambda: settings(deadline_ms=0), "deadline_ms must be in"),
        (lambda: settings(port=True), "wrong type"),
        (lambda: settings(host="0.0.0.0", allow_plaintext=True), "address must say"),
        (lambda: settings(host="10.0.0.1"), "set tls_cert"),
        (lambda: settings(drafters=["far:1"]), "set tls_ca"),
    ],
)
def test_bad_settings_are_refused_in_words(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make()
