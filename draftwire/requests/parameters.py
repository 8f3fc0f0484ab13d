"""Sampling parameters of a request. `draftwire.method.sampling` applies them; this module does not import torch."""

from dataclasses import dataclass, fields
from typing import Protocol

from draftwire.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
"""Largest presence and frequency penalty, as in OpenAI's API."""
MAX_BIAS = 100.0
"""Largest logit bias, as in OpenAI's API."""
MAX_BIASED_TOKENS = 1024
MAX_REPETITION_PENALTY = 100.0
MAX_TOP_K = 2**32 - 1
"""Largest value of the proto field (uint32)."""
MAX_ALLOWED_TOKENS = 2**18
"""Size of the largest vocabularies."""


class TextForm(Protocol):
    """Form that a text has to match, such as a `StructuredOutput`. A round knows only the masks of its `Automaton`."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that prescribe it, as the user wrote them."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters; `draftwire.method.sampling` has the order in which they apply.

    Raises:
        InvalidRequestError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    """0 is greedy decoding; at most 100."""
    top_k: int = 0
    """Keep the k most likely tokens, and those as likely as the last of them; 0 keeps all, 1 is greedy decoding; at
    most 2^32 - 1."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1], and those as likely as its
    last."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one, in [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and output, multiplies negative ones; above 0, at most 100."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated, in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias of its logit, in [-100, 100]; at most 1,024, no id twice."""
    allowed_token_ids: frozenset[int] | None = None
    """Only these tokens are possible, at most 262,144; None allows all."""
    min_tokens: int = 0
    """No stop token is possible before this many tokens are generated."""
    structured_output: TextForm | None = None
    """Only tokens are possible with which the generated text can still match this form. Cannot be combined with
    `allowed_token_ids` or `min_tokens`, because no token might be left."""

    def __post_init__(self) -> None:
        # NaN fails every comparison.
        _require(0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", "in [0, 100]", self.temperature)
        _require(0 <= self.top_k <= MAX_TOP_K, "top_k", f"in 0 (off)..{MAX_TOP_K}", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        is_penalty = 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY
        _require(is_penalty, "repetition_penalty", "above 0 and at most 100", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY, name, "in [-2, 2]", getattr(self, name))
        is_few = len(self.logit_bias) <= MAX_BIASED_TOKENS
        _require(is_few, "logit_bias", f"at most {MAX_BIASED_TOKENS} token ids", len(self.logit_bias))
        for token, bias in self.logit_bias:
            _require(
                token >= 0 and abs(bias) <= MAX_BIAS, "logit_bias", "ids with values in [-100, 100]", (token, bias)
            )
        num_biased = len({token for token, _ in self.logit_bias})
        _require(num_biased == len(self.logit_bias), "logit_bias", "without repeated ids", len(self.logit_bias))
        if self.allowed_token_ids is not None:
            count = len(self.allowed_token_ids)
            _require(1 <= count <= MAX_ALLOWED_TOKENS, "allowed_token_ids", f"1 to {MAX_ALLOWED_TOKENS} ids", count)
            _require(min(self.allowed_token_ids) >= 0, "allowed_token_ids", "token ids", min(self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", frozenset(self.allowed_token_ids))
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        if self.structured_output is not None:
            others = {"allowed_token_ids": self.allowed_token_ids is not None, "min_tokens": self.min_tokens > 0}
            for name, is_set in others.items():
                if is_set:
                    raise InvalidRequestError(f"structured_output and {name} together may leave no token possible")

    @property
    def greedy(self) -> bool:
        """Whether one token has all the mass."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether any penalty applies, so that logits depend on the tokens of the text."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that all token ids are within a vocabulary.

        Raises:
            InvalidRequestError: an id is not.
        """
        largest = {
            "logit_bias": max((token for token, _ in self.logit_bias), default=0),
            "allowed_token_ids": max(self.allowed_token_ids or (0,)),
        }
        for name, token in largest.items():
            _require(token < vocab_size, name, f"token ids in 0..{vocab_size - 1}", token)


PARAMETERS = tuple(field.name for field in fields(SamplingParams))
"""Names of all sampling parameters."""

NUMBERS: dict[str, type] = {field.name: field.type for field in fields(SamplingParams) if field.type in (int, float)}
"""Names and types of the scalar parameters, for the proto messages, the HTTP API and the command line."""


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{name} must be {expected}, not {value}")
