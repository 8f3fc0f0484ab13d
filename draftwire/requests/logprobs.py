"""Log-probabilities of tokens: request and report. Needs no package besides Python."""

from dataclasses import dataclass, field
from enum import Enum

from draftwire.errors import InvalidRequestError

MAX_LOGPROBS = 20
"""Upper bound of the likeliest tokens reported with each token."""

MAX_PROMPT_PART = 128
"""Most tokens of a prompt in one report of a verifier. Part of the protocol: gateways refuse more."""


class LogprobsMode(Enum):
    """Choice of the target's distribution that is reported."""

    RAW = "raw"
    """Log-softmax of the model's unprocessed logits."""
    PROCESSED = "processed"
    """The distribution that a token is drawn from: see `draftwire.method.sampling`."""

    @classmethod
    def named(cls, name: str) -> "LogprobsMode":
        """Parses a mode.

        Raises:
            InvalidRequestError: the name is unknown.
        """
        try:
            return cls(name)
        except ValueError:
            raise InvalidRequestError("logprobs_mode must be raw or processed") from None


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """The log-probabilities that a request asks for.

    Raises:
        InvalidRequestError: a number is out of range; the message names it.
    """

    logprobs: int | None = None
    """Number of the likeliest tokens to report with each generated token, beside its own log-probability, 0 to 20; None
    reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    mode: LogprobsMode = LogprobsMode.RAW

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidRequestError(f"{name} must be in 0..{MAX_LOGPROBS}, not {count}")


NO_LOGPROBS = LogprobsRequest()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one token of a text. Natural logarithms; -inf for impossible tokens."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    """The likeliest possible tokens at its position with their log-probabilities, likeliest first. May contain the
    token itself."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Log-probabilities of consecutive tokens of a prompt."""

    first_position: int
    """Position of the first of these tokens; 1 or more, because the prompt's first token has no log-probability."""
    tokens: list[TokenLogprob]
