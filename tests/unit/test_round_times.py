"""Where the time of rounds goes: the rounds of a session lie end to end, and the parts of each sum to it."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from gateway_fakes import FakeDrafter, FakeTarget, Fate, collect, make_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from draftwire.method.round_parts import GuessPart
from draftwire.method.rounds import DraftTimings, Fence, Verdict
from draftwire.method.token_source import TokenSource
from draftwire_gateway.options.mask_allowance import mask_s
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.round_times import RoundTimes, RoundWatch, WhyPlain


def verdict(
    number: int = 0, *, drafted: int = 0, left: int = 0, local_strategy: str = "", **microseconds: int
) -> Verdict:
    return Verdict(
        fence=Fence(7, 2, number, 5, 0),
        token_ids=[1] * (1 + drafted // 2),
        num_draft_tokens=drafted,
        num_accepted_tokens=drafted // 2,
        extra=TokenSource.RECOVERED if drafted else TokenSource.PLAIN,
        plain_rounds_left=left,
        verify_us=microseconds.get("verify", 0),
        queue_us=microseconds.get("queue", 0),
        timings=DraftTimings(microseconds.get("calibration", 0), microseconds.get("draft", 0)),
        mask_us=microseconds.get("mask", 0),
        guess=GuessPart(local_strategy) if local_strategy else None,
    )


def watched(*steps: WhyPlain | float | Verdict, opens: bool = False) -> list[RoundTimes]:
    """Returns what a watch tells of steps: a round is asked for, seconds pass, a verdict is taken.

    Args:
        steps: one after the other.
        opens: whether the first round opens the session.
    """
    told: list[RoundTimes] = []
    now = 100.0
    watch = RoundWatch([told.append], lambda: now)
    for number, step in enumerate(steps):
        if isinstance(step, WhyPlain):
            watch.ask(step, opens=opens and number == 0)
        elif isinstance(step, Verdict):
            watch.take(step, now)
        else:
            now += step
    watch.end()
    assert_whole(told)
    return told


def assert_whole(rounds: list[RoundTimes]) -> None:
    """The rounds tile the time, and the parts tile each round."""
    for times in rounds:
        inside = times.lost_s + times.prefill_s + times.calibration_s + times.draft_s
        inside += times.queue_s + times.verify_s + times.wire_s
        assert inside == pytest.approx(times.ended_at - times.started_at, abs=1e-9)
        assert inside + times.gateway_s == pytest.approx(times.duration_s, abs=1e-9)
        parts = [getattr(times, name) for name in RoundTimes.__slots__ if name.endswith("_s")]
        assert min(parts) >= 0.0
    for before, after in pairwise(rounds):
        assert after.started_at == pytest.approx(before.started_at + before.duration_s, abs=1e-9)


def test_first_round_is_prefill_and_the_next_has_its_parts() -> None:
    first, second = watched(
        WhyPlain.WARMING_UP,
        0.5,
        verdict(0, queue=400_000, verify=90_000),
        0.001,
        WhyPlain.EMPTY_BLOCK,
        0.1,
        verdict(1, drafted=4, queue=5_000, verify=30_000, calibration=3_000, draft=20_000),
        0.002,
        opens=True,
    )
    assert (first.is_first, first.why_plain) == (True, WhyPlain.WARMING_UP)
    assert (first.prefill_s, first.gateway_s) == pytest.approx((0.5, 0.001))
    assert first.queue_s == first.verify_s == first.wire_s == 0.0
    fence = second.verdict.fence
    assert (fence.epoch, fence.round, second.is_first, second.why_plain, second.lost_s) == (2, 1, False, None, 0.0)
    assert (second.verdict.num_draft_tokens, second.verdict.num_accepted_tokens, second.num_tokens) == (4, 2, 3)
    assert (second.queue_s, second.verify_s) == pytest.approx((0.005, 0.03))
    assert (second.calibration_s, second.draft_s) == pytest.approx((0.003, 0.02))
    assert (second.wire_s, second.gateway_s) == pytest.approx((0.1 - 0.058, 0.002))


def test_rounds_of_a_plain_run_start_with_the_verdict_before_them() -> None:
    """Also where the loop was busy when a verdict came, and takes it later."""
    now, told = 100.0, list[RoundTimes]()
    watch = RoundWatch([told.append], lambda: now)
    watch.ask(WhyPlain.NO_DRAFTER, opens=True)
    for left in (2, 1, 0):
        now += 0.014
        watch.take(verdict(2 - left, left=left, verify=2_000), now - 0.004)
    watch.end()
    assert [times.duration_s for times in told] == pytest.approx([0.01, 0.014, 0.018])
    assert [times.gateway_s for times in told] == pytest.approx([0.0, 0.0, 0.004])
    assert [times.is_first for times in told] == [True, False, False]
    assert told[1].wire_s == pytest.approx(0.012)
    assert_whole(told)


def test_report_of_a_round_does_not_delay_the_request_of_the_next() -> None:
    told = list[RoundTimes]()
    watch = RoundWatch([told.append], lambda: 100.0)
    watch.ask(WhyPlain.EMPTY_BLOCK)
    watch.take(verdict(0, drafted=4), 100.0)
    watch.ask(WhyPlain.EMPTY_BLOCK)
    assert told == [], "the request is sent first"
    watch.report()
    watch.report()
    assert [times.verdict.fence.round for times in told] == [0]
    watch.take(verdict(1, drafted=4), 100.0)
    watch.ask(WhyPlain.EMPTY_BLOCK)
    watch.take(verdict(2, drafted=4), 100.0)
    watch.ask(WhyPlain.EMPTY_BLOCK)
    watch.end()
    assert [times.verdict.fence.round for times in told] == [0, 1, 2], "in their order, and none is lost"


def test_waiting_for_a_drafter_that_is_given_up_is_a_part_of_its_own() -> None:
    (times,) = watched(WhyPlain.EMPTY_BLOCK, 5.0, WhyPlain.NO_DRAFTER, 0.02, verdict(verify=15_000))
    assert (times.lost_s, times.verify_s, times.wire_s) == pytest.approx((5.0, 0.015, 0.005))
    assert times.why_plain is WhyPlain.NO_DRAFTER


def test_block_of_a_drafter_given_up_was_not_waited_for_in_vain() -> None:
    (times,) = watched(WhyPlain.EMPTY_BLOCK, 0.4, WhyPlain.NO_DRAFTER, 0.1, verdict(drafted=2, draft=300_000))
    assert (times.lost_s, times.draft_s, times.wire_s) == pytest.approx((0.0, 0.3, 0.2))
    assert times.why_plain is None


def test_services_that_claim_more_than_the_round_took_are_cut() -> None:
    claim = verdict(drafted=4, verify=8_000, queue=4_000, draft=9_000, calibration=1_000)
    (times,) = watched(WhyPlain.EMPTY_BLOCK, 0.01, claim)
    assert (times.verify_s, times.queue_s, times.draft_s) == pytest.approx((0.008, 0.002, 0.0), abs=1e-9)


@pytest.mark.parametrize(
    ("drafted", "local_strategy", "mask_us", "expected_s"),
    [(0, "", 500, 500e-6), (4, "", 500, 900e-6), (4, "suffix", 500, 500e-6), (4, "", 10**9, 0.02)],
)
def test_masks_count_with_the_drafters_and_never_beyond_the_round(
    drafted: int, local_strategy: str, mask_us: int, expected_s: float
) -> None:
    """A drafter makes one before each of its tokens, the verifier another one behind the last."""
    claim = verdict(drafted=drafted, local_strategy=local_strategy, mask=mask_us)
    (times,) = watched(WhyPlain.EMPTY_BLOCK, 0.01, claim)
    assert mask_s(times) == pytest.approx(expected_s)


def observed(target: FakeTarget, drafter: Any, **arguments: Any) -> tuple[list[RoundTimes], int]:
    told: list[RoundTimes] = []
    result = run(collect(make_loop(target, drafter, observers=[told.append], **arguments)))
    return told, len(result.ids)


@settings(max_examples=60)
@given(
    accepts=st.lists(st.integers(0, 4), max_size=20),
    num_speculative_tokens=st.integers(0, 4),
    ready_after=st.integers(0, 6),
    fates=st.lists(st.sampled_from(list(Fate)), max_size=12),
)
def test_every_committed_round_is_told_once_whatever_happens(
    accepts: list[int], num_speculative_tokens: int, ready_after: int, fates: list[Fate]
) -> None:
    target = FakeTarget(accepts=accepts)
    left = list(fates)
    target.next_fate = lambda: left.pop(0) if left and sum(f is not Fate.TOLD for f in fates) <= 2 else Fate.TOLD
    drafter = FakeDrafter(target)
    drafter.ready_after = ready_after
    told, num_tokens = observed(
        target,
        drafter,
        loop_settings=LoopSettings(bridge_rounds=2, plain_run_rounds=3),
        num_speculative_tokens=num_speculative_tokens,
    )
    assert [times.verdict.fence.round for times in told] == list(range(len(told)))
    assert sum(times.num_tokens for times in told) == num_tokens == 20
    assert_whole(told)
    epochs = [times.verdict.fence.epoch for times in told]
    assert [times.is_first for times in told] == [
        place == 0 or epoch != epochs[place - 1] for place, epoch in enumerate(epochs)
    ]
    assert all((times.why_plain is None) is (times.verdict.num_draft_tokens > 0) for times in told)
    if not num_speculative_tokens:
        assert {times.why_plain for times in told} == {WhyPlain.NOT_ASKED_FOR}


def test_plain_rounds_say_why() -> None:
    alone, _ = observed(FakeTarget(), None)
    assert {times.why_plain for times in alone} == {WhyPlain.NO_DRAFTER}
    target = FakeTarget(accepts=[4, 4])
    told, _ = observed(target, FakeDrafter(target), max_tokens=7)  # 1 plain, 5 of a block, and one is left
    assert [times.why_plain for times in told] == [WhyPlain.WARMING_UP, None, WhyPlain.NO_ROOM]


async def test_time_of_a_slow_reader_is_the_gateways_and_not_the_networks() -> None:
    told: list[RoundTimes] = []
    target = FakeTarget(accepts=[2] * 10)
    async for _ in make_loop(target, FakeDrafter(target), observers=[told.append], max_tokens=10).run():
        await asyncio.sleep(0.05)
    assert len(told) > 3
    assert max(times.wire_s for times in told) < 0.05 < max(times.gateway_s for times in told)
    assert_whole(told)
