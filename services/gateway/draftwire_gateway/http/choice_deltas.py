"""Results of a request's choices, as responses report them: the same for both routes, streamed or not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from draftwire.requests.logprobs import PromptPart, TokenLogprob
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.event_ids import EventIds
from draftwire_gateway.http.tool_use import ToolUse
from draftwire_gateway.session.choices import ChoiceEvent, PromptEcho
from draftwire_gateway.session.committed_text import Delta, Finish
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.text.tool_call_reader import CallDelta, ToolCallReader

IMPOSSIBLE = -9999.0
"""Log-probability of an impossible token, as in OpenAI's API. JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Statistics of a choice that has ended."""

    generation: Generation
    statistics: Statistics
    drafter_error: str


@dataclass(frozen=True, slots=True)
class ReportedToken:
    """A token with its log-probability."""

    text: str
    """The token, decoded by itself."""
    logprob: float | None
    """None for the first token of a prompt, which has no log-probability."""
    top: list[tuple[str, float]]
    """Text and log-probability of the likeliest tokens at its position."""
    offset: int
    """Characters of the choice's text before the token; exact only if text lengths were requested."""


@dataclass(slots=True)
class ChoiceDelta:
    """New results of one choice: of one event, or accumulated."""

    choice: int
    text: str = ""
    tokens: list[ReportedToken] = field(default_factory=list)
    """Tokens of the text, if log-probabilities are requested."""
    prompt: list[dict[str, Any] | None] = field(default_factory=list)
    """Tokens of the prompt, if `prompt_logprobs` are requested; None for the first."""
    details: list[dict[str, Any]] = field(default_factory=list)
    """Details of each generated token, if `token_details` are requested."""
    rounds: list[dict[str, int]] = field(default_factory=list)
    reason: str | None = None
    """Finish reason; None until the choice has ended."""
    calls: list[CallDelta] = field(default_factory=list)
    """Tool calls that were read in the text, which is without them."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the generated tokens, if they are requested."""
    event_id: str = ""
    """Id of the event that these results are sent in, if that is requested."""
    num_prompt_tokens: int = 0
    """Tokens of the choice's prompt, where some were generated after it."""
    num_tokens: int = 0
    """Generated tokens."""
    cuts_call: bool = False
    """Whether the text has ended within the last call, which is none then."""

    def add(self, other: "ChoiceDelta") -> None:
        """Appends a later delta."""
        self.text += other.text
        self.tokens += other.tokens
        self.prompt += other.prompt
        self.details += other.details
        self.rounds += other.rounds
        self.token_ids += other.token_ids
        for call in other.calls:
            if call.id:
                self.calls.append(replace(call))
            else:
                self.calls[call.index].arguments += call.arguments
        if other.cuts_call:
            del self.calls[-1]
        self.num_prompt_tokens = other.num_prompt_tokens or self.num_prompt_tokens
        self.num_tokens += other.num_tokens
        self.reason = other.reason or self.reason


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of what a response reports beside the text."""

    num_choices: int
    """Choices of each prompt."""
    num_top: int | None = None
    """Number of likeliest tokens reported with each token of the text; None: no log-probabilities."""
    num_prompt_top: int | None = None
    """The same for the tokens of the prompt."""
    details: bool = False
    tools: ToolUse | None = None
    """How tool calls are read; None if all is text."""
    returns_ids: bool = False
    """Whether token ids are reported, and ids of events."""


class DeltaMaker:
    """Converts the events of one request into deltas."""

    def __init__(self, options: ResponseOptions, core: GatewayCore) -> None:
        self._options = options
        self._core = core
        self._lengths: dict[int, int] = {}
        """Length of the text of each choice so far, in characters."""
        self._echoed: dict[int, list[int]] = {}
        """Text offsets of the tokens of each echoed prompt."""
        self._reported: set[int] = set()
        """Prompts whose first token was reported."""
        self._event_ids: dict[int, EventIds] = {}
        self._readers: dict[int, ToolCallReader] = {}
        """Readers of the choices' texts, if tool calls are read."""
        self.endings: list[Ending] = []

    async def deltas(self, choice_event: ChoiceEvent) -> list[ChoiceDelta]:
        """Returns the deltas of an event, one for each choice that it concerns."""
        generation = choice_event.generation
        match choice_event.event:
            case Delta() as delta:
                generated = self._generated(generation.choice, delta)
                generated.num_prompt_tokens, generated.num_tokens = len(generation.prompt_ids), len(delta.token_ids)
                return [self._with_ids(generation, generated, delta.token_ids)]
            case Finish() as finish:
                self.endings.append(Ending(generation, finish.statistics, finish.drafter_error))
                return [self._with_ids(generation, self._finished(generation, finish.reason.value), [])]
            case PromptEcho() as echo:
                return await self._echo(generation, echo)
            case PromptPart() as part:
                return self._prompt(generation, part)

    def _finished(self, generation: Generation, reason: str) -> ChoiceDelta:
        delta = ChoiceDelta(generation.choice, prompt=self._first_of_prompt(generation), reason=reason)
        if self._options.tools is not None:
            reader = self._reader(generation.choice, self._options.tools)
            read = reader.finish()
            delta.text, delta.calls = read.text, read.calls
            delta.reason = self._options.tools.finish_reason(reason, reader)
            delta.cuts_call = reader.is_within_call and reason == "length"
        return delta

    def _with_ids(self, generation: Generation, delta: ChoiceDelta, token_ids: list[int]) -> ChoiceDelta:
        if self._options.returns_ids:
            if generation.choice not in self._event_ids:
                self._event_ids[generation.choice] = EventIds(generation.choice, generation.generated_ids)
            delta.token_ids = token_ids
            delta.event_id = self._event_ids[generation.choice].add(token_ids)
        return delta

    def _reader(self, choice: int, tools: ToolUse) -> ToolCallReader:
        if choice not in self._readers:
            self._readers[choice] = tools.reader()
        return self._readers[choice]

    def _generated(self, choice: int, delta: Delta) -> ChoiceDelta:
        start = self._lengths.get(choice, 0)
        self._lengths[choice] = start + len(delta.text)
        ends = list(accumulate(delta.text_lengths))
        choice_delta = ChoiceDelta(choice, delta.text)
        if self._options.tools is not None:
            read = self._reader(choice, self._options.tools).push(delta.text)
            choice_delta.text, choice_delta.calls = read.text, read.calls
        if self._options.num_top is not None:
            lengths = delta.text_lengths or [0] * len(delta.logprobs)
            offsets = [start + end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
            choice_delta.tokens = [self._reported_token(*pair) for pair in zip(delta.logprobs, offsets, strict=True)]
        if self._options.details:
            choice_delta.details = _details(delta, ends)
            choice_delta.rounds = [
                {
                    "num_draft_tokens": delta.num_draft_tokens,
                    "num_draft_positions": delta.num_draft_positions,
                    "num_tokens": len(delta.token_ids),
                }
            ]
        return choice_delta

    async def _echo(self, generation: Generation, echo: PromptEcho) -> list[ChoiceDelta]:
        """Starts the text of each choice of a prompt with the prompt."""
        deltas = [ChoiceDelta(choice, echo.text) for choice in self._choices_of(generation)]
        for choice_delta in deltas:
            self._lengths[choice_delta.choice] = len(echo.text)
        if self._options.num_top is not None:
            lengths = await self._core.text_lengths(echo.token_ids)
            self._echoed[generation.prompt_index] = [0, *accumulate(lengths)]
            first = ReportedToken(self._core.token_text(echo.token_ids[0]), None, [], 0)
            for choice_delta in deltas:
                choice_delta.tokens = [first]
        return deltas

    def _prompt(self, generation: Generation, part: PromptPart) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        starts = self._echoed.get(generation.prompt_index)
        if starts is not None:
            reported = [
                self._reported_token(token, starts[part.first_position + index])
                for index, token in enumerate(part.tokens)
            ]
            deltas = [ChoiceDelta(choice, tokens=reported) for choice in self._choices_of(generation)]
        if self._options.num_prompt_top is None:
            return deltas
        first = deltas[0] if deltas else ChoiceDelta(generation.choice)
        first.prompt = [*self._first_of_prompt(generation), *map(self._entry, part.tokens)]
        return deltas or [first]

    def _first_of_prompt(self, generation: Generation) -> list[dict[str, Any] | None]:
        """Returns the entry of a prompt's first token, if the prompt has not been reported yet."""
        is_new = generation.prompt_index not in self._reported and generation.logprobs.prompt_logprobs is not None
        if self._options.num_prompt_top is None or not is_new:
            return []
        self._reported.add(generation.prompt_index)
        return [None]

    def _choices_of(self, generation: Generation) -> range:
        first = generation.prompt_index * self._options.num_choices
        return range(first, first + self._options.num_choices)

    def _reported_token(self, token: TokenLogprob, offset: int) -> ReportedToken:
        text = self._core.token_text
        top = [(text(one), value) for one, value in token.top[: self._options.num_top or 0]]
        return ReportedToken(text(token.token_id), finite(token.logprob), top, offset)

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        text = self._core.token_text
        top = token.top[: self._options.num_prompt_top or 0]
        return {
            "id": token.token_id,
            "text": text(token.token_id),
            "logprob": finite(token.logprob),
            "top": [{"id": one, "text": text(one), "logprob": value} for one, value in top],
        }


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can represent."""
    return logprob if logprob > -math.inf else IMPOSSIBLE


def _details(delta: Delta, ends: Sequence[int]) -> list[dict[str, Any]]:
    logprobs: list[float | None] = [finite(token.logprob) for token in delta.logprobs]
    return [
        {
            "id": token,
            "text": delta.text[end - length : end],
            "source": source.value,
            "logprob": logprob,
            "draft_logprob": None if math.isnan(draft) else finite(draft),
        }
        for token, end, length, source, logprob, draft in zip(
            delta.token_ids,
            ends,
            delta.text_lengths,
            delta.sources,
            logprobs or [None] * len(delta.token_ids),
            delta.draft_logprobs,
            strict=True,
        )
    ]
