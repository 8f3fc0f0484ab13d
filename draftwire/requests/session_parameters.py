"""Request parameters that both services of a session need."""

from dataclasses import dataclass

from draftwire.errors import InvalidRequestError
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts

MAX_SALT_LENGTH = 256
"""Upper bound of the characters of a `cache_salt`."""


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """The parameters common to the sessions on verifier and drafter, part of both open messages and both specs.

    Raises:
        InvalidRequestError: the salt is too long.
    """

    prompt_len: int
    """How many of the ids that a session is opened with are the prompt; the others were generated before."""
    sampling: SamplingParams
    rule: RuleFacts
    """The verification rule; determines how to draft and whether distributions are sent."""
    max_draft_tokens: int
    """Upper bound of the draft tokens of a block."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a plain run, and that `min_tokens` masks."""
    choice: int = 0
    """Index of the choice that the session generates, part of the key of its random numbers."""
    cache_salt: str = ""
    """KV cache prefixes are shared only between sessions of the same salt."""
    traceparent: str = ""
    """The request's span as W3C Trace Context; empty if the request is not traced."""
    form_memory_bytes: int = 0
    """Memory that compiling the structured output took where it was measured, bytes; 0 if it was not."""
    shares_text: bool = False
    """Whether guesses may be read from texts of other sessions with the same salt, and theirs from this one: not if its
    random numbers may be drawn again, since a guess made of what they drew would bias what they draw."""

    def __post_init__(self) -> None:
        check_salt(self.cache_salt)


def check_salt(salt: str) -> None:
    """Checks the length of a salt.

    Raises:
        InvalidRequestError: the salt is too long.
    """
    if len(salt) > MAX_SALT_LENGTH:
        raise InvalidRequestError(f"cache_salt has at most {MAX_SALT_LENGTH} characters")


ALONE = SessionParameters(prompt_len=1, sampling=SamplingParams(), rule=RuleFacts("block"), max_draft_tokens=1)
"""Parameters of a text that belongs to no session: it shares nothing."""
