"""Whether a verifier answers: when it gets no new sessions, and when running ones leave it. In virtual time."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import grpc
import pytest
from gateway_fakes import describe
from grpc_health.v1 import health_pb2
from virtual_time import in_virtual_time, now

from draftwire.errors import UnavailableError
from draftwire.runtime.settings import ConnectionSettings
from draftwire_gateway.peers import wire
from draftwire_gateway.peers.answer_watch import ANSWER_SECONDS, BEAT_SECONDS, RETRY_SECONDS, AnswerWatch
from draftwire_gateway.peers.wire import VerifierLink

LOST_AFTER_S = 10.0


class Verifier:
    """Answers, unless it is frozen."""

    def __init__(self) -> None:
        self.is_frozen, self.is_ready = False, True
        self.num_silences = 0

    async def ask(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s if self.is_frozen else 0.001)
        if self.is_frozen:
            raise UnavailableError("v:1 does not answer")
        return self.is_ready

    def end_openings(self) -> None:
        self.num_silences += 1

    def watch(self, lost_after_s: float = LOST_AFTER_S) -> AnswerWatch:
        return AnswerWatch(self.ask, lost_after_s, self.end_openings)


@in_virtual_time
async def test_frozen_verifier_gets_no_session_after_3_s_and_is_lost_after_11_s() -> None:
    verifier = Verifier()
    watch = verifier.watch()
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(5.0)
    assert watch.is_well
    verifier.is_frozen, frozen_at = True, now()
    await asyncio.sleep(BEAT_SECONDS + ANSWER_SECONDS + 0.01)
    assert (watch.is_silent, watch.is_well, verifier.num_silences) == (True, False, 1)
    assert not watching.done()
    with pytest.raises(UnavailableError, match="v:1 does not answer"):
        await watching
    assert now() - frozen_at <= LOST_AFTER_S + BEAT_SECONDS + 4 * RETRY_SECONDS + 0.01
    assert now() - frozen_at > LOST_AFTER_S


@in_virtual_time
async def test_verifier_that_goes_on_in_time_is_well_again() -> None:
    verifier = Verifier()
    watch = verifier.watch()
    watching = asyncio.create_task(watch.run())
    for _ in range(3):
        verifier.is_frozen = True
        await asyncio.sleep(LOST_AFTER_S - 1.0)
        assert watch.is_silent
        verifier.is_frozen = False
        await asyncio.sleep(ANSWER_SECONDS + RETRY_SECONDS + 0.1)
        assert watch.is_well
    assert not watching.done()
    watching.cancel()


@in_virtual_time
async def test_other_signs_of_life_count_and_an_unready_verifier_is_not_well() -> None:
    verifier = Verifier()
    watch = verifier.watch()
    watching = asyncio.create_task(watch.run())
    verifier.is_frozen = True
    for _ in range(100):  # questions wait behind its work
        watch.note_sign()
        await asyncio.sleep(1.0)
    assert not watching.done()
    verifier.is_frozen = verifier.is_ready = False
    await asyncio.sleep(5.0)
    assert (watch.is_silent, watch.is_well) == (False, False)
    watching.cancel()


@in_virtual_time
async def test_one_missed_question_is_never_enough_to_leave() -> None:
    watch = Verifier().watch(lost_after_s=1.0)
    watch._ask = AsyncMock(side_effect=[True, UnavailableError("late"), True, *[UnavailableError("late")] * 2])
    with pytest.raises(UnavailableError):
        await watch.run()
    assert watch._ask.await_count == 5


def link_of_verifier() -> VerifierLink:
    return VerifierLink("v:1", MagicMock(connections=ConnectionSettings()), 60.0, 4)


@in_virtual_time
async def test_link_to_a_silent_verifier_breaks_and_no_opening_waits_for_it() -> None:
    """`open` waits for its call, which the watch ends; `maintain` then loses the sessions that are open."""
    link, verifier = link_of_verifier(), Verifier()
    link._ask_health = verifier.ask  # type: ignore[method-assign]
    link.description, link._lease_id = describe("target"), 1

    class Call:
        """Of OpenTargetSession; as gRPC's, it raises in whoever waits when it is cancelled."""

        def __init__(self) -> None:
            self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def __await__(self) -> Any:
            return self._answer.__await__()

        def cancel(self) -> bool:
            return self._answer.cancel()

    stub = MagicMock(OpenTargetSession=lambda *_, **__: Call())
    streaming = asyncio.Event()

    class Stream:
        def __aiter__(self) -> "Stream":
            return self

        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

        def cancel(self) -> None:
            streaming.set()

    with (
        patch.object(link, "_open_stream", lambda _: Stream()),
        patch.object(wire.verifier_pb2_grpc, "VerifierServiceStub", lambda _: stub),
        patch.object(wire.messages, "target_spec_to_proto", MagicMock()),
    ):
        running = asyncio.create_task(link._run_stream())
        await asyncio.sleep(0.1)
        verifier.is_frozen, frozen_at = True, now()
        opening = asyncio.create_task(link.open(MagicMock(session_id=1, epoch=0), MagicMock()))
        leaving = asyncio.create_task(link.open(MagicMock(session_id=2, epoch=0), MagicMock()))
        await asyncio.sleep(0.1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(UnavailableError, match="v:1 does not answer"):
            await opening
        assert now() - frozen_at < BEAT_SECONDS + ANSWER_SECONDS + 0.01
        assert (link.is_silent, link.is_well, streaming.is_set()) == (True, False, False)
        with pytest.raises(UnavailableError, match="v:1 does not answer"):
            await running
        assert streaming.is_set()


@pytest.mark.parametrize(
    ("code", "is_answer"), [("DEADLINE_EXCEEDED", False), ("UNAVAILABLE", False), ("RESOURCE_EXHAUSTED", True)]
)
async def test_refusal_is_an_answer_and_a_deadline_is_none(code: str, is_answer: bool) -> None:
    link = link_of_verifier()
    status = (grpc.StatusCode[code], grpc.aio.Metadata(), grpc.aio.Metadata())
    check = AsyncMock(side_effect=grpc.aio.AioRpcError(*status))
    with patch.object(wire.health_pb2_grpc, "HealthStub", lambda _: MagicMock(Check=check)):
        if is_answer:
            assert await link._ask_health(1.0)
        else:
            with pytest.raises(UnavailableError):
                await link._ask_health(1.0)
        for status, is_ready in (("SERVING", True), ("NOT_SERVING", False)):
            check.side_effect, check.return_value = None, health_pb2.HealthCheckResponse(status=status)
            assert await link._ask_health(1.0) == is_ready
