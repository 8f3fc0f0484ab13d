"""A gateway's answers without a gateway, for tests of the command line."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from draftwire.client import Completion, Piece, TokenSource
from draftwire.v1 import gateway_pb2

TOKENS = [
    (" a", TokenSource.PLAIN),
    ("b\nc", TokenSource.ACCEPTED),
    ("dé", TokenSource.ACCEPTED),
    ("e\x1b[31m", TokenSource.RECOVERED),
    ("", TokenSource.ACCEPTED),
    ("f", TokenSource.BONUS),
]
"""Texts of tokens and where they came from; one holds the start of an escape sequence, one no text of its own."""
ROUNDS = (TOKENS[:1], TOKENS[1:4], TOKENS[4:])
TEXT = "".join(text for text, _ in TOKENS)


def statistics(**changes: Any) -> gateway_pb2.GenerationStatistics:
    """Returns what a completion took: 100 ms, of which 10 are left when all parts are taken away."""
    values: dict[str, Any] = {
        "num_prompt_tokens": 7,
        "num_generated_tokens": 6,
        "num_emitted_tokens": 6,
        "num_rounds": 3,
        "num_drafts": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 3,
        "num_accepted_tokens_per_pos": [2, 1],
        "time_to_first_token_us": 12_340,
        "duration_us": 100_000,
        "draft_duration_us": 40_000,
        "calibration_duration_us": 20_000,
        "verify_duration_us": 25_000,
        "queue_duration_us": 5_000,
        "num_cached_prompt_tokens": 2,
        "num_drafters_lost": 1,
        "num_verifiers_lost": 0,
    }
    return gateway_pb2.GenerationStatistics(**{**values, **changes})


def completion(choice: int = 0, has_details: bool = False, **changes: Any) -> Completion:
    """Returns a completion of `TOKENS`."""
    return Completion(
        text=TEXT,
        token_ids=list(range(len(TOKENS))),
        finish_reason="length",
        seed=123,
        rejection_sample_method="block",
        is_lossy=changes.pop("is_lossy", False),
        drafter_error=changes.pop("drafter_error", ""),
        statistics=statistics(**changes),
        sources=[source for _, source in TOKENS],
        token_texts=[text for text, _ in TOKENS] if has_details else None,
        choice=choice,
    )


class FakeStream:
    """Brings a completion of `TOKENS`, or fails after some of its pieces."""

    def __init__(self, has_details: bool, num_choices: int, fails: "tuple[int, BaseException] | None") -> None:
        self._has_details = has_details
        self._num_choices = num_choices
        self._fails = fails
        self.is_cancelled = False
        self.completions: list[Completion] = []

    def __iter__(self) -> Iterator[Piece]:
        for number, tokens in enumerate((*ROUNDS, None)):
            if self._fails is not None and self._fails[0] == number:
                raise self._fails[1]
            if tokens is not None:
                yield self._piece(tokens)
        self.completions = [completion(choice, self._has_details) for choice in range(self._num_choices)]

    def _piece(self, tokens: Sequence[tuple[str, TokenSource]]) -> Piece:
        texts = [text for text, _ in tokens]
        return Piece(
            list(range(len(tokens))),
            "".join(texts),
            sources=[source for _, source in tokens],
            token_texts=texts if self._has_details else None,
        )

    @property
    def completion(self) -> Completion | None:
        return self.completions[0] if self.completions else None

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeClient:
    """Stands for `Client`; remembers what it is asked for."""

    def __init__(self) -> None:
        self.opened_with: tuple[str, dict[str, Any]] | None = None
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.streams: list[FakeStream] = []
        self.fails: list[tuple[int, BaseException] | None] = []
        """Of the next streams: after how many pieces they fail, and how."""
        self.answer: Any = None
        """Of `server`."""

    def __call__(self, address: str, **options: Any) -> "FakeClient":
        self.opened_with = (address, options)
        return self

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_ready(self, _timeout_s: float) -> None:
        pass

    def server(self) -> Any:
        return self.answer

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        copied = [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
        self.asked.append((copied, options))
        fails = self.fails.pop(0) if self.fails else None
        stream = FakeStream(options.get("token_details", False), options.get("num_choices") or 1, fails)
        self.streams.append(stream)
        return stream


def fake_client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """Puts one in the place of `Client`, and forgets what the environment says of colours and connections."""
    for name in ("NO_COLOR", "FORCE_COLOR", "DRAFTWIRE_ADDRESS", "DRAFTWIRE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeClient()
    monkeypatch.setattr("draftwire.client.Client", fake)
    return fake
