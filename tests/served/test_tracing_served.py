"""One trace for each request, made of the spans of all three services, as a collector gets them."""

import itertools
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from observing import read_metric
from opentelemetry.trace import SpanContext

from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from draftwire.runtime.traceparent import traceparent_of
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.in_process import InProcessStack
from tests.trace_collector import CollectedSpan, Collector, Trace, span_context

SCRIPT = "scripted:verify_ms=3,draft_ms=1,acceptance=0.8/0.6/0.5"
SLOW_SCRIPT = "scripted:verify_ms=20,draft_ms=2,acceptance=0.5"
PROMPT = "Xq7-zebra-at-dawn"
SERVICES = ("gateway", "verifier", "drafter")
PARTS = ("lost", "prefill", "calibration", "draft", "queue", "verify", "wire", "gateway")
SKEW_NS = 5_000_000
"""The services read the same clock, each once."""
ROUNDING_US = len(PARTS) + 1
"""Each part, and the round, is cut to whole microseconds."""

ATTRIBUTES = {
    "generate": {"num_choices", "request_id", "result"},
    "choice": {
        *("choice", "session_id", "rejection_sample_method", "num_speculative_tokens", "num_resumed_tokens"),
        *("finish_reason", "num_prompt_tokens", "num_cached_prompt_tokens", "num_generated_tokens", "num_rounds"),
        *("num_draft_tokens", "num_accepted_tokens", "num_ahead_hits", "num_ahead_late", "num_draft_nodes"),
        *("num_ahead_misses", "num_ahead_wasted_tokens", "max_held_bytes"),
        *("num_drafters_lost", "num_verifiers_lost"),
        "time_to_first_token_us",
    },
    "round": {
        *("round", "epoch", "num_draft_tokens", "num_accepted_tokens", "num_tokens", "extra_token", "why_plain"),
        *(f"{part}_us" for part in PARTS),
    },
    "read prompt": {"num_prompt_tokens", "num_reused_tokens", "num_steps"},
    "verify": {
        *("round", "epoch", "num_draft_tokens", "num_accepted_tokens", "extra_token", "num_sessions"),
        *("queue_us", "verify_us"),
    },
    "calibrate": {"round", "epoch", "num_sessions", "num_tokens"},
    "draft": {"round", "epoch", "num_sessions", "num_draft_tokens", "is_ahead"},
}
"""All that is ever said, by name of the span. `tokens` are numbers of tokens, never ids."""
WORDS = re.compile(
    r"(?:\d{1,20}|block|token|coupled|stop|length|finished|invalid|failed|cancelled"
    r"|plain|recovered|bonus|not_asked_for|no_drafter|warming_up|no_room|late|empty_block|no_guess)?"
)
"""All texts that they are said in."""
REQUEST_IDS = re.compile(r"user-42|[0-9a-f]{32}")


@dataclass
class Traced:
    """Services that send their spans to a collector in this process."""

    collector: Collector
    stack: InProcessStack
    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def generate(self, traceparent: str = "", text: str = PROMPT, *, request_id: str = "", **fields: Any) -> list[Any]:
        """Returns the finishes of a request's choices, in order."""
        request = gateway_pb2.GenerateRequest(text=text, **{"max_tokens": 40, "num_speculative_tokens": 3, **fields})
        given = {"traceparent": traceparent, "x-request-id": request_id}
        metadata = tuple((name, value) for name, value in given.items() if value)
        with grpc.insecure_channel(self.stack.address) as channel:
            answers = list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata))
        finishes = [answer.finish for answer in answers if answer.HasField("finish")]
        return sorted(finishes, key=lambda finish: finish.choice)

    def trace(self, trace_id: int, expected: Mapping[str, int]) -> Trace:
        """Waits for a trace that has its root and so many spans of each name, and returns it."""
        name = f"{trace_id:032x}"

        def is_there(collector: Collector) -> bool:
            trace = collector.traces().get(name)
            counts = {"generate": 1, **expected}.items()
            return trace is not None and all(len(trace.all(kind)) >= count for kind, count in counts)

        self.collector.wait_for(is_there)
        time.sleep(0.3)  # spans that should not be there come no later than others
        return self.collector.traces()[name]

    def follow(self, parent: SpanContext, **fields: Any) -> tuple[Trace, list[Any]]:
        """Returns the trace of a request that is part of another's, and the finishes of its choices."""
        finishes = self.generate(traceparent_of(parent), **fields)
        return self.trace(parent.trace_id, told(finishes)), finishes

    def begin(self, header: str = "") -> tuple[Trace, Any]:
        """Returns the trace that a request begins, and the finish of its choice."""
        before = set(self.collector.traces())
        (finish,) = self.generate(header)
        self.collector.wait_for(lambda collector: len(set(collector.traces()) - before) == 1)
        (name,) = set(self.collector.traces()) - before
        return self.trace(int(name, 16), told([finish])), finish


def told(finishes: Sequence[Any]) -> dict[str, int]:
    """Returns how many spans of each name choices tell of."""
    spent = [finish.statistics for finish in finishes]
    rounds, drafts = sum(one.num_rounds for one in spent), sum(one.num_drafts for one in spent)
    return {"choice": len(spent), "round": rounds, "verify": rounds, "draft": drafts, "calibrate": drafts}


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with pytest.MonkeyPatch.context() as patched, Collector() as collector:
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        lines: list[tuple[str, dict[str, Any]]] = []
        options: dict[str, dict[str, object]] = {name: {"otlp_endpoint": collector.endpoint} for name in SERVICES}
        for name in ("verifier", "drafter"):
            options[name]["model"] = SCRIPT
        stack = InProcessStack(options, on_log=lambda name, line: lines.append((name, dict(line))))
        with stack:
            yield Traced(collector, stack, lines)


def new_parent() -> SpanContext:
    generator = random.SystemRandom()
    return span_context(generator.getrandbits(127) + 1, generator.getrandbits(63) + 1)


def by_round(spans: list[CollectedSpan]) -> dict[tuple[int, int], CollectedSpan]:
    found = {(span["epoch"], span["round"]): span for span in spans}
    assert len(found) == len(spans), "each round is told of once"
    return found


def assert_whole(trace: Trace, finish: Any, choice: CollectedSpan) -> None:
    """A choice has all its spans, which belong together and say the same as its statistics."""
    mine = Trace([span for span in trace.spans if span.parent_id == choice.span_id])
    statistics = finish.statistics
    rounds, verified = by_round(mine.all("round")), by_round(mine.all("verify"))
    assert len(rounds) == statistics.num_rounds == choice["num_rounds"]
    assert rounds.keys() == verified.keys()
    for key, span in rounds.items():
        for name in ("num_draft_tokens", "num_accepted_tokens", "extra_token"):
            assert span[name] == verified[key][name], (key, name)
        assert verified[key]["verify_us"] / 1e6 <= verified[key].seconds + 1e-6
    with_draft = {key: span["num_draft_tokens"] for key, span in rounds.items() if span["num_draft_tokens"]}
    assert len(with_draft) == statistics.num_drafts
    assert sum(with_draft.values()) == statistics.num_draft_tokens
    assert sum(span["num_accepted_tokens"] for span in rounds.values()) == statistics.num_accepted_tokens
    assert sum(span["num_tokens"] for span in rounds.values()) == statistics.num_emitted_tokens
    drafted, calibrated = by_round(mine.all("draft")), by_round(mine.all("calibrate"))
    assert {key: span["num_draft_tokens"] for key, span in drafted.items()} == with_draft
    assert calibrated.keys() == drafted.keys()
    for key, span in drafted.items():
        assert calibrated[key].ended_ns == pytest.approx(span.started_ns, abs=1)
    assert len(mine.all("read prompt", "verifier")) == 1
    assert len(mine.all("read prompt", "drafter")) == 1


def test_one_request_is_one_trace_across_the_services(traced: Traced) -> None:
    trace, finish = traced.begin()
    assert finish.statistics.num_drafts > 3
    root, choice = trace.one("generate"), trace.one("choice")
    assert (root.parent_id, choice.parent_id) == ("", root.span_id)
    assert {span.parent_id for span in trace.spans if span not in (root, choice)} == {choice.span_id}
    assert {(span.service, span.name) for span in trace.spans} == {
        *(("gateway", name) for name in ("generate", "choice", "round")),
        *(("verifier", name) for name in ("read prompt", "verify")),
        *(("drafter", name) for name in ("read prompt", "calibrate", "draft")),
    }
    assert len({span.instance for span in trace.spans}) == len(SERVICES)
    assert_whole(trace, finish, choice)
    assert choice.event_names == ["verifier opened", "drafter ready"]
    assert choice["finish_reason"] == "length"
    assert root["result"] == "finished"


def test_rounds_lie_end_to_end_and_their_parts_fill_them(traced: Traced) -> None:
    trace, _ = traced.follow(new_parent())
    rounds, choice, root = trace.all("round"), trace.one("choice"), trace.one("generate")
    assert [span["round"] for span in rounds] == list(range(len(rounds)))
    for span in rounds:
        parts_us = sum(span[f"{part}_us"] for part in PARTS)
        assert span.seconds * 1e6 - ROUNDING_US <= parts_us <= span.seconds * 1e6 + 1
    for span, after in itertools.pairwise(rounds):
        assert span.ended_ns <= after.started_ns + 2
    assert root.started_ns <= choice.started_ns <= rounds[0].started_ns
    assert rounds[-1].ended_ns <= choice.ended_ns <= root.ended_ns
    for span in trace.spans:
        assert span.ended_ns >= span.started_ns
        assert span.started_ns >= root.started_ns - SKEW_NS, span
        assert span.ended_ns <= root.ended_ns + SKEW_NS, span
    verified = by_round(trace.all("verify"))
    for span in rounds:
        if span["num_draft_tokens"]:  # asked for by itself, so the step lies within the round
            step = verified[0, span["round"]]
            assert span.started_ns - SKEW_NS <= step.started_ns
            assert step.ended_ns <= span.ended_ns + SKEW_NS


def test_trace_of_the_client_goes_on(traced: Traced) -> None:
    parent = new_parent()
    trace, (finish,) = traced.follow(parent, request_id="user-42")
    assert trace.one("generate").parent_id == f"{parent.span_id:016x}"
    assert trace.one("generate").attributes["request_id"] == "user-42"
    assert_whole(trace, finish, trace.one("choice"))


def test_client_may_ask_not_to_be_traced(traced: Traced) -> None:
    untraced, sampled = new_parent(), new_parent()
    (silent,) = traced.generate(traceparent_of(span_context(untraced.trace_id, untraced.span_id, is_sampled=False)))
    assert silent.statistics.num_drafts > 0
    traced.follow(sampled)
    assert f"{untraced.trace_id:032x}" not in traced.collector.traces()
    assert all(span.parent_id != f"{untraced.span_id:016x}" for span in traced.collector.spans)


@pytest.mark.parametrize("header", ["nonsense", f"00-{0:032x}-{1:016x}-01", "00-" + "f" * 5000])
def test_header_that_cannot_be_understood_begins_a_trace(traced: Traced, header: str) -> None:
    trace, finish = traced.begin(header)
    assert finish.statistics.num_generated_tokens == 40
    assert trace.one("generate").parent_id == ""


def test_requests_at_the_same_time_have_traces_of_their_own(traced: Traced) -> None:
    parents = [new_parent() for _ in range(6)]
    headers = [traceparent_of(parent) for parent in parents]
    with ThreadPoolExecutor(len(parents)) as pool:
        finished = list(pool.map(lambda header: traced.generate(header, text=PROMPT + header), headers))
    sessions = set()
    for parent, (finish,) in zip(parents, finished, strict=True):
        trace = traced.trace(parent.trace_id, told([finish]))
        assert_whole(trace, finish, trace.one("choice"))
        sessions.add(trace.one("choice")["session_id"])
        assert {span.trace_id for span in trace.spans} == {f"{parent.trace_id:032x}"}
    assert len(sessions) == len(parents)
    shared = [span["num_sessions"] for span in traced.collector.spans if span.name == "verify"]
    assert max(shared) > 1, "some steps served several of them"


def test_each_choice_has_a_span_of_its_own(traced: Traced) -> None:
    trace, finishes = traced.follow(new_parent(), num_choices=3)
    choices = {span["choice"]: span for span in trace.all("choice")}
    assert trace.one("generate")["num_choices"] == len(choices) == 3
    for finish in finishes:
        assert choices[finish.choice].parent_id == trace.one("generate").span_id
        assert_whole(trace, finish, choices[finish.choice])


def test_client_that_leaves_ends_its_trace(traced: Traced) -> None:
    parent = new_parent()
    request = gateway_pb2.GenerateRequest(text=PROMPT, max_tokens=400)
    with grpc.insecure_channel(traced.stack.address) as channel:
        metadata = (("traceparent", traceparent_of(parent)),)
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata)
        for _ in range(5):
            next(call)
        call.cancel()
    trace = traced.trace(parent.trace_id, {"verify": 1, "choice": 1})
    assert trace.one("generate")["result"] == "cancelled"
    assert not trace.one("generate").is_error
    assert trace.one("choice").is_error
    assert trace.one("choice")["finish_reason"] == ""


def test_spans_tell_numbers_and_names_and_never_what_was_asked_or_answered(traced: Traced) -> None:
    traced.follow(new_parent(), logprobs=2, token_details=True)
    for span in traced.collector.spans:
        assert span.attributes.keys() <= ATTRIBUTES[span.name], span.name
        for name, value in span.attributes.items():
            assert isinstance(value, int) or (REQUEST_IDS if name == "request_id" else WORDS).fullmatch(str(value)), (
                value
            )
        for event in span.events:
            assert event.attributes.keys() <= {"address", "epoch", "reason"}
    seen = b"".join(request.SerializeToString() for request in traced.collector.requests)
    assert seen
    assert b"zebra" not in seen
    assert not [line for _, line in traced.lines if line.get("level") not in ("info", None)]


# Peers that are lost


@dataclass
class Fragile:
    """Two verifiers, two drafters and a gateway; each but the last is a stack of its own."""

    stacks: dict[str, list[InProcessStack]]
    address: str

    def kill_the_one_that_works(self, kind: str) -> None:
        (busy,) = [stack for stack in self.stacks[kind] if read_metric(stack, kind, "num_sessions")]
        busy.kill(kind)


@contextmanager
def fragile_stack(collector: Collector) -> Iterator[Fragile]:
    traced = {"otlp_endpoint": collector.endpoint}
    with ExitStack() as exits:
        stacks = {
            kind: [exits.enter_context(InProcessStack({kind: {"model": SLOW_SCRIPT, **traced}})) for _ in range(2)]
            for kind in ("verifier", "drafter")
        }
        peers = {
            kind: ",".join(f"127.0.0.1:{stack.services[kind].port}" for stack in of_kind)
            for kind, of_kind in stacks.items()
        }
        gateway = exits.enter_context(InProcessStack({"gateway": {**traced, **peers}}))
        yield Fragile(stacks, gateway.address)


def has_all_rounds(trace: Trace) -> bool:
    """Whether there is the root, and as many rounds as the choice tells of."""
    choices = trace.all("choice")
    return bool(trace.all("generate") and choices) and len(trace.all("round")) == choices[0]["num_rounds"]


def test_request_that_loses_its_drafter_and_its_verifier_is_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector, fragile_stack(collector) as fragile, Client(fragile.address) as client:
        pieces = client.stream(PROMPT, max_tokens=150, num_speculative_tokens=2)
        tokens = 0
        for piece in pieces:
            before, tokens = tokens, tokens + len(piece.token_ids)
            if before < 20 <= tokens:
                fragile.kill_the_one_that_works("drafter")
            if before < 60 <= tokens:
                time.sleep(0.5)  # its last spans but those of the last moment arrive
                fragile.kill_the_one_that_works("verifier")
        collector.wait_for(lambda collector: any(has_all_rounds(trace) for trace in collector.traces().values()))
        (trace,) = collector.traces().values()
    choice, rounds = trace.one("choice"), trace.all("round")
    assert choice["num_drafters_lost"] >= 1
    assert choice["num_verifiers_lost"] == 1
    names = [name for name in choice.event_names if name != "drafter ready"]
    assert [name for name in names if name.startswith("verifier")] == [
        "verifier opened",
        "verifier lost",
        "verifier opened",
    ]
    assert names.index("drafter lost") < names.index("verifier lost")
    addresses = [event.attributes["address"] for event in choice.events if event.name == "verifier opened"]
    assert len(set(addresses)) == 2
    assert [span["round"] for span in rounds] == list(range(len(rounds)))
    assert len(rounds) == choice["num_rounds"]
    assert len({span["epoch"] for span in rounds}) == 2
    assert {len({span.instance for span in trace.all(name)}) for name in ("verify", "draft")} == {2}
    assert {span.parent_id for span in trace.spans if span.name in ("verify", "draft")} == {choice.span_id}


# Without a collector, and without tracing


def imported_by(stack_lines: list[str]) -> set[str]:
    """Returns the modules that services said they imported."""
    return {line.rpartition("|")[2].strip() for line in stack_lines if line.startswith("import time:")}


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_services_serve_without_a_collector_and_import_tracing_by_option(
    is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at the collector's address."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    lines: dict[str, list[str]] = {name: [] for name in SERVICES}
    options: dict[str, dict[str, object]] = {"verifier": {"model": SCRIPT}, "drafter": {"model": SCRIPT}, "gateway": {}}
    for each in options.values():
        each.update({"otlp_endpoint": "http://127.0.0.1:9"} if is_traced else {})
    stack = LocalStack(options, on_log=lambda name, line: lines[name].append(str(line["event"])))
    with stack, Client(stack.address) as client:
        for _ in range(3):
            assert client.generate(PROMPT, max_tokens=40).statistics.num_generated_tokens == 40
        started = time.monotonic()
        stack.stop()
        stopped_s = time.monotonic() - started
    assert all(service.process.returncode == 0 for service in stack.services.values())
    assert stopped_s < 20.0
    for name in SERVICES:
        told = imported_by(lines[name])
        assert f"draftwire_{name}.core" in told, "what is imported is seen"
        assert ("opentelemetry.sdk.trace" in told) is is_traced
        if name != "gateway":  # FastAPI imports the interface, without the SDK
            assert any(module.partition(".")[0] == "opentelemetry" for module in told) is is_traced
        assert lines[name].count(f"{name}.spans_lost") == int(is_traced)
        assert "library.message_logged" not in lines[name]


def test_only_a_share_of_the_requests_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that say nothing, none at a ratio of 0. A gateway that does not wait sends its spans when it ends."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(10**6))
    parent = new_parent()
    with Collector() as collector:
        options: dict[str, dict[str, object]] = {
            "verifier": {"model": SCRIPT},
            "gateway": {"otlp_endpoint": collector.endpoint, "trace_sample_ratio": 0.0},
        }
        with InProcessStack(options) as stack:
            traced = Traced(collector, stack)
            traced.generate()
            (finish,) = traced.generate(traceparent_of(parent))
            assert collector.spans == [], "nothing was sent yet"
        (trace,) = collector.traces().values()
    assert trace.one("generate").parent_id == f"{parent.span_id:016x}"
    assert len(trace.all("round")) == finish.statistics.num_rounds
    assert {span.service for span in trace.spans} == {"gateway"}, "the verifier was not asked to record"
