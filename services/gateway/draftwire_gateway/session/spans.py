"""Spans of a traced request: the request, its choices, and their rounds.

generate                 the request, as the client's own span continues
choice                 one completion; the services' spans are below it too
round, round, ...    one for each verdict, end to end
"""

from __future__ import annotations  # OpenTelemetry is imported for the type checker only

import random
from typing import TYPE_CHECKING

from draftwire.runtime.traceparent import parse_traceparent, traceparent_of
from draftwire.runtime.tracing import PREFIX
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.round_times import RoundTimes
from draftwire_gateway.session.statistics import Statistics

if TYPE_CHECKING:
    from draftwire.runtime.open_telemetry import OtlpSpan, OtlpTracer

_PARTS = ("lost", "prefill", "calibration", "draft", "queue", "verify", "wire", "gateway")
"""Parts of a round's time; see `RoundTimes`."""
_COUNTS = (
    *("num_prompt_tokens", "num_cached_prompt_tokens", "num_generated_tokens", "num_rounds", "num_draft_tokens"),
    *("num_accepted_tokens", "num_ahead_hits", "num_ahead_late", "num_ahead_misses", "num_ahead_wasted_tokens"),
    *("max_held_bytes", "num_drafters_lost", "num_verifiers_lost", "time_to_first_token_us"),
)
"""`Statistics` of a choice that its span has."""


class ChoiceSpans:
    """Span of one choice, and those of its rounds. Used on the event loop only."""

    def __init__(self, tracer: OtlpTracer, span: OtlpSpan) -> None:
        self._tracer = tracer
        self._span = span
        self.traceparent = traceparent_of(span.context)
        """Parent of the services' spans; empty if the span is not recorded."""

    def add_event(self, event: str, **attributes: int | str) -> None:
        """Adds an event with the current time."""
        self._span.add_event(event, {PREFIX + name: value for name, value in attributes.items()})

    def add_round(self, times: RoundTimes) -> None:
        """Records the span of a committed round; a `RoundObserver`."""
        attributes: dict[str, int | str] = {
            PREFIX + "round": times.verdict.fence.round,
            PREFIX + "epoch": times.verdict.fence.epoch,
            PREFIX + "num_draft_tokens": times.verdict.num_draft_tokens,
            PREFIX + "num_accepted_tokens": times.verdict.num_accepted_tokens,
            PREFIX + "num_tokens": times.num_tokens,
            PREFIX + "extra_token": times.verdict.extra.value,
        }
        if times.verdict.ahead is not None and times.verdict.ahead.is_ahead:
            attributes[PREFIX + "ahead"] = "hit" if times.is_held else "late"
        if times.why_plain is not None:
            attributes[PREFIX + "why_plain"] = times.why_plain.value
        for part in _PARTS:
            attributes[f"{PREFIX}{part}_us"] = int(getattr(times, part + "_s") * 1e6)
        ended_at = times.started_at + times.duration_s
        self._tracer.record("round", self._span.context, times.started_at, ended_at, attributes)

    def end(self, session_id: int, statistics: Statistics, reason: str) -> None:
        """Ends the choice; its finish reason is empty if it was not finished."""
        attributes: dict[str, int | str] = {
            PREFIX + "session_id": str(session_id),  # does not fit into an attribute's 63 bits
            PREFIX + "finish_reason": reason,
            **{PREFIX + name: getattr(statistics, name) for name in _COUNTS},
        }
        self._span.end(attributes, "" if reason else "not finished")


class RequestSpans:
    """Span of one request. Used on the event loop only."""

    def __init__(self, tracer: OtlpTracer, span: OtlpSpan) -> None:
        self._tracer = tracer
        self._span = span

    def choice(self, generation: Generation) -> ChoiceSpans:
        """Starts the span of a choice. A choice that is retried because there was no room has several."""
        attributes: dict[str, int | str] = {
            PREFIX + "choice": generation.choice,
            PREFIX + "rejection_sample_method": generation.rule.name,
            PREFIX + "num_speculative_tokens": generation.num_speculative_tokens,
            PREFIX + "num_draft_nodes": generation.num_draft_nodes,
            PREFIX + "num_resumed_tokens": len(generation.generated_ids),
        }
        return ChoiceSpans(self._tracer, self._tracer.start("choice", self._span.context, attributes))

    def end(self, result: str, error: BaseException | None = None) -> None:
        """Ends the request, which is finished, invalid, failed or cancelled. An error's message is left out, as it may
        quote the prompt.
        """
        self._span.end({PREFIX + "result": result}, type(error).__name__ if error is not None else "")


class RequestTracing:
    """Decides which requests are traced."""

    def __init__(self, tracer: OtlpTracer, sample_ratio: float, generator: random.Random) -> None:
        """`sample_ratio` is the share of traced requests among those without a traceparent of their own."""
        self._tracer = tracer
        self._sample_ratio = sample_ratio
        self._generator = generator

    def begin(self, traceparent: str, num_choices: int, request_id: str = "") -> RequestSpans | None:
        """Starts the trace of a request, or continues its client's; returns None if it is not traced. An invalid
        traceparent header counts as none; the request's id is the one in log lines.
        """
        given = parse_traceparent(traceparent)
        if not (given.trace_flags.sampled if given is not None else self._generator.random() < self._sample_ratio):
            return None
        attributes: dict[str, int | str] = {PREFIX + "num_choices": num_choices, PREFIX + "request_id": request_id}
        return RequestSpans(self._tracer, self._tracer.start("generate", given, attributes, is_entry=True))
