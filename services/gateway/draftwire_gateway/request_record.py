"""Records of one request: metrics of its choices, and its span."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.runtime.served_request import ServedRequest, served_request
from draftwire_gateway.metrics import AHEAD_OUTCOMES, GatewayMetrics
from draftwire_gateway.session.choices import ChoiceEvent
from draftwire_gateway.session.committed_text import Delta, Finish
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.spans import RequestSpans
from draftwire_gateway.session.statistics import Statistics


@dataclass(slots=True)
class Latencies:
    """Measures the choices of one request, from when its prompts were tokenised. The tokens of a round arrive together,
    so the time since the round before is divided equally among them: each counts as one value.
    """

    metrics: GatewayMetrics
    clock: Callable[[], float] = time.perf_counter
    _began_at: float = field(init=False)
    _last_at: dict[int, float] = field(default_factory=dict)
    """Time of the last tokens of each choice."""

    def __post_init__(self) -> None:
        self._began_at = self.clock()

    def count_tokens(self, choice: int, num_tokens: int) -> None:
        """Observes the latency of new tokens of a choice."""
        if not num_tokens:
            return
        now, last = self.clock(), self._last_at.get(choice)
        self._last_at[choice] = now
        if last is None:
            self.metrics.time_to_first_token_s.observe(now - self._began_at)
        else:
            self.metrics.inter_token_latency_s.observe((now - last) / num_tokens, num_tokens)

    def count_end(self) -> None:
        """Observes the latency of a complete choice."""
        self.metrics.e2e_request_latency_s.observe(self.clock() - self._began_at)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Records a request from its first choice to its end; its prompts are counted when it is made. A context manager
    around its generation, whose error, if there is one, is the request's result.
    """

    _metrics: GatewayMetrics
    _generations: Sequence[Generation]
    _trace: RequestSpans | None = None
    """The request's span, which has begun, if it is traced."""
    _caller: str = ""
    """The caller's name; empty without tokens."""
    _num_unfinished: int = field(init=False)
    _latencies: Latencies = field(init=False)
    _statistics: dict[int, Statistics] = field(default_factory=dict)
    _request: ServedRequest | None = field(default_factory=served_request)

    def __post_init__(self) -> None:
        self._num_unfinished, self._latencies = len(self._generations), Latencies(self._metrics)
        num_tokens = sum({each.prompt_index: len(each.prompt_ids) for each in self._generations}.values())
        self._metrics.count_prompts(num_tokens, self._caller)
        if self._request is not None:
            self._request.num_prompt_tokens = num_tokens

    def begin_choice(self, choice: int, statistics: Statistics) -> None:
        """Records an attempt at a choice, whose statistics still grow. One that was refused was tried before."""
        self._count_losses(choice)
        self._statistics[choice] = statistics

    def add(self, event: ChoiceEvent) -> None:
        """Counts an event of a choice."""
        match event.event:
            case Delta(token_ids=token_ids):
                self._metrics.count_generated(len(token_ids), self._caller)
                if self._request is not None:
                    self._request.num_generated_tokens += len(token_ids)
                self._latencies.count_tokens(event.generation.choice, len(token_ids))
            case Finish(reason=reason):
                self._num_unfinished -= 1
                self._metrics.requests.labels(reason.value).inc()
                self._latencies.count_end()

    def __enter__(self) -> "RequestRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        result = _result_of(error)
        if isinstance(error, NoRoomError):
            self._metrics.count_refused("verifier", self._caller, self._num_unfinished)
        if self._trace is not None:
            self._trace.end(result, error if result in ("invalid", "failed") else None)
        if self._num_unfinished:
            self._metrics.requests.labels(result).inc(self._num_unfinished)
        for choice in list(self._statistics):
            self._count_losses(choice)
        for generation in self._generations:
            if generation.is_lossy:
                self._metrics.lossy_requests.labels(generation.rule.name).inc()

    def _count_losses(self, choice: int) -> None:
        statistics = self._statistics.pop(choice, None)
        if statistics is not None:
            self._metrics.drafters_lost.inc(statistics.num_drafters_lost)
            self._metrics.verifiers_lost.inc(statistics.num_verifiers_lost)
            counts = (statistics.num_ahead_hits, statistics.num_ahead_late, statistics.num_ahead_misses)
            for outcome, count in zip(AHEAD_OUTCOMES, counts, strict=True):
                self._metrics.ahead_rounds.labels(outcome).inc(count)


def _result_of(error: BaseException | None) -> str:
    """Returns the result of a request, and of those of its choices that were not finished."""
    match error:
        case None:
            return "finished"
        case InvalidRequestError():
            return "invalid"
        case NoRoomError():
            return "refused"
        case asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
        case _:
            return "failed"
