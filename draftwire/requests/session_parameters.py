"""What both services of a session have to know of its request."""

from dataclasses import dataclass

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts

MAX_SALT_LENGTH = 256
"""Characters of a `cache_salt`, at most."""


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """Said once: both openings carry it, and so do both services' specs.

    Raises:
        InvalidRequestError: the salt is too long.
    """

    prompt_len: int
    """How many of the ids that a session is opened with are the prompt; the others were generated before."""
    sampling: SamplingParams
    rule: RuleFacts
    """How blocks are judged: says what has to be drafted and sent."""
    max_draft_tokens: int
    """In a block, at most."""
    stop_token_ids: frozenset[int] = frozenset()
    """They end a plain run, and `min_tokens` keeps them away."""
    choice: int = 0
    """Index of the choice that the session generates, part of the key of its random numbers."""
    cache_salt: str = ""
    """What is computed for the prompt is shared only between sessions of the same salt."""
    traceparent: str = ""
    """The span of the request, in the form of W3C Trace Context; empty if nothing is traced."""

    def __post_init__(self) -> None:
        check_salt(self.cache_salt)


def check_salt(salt: str) -> None:
    """Makes sure that a salt is one.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(salt) > MAX_SALT_LENGTH:
        raise InvalidRequestError(f"cache_salt has at most {MAX_SALT_LENGTH} characters")
