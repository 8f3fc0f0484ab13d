"""Everything that can go wrong in a way that a caller can act on, as one tree."""

from enum import Enum

RETRY_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata of a full server: when to try again, milliseconds. gRPC itself reads it where a client has retries
configured. Source: gRPC proposal A6, "Client Retries"."""

GENERATED_KEY = "draftwire-generated-tokens"
"""Trailing metadata of a completion that was interrupted: how many tokens it had."""


class DraftwireError(Exception):
    """Base of all errors that are meant to be read by whoever caused them. The message holds no prompt and no token."""


class InvalidRequestError(DraftwireError):
    """A parameter is missing, out of range or not supported. Retrying does not help."""


class UnauthenticatedError(DraftwireError):
    """The caller did not show a token that is good here. The message does not say why."""


class WrongRoleError(DraftwireError):
    """The certificate of the caller is of a service that has no business with this call."""


class UnknownSessionError(DraftwireError):
    """No session, or no lease, of that id is open here."""


class ProtocolViolationError(DraftwireError):
    """A peer sent messages out of order, from the future, or about another prefix than the session's."""


class Violation(Enum):
    """How a draft block breaks the protocol."""

    ENCODING = "encoding"
    """An encoding that is unknown or not accepted, or sizes that do not fit together."""
    TOKEN_ID = "token_id"
    """An id beyond the vocabulary, or twice in one distribution."""
    WEIGHTS = "weights"
    """Numbers that are no distribution."""
    OUTSIDE_SUPPORT = "outside_support"
    """A draft token that its distribution makes impossible."""
    NO_DISTRIBUTIONS = "no_distributions"
    """The session's rule needs them."""
    LENGTH = "length"
    """More draft tokens than the session allows, or none."""
    PREFIX = "prefix"
    """Another prefix than the session's, or a round from the future."""
    PEER = "peer"
    """From a drafter that is not the session's."""


class BlockViolationError(InvalidRequestError):
    """A draft block breaks the protocol.

    Attributes:
        violation: how.
    """

    def __init__(self, violation: Violation, message: str) -> None:
        super().__init__(message)
        self.violation = violation


class ModelMismatchError(DraftwireError):
    """Two peers cannot work together: another protocol version, or vocabularies that differ."""


class NoRoomError(DraftwireError):
    """The server is full. Retrying later helps.

    Attributes:
        retry_after_s: when it is worth while to try again, seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @classmethod
    def hinted(cls, message: str, hint: object) -> "NoRoomError":
        """Makes one from a status and the value of its `RETRY_KEY`, which may be missing or nonsense."""
        text = str(hint)
        return cls(message, int(text) / 1e3) if text.isdecimal() else cls(message)


class UnavailableError(DraftwireError):
    """The server is not ready, is draining, or has lost a peer that it needs."""


class GroupLostError(UnavailableError):
    """The processes of a group are no longer in step, because one of them ended, hangs or failed: none can go on."""


class CompletionInterruptedError(UnavailableError):
    """A completion ended before its end. It can be resumed, here or elsewhere.

    Attributes:
        num_generated_tokens: tokens that it had, resumed ones included.
    """

    def __init__(self, message: str, num_generated_tokens: int) -> None:
        super().__init__(message)
        self.num_generated_tokens = num_generated_tokens
