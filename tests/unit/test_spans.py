"""What each service records of a traced session, and that it records nothing of others."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_fakes import FakeDrafter, FakeTarget, Fate, collect, make_loop, run

from draftwire.encoding import DraftDistributions
from draftwire.errors import UnavailableError
from draftwire.keys import KEY_BYTES
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.rounds import (
    Calibration,
    CommittedTokens,
    DraftBlock,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    Permit,
    TargetSessionSpec,
    Verdict,
)
from draftwire.services.drafter.config import DrafterConfig
from draftwire.services.drafter.core import DrafterCore
from draftwire.services.drafter.scheduler import Completed
from draftwire.services.drafter.scheduler import Step as DraftStep
from draftwire.services.drafter.scheduler import StepItem as DraftItem
from draftwire.services.drafter.spans import DrafterSpans
from draftwire.services.gateway.ports import DrafterLost
from draftwire.services.gateway.spans import ChoiceSpans
from draftwire.services.settings import ModelSettings
from draftwire.services.tracing import Attributes
from draftwire.services.verifier.config import VerifierConfig
from draftwire.services.verifier.core import VerifierCore
from draftwire.services.verifier.scheduler import Step, StepItem
from draftwire.services.verifier.spans import VerifierSpans
from draftwire.token_source import TokenSource
from draftwire.trace_context import TraceContext

PARENT = TraceContext(11, 22)
UNSAMPLED = TraceContext(11, 33, is_sampled=False)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span."""

    name: str
    parent: TraceContext | None
    started_at: float
    ended_at: float
    attributes: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.attributes[f"draftwire.{name}"]


@dataclass
class FakeSpan:
    """A span under way."""

    context: TraceContext = PARENT
    events: list[tuple[str, Attributes]] = field(default_factory=list)
    ended: list[tuple[Attributes, str]] = field(default_factory=list)

    def add_event(self, name: str, attributes: Attributes) -> None:
        self.events.append((name, attributes))

    def end(self, attributes: Attributes, error: str = "") -> None:
        self.ended.append((attributes, error))


@dataclass
class FakeTracer:
    """Keeps spans."""

    spans: list[Recorded] = field(default_factory=list)

    def start(
        self, name: str, parent: TraceContext | None, attributes: Attributes, *, is_entry: bool = False
    ) -> FakeSpan:
        return FakeSpan()

    def record(
        self, name: str, parent: TraceContext, started_at: float, ended_at: float, attributes: Attributes
    ) -> None:
        self.spans.append(Recorded(name, parent, started_at, ended_at, attributes))

    async def close(self) -> None:
        pass

    def take(self) -> list[Recorded]:
        spans, self.spans = self.spans, []
        return spans


@dataclass
class Spec:
    """As much of a session's opening as is looked at."""

    session_id: int
    traceparent: str = str(PARENT)
    epoch: int = 0
    token_ids: tuple[int, ...] = (1, 2, 3)


@dataclass(eq=False)
class Session:
    """As much of a session as is looked at."""

    session_id: int
    num_reused: int = 2

    @property
    def key(self) -> tuple[int, int]:
        return self.session_id, 0


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


def verifier_step(started_at: float, *sessions: Any) -> Step:
    return Step([StepItem(session, None, 1) for session in sessions], started_at)


# Verifier


def test_prompt_is_one_span_however_many_steps_read_it() -> None:
    tracer = FakeTracer()
    spans, session, other = VerifierSpans(tracer), Session(1), Session(2)
    spans.open(Spec(1))  # type: ignore[arg-type]
    spans.add(verifier_step(10.0, other), [(other, verdict_of(2, 0))], 10.5)  # type: ignore[list-item]
    spans.add(verifier_step(11.0, session, other), [], 11.5)
    spans.add(verifier_step(12.0, session), [], 12.5)
    assert tracer.spans == []
    spans.add(verifier_step(13.0, session, other), [(session, verdict_of(1, 0))], 13.5)  # type: ignore[list-item]
    read, verify = tracer.take()
    assert (read.name, read.parent, read.started_at, read.ended_at) == ("read prompt", PARENT, 11.0, 13.5)
    assert (read["num_prompt_tokens"], read["num_reused_tokens"], read["num_steps"]) == (3, 2, 3)
    assert (verify.name, verify.parent, verify.started_at, verify.ended_at) == ("verify", PARENT, 13.0, 13.5)
    assert (verify["round"], verify["num_sessions"], verify["extra_token"]) == (0, 2, "plain")
    assert (verify["queue_us"], verify["verify_us"]) == (30, 700)
    spans.add(verifier_step(14.0, session), [(session, verdict_of(1, 1, 4, 2))], 14.5)  # type: ignore[list-item]
    (verify,) = tracer.take()
    assert (verify["round"], verify["num_draft_tokens"], verify["num_accepted_tokens"]) == (1, 4, 2)


@pytest.mark.parametrize("traceparent", ["", str(UNSAMPLED)])
def test_verifier_records_nothing_of_a_session_that_is_not_traced(traceparent: str) -> None:
    tracer = FakeTracer()
    spans, session = VerifierSpans(tracer), Session(1)
    spans.open(Spec(1, traceparent))  # type: ignore[arg-type]
    spans.open(Spec(2))  # type: ignore[arg-type]
    spans.add(verifier_step(1.0, session), [(session, verdict_of(1, 0))], 2.0)  # type: ignore[list-item]
    assert tracer.spans == []


def test_closed_sessions_are_forgotten() -> None:
    tracer = FakeTracer()
    verifier, drafter = VerifierSpans(tracer), DrafterSpans(tracer)
    for spans in (verifier, drafter):
        spans.open(Spec(1))  # type: ignore[arg-type]
        assert spans._sessions
        spans.close((1, 0))
        spans.close((1, 0))
        assert not spans._sessions


# Drafter


def block_of(session_id: int, number: int, num_tokens: int) -> DraftBlock:
    nothing = DraftDistributions(Encoding.NONE, 320)
    timings = DraftTimings(calibration_us=2000, draft_us=5000)
    return DraftBlock(Fence(session_id, 0, number, 3, 99), [7] * num_tokens, nothing, 1, timings)


def test_drafter_records_its_prompt_and_both_halves_of_each_block() -> None:
    tracer = FakeTracer()
    spans, session, other = DrafterSpans(tracer), Session(1), Session(2)
    spans.open(Spec(1))  # type: ignore[arg-type]
    reading = DraftStep([DraftItem(session, 3, [], None, 2)])  # type: ignore[arg-type]
    spans.add(reading, [Completed(session, None, False)], 1.0, 1.5)  # type: ignore[arg-type]
    assert tracer.spans == []
    spans.add(reading, [Completed(session, None, True)], 2.0, 2.5)  # type: ignore[arg-type]
    (read,) = tracer.take()
    assert (read.name, read.parent, read.started_at, read.ended_at) == ("read prompt", PARENT, 1.0, 2.5)
    assert (read["num_prompt_tokens"], read["num_reused_tokens"], read["num_steps"]) == (3, 2, 2)
    items = [DraftItem(other, 3, [1], None, None), DraftItem(session, 3, [8, 9], None, None)]  # type: ignore[arg-type]
    done = [Completed(each, block_of(each.session_id, 6, 4), False) for each in (other, session)]  # type: ignore[arg-type]
    spans.add(DraftStep(items), done, 5.0, 6.0)
    calibrate, draft = tracer.take()
    assert [span.parent for span in (calibrate, draft)] == [PARENT, PARENT]
    assert (calibrate.name, calibrate.started_at, calibrate.ended_at) == ("calibrate", 5.0, pytest.approx(5.002))
    assert (draft.name, draft.started_at, draft.ended_at) == ("draft", pytest.approx(5.002), pytest.approx(5.007))
    assert (calibrate["num_tokens"], draft["num_draft_tokens"]) == (2, 4)
    for span in (calibrate, draft):
        assert (span["round"], span["epoch"], span["attempt"], span["num_sessions"]) == (6, 0, 1, 2)


def test_drafter_records_nothing_of_a_session_that_is_not_traced() -> None:
    tracer = FakeTracer()
    spans, session = DrafterSpans(tracer), Session(1)
    spans.open(Spec(1, str(UNSAMPLED)))  # type: ignore[arg-type]
    spans.open(Spec(2))  # type: ignore[arg-type]
    step = DraftStep([DraftItem(session, 3, [1], None, None)])  # type: ignore[arg-type]
    spans.add(step, [Completed(session, block_of(1, 0, 4), True)], 1.0, 2.0)  # type: ignore[arg-type]
    assert tracer.spans == []


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
    "traceparent": str(PARENT),
}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_verifier_records_until_a_session_is_closed_and_nothing_is_left_of_it() -> None:
    tracer = FakeTracer()
    core = VerifierCore(VerifierConfig(ModelSettings("scripted:")))
    await core.start()
    core.spans = VerifierSpans(tracer)
    lease_id, _ = core.open_lease()
    verifying = {"first_round": 5, "verifying_key": bytes(KEY_BYTES), "plain_rounds": 2}
    core.open_session(TargetSessionSpec(**SESSION, **verifying), lease_id)
    running, started = asyncio.create_task(core.run()), time.perf_counter()
    try:
        await until(lambda: len(tracer.spans) == 3)
        assert [(span.name, span.attributes.get("draftwire.round")) for span in tracer.spans] == [
            ("read prompt", None),
            ("verify", 5),
            ("verify", 6),
        ]
        assert all(started <= span.started_at <= span.ended_at <= time.perf_counter() for span in tracer.spans)
        assert core.spans._sessions
        core.end_lease(lease_id)
        assert not core.spans._sessions
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        core.stop()


async def test_drafter_records_until_a_session_is_closed_and_nothing_is_left_of_it() -> None:
    class Link:
        broken = False

        def push(self, block: DraftBlock) -> None:
            pass

    async def connect(*_: object) -> Link:
        return Link()

    tracer = FakeTracer()
    core = DrafterCore(DrafterConfig(ModelSettings("scripted:")), connect)
    await core.start()
    core.spans = DrafterSpans(tracer)
    lease_id, _ = core.open_lease()
    running, started = asyncio.create_task(core.run()), time.perf_counter()
    drafting = {"drafting_key": bytes(KEY_BYTES), "verifier_address": "a:1", "target_vocab_size": 320}
    try:
        await core.open_session(DraftSessionSpec(**SESSION, **drafting, permit=Permit(0, bytes(KEY_BYTES))), lease_id)
        fence = Fence(1, 0, 7, 3, CommittedTokens([1, 2, 3]).hash)
        core.calibrate(Calibration(fence, 3, [], 4))
        await until(lambda: len(tracer.spans) == 3)
        assert [(span.name, span.attributes.get("draftwire.round")) for span in tracer.spans] == [
            ("read prompt", None),
            ("calibrate", 7),
            ("draft", 7),
        ]
        assert all(started <= span.started_at <= span.ended_at <= time.perf_counter() for span in tracer.spans)
        assert core.spans._sessions
        core.close_session(1, 0)
        assert not core.spans._sessions
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        core.stop()


# Gateway


def test_every_session_of_a_choice_is_opened_with_its_span_and_what_happens_is_noted() -> None:
    async def scenario() -> tuple[FakeSpan, list[Recorded], Any, list[str], list[str]]:
        span, tracer = FakeSpan(), FakeTracer()
        first, second = FakeTarget(address="v:1"), FakeTarget(address="v:2")
        drafters = [FakeDrafter(first, second, instance_id=number) for number in (7, 8)]
        first.next_fate = lambda: Fate.LOST_UNTOLD if len(first.verdicts) == 6 else Fate.TOLD

        def lose_a_drafter(count: int) -> None:
            if count == 3:
                drafters[0].tell(DrafterLost(UnavailableError("gone")))

        first.after_verdict = lose_a_drafter
        spans = ChoiceSpans(tracer, span)
        loop = make_loop([first, second], drafters, observer=spans.add_round, spans=spans, max_tokens=30)
        result = await collect(loop)
        targets = [spec.traceparent for spec in (*first.attempts, *second.attempts)]
        return span, tracer.spans, result, targets, [s.spec.traceparent for each in drafters for s in each.sessions]

    span, rounds, result, targets, drafted = run(scenario())
    statistics = result.finish.statistics
    assert set(targets) == set(drafted) == {str(PARENT)}
    assert (len(targets), len(drafted)) == (2, 3)
    names = [name for name, _ in span.events]
    assert [name for name in names if name.startswith("verifier")] == [
        "verifier opened",
        "verifier lost",
        "verifier opened",
    ]
    assert [attributes["draftwire.address"] for name, attributes in span.events if name == "verifier opened"] == [
        "v:1",
        "v:2",
    ]
    assert names.count("drafter lost") == statistics.num_drafters_lost == 1
    assert names.count("drafter ready") == 3
    assert statistics.num_drafts > 3
    assert (len(rounds), {each.parent for each in rounds}) == (statistics.num_rounds, {PARENT})
    ((attributes, error),) = span.ended
    assert (error, attributes["draftwire.finish_reason"]) == ("", "length")
    assert attributes["draftwire.num_verifiers_lost"] == 1


def test_choice_that_fails_says_so() -> None:
    async def scenario() -> FakeSpan:
        span = FakeSpan()
        loop = make_loop([], None, spans=ChoiceSpans(FakeTracer(), span))
        with pytest.raises(UnavailableError):
            await collect(loop)
        return span

    ((attributes, error),) = run(scenario()).ended
    assert (attributes["draftwire.finish_reason"], error) == ("", "not finished")


def test_session_that_is_not_traced_is_opened_without_a_span() -> None:
    async def scenario() -> list[str]:
        target = FakeTarget()
        await collect(make_loop(target, None))
        return [spec.traceparent for spec in target.attempts]

    assert run(scenario()) == [""]
