"""What each service records of a traced session, and that it records nothing of others."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, AsyncMock, Mock

import pytest
from gateway_fakes import FakeDrafter, FakeTarget, Fate, collect, make_loop
from observing import until
from opentelemetry.trace import SpanContext
from session_specs import draft_spec, target_spec
from virtual_time import run

from draftwire.engine.draft_session import Step as DraftStep
from draftwire.engine.draft_session import StepItem as DraftItem
from draftwire.engine.target_session import Step, StepItem
from draftwire.errors import UnavailableError
from draftwire.method.encoding import DraftDistributions
from draftwire.method.keys import KEY_BYTES
from draftwire.method.quantization import Encoding
from draftwire.method.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftTimings,
    Fence,
    Permit,
    Verdict,
)
from draftwire.method.token_source import TokenSource
from draftwire.options.ahead.branch_drafter import BranchItem, BranchWork
from draftwire.options.ahead.branches import Branch
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import ModelSettings
from draftwire.runtime.traceparent import traceparent_of
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.scheduler import Completed
from draftwire_drafter.spans import DrafterSpans
from draftwire_gateway.session.ports import DrafterLost
from draftwire_gateway.session.spans import ChoiceSpans
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.spans import VerifierSpans
from tests.trace_collector import span_context

PARENT = span_context(11, 22)
UNSAMPLED = span_context(11, 33, is_sampled=False)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span."""

    name: str
    parent: SpanContext | None
    started_at: float
    ended_at: float
    attributes: Mapping[str, Any]

    @property
    def where(self) -> tuple[object, ...]:
        return self.name, self.parent, self.started_at, self.ended_at

    def says(self, **values: object) -> bool:
        """Whether these are among the attributes."""
        return {f"draftwire.{name}": value for name, value in values.items()}.items() <= self.attributes.items()


def new_span() -> Mock:
    return Mock(context=PARENT)


@dataclass
class FakeTracer:
    """Keeps spans."""

    spans: list[Recorded] = field(default_factory=list)

    def record(self, *span: Any) -> None:
        self.spans.append(Recorded(*span))

    def take(self) -> list[Recorded]:
        spans, self.spans = self.spans, []
        return spans


def spec_of(session_id: int, traceparent: str = traceparent_of(PARENT)) -> Any:
    """As much of a session's opening as is looked at."""
    told = SimpleNamespace(traceparent=traceparent)
    return SimpleNamespace(session_id=session_id, parameters=told, epoch=0, token_ids=(1, 2, 3))


def session_of(session_id: int) -> Any:
    """As much of a session as is looked at."""
    return SimpleNamespace(
        session_id=session_id, key=(session_id, 0), num_reused=2, spec=SimpleNamespace(max_held_blocks=0)
    )


def verdict_of(session_id: int, number: int, num_draft_tokens: int = 0, num_accepted: int = 0) -> Verdict:
    return Verdict(
        fence=Fence(session_id, 0, number, 3, 99),
        token_ids=[5] * (num_accepted + 1),
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted,
        extra=TokenSource.RECOVERED if num_draft_tokens else TokenSource.PLAIN,
        plain_rounds_left=0,
        verify_us=700,
        queue_us=30,
        num_cached_tokens=2,
    )


def verifier_step(*sessions: Any) -> Step:
    return Step([StepItem(session, None, 1) for session in sessions], started_at=0.0)


# Verifier


def test_prompt_is_one_span_however_many_steps_read_it() -> None:
    tracer = FakeTracer()
    spans, session, other = VerifierSpans(tracer), session_of(1), session_of(2)
    spans.open(spec_of(1))
    spans.add(verifier_step(other), [(other, verdict_of(2, 0))], 10.0, 10.5)
    spans.add(verifier_step(session, other), [], 11.0, 11.5)
    spans.add(verifier_step(session), [], 12.0, 12.5)
    assert tracer.spans == []
    spans.add(verifier_step(session, other), [(session, verdict_of(1, 0))], 13.0, 13.5)
    read, verify = tracer.take()
    assert read.where == ("read prompt", PARENT, 11.0, 13.5)
    assert read.says(num_prompt_tokens=3, num_reused_tokens=2, num_steps=3)
    assert verify.where == ("verify", PARENT, 13.0, 13.5)
    assert verify.says(round=0, num_sessions=2, extra_token="plain", queue_us=30, verify_us=700)
    spans.add(verifier_step(session), [(session, verdict_of(1, 1, 4, 2))], 14.0, 14.5)
    (verify,) = tracer.take()
    assert verify.says(round=1, num_draft_tokens=4, num_accepted_tokens=2)


def drafter_step(*sessions: Any) -> DraftStep:
    return DraftStep([DraftItem(session, 3, [8, 9], None, None) for session in sessions])


def completed(*sessions: Any) -> list[Completed]:
    return [Completed(session, block_of(session.session_id, 6, 4), False) for session in sessions]


@pytest.mark.parametrize("traceparent", ["", traceparent_of(UNSAMPLED)])
def test_nothing_is_recorded_of_a_session_that_is_not_traced(traceparent: str) -> None:
    tracer, session = FakeTracer(), session_of(1)
    verifier, drafter = VerifierSpans(tracer), DrafterSpans(tracer)
    for spans in (verifier, drafter):
        spans.open(spec_of(1, traceparent))
        spans.open(spec_of(2))
    verifier.add(verifier_step(session), [(session, verdict_of(1, 0))], 1.0, 2.0)
    drafter.add(drafter_step(session), completed(session), 1.0, 2.0)
    assert tracer.spans == []


@pytest.mark.parametrize("spans_of", [VerifierSpans, DrafterSpans])
def test_closed_sessions_are_forgotten(spans_of: Any) -> None:
    spans = spans_of(FakeTracer())
    spans.open(spec_of(1))
    assert spans._sessions
    for _ in range(2):
        spans.close((1, 0))
        assert not spans._sessions


# Drafter


def block_of(session_id: int, number: int, num_tokens: int) -> DraftBlock:
    nothing = DraftDistributions(Encoding.NONE, 320)
    timings = DraftTimings(calibration_us=2000, draft_us=5000)
    return DraftBlock(Fence(session_id, 0, number, 3, 99), [7] * num_tokens, nothing, timings)


def test_drafter_records_its_prompt_and_both_halves_of_each_block() -> None:
    tracer = FakeTracer()
    spans, session, other = DrafterSpans(tracer), session_of(1), session_of(2)
    spans.open(spec_of(1))
    reading = DraftStep([DraftItem(session, 3, [], None, 2)])
    spans.add(reading, [Completed(session, None, False)], 1.0, 1.5)
    assert tracer.spans == []
    spans.add(reading, [Completed(session, None, True)], 2.0, 2.5)
    (read,) = tracer.take()
    assert read.where == ("read prompt", PARENT, 1.0, 2.5)
    assert read.says(num_prompt_tokens=3, num_reused_tokens=2, num_steps=2)
    spans.add(drafter_step(other, session), completed(other, session), 5.0, 6.0)
    calibrate, draft = tracer.take()
    assert calibrate.where == ("calibrate", PARENT, 5.0, pytest.approx(5.002))
    assert draft.where == ("draft", PARENT, pytest.approx(5.002), pytest.approx(5.007))
    of_both = {"round": 6, "epoch": 0, "num_sessions": 2}
    assert calibrate.says(num_tokens=2, **of_both)
    assert draft.says(num_draft_tokens=4, is_ahead=False, **of_both)


def test_block_that_is_drafted_ahead_is_recorded_without_a_calibration() -> None:
    tracer = FakeTracer()
    spans, session = DrafterSpans(tracer), session_of(1)
    spans.open(spec_of(1))
    (requested,) = completed(session)
    assert isinstance(requested.outcome, DraftBlock)
    block = replace(requested.outcome, is_ahead=True)
    branches = [BranchItem(session, Branch(block.fence, []), None) for _ in range(2)]
    work = BranchWork(branches, None)  # type: ignore[arg-type]
    spans.add(DraftStep([], work), [Completed(session, block, False)], 5.0, 6.0)
    (draft,) = tracer.take()
    assert draft.name == "draft"
    assert draft.says(num_draft_tokens=4, is_ahead=True, round=6, num_sessions=1)


# In the cores


SESSION: dict[str, Any] = {
    "session_id": 1,
    "epoch": 0,
    "choice": 0,
    "token_ids": [1, 2, 3],
    "prompt_len": 3,
    "sampling": SamplingParams(),
    "rule": "block",
    "max_draft_tokens": 4,
    "stop_token_ids": frozenset(),
    "max_len": 20,
    "traceparent": traceparent_of(PARENT),
}


@asynccontextmanager
async def running(core: Any, spans: Any, tracer: FakeTracer, *expected: tuple[str, int | None]) -> AsyncIterator[int]:
    """Runs a core, yields a lease, and checks that spans were recorded and that nothing is left of them."""
    await core.start()
    core.spans = spans
    lease_id, _ = core.open_lease()
    task, started = asyncio.create_task(core.run()), time.perf_counter()
    try:
        yield lease_id
        await until(lambda: len(tracer.spans) == len(expected), "all spans are recorded", 20.0)
        assert [(span.name, span.attributes.get("draftwire.round")) for span in tracer.spans] == list(expected)
        assert all(started <= span.started_at <= span.ended_at <= time.perf_counter() for span in tracer.spans)
        assert spans._sessions
        core.end_lease(lease_id)
        assert not spans._sessions
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        core.stop()


async def test_verifier_records_until_a_session_closes_and_keeps_nothing_of_it() -> None:
    tracer, core = FakeTracer(), VerifierCore(VerifierConfig(ModelSettings("scripted:")))
    expected = (("read prompt", None), ("verify", 5), ("verify", 6))
    verifying = {"first_round": 5, "verifying_key": bytes(KEY_BYTES), "plain_rounds": 2}
    async with running(core, VerifierSpans(tracer), tracer, *expected) as lease_id:
        core.open_session(target_spec(**SESSION, **verifying), lease_id)


async def test_drafter_records_until_a_session_closes_and_keeps_nothing_of_it() -> None:
    connect = AsyncMock(return_value=Mock(broken=False))
    tracer, core = FakeTracer(), DrafterCore(DrafterConfig(ModelSettings("scripted:")), connect)
    expected = (("read prompt", None), ("calibrate", 7), ("draft", 7))
    drafting = {"drafting_key": bytes(KEY_BYTES), "verifier_address": "a:1", "target_vocab_size": 320}
    async with running(core, DrafterSpans(tracer), tracer, *expected) as lease_id:
        await core.open_session(draft_spec(**SESSION, **drafting, permit=Permit(0, bytes(KEY_BYTES))), lease_id)
        core.calibrate(Calibration(Fence(1, 0, 7, 3, CommittedTokens([1, 2, 3]).hash), 3, [], 4))


# Gateway


def test_every_session_of_a_choice_opens_with_its_span_and_notes_events() -> None:
    span, tracer = new_span(), FakeTracer()

    async def scenario() -> tuple[Any, list[str], list[str]]:
        first, second = FakeTarget(address="v:1"), FakeTarget(address="v:2")
        drafters = [FakeDrafter(first, second, instance_id=number) for number in (7, 8)]
        first.next_fate = lambda: Fate.LOST_UNTOLD if len(first.verdicts) == 6 else Fate.TOLD

        def lose_a_drafter(count: int) -> None:
            if count == 3:
                drafters[0].tell(DrafterLost(UnavailableError("gone")))

        first.after_verdict = lose_a_drafter
        spans = ChoiceSpans(tracer, span)
        loop = make_loop([first, second], drafters, observers=[spans.add_round], spans=spans, max_tokens=30)
        statistics = (await collect(loop)).finish.statistics
        targets = [spec.parameters.traceparent for spec in (*first.attempts, *second.attempts)]
        return statistics, targets, [s.spec.parameters.traceparent for each in drafters for s in each.sessions]

    statistics, targets, drafted = run(scenario())
    assert (targets, drafted) == ([traceparent_of(PARENT)] * 2, [traceparent_of(PARENT)] * 3)
    events = [call.args for call in span.add_event.call_args_list]
    assert [
        (name, attributes.get("draftwire.address")) for name, attributes in events if name.startswith("verifier")
    ] == [("verifier opened", "v:1"), ("verifier lost", ANY), ("verifier opened", "v:2")]
    names = [name for name, _ in events]
    assert names.count("drafter lost") == statistics.num_drafters_lost == 1
    assert names.count("drafter ready") == 3
    assert statistics.num_drafts > 3
    assert [each.parent for each in tracer.spans] == [PARENT] * statistics.num_rounds
    span.end.assert_called_once_with(ANY, "")
    attributes = span.end.call_args.args[0]
    assert attributes["draftwire.finish_reason"] == "length"
    assert attributes["draftwire.num_verifiers_lost"] == 1


def test_choice_that_fails_says_so() -> None:
    span = new_span()

    async def scenario() -> None:
        with pytest.raises(UnavailableError):
            await collect(make_loop([], None, spans=ChoiceSpans(FakeTracer(), span)))

    run(scenario())
    span.end.assert_called_once_with(ANY, "not finished")
    assert span.end.call_args.args[0]["draftwire.finish_reason"] == ""


def test_session_that_is_not_traced_is_opened_without_a_span() -> None:
    target = FakeTarget()
    run(collect(make_loop(target, None)))
    assert [spec.parameters.traceparent for spec in target.attempts] == [""]
