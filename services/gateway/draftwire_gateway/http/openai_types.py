"""OpenAI's objects: what both routes answer, and in what they differ."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftwire_gateway.http.choice_deltas import IMPOSSIBLE, ChoiceDelta, Ending, ReportedToken, ResponseOptions
from draftwire_gateway.http.usage import metrics_of, usage_of
from draftwire_gateway.text.text import REPLACEMENT

Object = dict[str, Any]

SLICE = 64
"""Entries of a list that are written at once, of a whole answer: each is of one token, with at most 20 others."""


@dataclass(frozen=True, slots=True)
class LazyList:
    """A list with one entry for each token, made when it is written: of a long answer it is never there as a whole."""

    tokens: Sequence[ReportedToken]
    entry_of: Callable[[ReportedToken], Any]

    def entries(self) -> list[Any]:
        """Returns the list."""
        return [self.entry_of(token) for token in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "LazyList":
        return LazyList(self.tokens[part], self.entry_of)


class ResponseFormatter(Protocol):
    """In what the routes differ."""

    whole: str
    """What an answer calls itself, and a chunk of one."""
    chunk: str
    id_prefix: str

    def of_whole(self, delta: ChoiceDelta) -> Object:
        """Returns the text of a choice that has ended."""

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Object:
        """Returns more of the text of a choice."""

    def logprobs(self, tokens: Sequence[ReportedToken]) -> Object:
        """Returns what is reported of tokens, in lists of the kind `LazyList`."""


class CompletionFormatter:
    """POST /v1/completions."""

    whole = chunk = "text_completion"
    id_prefix = "cmpl-"

    def of_whole(self, delta: ChoiceDelta) -> Object:
        """Returns the text of a choice that has ended."""
        return {"text": delta.text}

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Object:
        """Returns more of the text of a choice."""
        return {"text": delta.text}

    def logprobs(self, tokens: Sequence[ReportedToken]) -> Object:
        """Returns a list for each thing that is reported, with an entry for each token."""
        return {
            "tokens": LazyList(tokens, lambda token: token.text),
            "token_logprobs": LazyList(tokens, lambda token: token.logprob),
            "top_logprobs": LazyList(tokens, _likeliest_and_drawn),
            "text_offset": LazyList(tokens, lambda token: token.offset),
        }


class ChatFormatter:
    """POST /v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def of_whole(self, delta: ChoiceDelta) -> Object:
        """Returns the message of a choice that has ended."""
        return {"message": {"role": "assistant", "content": delta.text}}

    def of_chunk(self, delta: ChoiceDelta, *, is_first: bool) -> Object:
        """Returns more of the message of a choice; the first says whose it is, the last may have no text."""
        said: Object = {"role": "assistant"} if is_first else {}
        if delta.reason is None or delta.text or is_first:
            said["content"] = delta.text
        return {"delta": said}

    def logprobs(self, tokens: Sequence[ReportedToken]) -> Object:
        """Returns one list, with all that is reported of each token."""
        return {"content": LazyList(tokens, _chat_entry), "refusal": None}


def _likeliest_and_drawn(token: ReportedToken) -> dict[str, float] | None:
    """Returns the likeliest tokens and the drawn one by what they read as; of several that read alike the likeliest."""
    if token.logprob is None:
        return None
    said: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        said.setdefault(text, logprob)
    return said


def _chat_entry(token: ReportedToken) -> Object:
    said = _with_bytes(token.text, IMPOSSIBLE if token.logprob is None else token.logprob)
    return {**said, "top_logprobs": [_with_bytes(text, logprob) for text, logprob in token.top]}


def _with_bytes(text: str, logprob: float) -> Object:
    # A token that is a part of a character has no text of its own, and what stands for it has other bytes.
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class ResponseWriter:
    """Writes the answer to one request."""

    def __init__(self, formatter: ResponseFormatter, options: ResponseOptions, model: str) -> None:
        """Takes what is to be reported, and the name of the model."""
        self._formatter = formatter
        self._options = options
        self._head = {"id": formatter.id_prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}
        # All chunks begin alike: what differs is made for each token, and so has to be made fast.
        self._chunk_head = _dumped({**self._head, "object": formatter.chunk})[:-1] + ',"choices":['
        self._begun: set[int] = set()

    def answer(self, deltas: Sequence[ChoiceDelta], endings: Sequence[Ending]) -> Iterator[str]:
        """Yields a whole answer in parts, each made when it is asked for, of a size that takes milliseconds."""
        yield _dumped({**self._head, "object": self._formatter.whole})[:-1] + ',"choices":['
        separator = ""
        for delta in sorted(deltas, key=lambda one: one.choice):
            choice = self._choice(delta, self._formatter.of_whole(delta))
            if self._options.details:
                choice["draftwire"] = {"tokens": delta.details, "rounds": delta.rounds}
            yield separator
            yield from _in_parts(choice)
            separator = ","
        yield "]," + _dumped({"usage": usage_of(endings), "metrics": metrics_of(endings)})[1:]

    def chunk(self, delta: ChoiceDelta, *, reports_usage: bool) -> bytes:
        """Returns one server-sent event.

        Args:
            delta: what came.
            reports_usage: whether the last chunk will say what the request cost: then others say that they do not.
        """
        is_first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        choice = self._choice(delta, self._formatter.of_chunk(delta, is_first=is_first))
        if delta.reason is not None and not delta.tokens:
            choice["logprobs"] = None
        if self._options.details:
            num_draft_tokens = sum(one["num_draft_tokens"] for one in delta.rounds)
            choice["draftwire"] = {"num_draft_tokens": num_draft_tokens, "tokens": delta.details}
        return event(self._chunk_head + _dumped(choice) + ('],"usage":null}' if reports_usage else "]}"))

    def cost(self, endings: Sequence[Ending]) -> bytes:
        """Returns the server-sent event that says what the request cost."""
        cost = {"usage": usage_of(endings), "metrics": metrics_of(endings)}
        return event(self._chunk_head + "]," + _dumped(cost)[1:])

    def _choice(self, delta: ChoiceDelta, said: Object) -> Object:
        choice = {"index": delta.choice, **said, "logprobs": None, "finish_reason": delta.reason}
        if self._options.num_top is not None:
            choice["logprobs"] = self._formatter.logprobs(delta.tokens)
        if delta.prompt:
            choice["prompt_logprobs"] = delta.prompt
        return choice


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_listed)


def _listed(value: object) -> list[Any]:
    assert isinstance(value, LazyList), "answers are made of what JSON knows, and of lists that are made when needed"
    return value.entries()


def _in_parts(value: object) -> Iterator[str]:
    """Yields JSON: an object member by member, a long list slice by slice, anything else at once."""
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


def event(data: str) -> bytes:
    """Returns a server-sent event."""
    return f"data: {data}\n\n".encode()


END = event("[DONE]")
"""Ends a stream that has come to its end."""
