"""Interface of what guesses tokens from tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

READ_AT_ONCE = 512
"""Most tokens that a round adds to a text where others wait for it: a longer prompt delays the first guess of its own
text, and no other session."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow a text."""

    token_ids: list[int]
    match_len: int
    """How many of the text's last tokens are the same at the place that the guess was read from; 0 without one."""


NOTHING = Guess([], 0)
"""No guess."""


class FollowedText(Protocol):
    """One text. A guess is a function of its committed tokens, and of texts that were there before."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that will not be taken back."""

    def guess(self, num_tokens: int, drafted: Sequence[int] = ()) -> Guess:
        """Returns at most so many tokens that may follow; none if the text has no place like its end.

        Args:
            num_tokens: at least 1.
            drafted: tokens after the committed ones, to guess what follows them. They are not committed.
        """

    def close(self, num_prompt_tokens: int) -> None:
        """Ends the text, of which so many tokens were the prompt. Called at most once."""
        return  # nothing is kept, unless it is shared


class TextDrafter(Protocol):
    """Opens texts, and guesses how they go on."""

    def __call__(self, token_ids: Sequence[int] = (), salt: str | None = None) -> FollowedText:
        """Starts a text with some committed tokens.

        Args:
            token_ids: the prompt.
            salt: guesses may be read from other texts of the same salt, and others' from this one; None shares nothing.
                Texts whose random numbers may be drawn again share nothing, see docs/exactness.md.
        """


def continued(text: Sequence[int], start: int, num_tokens: int, drafted: Sequence[int] = ()) -> list[int]:
    """Returns the tokens of a text from a place on. Where the text ends, what was returned is repeated: a text that has
    begun to repeat itself goes on so.

    Args:
        text: some tokens.
        start: place of the first token to return, less than the length of the text with `drafted`.
        num_tokens: how many to return.
        drafted: further tokens of the text.
    """
    tokens = list(text[start : start + num_tokens])
    tokens += drafted[max(0, start - len(text)) :][: num_tokens - len(tokens)]
    for index in range(num_tokens - len(tokens)):
        tokens.append(tokens[index])
    return tokens
