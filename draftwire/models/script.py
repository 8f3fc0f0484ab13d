"""A target and drafter without weights: tokens, durations and acceptance follow a script, everything else is real.

A scripted pair runs in the real services, with real KV cache management, rules and random numbers; only the forward
passes are replaced by waiting. So load, faults and the overhead of the services can be measured and tested on any
machine. No torch here.
"""

import time
from dataclasses import dataclass, fields
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard
from draftwire.models.model_names import SCRIPT_PREFIX

LETTERS = 26
NUM_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Script:
    """Behaviour of a scripted pair. Both services use the same script."""

    verify_ms: float = 0.0
    """How long a step of the target takes, milliseconds."""
    draft_ms: float = 0.0
    """How long drawing a draft token takes, for all sessions of a step together, milliseconds."""
    calibration_ms: float = 0.0
    """How long reading committed tokens takes before drafting, milliseconds."""
    read_us: float = 0.0
    """Additional time of either model for each token that it reads, microseconds."""
    acceptance: tuple[float, ...] = (0.8,)
    """Probability that the draft token at each position is accepted if those before it were, at temperature 1; the
    last number holds for all further positions."""
    late_acceptance: tuple[float, ...] = ()
    """The same from place `late_from` of a text on; empty if it does not change."""
    late_from: int = 0
    """Place of a text, tokens."""
    vocab_size: int = 320
    """Vocabulary size of both models, at least 256."""
    context_length: int = 32_768
    """Context length of both models."""
    draft_row_us: float = 0.0
    """Additional time of a draft token for each block of a step but the first, microseconds."""
    recovered: float = 1.0
    """Probability that the token in the place of a rejected one is the capital letter, of which the drafter thinks
    first; else it is one of the digits, of which it thinks next."""

    def __post_init__(self) -> None:
        for name in ("verify_ms", "draft_ms", "draft_row_us", "calibration_ms", "read_us"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise InvalidRequestError(f"script: {name} must not be negative")
        if not 0.0 <= self.recovered <= 1.0:
            raise InvalidRequestError("script: recovered is a probability")
        given = (*self.acceptance, *self.late_acceptance)
        if not self.acceptance or not all(0.0 <= value <= 1.0 for value in given):
            raise InvalidRequestError("script: acceptance takes probabilities, such as 0.8/0.6/0.5")
        if self.vocab_size < 256 or self.context_length < 2:
            raise InvalidRequestError("script: vocab_size must be at least 256 and context_length at least 2")

    @classmethod
    def parse(cls, text: str) -> "Script":
        """Parses a model name such as `scripted:verify_ms=5,draft_ms=1,acceptance=0.8/0.6`.

        Raises:
            InvalidRequestError: an unknown name, or a value out of range.
        """
        items = [item for item in text.removeprefix(SCRIPT_PREFIX).split(",") if item]
        given = dict(item.partition("=")[::2] for item in items)
        if len(given) < len(items):
            raise InvalidRequestError(f"script: a setting is named twice in {text!r}")
        kinds = {field.name: field.type for field in fields(cls)}
        if unknown := given.keys() - kinds.keys():
            raise InvalidRequestError(f"script: unknown {', '.join(sorted(unknown))}; known: {', '.join(kinds)}")
        try:
            return cls(**{name: _value(kinds[name], value) for name, value in given.items()})
        except ValueError as error:
            raise InvalidRequestError(f"script: {error}") from error

    def acceptance_at(self, position: int, place: int = 0) -> float:
        """Returns the acceptance of a position in the block, which begins at a place of the text."""
        is_late = self.late_acceptance and place >= self.late_from
        acceptance = self.late_acceptance if is_late else self.acceptance
        return acceptance[min(position, len(acceptance) - 1)]

    def chances_at(self, position: int, place: int = 0) -> list[float]:
        """Returns how often each of the tokens that the drafter thinks of at a position of a block is the target's: the
        letter, the capital, the digits; see `acceptance_at`.
        """
        accepted = self.acceptance_at(position, place)
        left = 1.0 - accepted
        return [accepted, left * self.recovered, *[left * (1.0 - self.recovered) / NUM_DIGITS] * NUM_DIGITS]

    def card(self) -> ModelCard:
        """Returns the card of either model: one token for each byte."""
        return ModelCard.of(
            _byte_tokenizer(),
            name="scripted",
            revision="",
            dtype="float32",
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            stop_token_ids=(),
        )


def expected_tokens(first: int, count: int) -> list[int]:
    """Returns the drafter's tokens at positions `first` to `first + count - 1`: the alphabet, repeated."""
    return [ord("a") + position % LETTERS for position in range(first, first + count)]


def recovered_tokens(expected: int) -> list[int]:
    """Returns what the target may have in the place of a token that the drafter expects: the capital letter, then the
    digits.
    """
    return [expected - ord("a") + ord("A"), *range(ord("0"), ord("9") + 1)]


def wait(seconds: float) -> None:
    """Sleeps instead of a forward pass."""
    if seconds > 0.0:
        time.sleep(seconds)


def _value(kind: Any, text: str) -> Any:
    """Returns a setting, of type int, float, or a tuple of floats."""
    return kind(text) if kind in (int, float) else tuple(map(float, text.split("/")))


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose token i is the byte i."""
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
