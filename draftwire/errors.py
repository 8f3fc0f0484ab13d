"""Exceptions that a caller can act on, as one hierarchy."""

from enum import Enum

RETRY_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata key of a full server: delay before a retry, milliseconds. gRPC itself reads it where a client has
retries configured. Source: gRPC proposal A6, "Client Retries"."""

MAX_RETRY_AFTER_S = 3600.0
"""Longest retry delay that is taken over from a peer, seconds."""

GENERATED_KEY = "draftwire-generated-tokens"
"""Trailing metadata key of an interrupted completion: number of tokens it had."""


class DraftwireError(Exception):
    """Base of all errors that are reported to the caller. The message holds no prompt and no token."""


class InvalidRequestError(DraftwireError):
    """A parameter is missing, out of range or not supported. Retrying does not help."""


class ContextLengthError(InvalidRequestError):
    """A prompt, or what is to be generated after it, does not fit the model's context."""

    @classmethod
    def of(cls, context_length: int, fault: str) -> "ContextLengthError":
        """Returns an error in the words by which clients recognise it."""
        return cls(f"This model's maximum context length is {context_length} tokens; {fault}")


class UnauthenticatedError(DraftwireError):
    """The caller sent no valid token. The message does not say why."""


class WrongRoleError(DraftwireError):
    """The certificate of the caller is of a service that has no business with this call."""


class UnknownSessionError(DraftwireError):
    """No session or lease of that id is open on this server."""


class ProtocolViolationError(DraftwireError):
    """A peer sent messages out of order, from the future, or about another prefix than the session's."""


class Violation(Enum):
    """How a draft block breaks the protocol."""

    ENCODING = "encoding"
    """An encoding that is unknown or not accepted, or inconsistent sizes."""
    TOKEN_ID = "token_id"
    """An id beyond the vocabulary, or twice in one distribution."""
    WEIGHTS = "weights"
    """Weights that are not a distribution."""
    OUTSIDE_SUPPORT = "outside_support"
    """A draft token that its distribution makes impossible."""
    NO_DISTRIBUTIONS = "no_distributions"
    """No distributions, although the session's rule needs them."""
    LENGTH = "length"
    """More draft tokens than the session allows, or no tokens."""
    PREFIX = "prefix"
    """Another prefix than the session's, or a future round."""
    PEER = "peer"
    """A block from a drafter that is not the session's."""


class BlockViolationError(InvalidRequestError):
    """A draft block breaks the protocol.

    Attributes:
        violation: the kind.
    """

    def __init__(self, violation: Violation, message: str) -> None:
        super().__init__(message)
        self.violation = violation


class ModelMismatchError(DraftwireError):
    """Two peers are incompatible: different protocol versions or vocabularies."""


class NoRoomError(DraftwireError):
    """The server is full. Retrying later helps.

    Attributes:
        retry_after_s: delay before a retry, seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @classmethod
    def hinted(cls, message: str, hint: object) -> "NoRoomError":
        """Returns an error from a status message and the value of its `RETRY_KEY`, which may be missing or invalid."""
        text = str(hint)
        if not text.isdecimal():
            return cls(message)
        is_short = len(text) <= len(str(int(MAX_RETRY_AFTER_S * 1e3)))  # Python refuses to parse thousands of digits
        return cls(message, min(int(text) / 1e3, MAX_RETRY_AFTER_S) if is_short else MAX_RETRY_AFTER_S)


class UnavailableError(DraftwireError):
    """The server is not ready, is draining, or has lost a peer that it needs."""


class GroupLostError(UnavailableError):
    """The processes of a group are out of step, because one of them ended, hangs or failed: none can continue."""


class CompletionInterruptedError(UnavailableError):
    """A completion was interrupted. It can be resumed, on this server or another.

    Attributes:
        num_generated_tokens: tokens of the completion so far, resumed ones included.
    """

    def __init__(self, message: str, num_generated_tokens: int) -> None:
        super().__init__(message)
        self.num_generated_tokens = num_generated_tokens
