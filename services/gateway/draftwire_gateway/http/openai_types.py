"""Responses in OpenAI's format: the common parts of both routes, and their differences."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftwire_gateway.http.choice_deltas import IMPOSSIBLE, ChoiceDelta, Ending, ReportedToken, ResponseOptions
from draftwire_gateway.http.usage import metrics_of, usage_of
from draftwire_gateway.text.text import REPLACEMENT
from draftwire_gateway.text.tool_call_reader import CallDelta

Object = dict[str, Any]

SLICE = 64
"""List entries serialised at once in a response that is not streamed; an entry is a token with at most 20 others."""


@dataclass(frozen=True, slots=True)
class LazyList:
    """A list with one entry per token, built while it is serialised: a long response is never whole in memory."""

    tokens: Sequence[ReportedToken]
    entry_of: Callable[[ReportedToken], Any]

    def entries(self) -> list[Any]:
        """Builds the entries."""
        return [self.entry_of(token) for token in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "LazyList":
        return LazyList(self.tokens[part], self.entry_of)


class CompletionFormatter:
    """Responses of POST /v1/completions."""

    whole = chunk = "text_completion"
    """`object` of a response and of a chunk."""
    id_prefix = "cmpl-"

    def of_whole(self, delta: ChoiceDelta) -> Object:
        """Returns the fields with the text of a finished choice."""
        return {"text": delta.text}

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Object:
        """Returns the fields with the new text of a choice."""
        return {"text": delta.text}

    def logprobs(self, tokens: Sequence[ReportedToken]) -> Object:
        """Returns parallel lists with an entry for each token, as `LazyList`."""
        return {
            "tokens": LazyList(tokens, lambda token: token.text),
            "token_logprobs": LazyList(tokens, lambda token: token.logprob),
            "top_logprobs": LazyList(tokens, _likeliest_and_drawn),
            "text_offset": LazyList(tokens, lambda token: token.offset),
        }


class ChatFormatter:
    """Responses of POST /v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def of_whole(self, delta: ChoiceDelta) -> Object:
        """Returns the message of a finished choice; the content is null if there are only tool calls."""
        message: Object = {"role": "assistant", "content": delta.text if delta.text or not delta.calls else None}
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return {"message": message}

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Object:
        """Returns what is new of a choice's message. The first chunk holds the role; the last may have no text."""
        message: Object = {"role": "assistant"} if is_first else {}
        if delta.text or (not delta.calls and (delta.reason is None or is_first)):
            message["content"] = delta.text
        if delta.calls:
            message["tool_calls"] = [
                {"index": call.index, **(_call(call) if call.id else {"function": {"arguments": call.arguments}})}
                for call in delta.calls
            ]
        return {"delta": message}

    def logprobs(self, tokens: Sequence[ReportedToken]) -> Object:
        """Returns one list with an object for each token."""
        return {"content": LazyList(tokens, _chat_entry), "refusal": None}


ResponseFormatter = CompletionFormatter | ChatFormatter
"""Differences between the responses of the routes."""


def _likeliest_and_drawn(token: ReportedToken) -> dict[str, float] | None:
    """Returns the log-probabilities of the likeliest tokens and the drawn one by text; of equal texts, the highest."""
    if token.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        logprobs.setdefault(text, logprob)
    return logprobs


def _call(call: CallDelta) -> Object:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_entry(token: ReportedToken) -> Object:
    entry = _with_bytes(token.text, IMPOSSIBLE if token.logprob is None else token.logprob)
    return {**entry, "top_logprobs": [_with_bytes(text, logprob) for text, logprob in token.top]}


def _with_bytes(text: str, logprob: float) -> Object:
    # A token that is a part of a character decodes to U+FFFD, whose bytes are not the token's.
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class ResponseWriter:
    """Serialises a response of /v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        formatter: ResponseFormatter,
        options: ResponseOptions,
        model: str,
        *,
        reports_usage: bool,
        counts_on: bool = False,
    ) -> None:
        """Draws the response's id. With `reports_usage`, the last chunk reports usage and metrics, and all others hold
        `"usage": null`; with `counts_on`, they hold the tokens of their choice so far.
        """
        self._counts_on = counts_on
        self._num_tokens: dict[int, list[int]] = {}
        """Tokens of each choice's prompt, and those generated so far."""
        self._formatter = formatter
        self._options = options
        self._reports_usage = reports_usage
        self._head = {"id": formatter.id_prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}
        # The common start of all chunks is serialised once: there is a chunk for every round.
        self._chunk_head = _dumped({**self._head, "object": formatter.chunk})[:-1] + ',"choices":['
        self._begun: set[int] = set()

    def answer(self, deltas: Sequence[ChoiceDelta], endings: Sequence[Ending]) -> Iterator[str]:
        """Yields a whole response in parts, built lazily, each of which takes milliseconds."""
        yield _dumped({**self._head, "object": self._formatter.whole})[:-1] + ',"choices":['
        separator = ""
        for delta in sorted(deltas, key=lambda delta: delta.choice):
            choice = self._choice(delta, self._formatter.of_whole(delta))
            if self._options.details:
                choice["draftwire"] = {"tokens": delta.details, "rounds": delta.rounds}
            yield separator
            yield from _in_parts(choice)
            separator = ","
        yield "]," + _dumped({"usage": usage_of(endings), "metrics": metrics_of(endings)})[1:]

    def begin(self) -> bytes:
        """Returns nothing: the first chunk begins the stream."""
        return b""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Returns a chunk as a server-sent event."""
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        choice = self._choice(delta, self._formatter.of_chunk(delta, is_first=is_first))
        if delta.reason is not None and not delta.tokens:
            choice["logprobs"] = None
        if self._options.details:
            names = ("num_draft_tokens", "num_draft_positions")
            judged = {name: sum(counts[name] for counts in delta.rounds) for name in names}
            choice["draftwire"] = {**judged, "tokens": delta.details}
        data = self._chunk_head + _dumped(choice) + self._chunk_end(delta)
        return event(data, event_id=delta.event_id)

    def _chunk_end(self, delta: ChoiceDelta) -> str:
        """Returns the end of a chunk, with what it says of the usage."""
        if not self._counts_on:
            return '],"usage":null}' if self._reports_usage else "]}"
        counts = self._num_tokens.setdefault(delta.choice, [0, 0])
        counts[0] = delta.num_prompt_tokens or counts[0]
        counts[1] += delta.num_tokens
        usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
        return '],"usage":' + _dumped(usage) + "}"

    def end(self, endings: Sequence[Ending]) -> bytes:
        """Returns the event with usage and metrics, if it is wanted, and the last event of all streams."""
        if not self._reports_usage:
            return END
        cost = {"usage": usage_of(endings), "metrics": metrics_of(endings)}
        return event(self._chunk_head + "]," + _dumped(cost)[1:]) + END

    def _choice(self, delta: ChoiceDelta, fields: Object) -> Object:
        choice = {"index": delta.choice, **fields, "logprobs": None, "finish_reason": delta.reason}
        if self._options.num_top is not None:
            choice["logprobs"] = self._formatter.logprobs(delta.tokens)
        if delta.prompt:
            choice["prompt_logprobs"] = delta.prompt
        if self._options.returns_ids:
            choice["token_ids"] = delta.token_ids
        return choice


def _listed(value: object) -> list[Any]:
    assert isinstance(value, LazyList), "answers are made of what JSON knows, and of lists that are made when needed"
    return value.entries()


_dumped = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_listed).encode
"""Serialises a value. `json.dumps` would make an encoder for each chunk."""


def _in_parts(value: object) -> Iterator[str]:
    """Yields JSON: an object member by member, a long list slice by slice, other values at once."""
    if isinstance(value, dict) and value:
        for index, (name, member) in enumerate(value.items()):
            yield ("," if index else "{") + _dumped(name) + ":"
            yield from _in_parts(member)
        yield "}"
    elif isinstance(value, list | LazyList) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + _dumped(value[start : start + SLICE])[1:-1]
        yield "]"
    else:
        yield _dumped(value)


def event(data: str, name: str = "", event_id: str = "") -> bytes:
    """Returns a server-sent event, which may have a name and an id."""
    head = f"event: {name}\n" * bool(name) + f"id: {event_id}\n" * bool(event_id)
    return f"{head}data: {data}\n\n".encode()


END = event("[DONE]")
"""Last event of a complete stream."""
