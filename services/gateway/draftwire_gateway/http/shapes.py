"""OpenAI's objects: what both routes answer, and in what they differ."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftwire_gateway.http.pieces import IMPOSSIBLE, Ending, Piece, ToldToken, Wishes
from draftwire_gateway.http.usage import metrics_of, usage_of
from draftwire_gateway.text.text import REPLACEMENT

Object = dict[str, Any]

SLICE = 64
"""Entries of a list that are written at once, of a whole answer: each is of one token, with at most 20 others."""


@dataclass(frozen=True, slots=True)
class Told:
    """A list with one entry for each token, made when it is written: of a long answer it is never there as a whole."""

    tokens: Sequence[ToldToken]
    tell: Callable[[ToldToken], Any]

    def entries(self) -> list[Any]:
        """Returns the list."""
        return [self.tell(token) for token in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "Told":
        return Told(self.tokens[part], self.tell)


class Shape(Protocol):
    """In what the routes differ."""

    whole: str
    """What an answer calls itself, and a chunk of one."""
    chunk: str
    id_prefix: str

    def of_whole(self, piece: Piece) -> Object:
        """Returns the text of a choice that has ended."""

    def of_chunk(self, piece: Piece, *, is_first: bool) -> Object:
        """Returns more of the text of a choice."""

    def logprobs(self, tokens: Sequence[ToldToken]) -> Object:
        """Returns what is told of tokens, in lists of the kind `Told`."""


class CompletionShape:
    """POST /v1/completions."""

    whole = chunk = "text_completion"
    id_prefix = "cmpl-"

    def of_whole(self, piece: Piece) -> Object:
        """See `Shape`."""
        return {"text": piece.text}

    def of_chunk(self, piece: Piece, *, is_first: bool) -> Object:
        """See `Shape`."""
        return {"text": piece.text}

    def logprobs(self, tokens: Sequence[ToldToken]) -> Object:
        """See `Shape`."""
        return {
            "tokens": Told(tokens, lambda token: token.text),
            "token_logprobs": Told(tokens, lambda token: token.logprob),
            "top_logprobs": Told(tokens, _likeliest_and_drawn),
            "text_offset": Told(tokens, lambda token: token.offset),
        }


class ChatShape:
    """POST /v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def of_whole(self, piece: Piece) -> Object:
        """See `Shape`."""
        return {"message": {"role": "assistant", "content": piece.text}}

    def of_chunk(self, piece: Piece, *, is_first: bool) -> Object:
        """See `Shape`."""
        delta: Object = {"role": "assistant"} if is_first else {}
        if piece.reason is None or piece.text or is_first:
            delta["content"] = piece.text
        return {"delta": delta}

    def logprobs(self, tokens: Sequence[ToldToken]) -> Object:
        """See `Shape`."""
        return {"content": Told(tokens, _chat_entry), "refusal": None}


def _likeliest_and_drawn(token: ToldToken) -> dict[str, float] | None:
    """Returns the likeliest tokens and the drawn one by what they read as; of several that read alike the likeliest."""
    if token.logprob is None:
        return None
    said: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        said.setdefault(text, logprob)
    return said


def _chat_entry(token: ToldToken) -> Object:
    said = _with_bytes(token.text, IMPOSSIBLE if token.logprob is None else token.logprob)
    return {**said, "top_logprobs": [_with_bytes(text, logprob) for text, logprob in token.top]}


def _with_bytes(text: str, logprob: float) -> Object:
    # A token that is a part of a character has no text of its own, and what stands for it has other bytes.
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class Writer:
    """Writes the answer to one request."""

    def __init__(self, shape: Shape, wishes: Wishes, model: str) -> None:
        """Takes what is to be told, and the name of the model."""
        self._shape = shape
        self._wishes = wishes
        self._head = {"id": shape.id_prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}
        # All chunks begin alike: what differs is made for each token, and so has to be made fast.
        self._chunk_head = _dumped({**self._head, "object": shape.chunk})[:-1] + ',"choices":['
        self._begun: set[int] = set()

    def answer(self, pieces: Sequence[Piece], endings: Sequence[Ending]) -> Iterator[str]:
        """Yields a whole answer in parts, each made when it is asked for, of a size that takes milliseconds."""
        yield _dumped({**self._head, "object": self._shape.whole})[:-1] + ',"choices":['
        separator = ""
        for piece in sorted(pieces, key=lambda one: one.choice):
            choice = self._choice(piece, self._shape.of_whole(piece))
            if self._wishes.details:
                choice["draftwire"] = {"tokens": piece.details, "rounds": piece.rounds}
            yield separator
            yield from _in_parts(choice)
            separator = ","
        yield "]," + _dumped({"usage": usage_of(endings), "metrics": metrics_of(endings)})[1:]

    def chunk(self, piece: Piece, *, tells_usage: bool) -> bytes:
        """Returns one server-sent event.

        Args:
            piece: what came.
            tells_usage: whether the last chunk will say what the request cost: then others say that they do not.
        """
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        choice = self._choice(piece, self._shape.of_chunk(piece, is_first=is_first))
        if piece.reason is not None and not piece.tokens:
            choice["logprobs"] = None
        if self._wishes.details:
            num_draft_tokens = sum(one["num_draft_tokens"] for one in piece.rounds)
            choice["draftwire"] = {"num_draft_tokens": num_draft_tokens, "tokens": piece.details}
        return event(self._chunk_head + _dumped(choice) + ('],"usage":null}' if tells_usage else "]}"))

    def cost(self, endings: Sequence[Ending]) -> bytes:
        """Returns the server-sent event that says what the request cost."""
        cost = {"usage": usage_of(endings), "metrics": metrics_of(endings)}
        return event(self._chunk_head + "]," + _dumped(cost)[1:])

    def _choice(self, piece: Piece, said: Object) -> Object:
        choice = {"index": piece.choice, **said, "logprobs": None, "finish_reason": piece.reason}
        if self._wishes.num_top is not None:
            choice["logprobs"] = self._shape.logprobs(piece.tokens)
        if piece.prompt:
            choice["prompt_logprobs"] = piece.prompt
        return choice


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_listed)


def _listed(value: object) -> list[Any]:
    assert isinstance(value, Told), "answers are made of what JSON knows, and of lists that are made when needed"
    return value.entries()


def _in_parts(value: object) -> Iterator[str]:
    """Yields JSON: an object member by member, a long list slice by slice, anything else at once."""
    if isinstance(value, dict) and value:
        for index, (name, member) in enumerate(value.items()):
            yield ("," if index else "{") + _dumped(name) + ":"
            yield from _in_parts(member)
        yield "}"
    elif isinstance(value, list | Told) and len(value) > SLICE:
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
